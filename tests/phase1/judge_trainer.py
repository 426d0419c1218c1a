"""Judges tasks 1.12 and 1.13: evaluation, and training as a whole."""

from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from phase1 import reference
from phase1 import trainer as t
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import (
    UNIFORM,
    is_close,
    of_members,
    same_loss,
    short,
)
from phase1.models import GLOBAL_BATCH, STEPS

# 1.12 evaluate


@task("1.12", real=True)
@pytest.mark.parametrize(("n", "size"), [(1, 7), (3, 10), (4, 3)])
def test_evaluation_is_that_of_one_process(grade: Grade, n: int, size: int) -> None:
    _check_evaluated(grade.run(t.evaluate, n, size, 2).results, size)


def _check_evaluated(by_rank: list[Any], size: int, length: int = 0) -> None:
    n, alone = len(by_rank), reference.evaluate_alone(size, length)
    fetched = sorted(index for result in by_rank for index in result["fetched"])
    check(
        fetched == list(range(size)),
        f"{size} samples on {n} ranks: each should be fetched once by one rank, fetched were "
        f"{short(fetched)}. No padding, and no rank evaluates the share of another.",
    )
    for rank, result in enumerate(by_rank):
        check(
            same_loss(alone, result["found"]),
            f"rank {rank} of {n}: (loss, accuracy, targets) should be {short(alone)}, it is "
            f"{short(result['found'])}. Add up sums over samples and ranks, and divide once at "
            "the end.",
        )


@task("1.12")
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_the_batch_size_does_not_change_the_result(grade: Grade, batch_size: int) -> None:
    results = grade.run(t.evaluate, 2, 13, batch_size).results
    _check_evaluated(results, 13)
    for rank, result in enumerate(results):
        share, sizes = (7, 6)[rank], result["batch_sizes"]
        check(
            max(sizes, default=0) == min(batch_size, share),
            f"rank {rank} of 2: its {share} samples with batch_size {batch_size} should come in "
            f"forward passes of {min(batch_size, share)} at most; they came in {short(sizes)}. "
            "The caller sets batch_size to what fits in memory.",
        )


@task("1.12")
def test_evaluation_counts_positions_of_sequences(grade: Grade) -> None:
    _check_evaluated(grade.run(t.evaluate, 2, 5, 2, 3).results, 5, 3)


@task("1.12")
def test_modes_are_restored(grade: Grade) -> None:
    for rank, result in enumerate(grade.run(t.evaluate, 2, 6, 2).results):
        check(
            not result["noted"],
            f"rank {rank}: the model was called {' and '.join(result['noted'])}. Evaluation needs "
            "model.eval() and no_grad.",
        )
        check(
            result["restored"],
            f"rank {rank}: afterwards every module should be in the mode it was in before, also a "
            "part that was frozen in evaluation mode.",
        )


@task("1.12")
def test_evaluating_takes_one_small_all_reduce(grade: Grade) -> None:
    run = grade.run(t.evaluate, 4, 41, 2)
    check(
        max(run.collectives) <= 1,
        f"one all-reduce of the sums is enough; collectives by rank are {run.collectives}.",
    )
    sent = [int(number) for number in run.bytes_sent]
    check(
        max(sent) <= 240,
        f"three sums of 8 bytes are all that ranks must tell each other; they sent {sent} bytes. "
        "Add up on each rank, then all-reduce once.",
    )
    for rank, text in enumerate(grade.run(t.evaluate_nothing, 2).results):
        check(text, f"rank {rank}: an empty data set should be a ValueError; it is none.")


@task("1.12")
def test_evaluation_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, t.evaluate, 10, 2, 0)
    _check_evaluated(of_members(run), 10)


# 1.13 Trainer.fit

EPOCHS = 2


@task("1.13", real=True)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_is_that_of_one_process(grade: Grade, n: int) -> None:
    _check_fitted(grade.run(t.fit, n, EPOCHS).results)


def _check_fitted(by_rank: list[Any]) -> None:
    n = len(by_rank)
    orders = _global_batches(by_rank)
    alone = reference.fit_alone(tuple(map(tuple, orders)), EPOCHS)
    epochs = [orders[e * STEPS : (e + 1) * STEPS] for e in range(EPOCHS)]
    check(
        epochs[0] != epochs[1],
        "epochs 1 and 2 see the samples in the same order. Call set_epoch before each.",
    )
    for rank, result in enumerate(by_rank):
        check(
            len(result["history"]) == EPOCHS
            and [entry["epoch"] for entry in result["history"]] == [1, 2],
            f"rank {rank} of {n}: the history should have epochs 1 and 2; it is "
            f"{short(result['history'])}.",
        )
        for wanted, got in zip(alone["history"], result["history"], strict=True):
            check(
                same_loss(wanted, got),
                f"rank {rank} of {n}: epoch {wanted['epoch']} of one process from rank 0's "
                f"weights has losses {short(wanted['step_losses'])} and test {wanted['test']}; "
                f"here {short(got['step_losses'])} and {got['test']}.",
            )
        check(
            is_close(alone["state"], result["state"]),
            f"rank {rank} of {n}: the final weights are not those of one process.",
        )


def _global_batches(by_rank: list[Any]) -> list[list[int]]:
    """What the ranks have fetched together, step by step."""
    n, share = len(by_rank), GLOBAL_BATCH // len(by_rank)
    wanted = EPOCHS * STEPS * share
    for rank, result in enumerate(by_rank):
        check(
            len(result["fetched"]) == wanted,
            f"rank {rank} of {n}: {EPOCHS} epochs of {STEPS} steps of {share} samples are "
            f"{wanted}; it fetched {len(result['fetched'])}.",
        )
    return [
        [i for result in by_rank for i in result["fetched"][step : step + share]]
        for step in range(0, wanted, share)
    ]


@task("1.13", real=True)
def test_rank_0_alone_prints_a_line_an_epoch(grade: Grade) -> None:
    first, *others = (result["printed"] for result in grade.run(t.fit, 2, EPOCHS).results)
    lines = first.splitlines()
    check(
        len(lines) == EPOCHS and all("loss" in line.lower() for line in lines),
        f"rank 0 should print one line an epoch, with the loss; it printed {short(first)}.",
    )
    for rank, text in enumerate(others, start=1):
        check(not text, f"rank {rank} should print nothing; it printed {short(text)}.")


@task("1.13")
def test_batch_norm_is_judged_with_the_same_statistics(grade: Grade) -> None:
    results = grade.run(t.fit_normalised, 2, EPOCHS).results
    for rank, result in enumerate(results):
        check(
            result["history"] == results[0]["history"] and result["state"] == results[0]["state"],
            f"rank {rank}: history or state differs from rank 0's. Running statistics follow each "
            "rank's shard: give rank 0's buffers to all before the evaluation.",
        )
        counted = result["state"].get("1.num_batches_tracked")
        check(
            counted == [EPOCHS * STEPS],
            f"rank {rank}: BatchNorm should have seen {EPOCHS * STEPS} batches, it has {counted}. "
            "The model came in evaluation mode: switch to training at the start of each epoch.",
        )


PARAMETERS = 4  # of the classifier
REDUCED = STEPS * (PARAMETERS + 1)  # all-reduces of an epoch: the gradients, and the loss


@task("1.13")
def test_the_speed_is_that_of_all_ranks(grade: Grade) -> None:
    run = grade.run(t.fit, 4, EPOCHS, cluster=UNIFORM)
    _check_all_reduces(run.results)
    _check_speeds(run.results)
    _check_nothing_else_is_sent(run)


def _check_all_reduces(by_rank: list[Any]) -> None:
    for rank, result in enumerate(by_rank):
        calls = len(result["reduced_s"])
        check(
            calls == EPOCHS * REDUCED,
            f"rank {rank}: the trainer's all_reduce should be called {EPOCHS * REDUCED} times, "
            f"{PARAMETERS + 1} a step; it was {calls} times.",
        )


def _check_speeds(by_rank: list[Any]) -> None:
    """The seconds of an epoch go from its first sample to its last all-reduce."""
    _global_batches(by_rank)
    images, fetched = STEPS * GLOBAL_BATCH, STEPS * GLOBAL_BATCH // len(by_rank)
    for rank, result in enumerate(by_rank):
        speeds = result["images_per_s"]
        starts, ends = result["fetched_s"][::fetched], result["reduced_s"][REDUCED - 1 :: REDUCED]
        seconds = [end - start for start, end in zip(starts, ends, strict=True)]
        expected = [images / max(duration, 1e-9) for duration in seconds]
        check(
            len(speeds) == EPOCHS
            and all(abs(a / b - 1) <= 0.1 for a, b in zip(speeds, expected, strict=True)),
            f"rank {rank}: {images} images in {_rounded(seconds)} s of training are "
            f"{_rounded(expected)} images/s; the history has {_rounded(speeds)}. Count the images "
            "of all ranks, once, over the seconds of training, without those of the evaluation.",
        )


def _rounded(numbers: list[float]) -> str:
    return " and ".join(f"{number:,.4g}" for number in numbers)


def _check_nothing_else_is_sent(run: Run) -> None:
    """The model once, and a result an epoch: in messages of their own, or by collectives."""
    n = len(run.results)
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    most_sends = 2 * PARAMETERS * (n - 1) + EPOCHS * n * (n - 1)
    most_collectives = EPOCHS * (REDUCED + 1) + PARAMETERS + EPOCHS * STEPS
    check(
        sends <= most_sends and max(run.collectives) <= most_collectives,
        f"{EPOCHS * STEPS} steps on {n} ranks took {sends} messages and {max(run.collectives)} "
        f"collectives, where {PARAMETERS * (n - 1)} messages for the model and "
        f"{EPOCHS * (REDUCED + 1)} all-reduces would do. The model is broadcast once, when fit "
        "starts: equal gradients keep it equal.",
    )


@task("1.13")
def test_seed_and_average_are_used(grade: Grade) -> None:
    five, six = (grade.run(t.fit_with_arguments, 2, seed).results for seed in (5, 6))
    for rank, (one, other) in enumerate(zip(five, six, strict=True)):
        check(
            one["fetched"] != other["fetched"],
            f"rank {rank} of 2: seeds 5 and 6 show the samples in the same order, "
            f"{short(one['fetched'])}. Pass seed on to build_loader.",
        )
        check(
            one["average"] == [True] * STEPS,
            f"rank {rank} of 2: the trainer's average should be called {STEPS} times in "
            f"{STEPS} steps, with its all_reduce; it was called {len(one['average'])} times. Pass "
            "self.average and self.all_reduce on to train_step.",
        )


@task("1.13")
def test_a_batch_that_cannot_be_shared_stops_the_training(grade: Grade) -> None:
    for rank, text in enumerate(grade.run(t.fit_what_cannot_be_shared, 2).results):
        check(text, f"rank {rank}: a global batch of 7 on 2 ranks should be build_loader's error.")


@task("1.13")
def test_training_inside_a_group(grade: Grade) -> None:
    _check_fitted(grade.run(t.fit_in_group, 4, EPOCHS).results[1:3])
