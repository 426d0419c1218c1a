"""Judges task 4.6: every start obeys the contract while workers come and go."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.launch import LaunchError
from distlab.sim import Options
from distlab.util.text import counted, rank_names
from judging.checks import short, uneven
from judging.expect import expect, results_in_group
from phase4 import elastic as b
from phase4.elastic import Plan

EXIT_STOPPED = 75
FLOAT = 8  # bytes of a float64
Worker = Mapping[str, Any]
Step = tuple[int, list[int]]  # epoch, samples
Start = tuple[int, str, int]  # number of ranks, how they end early, and in which step
STUCK = (
    "All ranks take part in every all-reduce, also one whose share of the samples is empty; and "
    "what goes wrong on rank 0 alone must reach the others, which wait for it."
)
APART = (
    "The ranks are not in the same step, or one of them has left a collective out: all go on from "
    "the checkpoint that rank 0 finds, and a rank whose share is empty takes part in each "
    "all-reduce."
)


def _start(
    grade: Grade, root: str, num_ranks: int, plan: Plan, *, is_group: bool = False
) -> list[Worker]:
    """Start workers and run them to their end."""
    if not is_group:
        return _run(grade, root, num_ranks, plan).results
    with _explained(_alone(_first(root), num_ranks)):
        return results_in_group(grade, b.start, root, plan)


def _run(grade: Grade, root: str, num_ranks: int, plan: Plan) -> Run:
    """Run workers in a world of their own."""
    options, alone = uneven(grade.random, num_ranks), _alone(_first(root), num_ranks)
    stuck = f"{alone} {STUCK}".strip()
    with _explained(alone):
        return grade.run(b.start, num_ranks, root, plan, options=options, if_stuck=stuck)


@contextmanager
def _explained(alone: str) -> Iterator[None]:
    """Say what may be the cause if the ranks' calls do not match."""
    try:
        yield
    except LaunchError as error:
        if "mismatch" in f"{error}":
            error.args = (f"{alone} {APART} What came: {error}".strip(), *error.args[1:])
        raise


def _first(root: str) -> int:
    """Return the step of the newest checkpoint, from which a start goes on; 0 if there is none."""
    return max(map(b.step_of, Path(root).glob("step-*")), default=0)


def _alone(first: int, num_ranks: int) -> str:
    """Return a question, if ranks that each load on their own find different checkpoints."""
    if not first or num_ranks == 1:
        return ""
    return (
        f"Rank 0 sees the checkpoint of step {first}, and other ranks see an older list: did "
        "each rank load on its own? Only rank 0's load counts."
    )


# Stories

END = ("", 0)
STORIES: dict[str, tuple[Plan, Sequence[Start]]] = {
    "interrupted in half a step": (
        *(Plan(num_epochs=2, seed=5), [(4, "after", 3), (3, "before", 3), (4, *END)]),
    ),
    "one, then five": (Plan(seed=77), [(1, "stop", 4), (5, *END)]),
    "stopped where no checkpoint is due": (
        *(Plan(num_epochs=1, save_every=100), [(3, "stop", 1), (2, "stop", 2), (3, *END)]),
    ),
    "stopped after the last step": (Plan(num_epochs=1), [(2, "stop", 5)]),
    "a run that is over": (Plan(num_epochs=1), [(2, *END), (3, *END)]),
    "one sample": (Plan(1, 1, num_epochs=2, micro_batch=1), [(3, *END)]),
    "no epoch": (Plan(12, 4, num_epochs=0), [(3, *END)]),
    "a batch above the epoch on 8": (Plan(7, 9, micro_batch=1), [(8, *END)]),
}


@task("4.6")
@pytest.mark.parametrize("story", STORIES)
def test_every_start_obeys_the_contract(grade: Grade, story: str) -> None:
    _live(grade, *STORIES[story])


@task("4.6", real=True)
def test_three_workers_two_and_three_again(grade: Grade) -> None:
    _live(grade, Plan(), [(3, "before", 3), (2, "stop", 3), (3, *END)])


@task("4.6")
def test_training_inside_a_group(grade: Grade) -> None:
    _live(grade, Plan(num_epochs=2), [(3, "before", 3), (3, *END)], is_group=True)


def _live(
    grade: Grade, plan: Plan, starts: Sequence[Start], *, is_group: bool = False
) -> list[Step]:
    """Run and check one start after another; return the steps that were not rolled back."""
    counting: list[Step] = []
    story = "inside a group, " if is_group else ""
    with TemporaryDirectory(prefix="distlab-") as root:
        for place, (num_ranks, ends, at) in enumerate(starts):
            its_plan = plan._replace(ends=ends, at=at)
            first = _first(root)
            story += f"{', then ' if place else ''}{counted(num_ranks, 'worker')}{_how(its_plan)}"
            workers = _start(grade, root, num_ranks, its_plan, is_group=is_group)
            _check_places(workers, counting[:first])
            steps = _check_steps(workers, its_plan, first)
            _check_end(workers, its_plan, first, story)
            _check_saves(workers, its_plan, first)
            counting = counting[:first] + steps
    _check_epochs(counting, plan, story)
    _check_parameters(workers, counting, plan, story)
    return counting


def _how(plan: Plan) -> str:
    what = {"stop": "stopped after", "before": "interrupted in", "after": "interrupted in"}
    return f" {what[plan.ends]} their step {plan.at}" if plan.ends else ""


# One start: its steps, end and saves


def _check_places(workers: Sequence[Worker], done: Sequence[Step]) -> None:
    """Check that no rank trains on samples of ``done``, the steps before, while rank 0 does not."""
    trained = {(epoch, sample) for epoch, samples in done for sample in samples}
    again = [
        [
            s
            for step in worker["steps"]
            for epoch, part in step
            for s in part
            if (epoch, s) in trained
        ]
        for worker in workers
    ]
    behind = [rank for rank, samples in enumerate(again) if samples]
    check(
        not behind or 0 in behind,
        f"{rank_names(behind)} of {len(workers)} trained again on samples that had their turn in "
        f"the same epoch up to step {len(done)}, and rank 0 did not: {short(again)}. So the ranks "
        f"are at different places of the epoch. {_alone(len(done), len(workers))}",
    )


def _check_steps(workers: Sequence[Worker], plan: Plan, first: int) -> list[Step]:
    """Check all ranks' shares in each step after ``first``; return epochs and samples."""
    numbers = [len(worker["steps"]) for worker in workers]
    left = len(plan.sizes) - first
    check(
        len(set(numbers)) == 1,
        f"all ranks should call job.step() equally often; they do so {numbers} times. "
        f"{_alone(first, len(workers))}",
    )
    check(
        numbers[0] <= left,
        f"from step {first} on, there are {counted(left, 'step')} left to the end of the run, but "
        f"{len(workers)} ranks make {numbers[0]}. Where a run continues is counted in samples of "
        "the epoch, and is part of the checkpoint.",
    )
    return [
        _checked_step([worker["steps"][i] for worker in workers], plan, first + 1 + i)
        for i in range(numbers[0])
    ]


def _checked_step(by_rank: Sequence[Sequence[Step]], plan: Plan, step: int) -> Step:
    shares = [[s for _, samples in calls for s in samples] for calls in by_rank]
    where = f"in step {step} on {counted(len(by_rank), 'rank')}"
    samples, sizes = [*chain(*shares)], [len(share) for share in shares]
    check(
        len(samples) == plan.sizes[step - 1],
        f"{where}, there should be {counted(plan.sizes[step - 1], 'sample')} in all (epochs of "
        f"{plan.num_samples}, global_batch={plan.global_batch}); the ranks have {short(shares)}. "
        "The global batch stays whatever the number of ranks is; the last step of an epoch has "
        "the rest, neither filled up nor left out.",
    )
    check(
        max(sizes) - min(sizes) <= 1,
        f"{where}, the ranks have {sizes} samples; their shares should differ by at most one.",
    )
    for rank, calls in enumerate(by_rank):
        parts, fewest = [len(part) for _, part in calls], -(-sizes[rank] // plan.micro_batch)
        check(
            all(1 <= part <= plan.micro_batch for part in parts) and len(parts) == fewest,
            f"{where}, rank {rank} gives its job {parts} samples at once; with micro_batch="
            f"{plan.micro_batch}, its share of {sizes[rank]} should come in {fewest} parts of at "
            f"most {plan.micro_batch}, none of them empty. Otherwise fewer ranks need more memory.",
        )
    epoch = (step - 1) // plan.steps_per_epoch
    epochs = {epoch for calls in by_rank for epoch, _ in calls}
    expect(f"{where}, the epoch that add_gradients gets", [*epochs], [epoch])
    return epoch, samples


def _check_end(workers: Sequence[Worker], plan: Plan, first: int, story: str) -> None:
    """Check how each rank ends, and that it asks once after each step whether to stop."""
    left = len(plan.sizes) - first
    right: object = len(plan.sizes)
    if plan.ends == "stop" and plan.at < left:
        right = f"exit {EXIT_STOPPED}"
    elif plan.ends in ("before", "after") and plan.at <= left:
        right = "interrupted"
    for rank, worker in enumerate(workers):
        ended, is_over = worker["ended"], worker["ended"] != "interrupted"
        expect(
            *(f"{story}: the end of run_elastic on rank {rank}", ended, right),
            "On every rank it returns the number of steps of the whole run, exits with "
            "EXIT_STOPPED if it is asked to stop before the last one, and lets errors of "
            "collectives through.",
        )
        expect(
            f"{story}: the steps after which rank {rank} asks should_stop()",
            *(worker["asked"], [*range(1, len(worker["steps"]) + is_over)]),
            "All ranks ask once after each step: it is a collective.",
        )


def _check_saves(workers: Sequence[Worker], plan: Plan, first: int) -> None:
    """Check the steps after which a save is made, and that all ranks wait for it."""
    total = len(plan.sizes)
    last = first + len(workers[0]["steps"]) - (workers[0]["ended"] == "interrupted")
    due = [step for step in range(first + 1, last + 1) if step % plan.save_every == 0]
    is_end = last > first and (last == total or plan.ends == "stop")
    right = sorted({*due, *([last] if is_end else [])})
    for rank, worker in enumerate(workers):
        expect(
            f"in a start that does the steps {first + 1} to {last} of {total}, with save_every="
            f"{plan.save_every}, the saves of rank {rank}",
            *([step for step, _ in worker["saves"]], right if rank == 0 else []),
            "Steps are counted from the beginning of the run, not of a start; before an exit, the "
            "step that was reached is saved too. Rank 0 alone writes.",
        )
    for step, saved_s in workers[0]["saves"]:
        for rank, worker in enumerate(workers):
            later = [at_s for times_s in worker["times_s"][step - first :] for at_s in times_s]
            check(
                min([*later, worker["left_s"]]) >= saved_s,
                f"rank {rank} went on before rank 0 had saved step {step}. All ranks wait until "
                "the checkpoint is durable: one that leaves has the launcher end rank 0 too.",
            )


# The whole run


def _check_epochs(steps: Sequence[Step], plan: Plan, story: str) -> None:
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
    right = b.replay(plan, steps)
    for rank, worker in enumerate(workers):
        expect(
            *(f"{story}: in the end, the parameters of rank {rank}", worker["parameters"], right),
            "They are as after the same steps on one rank: gradients begin with zeros in each "
            "step; their sums over all ranks are divided by the samples of the step, not by ranks. "
            "A checkpoint holds what is reached after its step.",
            1e-8,
        )


@task("4.6")
def test_the_order_is_that_of_seed_and_epoch(grade: Grade) -> None:
    plan = Plan(num_samples=40, global_batch=8, num_epochs=2, seed=grade.random.randint(1, 99))
    on_one, on_three = (_live(grade, plan, [(n, *END)]) for n in (1, 3))
    for step, ((_, alone), (_, together)) in enumerate(zip(on_one, on_three, strict=True), 1):
        expect(
            f"the samples of step {step} on three ranks",
            *(sorted(together), sorted(alone)),
            "They should be those of one rank: neither the number of ranks nor torch's global "
            "generator may decide the order.",
        )
    half = len(on_one) // 2
    check(
        [samples for _, samples in on_one[:half]] != [samples for _, samples in on_one[half:]],
        "epochs 0 and 1 have the same order: the epoch should decide it, together with the seed.",
    )
    other = _live(grade, plan._replace(seed=plan.seed + 1), [(1, *END)])
    check(on_one != other, f"seeds {plan.seed} and {plan.seed + 1} give the same order.")


@task("4.6")
@pytest.mark.parametrize(("fails", "reason"), [("load", b.DAMAGED), ("save", b.FULL)])
def test_a_failure_of_rank_0_reaches_all(grade: Grade, fails: str, reason: str) -> None:
    with TemporaryDirectory(prefix="distlab-") as root:
        workers = _start(grade, root, 3, Plan(fails=fails))
    for rank, worker in enumerate(workers):
        ended = f"{worker['ended']}"
        check(
            ended.startswith("RuntimeError") and reason in ended,
            f"{fails} fails on rank 0: {reason}. Every rank should raise a RuntimeError that says "
            f"so; rank {rank} ends with {short(ended)}.",
        )


# Bytes


@task("4.6")
def test_gradients_travel_once(grade: Grade) -> None:
    num_ranks, width = 4, 5000
    short_run, long_run = (Plan(5, 5, epochs, 100, 1, width=width) for epochs in (1, 4))
    with TemporaryDirectory(prefix="distlab-") as root:
        run, longer = (
            grade.run(
                *(b.start, num_ranks, f"{root}/{plan.num_epochs}", plan),
                options=Options(algorithm="ring"),
                if_stuck=STUCK,
            )
            for plan in (short_run, long_run)
        )
    most = 2 * (num_ranks - 1) * (width + 1) * FLOAT
    sent = (sum(longer.bytes_sent) - sum(run.bytes_sent)) / 3
    check_cost(
        sent <= 1.1 * most + 4000,
        f"in each step, {num_ranks} ranks together sent {sent:,.0f} bytes; an all-reduce of "
        f"{(width + 1) * FLOAT:,} bytes of gradients takes {most:,.0f}. Gradients travel once per "
        "step, when all micro-batches are done, and as sums.",
    )


@task("4.6")
def test_the_state_travels_once(grade: Grade) -> None:
    num_ranks, plan = 3, Plan(num_epochs=1, width=5000)
    with TemporaryDirectory(prefix="distlab-") as root:
        _start(grade, root, 1, plan)
        run = _run(grade, root, num_ranks, plan)
    state_bytes = 2 * (plan.width + 1) * FLOAT
    for rank, received in enumerate(run.bytes_received):
        check_cost(
            received <= 1.1 * state_bytes + 4000,
            f"rank {rank} received {received:,.0f} bytes when it began, where the state has "
            f"{state_bytes:,}: rank 0 sends it to each of the others once.",
        )
