"""Judges task 3.14: values, memory, bytes, message order, everyday use and states."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from judging.checks import MEASURED, UNIFORM, check_refused
from judging.expect import expect, expect_cost
from phase3 import fully_sharded as b
from phase3 import zero
from phase3.judge_zero import (
    NUM_PARAMS,
    SLOW,
    STUCK,
    check_each,
    check_overlap,
    check_small_updates,
    check_trains_as_plain,
    check_trains_in_group,
)
from phase3.zero import FULLY

UNIT_BYTES = 2 * zero.WIDTH**2
PASSES = (  # number of frozen layers, is_evaluated, is_mixed
    (0, False, False),
    (b.SENT_LAYERS // 2, False, False),
    (b.SENT_LAYERS // 2, False, True),
    (0, True, False),
)
IN_A_PASS = {  # number of units whose bytes may be held, and a description
    "in a forward pass": (2, "two whole units"),
    "in the backward pass": (5, "two whole units and the gradients of three"),
}


# Values


@task("3.14", real=True)
def test_a_fully_sharded_model_trains_as_plain(grade: Grade) -> None:
    check_trains_as_plain(grade, FULLY, zero.CASES_IN_SHARDS)


@task("3.14")
def test_a_fully_sharded_model_inside_a_group(grade: Grade) -> None:
    check_trains_in_group(grade, FULLY)


@task("3.14")
def test_shards_are_kept_in_32_bits(grade: Grade) -> None:
    for n in (1, 3):
        by_rank = check_small_updates(grade, FULLY, n, "only what is gathered may be rounded.")
        for rank, result in enumerate(by_rank):
            what = f"rank {rank} of {n}: the dtypes of the output and of the shards"
            expect(what, result["dtypes"], ["torch.bfloat16", "torch.float32"])


@task("3.14")
def test_gradients_are_summed_in_the_dtype_that_was_asked_for(grade: Grade) -> None:
    for rank, gradient in enumerate(grade.run(b.reduce_in_float32, 2, if_stuck=STUCK).results):
        check(
            gradient in (None, 128.5),
            f"rank {rank} of 2, compute_dtype bfloat16, reduce_dtype float32, gradients of 256 and "
            f"1: their mean should be 128.5, got {gradient}. Cast the gradients to reduce_dtype "
            "before the reduce-scatter: in bfloat16, 256 + 1 is 256.",
        )


# Memory


@task("3.14")
@pytest.mark.parametrize("num_frozen", [0, zero.LAYERS])
def test_no_more_than_two_units_are_whole(grade: Grade, num_frozen: int) -> None:
    n = 4
    run = grade.run(zero.hold, n, FULLY, {}, num_frozen, options=MEASURED)
    trained = NUM_PARAMS * (zero.LAYERS - num_frozen) / zero.LAYERS
    between = (16 * trained + 4 * (NUM_PARAMS - trained)) / n
    slack = 0.01 * 16 * NUM_PARAMS / n
    for rank, by_moment in enumerate(run.results):
        for when, held in by_moment.items():
            units, what = IN_A_PASS.get(when, (0, ""))
            copies = 2 * UNIT_BYTES / n if units else 0.0
            most = between + slack + units * UNIT_BYTES + copies
            besides = (
                f", {units * UNIT_BYTES:,} for {what}, and {copies:,.0f} for copies of two shards "
                "in bfloat16, if the two units' gathers need any"
            )
            check_cost(
                held <= most,
                f"rank {rank} of {n}, {when}, {num_frozen} of {zero.LAYERS} units frozen: "
                f"{held:,} bytes are held, and at most {most:,.0f} should be: {between:,.0f} for "
                "the shards in float32, with gradients and Adam's state of those that are trained, "
                f"{slack:,.0f} to spare{besides if units else ''}. A whole unit takes "
                f"{UNIT_BYTES:,} bytes: free it as soon as it has computed, also if it is frozen, "
                "is only evaluated, or fails, and wait for a reduce-scatter before the next one. "
                "In the backward pass, the next unit to gather is the one before.",
            )


# Bytes and time


@task("3.14")
@pytest.mark.parametrize("n", [2, 3])
def test_units_travel_three_times(grade: Grade, n: int) -> None:
    layers, layer = b.SENT_LAYERS, zero.WIDTH**2
    unit = -(-layer // n) * n * 2 * (n - 1) / n
    for num_frozen, is_evaluated, is_mixed in PASSES if n == 2 else PASSES[:1]:
        once, twice = (
            grade.run(
                *(b.pass_through, n, num_frozen, passes, is_evaluated, is_mixed), cluster=UNIFORM
            )
            for passes in (1, 2)
        )
        units = 2 * layers if is_evaluated else 3 * layers + layers - num_frozen
        what = "two evaluations" if is_evaluated else "two forward and a backward pass"
        for rank in range(n):
            got = round(twice.bytes_sent[rank] - once.bytes_sent[rank])
            check_cost(
                got <= round(units * unit),
                f"rank {rank} of {n}, {layers} layers of {layer:,} parameters, {num_frozen} "
                f"of them frozen: {what} should send at most {units} times (N-1)/N of a layer in "
                f"bfloat16, {units * unit:,.0f} bytes; it sends {got:,}. Gather once forward and "
                "once backward, in the dtype to compute in, and reduce-scatter the gradients of "
                "what is trained.",
            )


@task("3.14", part="b")
def test_the_next_unit_comes_while_one_computes(grade: Grade) -> None:
    check_overlap(
        *(grade, FULLY, {}, 4),
        "A unit here is two layers of 256 x 128, together 256 KiB, of which the first is frozen. "
        "Start to gather all of the next unit before this one computes, forward and backward; and "
        "don't wait for a reduce-scatter before there is the next one.",
    )


# Order


def _parts_of(run: Run, rank: int) -> list[list[Any]]:
    """Return a rank's collectives, split into parts at the body's barriers."""
    parts: list[list[Any]] = [[]]
    events = run.trace.events if run.trace else []
    for event in sorted(events, key=lambda event: event.start_s):
        if event.rank == rank and event.kind == "collective":
            if event.name == "barrier":
                parts.append([])
            else:
                parts[-1].append(event)
    return parts


def _gathers(events: Sequence[Any], n: int) -> list[b.Mark]:
    """Return the start time of each gather, and the name of its unit."""
    words = b.words_by_bytes(n)
    return [
        (event.start_s, words.get(event.num_bytes, f"an all-gather of {event.num_bytes} bytes"))
        for event in events
        if event.name == "all_gather"
    ]


def _drawn(gathers: Sequence[b.Mark], marks: Sequence[b.Mark]) -> list[str]:
    """Return the names of the events in order; messages that start together share an entry."""
    by_time: dict[tuple[float, bool], list[str]] = {}
    for at_s, word in sorted([*gathers, *marks]):
        by_time.setdefault((at_s, word.startswith("gather")), []).append(word)
    return [" + ".join(by_time[when]) for when in sorted(by_time)]


def _check_drawn(here: str, expected: list[str], got: list[str], why: str) -> None:
    """Check that a pass runs as drawn; the message shows the first difference."""
    pairs = zip([*expected, "the end"], [*got, "the end"], strict=False)
    wanted, came = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    check_cost(
        got == expected,
        f"{here}: it should run as [{', '.join(expected)}], and runs as [{', '.join(got)}]; "
        f"{wanted} should come where {came} does. A message stands where it sets out, computing "
        f"where it ends. A unit waits for its own parameters alone; then it starts the next "
        f"unit's, which travel while it computes.{why}",
    )


@task("3.14", part="b")
def test_units_come_in_the_order_of_the_figure(grade: Grade) -> None:
    n = 2
    run = grade.run(b.draw, n, cluster=SLOW, options=MEASURED, if_stuck=STUCK)
    for rank, by_drawing in enumerate(run.results):
        parts = iter(_parts_of(run, rank))
        for marks, (what, drawing) in zip(by_drawing, b.DRAWINGS.items(), strict=True):
            _, forward, backward = (_gathers(next(parts), n) for _ in range(3))
            here, num = f"rank {rank} of {n}, {what}", len(drawing.uses)
            for direction, wanted, got, why in (
                ("forward", drawing.forward, _drawn(forward, marks[:num]), ""),
                ("backward", drawing.backward, _drawn(backward, marks[num:]), f" {drawing.why}"),
            ):
                _check_drawn(f"{here}, {direction} pass", wanted.split(", "), got, why)


# Everyday use

IN_USE = {  # name of a result -> right values, and the likely cause of wrong ones
    "seen": (
        b.SEEN,
        "Cast floating-point tensors, in args and kwargs, in tuples and dicts too, and no "
        "others: labels and token ids would be rounded.",
    ),
    "returned": (b.RETURNED, "Pass it on as it is."),
    "used": (
        {"calls of a forward hook": 1, "input of args has a gradient": True}
        | {"input of kwargs has a gradient": True},
        "Call the module, not its forward, which skips hooks. Casting belongs to the graph: "
        "detach nothing.",
    ),
}


@task("3.14")
def test_a_model_is_used_as_ever(grade: Grade) -> None:
    n = 2
    by_rank = grade.run(b.use_every_day, n, if_stuck=STUCK).results
    for rank, result in enumerate(by_rank):
        here = f"rank {rank} of {n}, a model that computes in bfloat16"
        for what, (expected, cause) in IN_USE.items():
            check_each(here, f", {what} in a pass,", expected, result[what], cause)
        cause = "Buffers stay as they are on each rank: they are neither sent nor cast."
        check_each(here, ", a buffer,", b.buffers_on(rank), result["buffers"], cause)
    refusals = [result["refusal"] for result in by_rank]
    check_refused(refusals, f"a module whose {b.UNBORN} is on the device meta", b.UNBORN)


# States


@task("3.14")
@pytest.mark.parametrize("kind", ["plain", "tied", "frozen", zero.TWO])
def test_states_fit_any_number_of_ranks(grade: Grade, kind: str) -> None:
    state, dtypes = b.whole_numbers(kind), b.dtypes_of(kind)
    for n in (1, 3):
        run = grade.run(b.restore, n, kind, if_stuck=STUCK)
        for rank, result in enumerate(run.results):
            here = f"rank {rank} of {n}, a {kind} model after load_full_state_dict of float16"
            for way in ("full_state_dict", "load_state_dict of the shards"):
                cause = "Is each parameter's part in its place, and are the buffers there?"
                check_each(f"{here}, {way}", "", state, result[way], cause)
            sent = sum(event.num_bytes for event in _parts_of(run, rank)[1])
            _check_stored(here, kind, result, sent)
            cause = "Gather the shards in their own dtype: a checkpoint in bfloat16 loses digits."
            check_each(f"{here}, full_state_dict", ", its dtype,", dtypes, result["dtypes"], cause)


def _check_stored(here: str, kind: str, result: dict[str, Any], sent: int) -> None:
    """Check the bytes of a full state and of the shards, and the error for an incomplete state."""
    check_cost(
        sent <= result["bytes"],
        f"{here}, full_state_dict: this rank's shards, {result['bytes']} bytes, should be in one "
        f"all-gather each; it brings {sent} bytes into collectives. An all-gather of a flat "
        "returns all of its parameters.",
    )
    dtypes = ["torch.float32", "torch.float64"][kind != zero.TWO :]
    cause = "Copy into the shard's own memory: a view keeps the whole parameters, and their dtype."
    expect(f"{here}: the dtypes of the shards", result["shards"], dtypes, cause)
    expect_cost(f"{here}: the bytes of the shards' memory", result["held"], result["bytes"], cause)
    check(
        b.MISSING in result["error"],
        f"{here} without {b.MISSING}: a KeyError should name it; there is {result['error']}. Who "
        "restarts from a checkpoint that does not fit must not train from other numbers.",
    )
