"""Judges task 1.13: the training as a whole is that of one process."""

import re
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import verb
from judging.checks import check_refused, is_close, same_loss, short
from judging.groups import STUCK_IN_GROUP
from phase1 import reference
from phase1 import trainer as t
from phase1.models import GLOBAL_BATCH, LR, NUM_TEST, STEPS

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


def orders_of(by_rank: list[Any], epochs: int) -> reference.Steps:
    """What the ranks have fetched, by step and rank."""
    n, share = len(by_rank), GLOBAL_BATCH // len(by_rank)
    wanted = epochs * STEPS * share
    for rank, result in enumerate(by_rank):
        check(
            len(result["fetched"]) == wanted,
            f"rank {rank} of {n}: in {epochs} epochs of {STEPS} steps of {share} samples, a rank "
            f"should fetch {wanted} samples; it fetched {len(result['fetched'])}.",
        )
    return tuple(
        tuple(tuple(result["fetched"][start : start + share]) for result in by_rank)
        for start in range(0, wanted, share)
    )


def _batches(steps: reference.Steps) -> list[list[int]]:
    """The samples of each global batch, in whatever order and on whatever rank."""
    return [sorted(sample for share in step for sample in share) for step in steps]


def _check_fitted(by_rank: list[Any], calls: list[int], **settings: Any) -> None:
    """Check histories and final state against those of one process, on every rank."""
    orders = orders_of(by_rank, sum(calls))
    alone = reference.fit_alone(orders, tuple(calls), **settings)
    for rank, result in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}"
        _check_histories(here, alone["histories"], result)
        check(
            result["histories"] == by_rank[0]["histories"],
            f"{here}: the history should be the same as on rank 0, "
            f"{short(by_rank[0]['histories'])}; it is {short(result['histories'])}.",
        )
        wrong = [name for name, values in alone["state"].items() if not _same(values, result, name)]
        statistics = f" {STATISTICS}" if any("running" in name for name in wrong) else ""
        check(
            not wrong,
            f"{here}: at the end, the values of {', '.join(wrong)} differ from those of one "
            f"process that starts from rank 0's weights.{statistics}",
        )
        _check_share_of_test(here, result["num_tested"], sum(calls), len(by_rank))
        check(
            not result["types"],
            f"{here}: the history contains values of the wrong types: {short(result['types'])}.",
        )


def _check_share_of_test(here: str, num_tested: int, epochs: int, n: int) -> None:
    share = NUM_TEST / n
    check(
        abs(num_tested - epochs * share) < epochs,
        f"{here}: in {epochs} evaluations of {NUM_TEST} samples, each of {n} ranks should fetch "
        f"about {epochs * share:.0f} samples; this rank fetched {num_tested}. Ranks share the "
        "evaluation, as in 1.12.",
    )


def _same(values: list[float], result: Any, name: str) -> bool:
    return is_close(values, result["state"].get(name))


def _check_histories(here: str, expected: list[Any], result: Any) -> None:
    for call, (wanted, got) in enumerate(zip(expected, result["histories"], strict=True), start=1):
        numbers = [entry["epoch"] for entry in wanted]
        found = [entry["epoch"] for entry in got]
        check(
            found == numbers,
            f"{here}: call {call} of fit should return a history of the epochs {numbers}; it "
            f"returned a history of {found}.",
        )
        for want, entry in zip(wanted, got, strict=True):
            _check_epoch(f"{here}, call {call}, epoch {want['epoch']}", want, entry)


def _check_epoch(here: str, want: Any, got: Any) -> None:
    check(
        same_loss(want["step_losses"], got["step_losses"]),
        f"{here}: one process that starts from rank 0's weights gets the step losses "
        f"{short(want['step_losses'])}; here they are {short(got['step_losses'])}.",
    )
    check(
        same_loss(want["test"], got["test"]),
        f"{here}: one process gets the test loss and accuracy {want['test']}; here they are "
        f"{got['test']}, although the losses of the steps are right. Is the model evaluated after "
        f"the epoch's last step, with rank 0's buffers? {STATISTICS}",
    )


@task("1.13")
def test_fit_called_again_trains_on(grade: Grade) -> None:
    """In between, all ranks but rank 0 have changed their weights."""
    calls = [1, 6]  # so many that the test loss rises
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
    for rank, result in enumerate(grade.run(t.fit_normalised, 2, [0]).results):
        here = f"rank {rank} of 2, epochs=0"
        check(
            result["histories"] == [[]] and not result["fetched"] and not result["printed"],
            f"{here}: fit should train nothing, print nothing and return an empty history; the "
            f"history is {short(result['histories'])}, {len(result['fetched'])} samples were "
            f"fetched, and {short(result['printed'])} was printed.",
        )
        check(result["state"] == start, f"{here}: after fit, all ranks should have rank 0's model.")


@task("1.13", real=True)
def test_rank_0_alone_prints_a_line_an_epoch(grade: Grade) -> None:
    _check_printed(grade.run(t.fit, 2, [EPOCHS]).results)


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
    """Whether the number itself is in the line, not just in ``rank 0/2``, 1.73 or 1,024."""
    return bool(re.search(rf"(?<![\d.,/]){number}(?![\d]|[.,]\d)", line))


@task("1.13")
def test_batch_norm_is_judged_with_the_statistics_of_rank_0(grade: Grade) -> None:
    results = grade.run(t.fit_normalised, 2, [EPOCHS]).results
    for rank, result in enumerate(results):
        check(
            not result["modes"],
            f"rank {rank} of 2: {' and '.join(result['modes'])} "
            f"{verb(result['modes'], 'were', 'was')} in evaluation mode during a step. Switch to "
            "training mode at the start of each epoch: the caller may have evaluated the model "
            "before.",
        )
    _check_fitted(results, [EPOCHS], normalised=True)


@task("1.13")
def test_the_seed_fixes_the_order_whatever_the_number_of_ranks(grade: Grade) -> None:
    seed = grade.random.randint(1, 10**6)
    drawn = _check_order(grade, seed, seed)
    check(
        drawn != _check_order(grade, None, 0),
        f"seeds {seed} and 0 (the default) give the same order of samples. Pass seed on to "
        "build_loader.",
    )


def _check_order(grade: Grade, seed: int | None, same: int) -> list[list[int]]:
    """Check that two ranks see the order that one sees; None leaves the seed out."""
    alone, two = _order_of(grade, 1, seed), _order_of(grade, 2, same)
    check(
        alone == two,
        f"seed {same} gives the global batches {short(alone)} on 1 rank, but {short(two)} on 2 "
        "ranks. The order of the samples should be the same for any number of ranks.",
    )
    return alone


def _order_of(grade: Grade, n: int, seed: int | None, epochs: int = 1) -> list[list[int]]:
    fetched = grade.run(t.fit_seeded, n, seed, epochs).results
    return _batches(orders_of([{"fetched": samples} for samples in fetched], epochs))


@task("1.13")
def test_runs_of_different_seeds_share_no_epoch(grade: Grade) -> None:
    seed = grade.random.randint(1, 10**6)
    orders = [_order_of(grade, 1, seed + more, EPOCHS) for more in range(EPOCHS)]
    epochs = {
        (seed + more, epoch + 1): order[epoch * STEPS : (epoch + 1) * STEPS]
        for more, order in enumerate(orders)
        for epoch in range(EPOCHS)
    }
    for (one, epoch), order in epochs.items():
        twins = [key for key, other in epochs.items() if other == order]
        check(
            twins == [(one, epoch)],
            f"(seed, epoch) {' and '.join(map(str, twins))} give the same order of samples. Pass "
            "the seed to build_loader as it is, and the epoch to set_epoch.",
        )


@task("1.13")
def test_average_and_all_reduce_are_used(grade: Grade) -> None:
    n = 2
    results = grade.run(t.fit_summing, n).results
    for rank, result in enumerate(results):
        check(
            result["average"] == [True] * STEPS and result["sizes"] == [2] * STEPS,
            f"rank {rank} of {n}: the trainer's average should be called {STEPS} times in {STEPS} "
            f"steps, with the trainer's all_reduce; average was called {len(result['average'])} "
            f"times, and all_reduce with tensors of {short(result['sizes'])} numbers. "
            "self.step(batch) passes both on to train_step.",
        )
    _check_fitted(results, [1], lr=n * LR)  # the average given sums


@task("1.13")
def test_a_batch_that_cannot_be_shared_stops_the_training(grade: Grade) -> None:
    results = grade.run(t.fit_what_cannot_be_shared, 2).results
    check_refused(results, "A global batch of 7 on 2 ranks (build_loader's error)")


@task("1.13")
def test_the_training_happens_on_the_device(grade: Grade) -> None:
    results = grade.run(t.fit_there, 2, [1]).results
    for rank, result in enumerate(results):
        check(
            result["devices"] == [result["device"]],
            f"rank {rank}: the model was on {result['device']}, but is on "
            f"{' and '.join(result['devices'])} after fit. Move batches, not the model.",
        )
    _check_fitted(results, [1], normalised=True)


@task("1.13")
def test_training_inside_a_group(grade: Grade) -> None:
    results = grade.run(t.fit_in_group, 4, [EPOCHS], if_stuck=STUCK_IN_GROUP).results[1:3]
    _check_fitted(results, [EPOCHS], normalised=True)
    _check_printed(results)
