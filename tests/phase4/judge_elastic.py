"""Judges task 4.6: who trains on what, from where on, with whose gradients, and who saves."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.launch import LaunchError
from distlab.util.text import counted
from judging.checks import is_close, of_members, short, short_beside, uneven
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import elastic as b
from phase4.elastic import Plan

EXIT_STOPPED = 75
FLOAT = 8  # bytes of a float64
Worker = Mapping[str, Any]
Step = tuple[int, list[int]]  # epoch, samples
STUCK = (
    "All ranks take part in every all-reduce, also one whose share of the samples is empty; and "
    "what goes wrong on rank 0 alone must reach the others, which wait for it."
)

APART = (
    "The ranks are not in the same step, or one of them has left a collective out: all go on from "
    "the checkpoint that rank 0 finds, and a rank whose share is empty takes part in each "
    "all-reduce."
)


@contextmanager
def _root() -> Iterator[str]:
    with TemporaryDirectory(prefix="distlab-") as root:
        yield root


def _newest(root: str) -> int:
    return max(map(b.step_of, Path(root).glob("step-*")), default=0)


def _start(grade: Grade, root: str, num_ranks: int, plan: Plan) -> list[Worker]:
    options = uneven(grade.random, num_ranks)
    try:
        return grade.run(b.start, num_ranks, root, plan, options=options, if_stuck=STUCK).results
    except LaunchError as error:
        if "mismatch" in f"{error}":
            error.args = (f"{APART} What came: {error}", *error.args[1:])
        raise


def _whole_run(grade: Grade, num_ranks: int, plan: Plan) -> list[Worker]:
    with _root() as root:
        return _start(grade, root, num_ranks, plan)


# What the ranks have done in each step.


def _check_steps(workers: Sequence[Worker], plan: Plan, first: int) -> list[Step]:
    """Check the shares of all ranks in each step after ``first``; return epochs and samples."""
    numbers = [len(worker["steps"]) for worker in workers]
    check(
        len(set(numbers)) == 1,
        f"all ranks should call job.step() equally often; they do so {numbers} times.",
    )
    most = len(plan.sizes) - first
    check(
        numbers[0] <= most,
        f"from step {first} on, there are {counted(most, 'step')} left to the end of the run, but "
        f"{len(workers)} ranks make {numbers[0]}.{_begun_anew(first)}",
    )
    return [
        _checked_step([worker["steps"][i] for worker in workers], plan, first + 1 + i)
        for i in range(numbers[0])
    ]


def _begun_anew(first: int) -> str:
    return (
        " Where a run goes on is counted in samples of the epoch, and is part of the checkpoint."
        if first
        else ""
    )


def _checked_step(by_rank: Sequence[Sequence[Step]], plan: Plan, step: int) -> Step:
    shares = [[s for _, samples in calls for s in samples] for calls in by_rank]
    where = f"in step {step} on {counted(len(by_rank), 'rank')}"
    samples = [sample for share in shares for sample in share]
    check(
        len(samples) == plan.sizes[step - 1],
        f"{where}, there should be {counted(plan.sizes[step - 1], 'sample')} in all (epochs of "
        f"{plan.num_samples}, global_batch={plan.global_batch}); the ranks have {short(shares)}. "
        "The global batch stays whatever the number of ranks is; the last step of an epoch has "
        "the rest, neither filled up nor left out.",
    )
    sizes = [len(share) for share in shares]
    check(
        max(sizes) - min(sizes) <= 1,
        f"{where}, the ranks have {sizes} samples; their shares should differ by at most one.",
    )
    _check_micro_batches(by_rank, plan, where)
    epoch = (step - 1) // plan.steps_per_epoch
    found = {epoch for calls in by_rank for epoch, _ in calls}
    check(found == {epoch}, f"{where}, the epoch is {epoch}; add_gradients was given {found}.")
    return epoch, samples


def _check_micro_batches(by_rank: Sequence[Sequence[Step]], plan: Plan, where: str) -> None:
    for rank, calls in enumerate(by_rank):
        sizes = [len(samples) for _, samples in calls]
        fewest = -(-sum(sizes) // plan.micro_batch)
        check(
            all(1 <= size <= plan.micro_batch for size in sizes) and len(sizes) == fewest,
            f"{where}, rank {rank} gives its job {sizes} samples at once; with micro_batch="
            f"{plan.micro_batch}, its share of {sum(sizes)} should come in {fewest} parts of at "
            f"most {plan.micro_batch}, none of them empty. Otherwise fewer ranks need more memory.",
        )


def _check_epochs(steps: Sequence[Step], plan: Plan, story: str) -> None:
    """Check that each epoch has each sample once, in the steps that count."""
    for epoch in range(plan.num_epochs):
        trained = [sample for number, samples in steps if number == epoch for sample in samples]
        wrong = [s for s in range(plan.num_samples) if trained.count(s) != 1]
        check(
            not wrong and len(trained) == plan.num_samples,
            f"{story}: in epoch {epoch}, each of {plan.num_samples} samples should be trained on "
            f"once, in the steps that were not rolled back; that is not so for {short(wrong)}. "
            "The order of an epoch comes from the seed and the epoch alone, whatever the number "
            "of ranks, and a run goes on at the sample that the checkpoint tells.",
        )


def _check_parameters(
    workers: Sequence[Worker], steps: Sequence[Step], plan: Plan, story: str
) -> None:
    expected = b.replay(plan, steps)
    for rank, worker in enumerate(workers):
        check(
            is_close(worker["parameters"], expected, 1e-8),
            f"{story}: in the end, the parameters of rank {rank} should be "
            f"{short_beside(expected, worker['parameters'])} as after the same steps on one rank; "
            f"they are {short_beside(worker['parameters'], expected)}. Gradients begin with zeros "
            "in each step; their sums over all ranks are divided by the samples of the step, not "
            "by ranks. A checkpoint holds what is reached after its step.",
        )


def _check_ends(workers: Sequence[Worker], expected: object, story: str) -> None:
    for rank, worker in enumerate(workers):
        found = worker["ended"]
        check(
            type(found) is type(expected) and found == expected,
            f"{story}: run_elastic should end with {expected!r} on every rank; on rank {rank}, "
            f"it ends with {found!r}.",
        )


# Workers that come and go.


def _interruption(grade: Grade, plan: Plan, is_last: bool) -> Plan:
    if is_last:
        return plan
    ends = grade.random.choice(["before", "after", "stop"])
    return plan._replace(ends=ends, at=grade.random.randint(3, 4))


def _how(plan: Plan) -> str:
    what = {"stop": "stopped after", "before": "interrupted in", "after": "interrupted in"}
    return f" {what[plan.ends]} their step {plan.at}" if plan.ends else ""


def _ends(plan: Plan) -> object:
    return {"stop": f"exit {EXIT_STOPPED}", "": len(plan.sizes)}.get(plan.ends, "interrupted")


def _live(grade: Grade, num_workers: Sequence[int], plan: Plan) -> None:
    """Start one number of workers after the other, and check what they did together."""
    counting: list[Step] = []
    told: list[str] = []
    with _root() as root:
        for i, num_ranks in enumerate(num_workers):
            plan = _interruption(grade, plan._replace(ends=""), i == len(num_workers) - 1)
            first = _newest(root)
            told.append(f"{counted(num_ranks, 'worker')}{_how(plan)}")
            workers = _start(grade, root, num_ranks, plan)
            counting = counting[:first] + _check_steps(workers, plan, first)
            _check_ends(workers, _ends(plan), ", then ".join(told))
            _check_saves(workers, plan, first)
    story = ", then ".join(told)
    _check_epochs(counting, plan, story)
    _check_parameters(workers, counting, plan, story)


@task("4.6")
@pytest.mark.parametrize(
    "num_workers", [(4, 3, 4), (1, 5), (2, 8), (5, 1, 3)], ids=lambda n: "-".join(map(str, n))
)
def test_workers_come_and_go(grade: Grade, num_workers: Sequence[int]) -> None:
    _live(grade, num_workers, Plan(seed=grade.random.randint(1, 999)))


@task("4.6", real=True)
def test_three_workers_two_and_three_again(grade: Grade) -> None:
    _live(grade, (3, 2, 3), Plan())


@task("4.6")
def test_half_of_a_step_does_not_count(grade: Grade) -> None:
    plan = Plan(num_epochs=2)
    counting: list[Step] = []
    with _root() as root:
        for ends in ("after", "before", ""):
            first = _newest(root)
            workers = _start(grade, root, 2, plan._replace(ends=ends, at=3))
            counting = counting[:first] + _check_steps(workers, plan, first)
    story = "2 workers interrupted in step 3, in step 5 of the run, then not"
    _check_epochs(counting, plan, story)
    _check_parameters(workers, counting, plan, story)


# One start.


@task("4.6")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_every_step_has_the_global_batch(grade: Grade, num_ranks: int) -> None:
    plan = Plan(grade.random.choice([22, 23]), global_batch=7, num_epochs=2, micro_batch=3)
    workers = _whole_run(grade, num_ranks, plan)
    steps = _check_steps(workers, plan, 0)
    story = counted(num_ranks, "worker")
    _check_ends(workers, len(plan.sizes), story)
    _check_epochs(steps, plan, story)
    _check_parameters(workers, steps, plan, story)


@task("4.6")
@pytest.mark.parametrize(
    "plan",
    [
        Plan(num_samples=1, global_batch=1, num_epochs=2, micro_batch=1),
        Plan(num_samples=4, global_batch=9, num_epochs=3, micro_batch=9),
        Plan(num_samples=12, global_batch=4, num_epochs=1, micro_batch=1, save_every=9),
        Plan(num_samples=12, global_batch=4, num_epochs=0),
    ],
    ids=["one sample", "batch above the epoch", "no rest", "no epoch"],
)
def test_odd_sizes(grade: Grade, plan: Plan) -> None:
    workers = _whole_run(grade, 3, plan)
    steps = _check_steps(workers, plan, 0)
    story = f"3 workers, {plan.num_samples} samples, global_batch={plan.global_batch}"
    _check_ends(workers, len(plan.sizes), story)
    _check_epochs(steps, plan, story)
    _check_parameters(workers, steps, plan, story)


@task("4.6")
def test_the_order_is_that_of_seed_and_epoch(grade: Grade) -> None:
    plan = Plan(num_samples=40, global_batch=8, num_epochs=2, seed=grade.random.randint(1, 99))
    one = _check_steps(_whole_run(grade, 1, plan), plan, 0)
    three = _check_steps(_whole_run(grade, 3, plan), plan, 0)
    for step, ((_, alone), (_, together)) in enumerate(zip(one, three, strict=True), 1):
        check(
            sorted(alone) == sorted(together),
            f"step {step} has the samples {short(sorted(alone))} on one rank and "
            f"{short(sorted(together))} on three: they should be the same. Neither the number of "
            "ranks nor torch's global generator may decide the order.",
        )
    half = len(one) // 2
    check(
        [samples for _, samples in one[:half]] != [samples for _, samples in one[half:]],
        "epochs 0 and 1 have the same order: the epoch should decide it, together with the seed.",
    )
    other = plan._replace(seed=plan.seed + 1)
    check(
        one != _check_steps(_whole_run(grade, 1, other), other, 0),
        f"seeds {plan.seed} and {other.seed} give the same order.",
    )


@task("4.6")
def test_rank_0_saves_and_the_others_wait(grade: Grade) -> None:
    plan = Plan(num_epochs=2, save_every=grade.random.choice([3, 4]))
    with _root() as root:  # the second start begins where no checkpoint is due
        for start in (plan._replace(ends="stop", at=2), plan):
            first = _newest(root)
            workers = _start(grade, root, 3, start)
            _check_steps(workers, plan, first)
            _check_saves(workers, start, first)
            _check_waiting(workers, first)


def _check_saves(workers: Sequence[Worker], plan: Plan, first: int) -> None:
    """Check after which steps there is a save, in a start from step ``first`` on."""
    total = len(plan.sizes)
    last = first + len(workers[0]["steps"]) - (workers[0]["ended"] == "interrupted")
    due = [step for step in range(first + 1, last + 1) if step % plan.save_every == 0]
    is_end = last > first and (last == total or plan.ends == "stop")
    expected = sorted({*due, *([last] if is_end else [])})
    for rank, worker in enumerate(workers):
        steps = [step for step, _ in worker["saves"]]
        wanted = expected if rank == 0 else []
        check(
            steps == wanted,
            f"rank {rank} should save after the steps {wanted}, in a start that does the steps "
            f"{first + 1} to {last} of {total}, with save_every={plan.save_every}; it saves as "
            f"{steps}. Steps are counted from the beginning of the run, not of a start. Rank 0 "
            "alone writes.",
        )


def _check_waiting(workers: Sequence[Worker], first: int) -> None:
    for step, saved_s in workers[0]["saves"]:
        for rank, worker in enumerate(workers):
            later = [at_s for times_s in worker["times_s"][step - first :] for at_s in times_s]
            check(
                min([*later, worker["left_s"]]) >= saved_s,
                f"rank {rank} went on before rank 0 had saved step {step}. All ranks wait until "
                "the checkpoint is durable: one that leaves has the launcher end rank 0 too.",
            )


@task("4.6")
@pytest.mark.parametrize("at", [1, 3])
def test_a_stop_loses_no_step(grade: Grade, at: int) -> None:
    plan = Plan(num_epochs=1, save_every=100, ends="stop", at=at)
    with _root() as root:
        workers = _start(grade, root, 3, plan)
        newest = _newest(root)
    _check_ends(workers, f"exit {EXIT_STOPPED}", f"should_stop() is true after step {at}")
    check(
        newest == at,
        f"should_stop() returned true after step {at}, and the newest checkpoint is "
        f"{newest or 'none'}: save before you exit, whatever save_every says.",
    )
    for rank, worker in enumerate(workers):
        check(
            worker["asked"] == [*range(1, at + 1)],
            f"rank {rank} should ask should_stop() once after each step, {[*range(1, at + 1)]}; "
            f"it asks when {worker['asked']} steps are done. All ranks ask: it is a collective.",
        )


@task("4.6")
def test_a_stop_after_the_last_step(grade: Grade) -> None:
    plan = Plan(num_epochs=1, ends="stop", at=5)
    workers = _whole_run(grade, 2, plan)
    _check_ends(workers, 5, "should_stop() is true after the last of 5 steps")


@task("4.6")
def test_a_run_that_is_over_does_nothing(grade: Grade) -> None:
    plan = Plan(num_epochs=1, save_every=2)
    with _root() as root:
        before = _start(grade, root, 2, plan)
        after = _start(grade, root, 3, plan)
    _check_ends(after, 5, "a run of 5 steps that is over")
    for rank, worker in enumerate(after):
        check(
            not worker["steps"] and not worker["saves"],
            f"a run that is over: rank {rank} trains {counted(len(worker['steps']), 'step')} and "
            f"saves as {[step for step, _ in worker['saves']]}; there is nothing left to do.",
        )
        check(
            worker["parameters"] == before[0]["parameters"],
            f"a run that is over: rank {rank} should still load what was trained.",
        )


@task("4.6")
@pytest.mark.parametrize(("fails", "reason"), [("load", b.DAMAGED), ("save", b.FULL)])
def test_a_failure_of_rank_0_reaches_all(grade: Grade, fails: str, reason: str) -> None:
    workers = _whole_run(grade, 3, Plan(fails=fails))
    for rank, worker in enumerate(workers):
        found = f"{worker['ended']}"
        check(
            found.startswith("RuntimeError") and reason in found,
            f"{fails} fails on rank 0: {reason}. Every rank should raise a RuntimeError that says "
            f"so; rank {rank} ends with {short(found)}.",
        )


# What travels.


@task("4.6")
def test_gradients_travel_once(grade: Grade) -> None:
    num_ranks, width = 4, 5000
    short_run, long_run = (Plan(5, 5, epochs, 100, 1, width=width) for epochs in (1, 4))
    with _root() as one, _root() as other:
        run = grade.run(b.start, num_ranks, one, short_run, if_stuck=STUCK)
        longer = grade.run(b.start, num_ranks, other, long_run, if_stuck=STUCK)
    alone = grade.run(b.reduce_once, num_ranks, width + 1)
    found = (sum(longer.bytes_sent) - sum(run.bytes_sent)) / 3
    gradient_bytes = (width + 1) * FLOAT
    most = sum(alone.bytes_sent)
    check(
        found <= 1.1 * most + 4000,
        f"in each step, {num_ranks} ranks together sent {found:,.0f} bytes; an all-reduce of "
        f"{gradient_bytes:,} bytes of gradients takes {most:,.0f}. Gradients travel once per step, "
        "when all micro-batches are done, and as sums.",
    )


@task("4.6")
def test_the_state_travels_once(grade: Grade) -> None:
    num_ranks, plan = 3, Plan(num_epochs=1, width=5000)
    with _root() as root:
        _start(grade, root, 1, plan)
        run = grade.run(b.start, num_ranks, root, plan, if_stuck=STUCK)
    state_bytes = 2 * (plan.width + 1) * FLOAT
    for rank, received in enumerate(run.bytes_received):
        check(
            received <= 1.1 * state_bytes + 4000,
            f"rank {rank} received {received:,.0f} bytes when it began, where the state has "
            f"{state_bytes:,}: rank 0 sends it to each of the others once.",
        )


@task("4.6")
def test_training_inside_a_group(grade: Grade) -> None:
    plan = Plan(num_epochs=2)
    with _root() as root:
        body = (inside_group, OUTER_WORLD_SIZE, b.start, root)
        stopped = plan._replace(ends="before", at=3)
        _check_steps(of_members(grade.run(*body, stopped, if_stuck=STUCK_IN_GROUP)), plan, 0)
        workers = of_members(grade.run(*body, plan, if_stuck=STUCK_IN_GROUP))
    _check_ends(workers, len(plan.sizes), "3 workers inside a group")
    _check_steps(workers, plan, 2)
