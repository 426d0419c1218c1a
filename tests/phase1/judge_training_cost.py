"""Judges task 1.13: the speed in the history, and what training sends."""

from typing import Any

from distlab.grade import Grade, Run, check, task
from judging.checks import UNIFORM, distance
from phase1 import trainer as t
from phase1.judge_trainer import EPOCHS, orders_of
from phase1.models import GLOBAL_BATCH, STEPS, network

PARAMETERS = len(list(network(0, normalised=False).parameters()))
REDUCED = STEPS * (PARAMETERS + 1)  # all-reduces of an epoch: the gradients, and the loss


@task("1.13")
def test_the_speed_is_that_of_all_ranks(grade: Grade) -> None:
    run = grade.run(t.fit_counted, 4, [EPOCHS], grade.random.uniform(5e-4, 2e-3), cluster=UNIFORM)
    for rank, result in enumerate(run.results):
        calls = len(result["reduced_s"])
        check(
            calls == EPOCHS * REDUCED,
            f"rank {rank}: the trainer's all_reduce should be called {EPOCHS * REDUCED} times, "
            f"{PARAMETERS + 1} in each step; it was called {calls} times.",
        )
    _check_speeds(run.results)


def _check_speeds(by_rank: list[Any]) -> None:
    """Check the speeds: an epoch lasts from its first sample to its last all-reduce."""
    orders_of(by_rank, EPOCHS)
    n, images = len(by_rank), STEPS * GLOBAL_BATCH
    for rank, result in enumerate(by_rank):
        starts = result["fetched_s"][:: images // n]
        ends = result["reduced_s"][REDUCED - 1 :: REDUCED]
        seconds = [end - start for start, end in zip(starts, ends, strict=True)]
        expected, found = [images / max(s, 1e-9) for s in seconds], result["images_per_s"]
        cause = "Only the seconds of the steps count, not those of the evaluation."
        if _within_1_percent([n * speed for speed in found], expected):
            cause = "That is the speed of one rank: count the images of all ranks."
        check(
            _within_1_percent(found, expected),
            f"rank {rank} of {n}: {images} images per epoch, in {_rounded(seconds)} s of training, "
            f"are {_rounded(expected)} images/s; the history says {_rounded(found)}. {cause}",
        )


def _within_1_percent(found: list[float], expected: list[float]) -> bool:
    return distance([a / b for a, b in zip(found, expected, strict=False)], [1.0] * EPOCHS) <= 0.01


def _rounded(numbers: list[float]) -> str:
    return " and ".join(f"{number:,.4g}" for number in numbers)


@task("1.13")
def test_nothing_else_is_sent(grade: Grade) -> None:
    """The lesson's own broadcast_parameters and evaluate determine what these may send."""
    n, buffers = 4, len(list(network(0, normalised=True).buffers()))
    parts = grade.run(t.parts_of_fit, n, EPOCHS)
    run = grade.run(t.fit_normalised, n, [EPOCHS])
    in_steps = EPOCHS * STEPS * (len(list(network(0, normalised=True).parameters())) + 1)
    allowed = _broadcasts(parts, n) + in_steps + EPOCHS * buffers
    found = _broadcasts(run, n)
    check(
        found <= allowed + 1e-6,
        f"in {EPOCHS} epochs of {STEPS} steps on {n} ranks, rank 0 sent {run.messages[0]} messages "
        f"and called {run.collectives[0]} collectives. With every {n - 1} messages counted as one "
        f"collective, the ranks used {found:.0f} collectives, where {allowed:.0f} would be enough: "
        "the model is broadcast once, when fit starts (equal gradients keep it equal), each of "
        f"{buffers} buffers once per epoch, and there is one evaluation per epoch.",
    )


def _broadcasts(run: Run, n: int) -> float:
    """Count a rank's collectives, and all messages: N-1 of these count as one collective."""
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    return max(run.collectives) + sends / (n - 1)
