"""Judges task 4.2: resumed runs equal uninterrupted ones, and each sample comes once per epoch."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import joined
from judging.checks import MEASURED, ON_CPU, check_refused, short, uneven
from judging.expect import check_small, expect, expect_on_all_ranks, results_in_group
from phase4 import resumed as b
from phase4.resumed import GENERATORS, PARTS, Plan

MOST_BYTES = 40_000  # size limit for a rank's generator states
IN_A_GROUP = -1  # stands in for a number of ranks, to test inside a group
STUCK = (
    "All ranks call state_dict, and each of its collectives: rank 0 alone can't know the "
    "generators of the others. Loading needs no collective."
)
LOST = {
    "sampler": "The sampler continues at the position and in the epoch that were saved, in the "
    "order of the seed that was saved.",
    "random": "Python's own generator, of random.gauss for example, belongs to the state; all "
    "three parts of random.getstate() do.",
    "NumPy": "NumPy's global generator belongs to the state; all five parts of "
    "np.random.get_state() do.",
    "torch": "torch's generator for the CPU, of dropout for example, belongs to the state.",
}
DRAWN = "The generators belong to the state, and are set after the parts, which may draw numbers."
Found = Mapping[str, Any]


# A run that is interrupted


def _different(prints: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return [name for name in right if prints.get(name) != right[name]]


def _check_runs(results: Sequence[Found], where: str = "") -> None:
    """Check all ranks after each action in turn, so that causes are found before their effects."""
    names = [f"{where}rank {rank} of {len(results)}" for rank in range(len(results))]
    for name, facts in zip(names, results, strict=True):
        expect(
            f"{name}: the fingerprints of what state_dict returns, compared with rank 0's",
            *(facts["states"], results[0]["states"]),
            "The state is the same on all ranks: gather the generators of all ranks on all.",
        )
        expect(
            *(f"{name}: what changes the state that is loaded", facts["changed"], []),
            "Optimizers keep the tensors that they load, and change them in place: give the parts "
            "copies.",
        )
    for by_rank in zip(*(facts["prints"] for facts in results), strict=True):
        for name, facts, (step, done, prints) in zip(names, results, by_rank, strict=True):
            _check_prints(
                prints, facts["right"][step], f"{name} has {done} in step {step}", done, results
            )
    for name, facts in zip(names, results, strict=True):
        what = f"{name}: the samples of each step of the interrupted run"
        expect(what, facts["resumed batches"], facts["batches"], LOST["sampler"])


def _check_prints(
    prints: Mapping[str, str],
    right: Mapping[str, str],
    what: str,
    done: str,
    results: Sequence[Found],
) -> None:
    """Compare a rank's parts and generators with those of an uninterrupted run."""
    different = _different(prints, right)
    if not different:
        return
    names = joined([f"the generator of {n}" if n in GENERATORS else n for n in different])
    has_lost_parts = bool({*different} & {*PARTS} - {"sampler"})
    lost = [cause for name, cause in LOST.items() if name in different]
    if done == "saved":
        cause = "Calling state_dict changes nothing: it neither draws numbers nor trains."
    elif has_lost_parts:
        cause = "Every part is saved, and loaded, and a run goes on over the end of an epoch."
    else:  # a part that draws while it is loaded changes all generators
        cause = DRAWN if len(lost) >= len(GENERATORS) else " ".join(lost)
    all_of_0 = [of_0[n] for of_0 in results[0]["right"] for n in GENERATORS]
    taken = [n for n in different if n in GENERATORS and prints[n] in all_of_0]
    if taken and right not in results[0]["right"]:
        cause = (
            f"The generator of {taken[0]} is that of rank 0 now. Each rank draws other numbers, "
            "so the state holds the generators of all ranks, also where rank 0 alone writes it."
        )
    check(
        False,
        f"{what}. Its state then differs from that of a run without a stop in {names}. {cause}",
    )


@task("4.2", real=True)
def test_a_resumed_run_is_the_same_run(grade: Grade) -> None:
    plan, options = Plan(seed=grade.random.randrange(1000)), uneven(grade.random, 3)
    run = grade.run(b.interrupt, 3, plan, (1, 2, 5), options=options, if_stuck=STUCK)
    _check_runs(run.results)


@task("4.2")
def test_resuming_inside_a_group(grade: Grade) -> None:
    _check_runs(results_in_group(grade, b.interrupt, Plan(), (1, 3)), "inside a group, ")


# The sampler


@task("4.2")
@pytest.mark.parametrize(
    ("num_samples", "global_batch", "num_ranks"),
    [(10, 4, 3), (12, 4, 2), (2, 8, 5), (10, 4, IN_A_GROUP)],
)
def test_each_sample_comes_once_an_epoch(
    grade: Grade, num_samples: int, global_batch: int, num_ranks: int
) -> None:
    plan = Plan(num_samples, global_batch, seed=grade.random.randrange(1000))
    alone = grade.call(b.sample, plan, 3)["epochs"]
    where = f"{num_samples} samples, global batches of {global_batch}, {num_ranks} ranks"
    if num_ranks == IN_A_GROUP:
        where = where.replace("-1 ranks", "inside a group")
        results = results_in_group(grade, b.sample, plan, 3)
    else:
        results = grade.run(b.sample, num_ranks, plan, 3).results
    _check_samples(results, alone, plan, where)


def _check_samples(
    results: Sequence[Found], alone: Sequence[list[list[int]]], plan: Plan, where: str
) -> None:
    num_batches = -(-plan.num_samples // plan.global_batch)
    for rank, facts in enumerate(results):
        check(
            facts["undisturbed"],
            f"{where}: the sampler changed the global generators of rank {rank}, which draws other "
            "numbers now. Give randperm a generator of its own.",
        )
        expect(
            f"{where}: epoch and position on rank {rank}, after three epochs,",
            *(facts["place"], [3, 0]),
            "advance() moves the position by a global batch, and begins the next epoch at position "
            "0 once all samples were trained on.",
        )
        expect(
            f"{where}: len(sampler) on rank {rank} before the steps of three epochs",
            *(facts["lengths"], [*range(num_batches, 0, -1)] * 3),
            "A last batch that is shorter counts.",
        )
    for epoch in range(3):
        _check_epoch([facts["epochs"][epoch] for facts in results], alone[epoch], plan, where)


def _check_epoch(
    by_rank: Sequence[list[list[int]]], alone: list[list[int]], plan: Plan, where: str
) -> None:
    num_full, rest = divmod(plan.num_samples, plan.global_batch)
    right_sizes = [plan.global_batch] * num_full + [rest] * (rest > 0)
    expect(
        *(f"{where}: the number of batches by rank", [*map(len, by_rank)]),
        [len(right_sizes)] * len(by_rank),
        "Each rank gets its part of each batch, also where that is empty.",
    )
    together = [[*chain(*parts)] for parts in zip(*by_rank, strict=True)]
    expect(
        *(f"{where}: the samples of an epoch, sorted,", sorted(chain(*together))),
        [*range(plan.num_samples)],
        "Each comes once: the last batch is neither dropped nor filled up, and all ranks have the "
        "same order, which comes from the seed and the epoch.",
    )
    expect(
        *(f"{where}: the sizes of the global batches", [*map(len, together)], right_sizes),
        "Cut the order of the epoch into global batches first, and then each batch into the parts "
        "of the ranks.",
    )
    for step, parts in enumerate(zip(*by_rank, strict=True)):
        sizes = [len(part) for part in parts]
        check(
            max(sizes) - min(sizes) <= 1,
            f"{where}: the ranks have {sizes} samples of a batch, which may differ by 1 at most: "
            "all wait for the rank that has most. tensor_split cuts so.",
        )
        expect(
            *(f"{where}: global batch {step}, sorted,", sorted(together[step])),
            sorted(alone[step]),
            "That is the batch on 1 rank: the order does not depend on the number of ranks.",
        )


@task("4.2")
def test_the_order_follows_from_seed_and_epoch(grade: Grade) -> None:
    plan = Plan(num_samples=40, global_batch=40)
    first, other, again = (
        [epoch[0] for epoch in grade.call(b.sample, plan._replace(seed=seed), 2)["epochs"]]
        for seed in (3, 8, 3)
    )
    for what, same in (("epochs 0 and 1", first[1]), ("seeds 3 and 8", other[0])):
        check(
            first[0] != same,
            f"{what} give one order of 40 samples, {short(first[0])}. The seed of an epoch's "
            "generator is made of both, the seed and the epoch.",
        )
    check(
        again == first,
        "the same seed gave two orders of epochs 0 and 1. A resumed run needs the order of the run "
        "before: draw it from nothing but the seed and the epoch.",
    )


@task("4.2")
@pytest.mark.parametrize(("taken", "trained"), [(3, 1), (1, 4)])
def test_batches_that_are_asked_for_move_nothing(grade: Grade, taken: int, trained: int) -> None:
    plan = Plan(num_samples=18, global_batch=4)  # five batches per epoch
    results = grade.run(b.look_ahead, 2, plan, taken, trained).results
    facts, whole = results[1], results[1]["whole"]
    where = f"{taken} of 5 batches were asked for, and {trained} trained on"
    check(
        facts["unchanged"],
        f"{where}: load_state_dict changed the state that it was given; it may be loaded again.",
    )
    expect(
        *(f"{where}: the state of the sampler", facts["state"]),
        {"epoch": 0, "position": 4 * trained, "seed": plan.seed, "num_samples": 18},
        "A DataLoader asks ahead; advance() alone moves the position, by a global batch.",
    )
    expect(
        *(f"{where}: what the iterator yields then", facts["rest"], whole[taken:]),
        "advance() does not move an iterator that has begun.",
    )
    expect(
        f"{where}: what another sampler that loads this state yields, and its length",
        *([facts["left"], facts["length"]], [whole[trained:], 5 - trained]),
        LOST["sampler"],
    )
    wider = [sorted(a + b) for a, b in zip(*(facts["wider"] for facts in results), strict=False)]
    left = sorted(chain(*chain(*(facts["whole"][trained:] for facts in results))))
    expect(
        f"{where}: loaded into a sampler with global batches of 7, the samples and batch sizes",
        *([sorted(chain(*wider)), [*map(len, wider[:-1])]], [left, [7] * (len(wider) - 1)]),
        "The position counts samples, so that it can be loaded with any global batch, which is the "
        "sampler's own.",
    )
    what = "loading the state of a dataset of 18 samples where there are 24, in another order,"
    check_refused([facts["refusal"]], what, "18", "24")


# Loading


@task("4.2")
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 5)])
def test_another_number_of_ranks_goes_on(grade: Grade, before: int, after: int) -> None:
    plan = Plan(num_samples=19, global_batch=4, seed=grade.random.randrange(1000))
    run = grade.run(b.other_ranks, max(before, after), plan, before, after, 2, if_stuck=STUCK)
    where = f"saved on {before} ranks after 2 of 5 steps, loaded on {after}"
    saved = run.results[0]["saved"]
    for rank, facts in enumerate(run.results[:after]):
        different = [name for name in PARTS if facts["loaded"][name] != saved[name]]
        expect(
            f"{where}: the parts of another state on rank {rank}",
            *(
                different,
                [],
                "Parts have one state on all ranks: load them on any number of these.",
            ),
        )
        expect(
            f"{where}, twice: what rank {rank} draws from random, NumPy and torch the second time",
            *(facts["draws again"], facts["draws"]),
            "Seed them by what is in the state and by the rank.",
        )
    draws = [facts["draws"] for facts in run.results[:after]]
    for name, numbers in zip(GENERATORS, zip(*draws, strict=True), strict=True):
        check(
            len({*numbers}) == len(numbers),
            f"{where}: two ranks draw the same from the generator of {name}; the ranks draw "
            f"{short([*numbers])}. Seed it by the rank too.",
        )
    parts = [facts["before"] for facts in run.results[:before]]
    parts += [facts["after"] for facts in run.results[:after]]
    expect(
        *(f"{where}: the samples of the epoch, sorted,", sorted(chain(*chain(*parts)))),
        [*range(19)],
        "The position counts samples of all ranks together.",
    )


@task("4.2")
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "here"])
@pytest.mark.parametrize("name", ["model", "drawing"])
def test_other_parts_are_refused(grade: Grade, is_saved: bool, name: str) -> None:
    by_rank = grade.run(b.load_other_parts, 2, Plan(), name, is_saved, if_stuck=STUCK).results
    where = f"a part {name!r} that is {'in the state alone' if is_saved else 'not in the state'}"
    check_refused([facts["refusal"] for facts in by_rank], where, name)
    expect_on_all_ranks(
        f"{where}: what has changed when it is refused",
        *([facts["changed"] for facts in by_rank], []),
        "Compare all names first, then load.",
    )


@task("4.2")
def test_only_generators_travel(grade: Grade) -> None:
    run = grade.run(b.save_large, 4, options=MEASURED, if_stuck=STUCK)
    check_small(run, 3, MOST_BYTES // 2, "TrainingState, saved and loaded,")


@task("4.2")
def test_the_generator_of_cuda(grade: Grade) -> None:
    [(is_restored, error)] = grade.run(b.with_cuda, 1, options=ON_CPU).results
    check(
        is_restored,
        "where a process has used CUDA (here torch.cuda's functions pretend so), its generator is "
        "not as it was saved: torch.cuda.get_rng_state belongs to the state too.",
    )
    check(
        not error,
        "a state that was saved with CUDA should load where there is none, without CUDA's "
        f"generator; it raises RuntimeError: {error}.",
    )
