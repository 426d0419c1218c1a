"""Judges task 4.2: that a resumed run is the same run, and that each sample comes once an epoch."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import joined
from judging.checks import MEASURED, check_refused, of_members, short, uneven
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import resumed as b
from phase4.resumed import GENERATORS, PARTS, Plan

MOST_BYTES = 40_000
PLAN_OF_FIVE = Plan(num_samples=18, global_batch=4)  # five batches
STUCK = (
    "All ranks call state_dict, and each of its collectives: rank 0 alone can't know the "
    "generators of the others. Loading needs no collective."
)
LOST = {
    "sampler": "The sampler goes on at the position and in the epoch that were saved, in the order "
    "of the seed that was saved.",
    "random": "Python's own generator, of random.gauss for example, belongs to the state; all "
    "three parts of random.getstate() do.",
    "NumPy": "NumPy's global generator belongs to the state; all five parts of "
    "np.random.get_state() do.",
    "torch": "torch's generator for the CPU, of dropout for example, belongs to the state.",
}
Found = Mapping[str, Any]


def _different(prints: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return [name for name in right if prints.get(name) != right[name]]


def _check_same(
    prints: Mapping[str, str], right: Mapping[str, str], where: str, of_0: Found
) -> None:
    """Check all parts and generators of a rank.

    Args:
        prints: that were found.
        right: those of the run without a stop.
        where: the beginning of the sentence, which ends before what is different.
        of_0: the right ones of rank 0.
    """
    different = _different(prints, right)
    if not different:
        return
    names = joined([f"the generator of {n}" if n in GENERATORS else n for n in different])
    taken = [n for n in different if n in GENERATORS and prints[n] == of_0[n]]
    only = [] if {*different} & {*PARTS} - {"sampler"} else [n for n in LOST if n in different]
    cause = LOST[only[0]] if only else "Every part is saved, and loaded."
    if taken:
        cause = (
            f"The generator of {taken[0]} is that of rank 0 now. Each rank draws other numbers, "
            "so the state holds the generators of all ranks, also where rank 0 alone writes it."
        )
    check(False, f"{where} other bits than in a run without a stop: {names}. {cause}")


def _check_everywhere(results: Sequence[Found], plan: Plan) -> None:
    """Check what is saved, then what is loaded, then how runs go on: causes before effects."""
    names = [f"rank {rank} of {len(results)}" for rank in range(len(results))]
    for who, found in zip(names, results, strict=True):
        _check_saving(found, results[0], who)
    for who, found in zip(names, results, strict=True):
        _check_loaded(found, results[0], who, plan)
    for who, found in zip(names, results, strict=True):
        _check_going_on(found, results[0], who, plan)


def _check_saving(found: Found, of_0: Found, who: str) -> None:
    _check_same(
        *(found["saving"], found["right"][-1]),
        f"calling state_dict after each step should change nothing; {who} has, in the end,",
        of_0["right"][-1],
    )
    check(
        found["states"] == of_0["states"],
        f"state_dict should return the same on all ranks; it returns something else on {who} "
        "than on rank 0. Gather the generators of all ranks on all of them.",
    )


def _check_loaded(found: Found, of_0: Found, who: str, plan: Plan) -> None:
    for step in reversed(range(plan.num_steps)):  # later ones show more
        where = f"stopped after step {step} of {plan.num_steps}, and loaded into new objects: {who}"
        prints, right = found["once"][step]["loaded"], found["right"][step]
        _check_same(prints, right, f"{where} has", of_0["right"][step])


def _check_going_on(found: Found, of_0: Found, who: str, plan: Plan) -> None:
    for step, (once, twice) in enumerate(zip(found["once"], found["twice"], strict=True)):
        stopped = f"stopped after step {step} of {plan.num_steps}, and resumed"
        wanted = found["batches"][step:]
        check(
            once["batches"] == wanted,
            f"{stopped}: {who} should train on the samples {short(wanted)} then, step by step; it "
            f"trains on {short(once['batches'])}.",
        )
        right, of_others = found["right"][-1], of_0["right"][-1]
        _check_same(once["end"], right, f"{stopped}: {who} has in the end", of_others)
        again = f"{stopped}, and stopped and resumed again a step later: {who} has in the end"
        _check_same(twice, right, again, of_others)


@task("4.2")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resumed_run_is_the_same_run(grade: Grade, num_ranks: int) -> None:
    _resume_everywhere(grade, num_ranks, Plan(seed=grade.random.randrange(1000)))


@task("4.2", real=True)
def test_three_ranks_are_resumed(grade: Grade) -> None:
    _resume_everywhere(grade, 3, Plan(seed=grade.random.randrange(1000)))


@task("4.2")
def test_more_ranks_than_samples_in_a_batch(grade: Grade) -> None:
    _resume_everywhere(grade, 5, Plan(num_steps=3))


def _resume_everywhere(grade: Grade, num_ranks: int, plan: Plan) -> None:
    options = uneven(grade.random, num_ranks)
    run = grade.run(b.interrupt_everywhere, num_ranks, plan, options=options, if_stuck=STUCK)
    _check_everywhere(run.results, plan)


@task("4.2")
def test_resuming_inside_a_group(grade: Grade) -> None:
    plan = Plan(num_steps=3)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.interrupt_everywhere, plan), if_stuck=STUCK_IN_GROUP
    )
    _check_everywhere(of_members(run), plan)


@task("4.2")
@pytest.mark.parametrize(
    ("num_samples", "global_batch", "num_ranks"),
    [(10, 4, 3), (12, 4, 2), (7, 3, 5), (3, 8, 1), (2, 8, 5), (1, 1, 8), (20, 1, 2)],
)
def test_each_sample_comes_once_an_epoch(
    grade: Grade, num_samples: int, global_batch: int, num_ranks: int
) -> None:
    plan = Plan(num_samples, global_batch, seed=grade.random.randrange(1000))
    alone = grade.call(b.sample, plan, 3)["epochs"]
    where = f"{num_samples} samples, global batches of {global_batch}, {num_ranks} ranks"
    _check_samples(grade.run(b.sample, num_ranks, plan, 3).results, alone, plan, where)


@task("4.2")
def test_samples_are_shared_inside_a_group(grade: Grade) -> None:
    plan = Plan(num_samples=10, global_batch=4)
    alone = grade.call(b.sample, plan, 3)["epochs"]
    run = grade.run(*(inside_group, OUTER_WORLD_SIZE, b.sample, plan, 3), if_stuck=STUCK_IN_GROUP)
    where = f"10 samples, global batches of 4, the group {[*MEMBERS]} of {OUTER_WORLD_SIZE} ranks"
    _check_samples(of_members(run), alone, plan, where)


def _check_samples(
    results: Sequence[Found], alone: Sequence[list[list[int]]], plan: Plan, where: str
) -> None:
    for rank, found in enumerate(results):
        check(
            found["undisturbed"],
            f"{where}: the sampler changed the global generators of rank {rank}, which draws other "
            "numbers now. Give randperm a generator of its own.",
        )
    for epoch in range(3):
        _check_epoch([found["epochs"][epoch] for found in results], alone[epoch], plan, where)
    for rank, found in enumerate(results):
        check(
            found["place"] == [3, 0],
            f"{where}: after three epochs, the state of the sampler should hold epoch 3, position "
            f"0; on rank {rank} it holds epoch {found['place'][0]}, position {found['place'][1]}.",
        )
        num_batches = -(-plan.num_samples // plan.global_batch)
        lengths = [*range(num_batches, 0, -1)] * 3
        check(
            found["lengths"] == lengths,
            f"{where}: on rank {rank} len(sampler) should be {short(lengths)} before the steps of "
            f"three epochs; it is {short(found['lengths'])}. A last batch that is shorter counts.",
        )


def _check_epoch(
    by_rank: Sequence[list[list[int]]], alone: list[list[int]], plan: Plan, where: str
) -> None:
    counts = sorted({len(batches) for batches in by_rank})
    num_batches = -(-plan.num_samples // plan.global_batch)
    check(
        counts == [num_batches],
        f"{where}: each rank should get its part of {num_batches} batches in an epoch, also where "
        f"that is empty; the ranks got {joined([*map(str, counts)])}.",
    )
    together = [[*chain(*parts)] for parts in zip(*by_rank, strict=True)]
    trained = sorted(chain(*together))
    check(
        trained == [*range(plan.num_samples)],
        f"{where}: each sample should come once in an epoch; these came: {short(trained)}. The "
        "last batch is neither dropped nor filled up, and all ranks have the same order, which "
        "comes from the seed and the epoch.",
    )
    sizes = [len(batch) for batch in together]
    check(
        all(size == plan.global_batch for size in sizes[:-1]),
        f"{where}: the global batches have {short(sizes)} samples; all but the last should have "
        f"{plan.global_batch}, on all ranks together.",
    )
    for parts in zip(*by_rank, strict=True):
        found = [len(part) for part in parts]
        check(
            max(found) - min(found) <= 1,
            f"{where}: the ranks have {found} samples of a batch, which may differ by 1 at most.",
        )
    for step, (found, right) in enumerate(zip(together, alone, strict=True)):
        check(
            sorted(found) == sorted(right),
            f"{where}: global batch {step} is {short(sorted(found))}; on 1 rank it is "
            f"{short(sorted(right))}. The order does not depend on the number of ranks.",
        )


@task("4.2")
def test_the_order_follows_from_seed_and_epoch(grade: Grade) -> None:
    plan = Plan(num_samples=40, global_batch=40)
    first, second = (
        [epoch[0] for epoch in grade.call(b.sample, plan._replace(seed=seed), 2)["epochs"]]
        for seed in (3, 8)
    )
    check(
        first[0] != first[1],
        f"epochs 0 and 1 of 40 samples have one order, {short(first[0])}: it should be another one "
        "in each epoch.",
    )
    check(
        first[0] != second[0],
        f"seeds 3 and 8 give one order of 40 samples, {short(first[0])}: it should follow from the "
        "seed.",
    )
    again = grade.call(b.sample, plan._replace(seed=3), 1)["epochs"][0][0]
    check(again == first[0], "the same seed gave two orders of epoch 0.")


@task("4.2")
@pytest.mark.parametrize(("taken", "trained"), [(3, 1), (4, 0), (1, 4)])
def test_batches_that_are_asked_for_move_nothing(grade: Grade, taken: int, trained: int) -> None:
    results = grade.run(b.look_ahead, 2, PLAN_OF_FIVE, taken, trained).results
    where = f"{taken} of 5 batches were asked for, and {trained} trained on"
    _check_position(results[1], where, taken, trained)
    wider = [sorted(a + b) for a, b in zip(*(found["wider"] for found in results), strict=False)]
    sizes, samples = [len(batch) for batch in wider], sorted(chain(*wider))
    left = sorted(chain(*chain(*(found["whole"][trained:] for found in results))))
    check(
        samples == left and all(size == 7 for size in sizes[:-1]),
        f"{where}: loaded into a sampler with global batches of 7, the samples {short(left)} are "
        f"left; it yields {short(samples)}, in batches of {sizes}.",
    )


def _check_position(found: Found, where: str, taken: int, trained: int) -> None:
    check(found["unchanged"], f"{where}: load_state_dict changed the state of the sampler.")
    state = {"epoch": 0, "position": 4 * trained, "seed": PLAN_OF_FIVE.seed, "num_samples": 18}
    check(
        found["state"] == state,
        f"{where}: the sampler's state should hold {state}; it holds {found['state']}. A "
        "DataLoader asks ahead; advance() alone moves the position, by a global batch.",
    )
    whole = found["whole"]
    check(
        found["rest"] == whole[taken:],
        f"{where}: the iterator should go on with {short(whole[taken:])}; it yields "
        f"{short(found['rest'])}. advance() does not move an iterator that has begun.",
    )
    check(
        found["left"] == whole[trained:] and found["length"] == 5 - trained,
        f"{where}: another sampler that loads this state should yield {short(whole[trained:])} and "
        f"have the length {5 - trained}; it yields {short(found['left'])} and has the length "
        f"{found['length']}.",
    )


@task("4.2")
def test_the_sampler_of_another_dataset_is_refused(grade: Grade) -> None:
    refusal = grade.call(b.other_samples, Plan(num_samples=11))
    check_refused([refusal], "loading a state of 11 samples where there are 17", "11", "17")


@task("4.2")
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 5), (1, 3)])
def test_another_number_of_ranks_goes_on(grade: Grade, before: int, after: int) -> None:
    plan = Plan(num_samples=19, global_batch=4, seed=grade.random.randrange(1000))
    run = grade.run(b.other_ranks, max(before, after), plan, before, after, 2, if_stuck=STUCK)
    where = f"saved on {before} ranks after 2 of 5 steps, loaded on {after}"
    saved = run.results[0]["saved"]
    for rank, found in enumerate(run.results[:after]):
        different = [name for name in PARTS if found["loaded"][name] != saved[name]]
        check(not different, f"{where}: rank {rank} has another state of {joined(different)}.")
        check(
            found["draws"] == found["draws again"],
            f"{where}, twice: rank {rank} draws {found['draws']} from the generators of random, "
            f"NumPy and torch, and then {found['draws again']}. Seed them by what is in the state "
            "and by the rank.",
        )
    _check_draws_differ([found["draws"] for found in run.results[:after]], where)
    parts = [found["before"] for found in run.results[:before]]
    parts += [found["after"] for found in run.results[:after]]
    trained = sorted(chain(*chain(*parts)))
    check(
        trained == [*range(19)],
        f"{where}: each sample should come once in the epoch; these came: {short(trained)}. The "
        "position counts samples of all ranks together.",
    )


def _check_draws_differ(draws: Sequence[Sequence[float]], where: str) -> None:
    for name, numbers in zip(GENERATORS, zip(*draws, strict=True), strict=True):
        check(
            len({*numbers}) == len(numbers),
            f"{where}: two ranks draw the same from the generator of {name}; the ranks draw "
            f"{short([*numbers])}. Seed it by the rank too.",
        )


@task("4.2")
def test_a_state_can_be_loaded_again(grade: Grade) -> None:
    found = grade.call(b.load_again, Plan())
    for when in ("by loading", "by training"):
        check(
            not found[when],
            f"the state that was loaded was changed {when}. Optimizers keep the tensors that they "
            "load, and change them in place: give the parts copies.",
        )
    different = _different(found["again"], found["right"])
    check(not different, f"loaded again after 3 steps, other bits: {joined(different)}.")


@task("4.2")
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "here"])
def test_other_parts_are_refused(grade: Grade, is_saved: bool) -> None:
    results = grade.run(b.load_other_parts, 2, Plan(), is_saved, if_stuck=STUCK).results
    for name, by_rank in zip(PARTS, zip(*results, strict=True), strict=True):
        _check_parts_refused(name, is_saved, by_rank)


def _check_parts_refused(name: str, is_saved: bool, by_rank: Sequence[Found]) -> None:
    where = f"a part {name!r} that is {'in the state alone' if is_saved else 'not in the state'}"
    check_refused([found["refusal"] for found in by_rank], where, name, same_text=False)
    for rank, found in enumerate(by_rank):
        check(
            not found["changed"],
            f"{where} is refused before anything is loaded; on rank {rank} "
            f"{joined(found['changed'])} changed. Compare all names first, then load.",
        )


@task("4.2")
def test_what_parts_draw_while_they_are_loaded(grade: Grade) -> None:
    for rank, same in enumerate(grade.run(b.load_what_draws, 2).results):
        lost = [name for name, is_same in zip(GENERATORS, same, strict=True) if not is_same]
        check(
            not lost,
            f"the parts drew numbers while they were loaded, and the generators of {joined(lost)} "
            f"on rank {rank} are not as they were saved. Set the generators after the parts.",
        )


@task("4.2")
def test_only_generators_travel(grade: Grade) -> None:
    run = grade.run(b.save_large, 4, options=MEASURED, if_stuck=STUCK)
    for rank, (calls, sent) in enumerate(zip(run.collectives, run.bytes_sent, strict=True)):
        check(
            calls <= 3,
            f"state_dict and load_state_dict called {calls} collectives on rank {rank}; one gather "
            "of all generators takes two, and loading needs none.",
        )
        check(
            sent <= 3 * MOST_BYTES,
            f"rank {rank} of 4 sent {sent:,.0f} bytes to the 3 others; its generators take some "
            f"13,000, and may take {MOST_BYTES:,} for each. The parts are the same on all ranks, "
            "and need not travel.",
        )


@task("4.2")
def test_the_generator_of_cuda(grade: Grade) -> None:
    found = grade.call(b.with_cuda)
    check(
        found["restored"],
        "where CUDA is in use (here torch.cuda's functions pretend so), its generator is not as it "
        "was saved: torch.cuda.get_rng_state belongs to the state too.",
    )
    check(
        not found["error"],
        "a state that was saved with CUDA should load where there is none, without CUDA's "
        f"generator; it raises RuntimeError: {found['error']}.",
    )
