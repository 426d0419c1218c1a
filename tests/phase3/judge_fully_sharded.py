"""Judges task 3.20: values, memory during and between the passes, bytes, time, and states."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import MEASURED, UNIFORM, is_close, of_members, uneven
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import zero as b
from phase3.judge_zero_optimizers import (
    BYTES_PER_S,
    CAUSES,
    REAL_SIZES,
    SIZES,
    SLOW,
    check_values,
)

NAME = "FullyShardedDataParallel"
UNIT_BYTES = 2 * b.WIDTH**2
NUM_PARAMS = b.FULL_LAYERS * b.WIDTH**2
PASSES = (  # number of frozen layers, is_evaluated, is_mixed
    (0, False, False),
    (b.SENT_LAYERS // 2, False, False),
    (b.SENT_LAYERS // 2, False, True),
    (0, True, False),
)
IN_A_PASS = {  # how many units' bytes may be held, and what they are
    "in a forward pass": (2, "two whole units"),
    "in a backward pass": (5, "two whole units and the gradients of three"),
}
STUCK = "All ranks must gather and reduce the same units in the same order."
BUFFERS = {"shift": [0.5] * 3}


# Values


def check_trained_fully(
    what: str, by_rank: list[list[dict[str, Any]]], cases: tuple[tuple[str, str, int], ...]
) -> None:
    """Check the full states after training, in each case and on each rank."""
    n = len(by_rank)
    for place, case in enumerate(cases):
        expected = b.expected_after(*case, n) | BUFFERS
        kind, optimizer, passes = case
        for rank, of_rank in enumerate(by_rank):
            here = (
                f"{what}, rank {rank} of {n}, a {kind} model after {b.STEPS} steps of {optimizer} "
                f"with {passes} backward pass{'es' * (passes > 1)} each, full_state_dict"
            )
            check_values(here, expected, of_rank[place], CAUSES[kind], kind)


@task("3.20", real=True)
def test_a_fully_sharded_model_trains_as_plain(grade: Grade) -> None:
    for n in SIZES if grade.is_simulated else REAL_SIZES:
        cases = b.FULL_CASES if n == 3 or not grade.is_simulated else b.FULL_CASES[:2]
        options = uneven(grade.random, n) if grade.is_simulated else None
        run = grade.run(b.train_fully, n, cases, options=options, if_stuck=STUCK)
        check_trained_fully(NAME, run.results, cases)


@task("3.20")
def test_a_fully_sharded_model_inside_a_group(grade: Grade) -> None:
    cases = b.FULL_CASES[:3]
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.train_fully, cases), if_stuck=STUCK_IN_GROUP
    )
    check_trained_fully(f"{NAME} inside a group", of_members(run), cases)


@task("3.20")
def test_two_forward_passes_before_a_backward_pass(grade: Grade) -> None:
    n = 2
    expected = b.used_twice_plain(n) | BUFFERS
    for rank, found in enumerate(grade.run(b.use_twice, n, if_stuck=STUCK).results):
        here = f"{NAME}, rank {rank} of {n}, after a step on the loss of two forward passes"
        uses = found.pop("uses")
        check(
            {*uses} == {2},
            f"{here}: the number of each unit should be 2, one more for each time that it has "
            f"computed; they are {', '.join(map(str, uses))}.",
        )
        check_values(here, expected, found, "Are the gradients of both added up?")


@task("3.20")
def test_shards_are_kept_in_32_bits(grade: Grade) -> None:
    for n in (1, 3):
        for rank, found in enumerate(grade.run(b.take_small_steps_fully, n).results):
            here = f"rank {rank} of {n}, compute_dtype=bfloat16"
            dtypes = ["torch.bfloat16", "torch.float32"]
            check(
                found["dtypes"] == dtypes,
                f"{here}: the output and the shards should be in {' and '.join(dtypes)}; they are "
                f"in {' and '.join(found['dtypes'])}.",
            )
            check(
                found["values"] == [0.96875, 0.96875],
                f"{here}: 32 steps of SGD with lr=2^-10 and gradients of 1.0 should take "
                f"parameters from 1.0 to 0.96875; they are {found['values']}. 16 bits cannot hold "
                "1 - 2^-10: only what is gathered may be rounded.",
            )


# Memory


@task("3.20")
@pytest.mark.parametrize("num_frozen", [0, b.FULL_LAYERS])
def test_no_more_than_two_units_are_whole(grade: Grade, num_frozen: int) -> None:
    n = 4
    run = grade.run(b.hold_fully, n, num_frozen, options=MEASURED)
    trained = NUM_PARAMS * (b.FULL_LAYERS - num_frozen) / b.FULL_LAYERS
    between = (16 * trained + 4 * (NUM_PARAMS - trained)) / n
    slack = 0.02 * 16 * NUM_PARAMS / n
    for rank, found in enumerate(run.results):
        for when, held in found.items():
            units, what = IN_A_PASS.get(when, (0, ""))
            copies = 2 * UNIT_BYTES / n if units else 0.0
            most = between + slack + units * UNIT_BYTES + copies
            besides = (
                f", {units * UNIT_BYTES:,} for {what}, and {copies:,.0f} for copies of two shards "
                "in bfloat16, if the two units' gathers need any"
            )
            check(
                held <= most,
                f"rank {rank} of {n}, {when}, {num_frozen} of {b.FULL_LAYERS} units frozen: "
                f"{held:,} bytes are held, and at most {most:,.0f} should be: {between:,.0f} for "
                "the shards in float32, with gradients and Adam's state of those that are trained, "
                f"{slack:,.0f} to spare{besides if units else ''}. A whole unit takes "
                f"{UNIT_BYTES:,} bytes: free it as soon as it has computed, also if it is frozen, "
                "is only evaluated, or fails, and wait for a reduce-scatter before the next one.",
            )


# Bytes


@task("3.20")
@pytest.mark.parametrize("n", [2, 3])
def test_units_travel_three_times(grade: Grade, n: int) -> None:
    unit = -(-(b.WIDTH**2) // n) * n * 2 * (n - 1) / n
    layers = b.SENT_LAYERS
    for num_frozen, is_evaluated, is_mixed in PASSES if n == 2 else PASSES[:1]:
        one, two = (
            grade.run(
                *(b.pass_through, n, num_frozen, passes, is_evaluated, is_mixed), cluster=UNIFORM
            )
            for passes in (1, 2)
        )
        units = 2 * layers if is_evaluated else 3 * layers + layers - num_frozen
        for rank in range(n):
            got = round(two.bytes_sent[rank] - one.bytes_sent[rank])
            what = "two evaluations" if is_evaluated else "two forward and a backward pass"
            check(
                got <= round(units * unit),
                f"rank {rank} of {n}, {layers} layers of {b.WIDTH**2:,} parameters, {num_frozen} "
                f"of them frozen: {what} should send at most {units} times (N-1)/N of a layer in "
                f"bfloat16, {units * unit:,.0f} bytes; it sends {got:,}. Gather once forward and "
                "once backward, in the dtype to compute in, and reduce-scatter the gradients of "
                "what is trained.",
            )


# Time


@task("3.20")
def test_the_next_unit_comes_while_one_computes(grade: Grade) -> None:
    n = 4
    plain, sharded, made = (
        grade.run(b.go_back_once_fully, n, kind, cluster=SLOW, options=MEASURED)
        for kind in ("plain", "sharded", "made")
    )
    unit_s = 256 * 256 * 4 * (n - 1) / n / BYTES_PER_S + 3e-6
    most, got = plain.seconds + 4 * unit_s, sharded.seconds - made.seconds
    check(
        got <= most,
        f"a forward and a backward pass of {b.TIMED_UNITS} units, each half frozen, should take at "
        f"most {1e6 * most:.0f} µs on {n} ranks: {1e6 * plain.seconds:.0f} µs of computing, and "
        f"four units' travel that nothing hides; it takes {1e6 * got:.0f} µs. Start to gather all "
        "of the next unit before this one computes, forward and backward; and don't wait for a "
        "reduce-scatter before there is the next one.",
    )


# States


@task("3.20")
@pytest.mark.parametrize("kind", ["plain", "tied", "frozen"])
def test_states_fit_another_number_of_ranks(grade: Grade, kind: str) -> None:
    case = (kind, "SGD with momentum", 1)
    saved = grade.run(b.train_fully, 4, (case,)).results[0][0]
    for n in (1, 3):
        for rank, found in enumerate(grade.run(b.restore, n, kind, saved).results):
            for way in ("full", "from shards"):
                here = f"rank {rank} of {n}, a {kind} model saved on 4 ranks and loaded, {way}"
                check_values(here, saved, found[way], "Is each parameter's part in its place?")
            loss = b.loss_with(kind, saved, rank)
            check(
                is_close(loss, found["loss"], 1e-7),
                f"rank {rank} of {n}, a {kind} model saved on 4 ranks and loaded: its loss should "
                f"be {loss:.6f}, and is {found['loss']:.6f}.",
            )
