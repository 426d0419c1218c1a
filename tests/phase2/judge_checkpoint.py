"""Judges tasks 2.5 and 2.6: a checkpointed function gives the results of the plain one."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.sim import GPU, Cluster
from distlab.util.text import counted
from judging.checks import MEASURED, check_refused, is_close
from judging.expect import expect, expect_cost
from phase2 import checkpointing as b

FLOPS_PER_S = 1e12
# Computing time depends only on FLOPs; memory traffic takes no time.
SPEED = {"float32": FLOPS_PER_S}
COUNTING = Cluster(1, 1, gpu=GPU("toy", 1e15, 1e30, SPEED, SPEED))
SLACK = 0.5  # in activations: room for generator states, parameter gradients and so on
ON_THEIR_WAY = 4  # in activations: room for gradients and results being computed


def alone(body: Callable[..., Any], *args: object) -> Any:
    """Run a body without checkpointing, in this process, and return its result."""
    lesson = SimpleNamespace(checkpoint=b.plain, checkpoint_sequential=b.plain_sequential)
    with torch.random.fork_rng():
        return body(lesson, *args)


@task("2.5")
@pytest.mark.parametrize("case", b.CASES)
def test_gradients_are_those_of_the_plain_function(grade: Grade, case: str) -> None:
    seed = grade.random.randrange(2**31)
    expected, found = alone(b.run_case, case, seed), grade.call(b.run_case, case, seed)
    here, cause = case.replace("_", " "), " ".join((b.CASES[case].__doc__ or "").split())
    check_gradients(here, expected, found, cause)
    for name, in_one_pass in expected["calls"].items():
        # Recomputing outer calls inner once, and recomputing inner calls it once more.
        wanted = 3 if name == "inner" else 2 * in_one_pass
        expect_cost(
            f"{here}: the number of calls of {name} in both passes",
            found["calls"].get(name, 0),
            wanted,
            "fn is called in both passes, also inside of another checkpoint. It is called plainly "
            "only where gradients are disabled, and where it is a module and neither its "
            "parameters nor its arguments require a gradient.",
        )


def check_gradients(here: str, expected: Any, found: Any, cause: str) -> None:
    """Compare loss and gradients with those of a run without checkpointing."""
    expect(
        f"{here}: the loss, as of the plain call,", found["loss"], expected["loss"], cause, 1e-10
    )
    for name, wanted in expected["gradients"].items():
        got = found["gradients"][name]
        factor = "" if any(got) else "There is none at all. "
        if is_close([2 * x for x in wanted], got):
            factor = "It is twice what it should be. "
        expect(f"{here}: the gradient of {name}", got, wanted, factor + cause, 1e-10)


@task("2.5")
def test_fn_is_called_twice_with_arguments_of_one_kind(grade: Grade) -> None:
    for found in grade.call(b.watch_calls):
        check(
            not found["is_of_torch"],
            "fn was called by torch.utils.checkpoint: write the recomputation yourself.",
        )
        expect(
            "the calls of fn(x, y, ids, 2.0), one in each pass, by whether x, y and ids require a "
            "gradient,",
            found["calls"],
            [[*found["needing"], False]] * 2,
            "A gradient that nobody needs costs time and memory, and integers cannot have one.",
        )


@task("2.5")
def test_without_anything_to_differentiate_fn_is_called_once(grade: Grade) -> None:
    for situation, found in grade.call(b.call_without_gradients).items():
        expect(
            f"a module that is {situation}, and an argument that requires no gradient: the number "
            "of calls, and whether the result requires a gradient,",
            found,
            [1, False],
            "With a gradient, every later layer keeps activations for it.",
        )


@task("2.5", part="b")
def test_a_changed_argument_is_an_error(grade: Grade) -> None:
    for which, error in grade.call(b.change_argument).items():
        check(
            error,
            f"{which} was changed in place between the passes: the second call would compute with "
            "other numbers than the first, so the backward pass should raise a RuntimeError; it "
            "raised nothing. autograd notices by itself if the tensor was kept by "
            "save_for_backward.",
        )


OF_DRAWN = {
    "y": "The forward pass should draw the same random numbers as without checkpointing.",
    "between": "Set the generator to an earlier state in the backward pass only.",
    "gradient": "Does the second call draw the numbers of the first? With others, dropout drops "
    "other elements than in the forward pass.",
    "after": "After the second call, set the generator back to where it was before it.",
}


@task("2.5", part="b", real=True)
def test_the_same_random_numbers_are_drawn_twice(grade: Grade) -> None:
    seed = grade.random.randrange(2**31)
    for rank, found in enumerate(grade.run(b.draw, 3, seed).results):
        with torch.random.fork_rng():
            expected = b.draw_with(b.plain, seed + rank)
        for name, what in b.DRAWN.items():
            here = f"dropout and noise, rank {rank} of 3: {what}"
            expect(here, found[name], expected[name], OF_DRAWN[name], 1e-9)


@task("2.5", part="b")
def test_autocast_is_as_in_the_first_call(grade: Grade) -> None:
    seed = grade.random.randrange(2**31)
    runs = zip(b.CASTS, grade.call(b.cast, seed), alone(b.cast, seed), strict=True)
    for (forward, backward), found, expected in runs:
        here = f"forward pass with {_text(forward)}, backward pass with {_text(backward)}"
        expect(
            f"{here}: what the two calls of fn see",
            [_text(state) for state in found["seen"]],
            [_text(forward)] * 2,
            "The backward pass may run anywhere: note the dtype and whether autocast is enabled in "
            "the forward pass, and bring them back with torch.autocast.",
        )
        what = "what autocast is after the backward pass"
        expect(f"{here}: {what}", _text(found["after"]), _text(expected["after"]))
        expect(f"{here}: the dtype of the result", found["dtype"], expected["dtype"])
        what = f"{here}: the gradient of x"
        expect(what, found["gradient"], expected["gradient"], tolerance=1e-6)


def _text(state: b.Autocast) -> str:
    return f"autocast to {state[0]}" if state[1] else "autocast disabled"


@task("2.5")
def test_only_the_arguments_are_held_between_the_passes(grade: Grade) -> None:
    run = grade.run(b.hold, 1, options=MEASURED)
    found = run.results[0]
    held, peak = found["held"] / b.UNIT, (run.peak_bytes[0] - found["before"]) / b.UNIT
    expect(
        "whether a result through which a gradient has to come requires one", found["needs"], True
    )
    check_cost(
        held <= 1 + SLACK,
        f"{b.LAYERS} layers in one checkpoint: between the passes 1 argument of {b.UNIT:,} bytes "
        f"should be held, but no result that the caller has deleted; {held:.1f} times these bytes "
        "are. Does the forward pass record a graph, or keep what it computes?",
    )
    # In the forward pass, the argument, a layer's input and its two results are held.
    check_cost(
        peak <= 5 + SLACK,
        f"{b.LAYERS} layers in one checkpoint: what fn computes on the way should be freed at "
        f"once, but in the forward pass {peak:.1f} activations are held at one moment. Call fn so "
        "that autograd records nothing.",
    )


@task("2.5")
def test_a_chain_takes_little_memory_and_one_more_forward_pass(grade: Grade) -> None:
    run = grade.run(b.train_chain, 1, cluster=COUNTING, options=MEASURED)
    _check_costs(
        f"{b.BLOCKS} blocks of {b.LAYERS} layers, each block in a checkpoint",
        *(run, b.BLOCKS * b.LAYERS, b.BLOCKS + b.LAYERS),
        "Is what the second call has computed freed before the next block's turn? The backward "
        "pass should call fn once for all gradients, and the forward pass should compute none.",
    )


def _check_costs(here: str, run: Run, num_layers: int, num_held: int, cause: str) -> None:
    """Check a step's memory and time; the body has returned the bytes of the parameters."""
    held = (run.peak_bytes[0] - 2 * run.results[0]) / b.UNIT
    forward = round(run.seconds * FLOPS_PER_S) / (num_layers * b.LAYER_FLOPS)
    check_cost(
        held <= num_held + ON_THEIR_WAY + SLACK and 3 <= forward <= 4,
        f"{here}: about {num_held} activations should be held at once, {num_held + ON_THEIR_WAY} "
        f"with gradients on their way; {held:.1f} were. The step should cost 3 to 4 forward passes "
        f"through all layers; it cost {forward:.2f}. {cause}",
    )


# Task 2.6: checkpoint_sequential

NUM_LAYERS = 36  # layers of the sequence whose memory is measured
SIZES = [(10, 4), (6, 1), (8, 8), (9, 5), (1, 1), (11, 3)]  # numbers of layers and of segments


@task("2.6")
def test_segments_are_of_equal_size(grade: Grade) -> None:
    seed = grade.random.randrange(2**31)
    by_case, plain = grade.call(b.run_segments, SIZES, seed), alone(b.run_segments, SIZES, seed)
    for (num_layers, segments), found, expected in zip(SIZES, by_case, plain, strict=True):
        here = f"{counted(num_layers, 'layer')}, {counted(segments, 'segment')}"
        every = [*range(num_layers)]
        cause = "Take slices of the caller's sequence, and remove nothing."
        expect(f"{here}: the layers in the sequence afterwards", found["left"], every, cause)
        cause = "Call neither train nor eval."
        expect(f"{here}: the modes of the layers", found["modes"], expected["modes"], cause)
        expect(f"{here}: the layers that the forward pass calls", found["forward"], every)
        _check_sizes(here, num_layers, segments, found["backward"])
        cause = "Does the first segment count, whose input needs no gradient?"
        check_gradients(here, expected, found, cause)
        what = "the random numbers drawn after the backward pass"
        expect(f"{here}: {what}", found["after"], expected["after"], tolerance=1e-9)
        expect(f"{here}: what has changed of x, the caller's,", found["changed"], [])


def _check_sizes(here: str, num_layers: int, segments: int, calls: list[int]) -> None:
    """Check that the backward pass calls whole segments again, and that their sizes are right."""
    missing = [number for number in range(num_layers) if number not in calls]
    check(
        len(set(calls)) == len(calls)
        and missing == [*range(num_layers)][num_layers - len(missing) :]
        and (calls or segments == 1),
        f"{here}: the backward pass should call all layers again, each once, and may leave out "
        f"only the last segment; it called {calls}. A function that reads variables of a loop "
        "finds their last values when it is called later.",
    )
    starts = [now for before, now in pairwise([-2, *calls]) if now != before + 1]
    bounds = sorted({*starts, len(calls), num_layers})  # the last segment need not be called again
    sizes = [end - start for start, end in pairwise(bounds)]
    cause = ""
    if len(sizes) == num_layers > segments:
        cause = "Each layer has its own checkpoint: checkpoint a segment as one function."
    elif len(sizes) == segments and sizes[-1] == max(sizes):
        cause = "The last segment got all that was left over: spread it."
    check(
        len(sizes) == segments and max(sizes) - min(sizes) <= 1,
        f"{here}: in the backward pass the layers {calls} were called again, so the sizes of the "
        f"segments are {sizes}. There should be {segments}, whose sizes differ by at most 1. "
        f"{cause}",
    )


@task("2.6")
@pytest.mark.parametrize("segments", [3, 12])
def test_memory_is_that_of_inputs_and_one_segment(grade: Grade, segments: int) -> None:
    run = grade.run(b.train_segments, 1, NUM_LAYERS, segments, cluster=COUNTING, options=MEASURED)
    _check_costs(
        f"{NUM_LAYERS} layers, {segments} segments",
        *(run, NUM_LAYERS, segments + NUM_LAYERS // segments),
        "That is the inputs of all segments and the activations of one. Does the backward pass "
        "compute all of them again, and is a segment checkpointed as one function, not each layer?",
    )


@task("2.6")
def test_segments_that_cannot_be_are_refused(grade: Grade) -> None:
    for num_layers, segments in [(4, 5), (4, 0), (12, -1), (0, 1)]:
        refusal = grade.call(b.refuse_segments, num_layers, segments)
        what = f"Cutting {counted(num_layers, 'layer')} into {counted(segments, 'segment')}"
        check_refused([refusal], what, str(num_layers), str(segments))
