"""Judges task 1.12: evaluation counts every sample once, on one rank, and sends three numbers."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import check_refused, is_close, of_members, same_loss, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import evaluation as b
from phase1 import reference
from phase1.models import CLASSES, Moody

DEFAULT_BATCH_SIZE = 256
TYPES = ["Evaluation", "float", "float", "int"]


@task("1.12", real=True)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_evaluation_is_that_of_one_process(grade: Grade, n: int) -> None:
    size = {1: grade.random.randint(5, 9), 3: 3 * grade.random.randint(2, 4) + 1, 4: 3}[n]
    batch_size = grade.random.randint(1, 3)
    run = grade.run(b.evaluate, n, size, 0, {"batch_size": batch_size})
    _check_evaluated(run.results, size, batch_size=batch_size)


def _check_evaluated(
    by_rank: list[Any], size: int, length: int = 0, batch_size: int = DEFAULT_BATCH_SIZE
) -> None:
    _check_shares(by_rank, size)
    for rank, result in enumerate(by_rank):
        _check_numbers(by_rank, rank, size, length)
        _check_passes(rank, len(by_rank), result, size, batch_size)
        check(
            result["types"] == TYPES,
            f"rank {rank}: evaluate should return {TYPES[0]}({', '.join(TYPES[1:])}); it returned "
            f"{result['types'][0]}({', '.join(result['types'][1:])}).",
        )


def _check_shares(by_rank: list[Any], size: int) -> None:
    n = len(by_rank)
    for rank, result in enumerate(by_rank):
        share = list(range(rank, size, n))
        check(
            sorted(result["fetched"]) == share,
            f"{counted(size, 'sample')} on {counted(n, 'rank')}: rank {rank} should fetch samples "
            f"{short(share)}, each once; it fetched {short(result['fetched'])}. Rank r takes "
            "samples r, r+N, r+2N, … without padding, and no rank evaluates another rank's share.",
        )


def _check_numbers(by_rank: list[Any], rank: int, size: int, length: int) -> None:
    n, found = len(by_rank), by_rank[rank]["found"]
    alone = reference.evaluate_alone(size, length)
    check(
        same_loss(alone, found) and found == by_rank[0]["found"],
        f"rank {rank} of {n}: (loss, accuracy, targets) should be {alone} on every rank, but here "
        f"they are {found}. {_why_other_numbers(found, rank, n, size, length)}",
    )


def _why_other_numbers(found: list[Any], rank: int, n: int, size: int, length: int) -> str:
    alone = reference.evaluate_alone(size, length)
    if same_loss([alone[0], alone[2]], [found[0], found[2]]):
        return (
            "The loss and the number of targets are right. An answer is right if the largest "
            "logit, along the last dim, is that of the target."
        )
    if n > 1 and rank < size and same_loss(reference.evaluate_alone(size, length, rank, n), found):
        return "Those are the results for this rank's own samples: all-reduce the sums."
    if alone[2] != size == found[2]:
        return f"A sample has {length} targets here: count targets, not samples."
    return "Add up over all samples and ranks, and divide once at the end."


def _check_passes(rank: int, n: int, result: Any, size: int, batch_size: int) -> None:
    """The caller has chosen what fits in memory; a pass without any row does no harm."""
    share = len(range(rank, size, n))
    expected = [min(batch_size, share - start) for start in range(0, share, batch_size)]
    found = [rows for rows in result["rows"] if rows]
    check(
        found == expected,
        f"rank {rank} of {n}: its {share} samples with batch_size {batch_size} should go through "
        f"forward passes of {short(expected)} samples; they went through passes of {short(found)}. "
        "The caller sets batch_size to what fits in memory.",
    )


@task("1.12")
def test_the_batch_size_does_not_change_the_result(grade: Grade) -> None:
    size, larger = 2 * grade.random.randint(5, 7) + 1, grade.random.randint(30, 300)
    for batch_size in (1, grade.random.randint(3, 4), larger):
        results = grade.run(b.evaluate, 2, size, 0, {"batch_size": batch_size}).results
        _check_evaluated(results, size, batch_size=batch_size)


@task("1.12")
def test_a_forward_pass_has_256_samples_by_default(grade: Grade) -> None:
    size = 2 * DEFAULT_BATCH_SIZE + grade.random.randint(3, 20)
    _check_evaluated(grade.run(b.evaluate, 2, size).results, size)


@task("1.12")
def test_evaluation_counts_positions_of_sequences(grade: Grade) -> None:
    """There are as many positions as classes, so the wrong dim gives the right shape, too."""
    size, length = grade.random.randint(5, 8), CLASSES
    _check_evaluated(grade.run(b.evaluate, 2, size, length).results, size, length)


@task("1.12")
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_modes_are_restored(grade: Grade, mode: bool) -> None:
    """The model is in this mode; some of its parts are in the other."""
    parts = len(list(Moody().modules())) - 1
    modes = [mode, not mode, *(grade.random.random() < 0.5 for _ in range(parts - 1))]
    results = grade.run(b.evaluate_modes, 2, grade.random.randint(4, 6), modes).results
    for rank, result in enumerate(results):
        check(
            not result["noted"],
            f"rank {rank}: the model was called {' and '.join(result['noted'])}. Evaluation needs "
            "model.eval() and torch.no_grad.",
        )
        check(
            result["restored"],
            f"rank {rank}: after evaluate, every module should be back in the mode it was in "
            "before, including a part that was frozen in evaluation mode.",
        )
        check(
            not result["changed"],
            f"rank {rank}: the model's parameters or buffers have changed; evaluation should leave "
            "them as they are.",
        )


@task("1.12")
def test_evaluating_takes_one_small_all_reduce(grade: Grade) -> None:
    n, size = 8, grade.random.randint(20, 40)
    run = grade.run(b.evaluate, n, size, 0, {"batch_size": 2})
    check(
        max(run.collectives) <= 1,
        f"one all-reduce of the sums is enough; collective calls per rank: {run.collectives}.",
    )
    sent, most = [int(number) for number in run.bytes_sent], 3 * 24  # log2 8 messages
    check(
        max(sent) <= most,
        f"ranks need to exchange only three sums of 8 bytes, for which each of {n} ranks sends at "
        f"most {most} bytes in an all-reduce; bytes sent per rank: {sent}. Add up on each rank, "
        "then all-reduce once.",
    )
    check(
        min(run.bytes_received) >= 3 * 4,
        "every rank should receive the three sums in an all-reduce; bytes received per rank: "
        f"{[int(number) for number in run.bytes_received]}. Does every rank evaluate the whole "
        "data set?",
    )
    _check_evaluated(run.results, size, batch_size=2)


@task("1.12")
def test_an_empty_data_set_is_refused_on_every_rank(grade: Grade) -> None:
    check_refused(grade.run(b.evaluate_nothing, 2).results, "An empty data set")


@task("1.12")
def test_sums_are_exact_in_bfloat16(grade: Grade) -> None:
    share, num_wrong = 4 * grade.random.randint(65, 124) + 3, grade.random.randint(50, 250)
    size = 2 * share  # in bfloat16, a share is one too large
    expected = [64 * num_wrong / size, 1 - num_wrong / size, size]
    for rank, found in enumerate(grade.run(b.evaluate_in_bfloat16, 2, size, num_wrong).results):
        check(
            is_close(
                [1.0] * 3, [got / want for got, want in zip(found, expected, strict=True)], 1e-6
            ),
            f"for a model in bfloat16 and {size} targets, of which {num_wrong} have a wrong answer "
            f"and a loss of 64, (loss, accuracy, targets) should be {expected}, but on rank {rank} "
            f"of 2 they are {found}. bfloat16 has 8 significant bits, so 303 becomes 304. Add up "
            "in float32 or float64.",
        )


@task("1.12")
def test_everything_happens_on_the_device(grade: Grade) -> None:
    size = grade.random.randint(5, 8)
    results = grade.run(b.evaluate_there, 2, size).results
    _check_evaluated(results, size)
    for rank, result in enumerate(results):
        device, called, sent = result["device"], result["devices"], result["sent"]
        check(
            called == [device] and set(sent) == {device},
            f"rank {rank}: with device={device!r} the model should be called with tensors on that "
            "device, and the sums should be all-reduced from there, as NCCL only sends tensors on "
            f"GPUs; the model was called with tensors on {' and '.join(called)}, and the tensors "
            f"sent were on {short(sent)}.",
        )


@task("1.12")
def test_evaluation_inside_a_group(grade: Grade) -> None:
    size = grade.random.randint(len(MEMBERS) + 1, 10)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.evaluate, size, 0, None), if_stuck=STUCK_IN_GROUP
    )
    _check_evaluated(of_members(run), size)
