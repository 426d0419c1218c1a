"""Judges task 2.7: a sequence of layers, checkpointed segment by segment."""

from itertools import pairwise
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import MEASURED, check_refused, is_close
from phase2 import checkpointing as b
from phase2.judge_checkpoint import COUNTING, SLACK, alone, check_gradients, flops_of

NUM_LAYERS = 36  # where memory is measured
SIZES = [(10, 4), (6, 1), (8, 8)]  # numbers of layers and of segments
SIZES_WITH_INTEGERS = [(9, 5), (1, 1), (11, 3)]


@task("2.7")
@pytest.mark.parametrize("sizes", [SIZES, SIZES_WITH_INTEGERS], ids=["floats", "integers"])
def test_segments_are_of_equal_size(grade: Grade, sizes: list[tuple[int, int]]) -> None:
    seed = grade.random.randrange(2**31)
    by_case = grade.call(b.run_segments, sizes, seed)
    plain = alone(b.run_segments, sizes, seed)
    for (num_layers, segments), found, expected in zip(sizes, by_case, plain, strict=True):
        _check_run(num_layers, segments, expected, found)


def _check_run(num_layers: int, segments: int, expected: Any, found: Any) -> None:
    here = f"{counted(num_layers, 'layer')}, {counted(segments, 'segment')}"
    check(
        found["left"] == [*range(num_layers)],
        f"{here}: the sequence of layers is the caller's and should stay as it is; afterwards "
        f"there are the layers {found['left']} in it. Take slices of it, and remove nothing.",
    )
    check(
        found["modes"] == expected["modes"],
        f"{here}: some layers are in evaluation mode, where dropout drops nothing. Each layer "
        "should stay in its mode: call neither train nor eval.",
    )
    check(
        found["forward"] == [*range(num_layers)],
        f"{here}: the forward pass should call each layer once, in order; it called "
        f"{found['forward']}.",
    )
    _check_sizes(here, num_layers, segments, found["backward"])
    check_gradients(
        *(here, expected, found),
        "Does the first segment count, whose input needs no gradient?",
    )
    check(
        is_close(expected["after"], found["after"]),
        f"{here}: the random numbers drawn after the backward pass differ from those without "
        "checkpointing.",
    )


def _check_sizes(here: str, num_layers: int, segments: int, calls: list[int]) -> None:
    """Check what the backward pass calls again: segments, from the last to the first."""
    check(
        len(set(calls)) == len(calls),
        f"{here}: the backward pass should call each layer once at most; it called {calls}. A "
        "function that reads variables of a loop finds their last values when it is called later.",
    )
    missing = [number for number in range(num_layers) if number not in calls]
    check(
        missing == [*range(num_layers)][num_layers - len(missing) :],
        f"{here}: the backward pass should call all layers again, and may leave out only the last "
        f"segment; it called {calls}.",
    )
    check(
        calls or segments == 1,
        f"{here}: the backward pass called no layer again, so nothing was checkpointed.",
    )
    sizes = _sizes(num_layers, calls)
    check(
        len(sizes) == segments and max(sizes) - min(sizes) <= 1,
        f"{here}: in the backward pass the layers {calls} were called again, so the sizes of the "
        f"segments are {sizes}. There should be {segments}, whose sizes differ by at most 1. "
        f"{_why(sizes, num_layers, segments)}",
    )


def _sizes(num_layers: int, calls: list[int]) -> list[int]:
    """The sizes of the segments, in order; the last one may not have been called again."""
    starts = [now for before, now in pairwise([-2, *calls]) if now != before + 1]
    bounds = sorted({*starts, len(calls), num_layers})
    return [end - start for start, end in pairwise(bounds)]


def _why(sizes: list[int], num_layers: int, segments: int) -> str:
    if len(sizes) == num_layers > segments:
        return "Each layer has its own checkpoint: checkpoint a segment as one function."
    if len(sizes) == segments and sizes[-1] == max(sizes):
        return "The last segment got all that was left over: spread it."
    return ""


@task("2.7")
@pytest.mark.parametrize("segments", [6, 3, 12])
def test_memory_is_that_of_inputs_and_one_segment(grade: Grade, segments: int) -> None:
    run = grade.run(b.train_segments, 1, NUM_LAYERS, segments, cluster=COUNTING, options=MEASURED)
    here = f"{NUM_LAYERS} layers, {segments} segments"
    inside = NUM_LAYERS // segments
    most = segments + inside + 4  # and gradients on their way
    held = (run.peak_bytes[0] - 2 * run.results[0]) / b.UNIT
    check(
        held <= most + SLACK / b.UNIT,
        f"{here}: about {segments} inputs and {inside} activations of one segment should be held "
        f"at once, {most} with what is being computed; {held:.1f} were. Does the backward pass "
        "compute all of them again, and is a segment checkpointed as one function, not each layer?",
    )
    forward = NUM_LAYERS * b.LAYER_FLOPS
    check(
        3 * forward <= flops_of(run) <= 4 * forward,
        f"{here}: with checkpointing a step costs at most four forward passes; this one cost "
        f"{flops_of(run) / forward:.2f}.",
    )


@task("2.7")
def test_segments_that_cannot_be_are_refused(grade: Grade) -> None:
    cases = [(4, 5), (4, 0), (12, -1), (0, 1)]
    found = grade.call(b.refuse_segments, cases)
    for (num_layers, segments), refusal in zip(cases, found, strict=True):
        what = f"Cutting {counted(num_layers, 'layer')} into {counted(segments, 'segment')}"
        check_refused([refusal], what, str(num_layers), str(segments))
