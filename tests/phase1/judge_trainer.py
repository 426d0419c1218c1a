"""Judges task 1.13: a full training run gives the same result as on one process."""

import re
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from judging.checks import ON_CPU, UNIFORM, check_refused, is_close, short
from judging.expect import expect, expect_on_all_ranks
from judging.groups import STUCK_IN_GROUP
from phase1 import reference
from phase1 import training as t
from phase1.models import GLOBAL_BATCH, LR, NUM_TEST, STEPS, network

EPOCHS = 2
STATISTICS = (
    "Each rank computes running statistics from its own shard: broadcast rank 0's buffers to all "
    "ranks after each epoch, before the evaluation."
)
UNDER_IF = "Every rank must make every collective call: is one of them under a condition?"


@task("1.13", real=True)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_is_that_of_one_process(grade: Grade, n: int) -> None:
    results = grade.run(t.fit, n, [EPOCHS], if_stuck=UNDER_IF if n > 1 else "").results
    orders = orders_of(results, EPOCHS)
    first, second = _batches(orders[:STEPS]), _batches(orders[STEPS:])
    cause = "Call set_epoch before each epoch."
    if first[0] == list(range(GLOBAL_BATCH)):
        cause = "It is the order of the data set: let build_loader shuffle."
    check(first != second, f"epochs 1 and 2 use the samples in the same order. {cause}")
    _check_fitted(results, [EPOCHS])
    _check_printed(results)


def orders_of(by_rank: list[Any], epochs: int) -> reference.Steps:
    """Return the samples that the ranks have fetched, by step and rank."""
    n, share = len(by_rank), GLOBAL_BATCH // len(by_rank)
    wanted = epochs * STEPS * share
    for rank, result in enumerate(by_rank):
        what = f"the number of samples fetched, {share} in each of {STEPS} steps per epoch,"
        expect(f"rank {rank} of {n}, {epochs} epochs: {what}", len(result["fetched"]), wanted)
    return tuple(
        tuple(tuple(result["fetched"][start : start + share]) for result in by_rank)
        for start in range(0, wanted, share)
    )


def _batches(steps: reference.Steps) -> list[list[int]]:
    """Return each step's global batch: the samples of all ranks, sorted."""
    return [sorted(sample for share in step for sample in share) for step in steps]


def _check_fitted(by_rank: list[Any], calls: list[int], **settings: Any) -> None:
    """Check the histories and final states of all ranks against those of one process."""
    n, orders = len(by_rank), orders_of(by_rank, sum(calls))
    alone = reference.fit_alone(orders, tuple(calls), **settings)
    for rank, result in enumerate(by_rank):
        here = f"rank {rank} of {n}"
        _check_histories(here, alone["histories"], result["histories"])
        expect(
            f"{here}: the history, exactly as on rank 0,",
            result["histories"],
            by_rank[0]["histories"],
        )
        wrong = [
            name
            for name, values in alone["state"].items()
            if not is_close(values, result["state"].get(name))
        ]
        check(
            not wrong,
            f"{here}: at the end, the values of {', '.join(wrong)} differ from those of one "
            f"process that starts from rank 0's weights. "
            f"{STATISTICS * any('running' in name for name in wrong)}",
        )
        share = sum(calls) * NUM_TEST / n
        judge = check_cost if result["num_tested"] > share else check
        judge(
            abs(result["num_tested"] - share) < sum(calls) or not sum(calls),
            f"{here}: in {sum(calls)} evaluations of {NUM_TEST} samples, each rank should fetch "
            f"about {share:.0f} samples; this rank fetched {result['num_tested']}. Ranks share the "
            "evaluation, as in 1.12.",
        )
        expect(f"{here}: the values of wrong types in the history", result["types"], [])


def _check_histories(here: str, expected: list[Any], found: list[Any]) -> None:
    for call, (wanted, got) in enumerate(zip(expected, found, strict=True), start=1):
        numbers = ([entry["epoch"] for entry in history] for history in (got, wanted))
        expect(f"{here}: the epochs in the history of call {call} of fit", *numbers)
        for want, entry in zip(wanted, got, strict=True):
            where = f"{here}, call {call}, epoch {want['epoch']}: the"
            what = "step losses of one process that starts from rank 0's weights"
            expect(f"{where} {what}", entry["step_losses"], want["step_losses"], "", 1e-6)
            expect(
                f"{where} test loss and accuracy",
                entry["test"],
                want["test"],
                "The losses of the steps are right. Is the model evaluated after the epoch's last "
                f"step, with rank 0's buffers? {STATISTICS}",
                1e-6,
            )


@task("1.13")
def test_fit_called_again_trains_on(grade: Grade) -> None:
    """Between the calls, all ranks but rank 0 change their weights."""
    calls = [1, 6]  # enough epochs for the test loss to rise
    results = grade.run(t.fit, 2, calls).results
    orders = _batches(orders_of(results, sum(calls)))
    check(
        orders[:STEPS] == orders[STEPS : 2 * STEPS],
        "fit, called again with the same seed, should use the samples in the same order again: "
        "each call counts its epochs from the start.",
    )
    _check_fitted(results, calls)


@task("1.13")
def test_no_epoch_is_an_empty_history(grade: Grade) -> None:
    start = reference.state_at_start(True)
    for rank, result in enumerate(grade.run(t.fit, 2, [0], True).results):
        here = f"rank {rank} of 2, epochs=0"
        what = "the history, the samples fetched and what is printed"
        found = [result["histories"], result["fetched"], result["printed"]]
        expect(f"{here}: {what}", found, [[[]], [], ""])
        check(result["state"] == start, f"{here}: after fit, all ranks should have rank 0's model.")


def _check_printed(by_rank: list[Any]) -> None:
    first, *others = by_rank
    lines = first["printed"].splitlines()
    check(
        len(lines) == EPOCHS
        and all("loss" in line.lower() for line in lines)
        and all(_names(epoch, line) for epoch, line in enumerate(lines, start=1)),
        "rank 0 should print one line per epoch, with the number of the epoch and the loss; it "
        f"printed {short(first['printed'])}.",
    )
    next_epochs = first["fetched_s"][:: len(first["fetched"]) // EPOCHS][1:]
    check(
        all(line <= begin for line, begin in zip(first["printed_s"], next_epochs, strict=False)),
        "rank 0 should print an epoch's line as soon as the epoch is over, but printed it only "
        "after the next epoch had begun.",
    )
    for rank, result in enumerate(others, start=1):
        text = result["printed"]
        check(not text, f"rank {rank} should print nothing; it printed {short(text)}.")


def _names(number: int, line: str) -> bool:
    """Return whether the line contains ``number``, and not only inside 0/2, 1.73 or 1,024."""
    return bool(re.search(rf"(?<![\d.,/]){number}(?![\d]|[.,]\d)", line))


@task("1.13")
def test_batch_norm_is_judged_with_the_statistics_of_rank_0(grade: Grade) -> None:
    results = grade.run(t.fit, 2, [EPOCHS], True).results
    expect_on_all_ranks(
        "the modules that are in evaluation mode during a step",
        [result["modes"] for result in results],
        [],
        "Switch to training mode at the start of each epoch: the caller may have evaluated the "
        "model before.",
    )
    _check_fitted(results, [EPOCHS], normalised=True)


@task("1.13")
def test_the_seed_fixes_the_order_whatever_the_number_of_ranks(grade: Grade) -> None:
    seed = grade.random.randint(1, 10**6)
    for given, same in (seed, seed), (None, 0):  # None: call fit without a seed; its default is 0
        alone, two = _order_of(grade, 1, given), _order_of(grade, 2, same)
        expect(f"seed {same}: the global batches on 2 ranks, as on 1 rank,", two, alone)


def _order_of(grade: Grade, n: int, seed: int | None, epochs: int = 1) -> list[list[int]]:
    return _batches(orders_of(grade.run(t.fit, n, [epochs], False, seed).results, epochs))


@task("1.13")
def test_runs_of_different_seeds_share_no_epoch(grade: Grade) -> None:
    seed = grade.random.randint(1, 10**6)
    orders = [_order_of(grade, 1, seed + more, EPOCHS) for more in range(EPOCHS)]
    epochs = {
        (seed + more, epoch + 1): order[epoch * STEPS : (epoch + 1) * STEPS]
        for more, order in enumerate(orders)
        for epoch in range(EPOCHS)
    }
    for key, order in epochs.items():
        twins = [other for other, batches in epochs.items() if batches == order]
        check(
            twins == [key],
            f"(seed, epoch) {' and '.join(map(str, twins))} give the same order of samples. Pass "
            "the seed to build_loader as it is, and the epoch to set_epoch.",
        )


@task("1.13")
def test_average_and_all_reduce_are_used(grade: Grade) -> None:
    n = 2
    results = grade.run(t.fit_summing, n).results
    expect_on_all_ranks(
        f"whether each call of average, one in each of {STEPS} steps, gets the trainer's "
        "all_reduce, and the sizes of tensors that all_reduce gets,",
        [[result["average"], result["sizes"]] for result in results],
        [[True] * STEPS, [2] * STEPS],
        "self.step(batch) passes both on to train_step.",
    )
    _check_fitted(results, [1], lr=n * LR)  # this average sums, so gradients are n times as large


@task("1.13")
def test_a_batch_that_cannot_be_shared_stops_the_training(grade: Grade) -> None:
    results = grade.run(t.fit_what_cannot_be_shared, 2).results
    check_refused(results, "A global batch of 7 on 2 ranks (build_loader's error)")


@task("1.13")
def test_the_training_happens_on_the_device(grade: Grade) -> None:
    results = grade.run(t.fit_there, 2, [1], options=ON_CPU).results
    devices, right = [result["devices"] for result in results], [results[0]["device"]]
    expect_on_all_ranks(
        "the devices of the model after fit, which moves batches alone,", devices, right
    )
    _check_fitted(results, [1], normalised=True)


@task("1.13")
def test_training_inside_a_group(grade: Grade) -> None:
    results = grade.run(t.fit_in_group, 4, [EPOCHS], if_stuck=STUCK_IN_GROUP).results[1:3]
    _check_fitted(results, [EPOCHS], normalised=True)
    _check_printed(results)


# The cost

PARAMETERS = len(list(network(0, normalised=False).parameters()))
REDUCED = STEPS * (PARAMETERS + 1)  # all-reduces per epoch, for the gradients and the loss


@task("1.13")
def test_the_speed_is_that_of_all_ranks(grade: Grade) -> None:
    n, images, sample_s = 4, STEPS * GLOBAL_BATCH, grade.random.uniform(5e-4, 2e-3)
    results = grade.run(t.fit_counted, n, [EPOCHS], sample_s, cluster=UNIFORM).results
    orders_of(results, EPOCHS)
    for rank, result in enumerate(results):
        calls = len(result["reduced_s"])
        expect(f"rank {rank}: the calls of the trainer's all_reduce", calls, EPOCHS * REDUCED)
        # An epoch lasts from its first sample to its last all-reduce.
        starts = result["fetched_s"][:: images // n]
        ends = result["reduced_s"][REDUCED - 1 :: REDUCED]
        found, cause = result["images_per_s"], "Only the seconds of the steps count."
        shares = [
            speed * (end - start) / images
            for speed, start, end in zip(found, starts, ends, strict=True)
        ]
        if is_close([n * share for share in shares], [1.0] * EPOCHS, 0.01):
            cause = "That is the speed of one rank: count the images of all ranks."
        expect(
            f"rank {rank} of {n}: images_per_s, over the {images} images per epoch divided by the "
            "seconds of training,",
            shares,
            [1.0] * EPOCHS,
            cause,
            0.01,
        )


@task("1.13")
def test_nothing_else_is_sent(grade: Grade) -> None:
    """The limit includes what the lesson's own broadcast_parameters and evaluate send."""
    model = network(0, normalised=True)
    n, buffers = 4, len(list(model.buffers()))
    parts = grade.run(t.parts_of_fit, n, EPOCHS)
    run = grade.run(t.fit, n, [EPOCHS], True)
    in_steps = EPOCHS * STEPS * (len(list(model.parameters())) + 1)
    allowed, used = _broadcasts(parts, n) + in_steps + EPOCHS * buffers, _broadcasts(run, n)
    check_cost(
        used <= allowed + 1e-6,
        f"in {EPOCHS} epochs of {STEPS} steps on {n} ranks, rank 0 sent {run.messages[0]} messages "
        f"and called {run.collectives[0]} collectives. With every {n - 1} messages counted as one "
        f"collective, the ranks used {used:.0f} collectives, where {allowed:.0f} would be enough: "
        "the model is broadcast once, when fit starts (equal gradients keep it equal), each of "
        f"{buffers} buffers once per epoch, and there is one evaluation per epoch.",
    )


def _broadcasts(run: Run, n: int) -> float:
    """Return the largest number of collectives on a rank, plus one for every N-1 messages sent."""
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    return max(run.collectives) + sends / (n - 1)
