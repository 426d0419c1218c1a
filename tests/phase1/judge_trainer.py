"""Judges tasks 1.12 and 1.13: evaluation, and training as a whole."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from phase1 import trainer as t
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import (
    UNIFORM,
    check_ranks,
    is_close,
    of_members,
    short,
)

# 1.12 evaluate


@task("1.12", real=True)
@pytest.mark.parametrize(("n", "size"), [(1, 7), (3, 10), (4, 3)])
def test_evaluation_is_that_of_one_process(grade: Grade, n: int, size: int) -> None:
    _check_evaluated(grade.run(t.evaluate, n, size, 2).results, size)


def _check_evaluated(by_rank: list[Any], size: int, length: int = 0) -> None:
    n, alone = len(by_rank), t.evaluate_alone(size, length)
    fetched = sorted(index for result in by_rank for index in result["fetched"])
    check(
        fetched == list(range(size)),
        f"{size} samples on {n} ranks: each should be fetched once by one rank, fetched were "
        f"{short(fetched)}. No padding, and no rank evaluates the share of another.",
    )
    check_ranks(
        [alone] * n,
        [result["found"] for result in by_rank],
        "(loss, accuracy, targets)",
        "Add up sums over samples and ranks, and divide once at the end.",
    )


@task("1.12")
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_the_batch_size_does_not_change_the_result(grade: Grade, batch_size: int) -> None:
    _check_evaluated(grade.run(t.evaluate, 2, 13, batch_size).results, 13)


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
    run = grade.run(t.evaluate, 4, 13, 2)
    check(
        run.collectives == [1] * 4,
        f"one all-reduce of the sums is enough; collectives by rank are {run.collectives}.",
    )
    for rank, text in enumerate(grade.run(t.evaluate_nothing, 2).results):
        check(text, f"rank {rank}: an empty data set should be a ValueError; it is none.")


@task("1.12")
def test_evaluation_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, t.evaluate, 10, 2, 0)
    _check_evaluated(of_members(run), 10)


# 1.13 Trainer.fit

EPOCHS = 3


@task("1.13", real=True)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_is_that_of_one_process(grade: Grade, n: int) -> None:
    _check_fitted(grade.run(t.fit, n, EPOCHS).results)


def _check_fitted(by_rank: list[Any]) -> None:
    n = len(by_rank)
    orders = _global_batches(by_rank)
    alone = t.fit_alone(orders, EPOCHS)
    epochs = [orders[e * t.STEPS : (e + 1) * t.STEPS] for e in range(EPOCHS)]
    check(
        epochs[0] != epochs[1],
        "epochs 1 and 2 see the samples in the same order. Call set_epoch before each.",
    )
    for rank, result in enumerate(by_rank):
        check(
            len(result["history"]) == EPOCHS
            and [entry["epoch"] for entry in result["history"]] == [1, 2, 3],
            f"rank {rank} of {n}: the history should have epochs 1, 2, 3; it is "
            f"{short(result['history'])}.",
        )
        for wanted, got in zip(alone["history"], result["history"], strict=True):
            check(
                is_close(wanted, got),
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
    n, share = len(by_rank), t.GLOBAL_BATCH // len(by_rank)
    wanted = EPOCHS * t.STEPS * share
    for rank, result in enumerate(by_rank):
        check(
            len(result["fetched"]) == wanted,
            f"rank {rank} of {n}: {EPOCHS} epochs of {t.STEPS} steps of {share} samples are "
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
        len(lines) == EPOCHS and all("loss" in line for line in lines),
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
        (counted,) = result["state"]["1.num_batches_tracked"]
        check(
            counted == EPOCHS * t.STEPS,
            f"rank {rank}: BatchNorm has seen {counted:.0f} batches of {EPOCHS * t.STEPS}. The "
            "model came in evaluation mode: switch to training at the start of each epoch.",
        )


@task("1.13")
def test_the_speed_is_that_of_all_ranks(grade: Grade) -> None:
    run = grade.run(t.fit, 4, EPOCHS, cluster=UNIFORM)
    images = t.STEPS * t.GLOBAL_BATCH
    for rank, result in enumerate(run.results):
        speeds = result["images_per_s"]
        spent = sum(images / speed for speed in speeds if speed > 0)
        check(
            0 < spent <= 1.001 * run.seconds,
            f"rank {rank}: {short(speeds)} images/s would have taken {spent:.3f} s, the run took "
            f"{run.seconds:.3f} s. Count the images of all ranks.",
        )
        parameters = 4  # of the classifier
        check(
            result["all_reduces"] == EPOCHS * t.STEPS * (parameters + 1),
            f"rank {rank}: the trainer's all_reduce should be called "
            f"{EPOCHS * t.STEPS * (parameters + 1)} times, {parameters + 1} a step; it was "
            f"{result['all_reduces']} times.",
        )


@task("1.13")
def test_a_batch_that_cannot_be_shared_stops_the_training(grade: Grade) -> None:
    for rank, text in enumerate(grade.run(t.fit_what_cannot_be_shared, 2).results):
        check(text, f"rank {rank}: a global batch of 7 on 2 ranks should be build_loader's error.")


@task("1.13")
def test_training_inside_a_group(grade: Grade) -> None:
    _check_fitted(grade.run(t.fit_in_group, 4, EPOCHS).results[1:3])
