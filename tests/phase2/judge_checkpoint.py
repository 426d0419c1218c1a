"""Judges tasks 2.6 and 2.7: what is checkpointed has the results and gradients of the plain one."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster
from distlab.util.text import counted
from judging.checks import MEASURED, check_refused, distance, is_close, short
from judging.comparing import check_equal
from phase2 import checkpointing as b

FLOPS_PER_S = 1e12
# Computation takes as long as its FLOPs; memory traffic takes no time.
COUNTING = Cluster(
    1,
    1,
    gpu=GPU("toy", 1e15, 1e30, {"float32": FLOPS_PER_S}, {"float32": FLOPS_PER_S}),
)
SLACK = 0.5 * b.UNIT  # generators' states, gradients of parameters and other small things


def alone(body: Callable[..., Any], *args: object) -> Any:
    """Return what a body finds without any checkpointing, in this process."""
    lesson = SimpleNamespace(checkpoint=b.plain, checkpoint_sequential=b.plain_sequential)
    with torch.random.fork_rng():
        return body(lesson, *args)


def flops_of(run: Run) -> int:
    """The FLOPs of a run on the cluster that counts them."""
    return round(run.seconds * FLOPS_PER_S)


@task("2.6")
@pytest.mark.parametrize("about", b.CASES)
def test_gradients_are_those_of_the_plain_function(grade: Grade, about: str) -> None:
    seed = grade.random.randrange(2**31)
    expected = alone(b.run_cases, about, seed)
    for case, found in grade.call(b.run_cases, about, seed).items():
        here = case.replace("_", " ")
        check_gradients(here, expected[case], found, _cause(case))
        for name, in_one_pass in expected[case]["calls"].items():
            _check_calls(f"{here}: {name}", in_one_pass, found["calls"].get(name, 0))


def _cause(case: str) -> str:
    """The likely cause of a wrong case, which its docstring gives."""
    return " ".join((getattr(b, case).__doc__ or "").split())


def _check_calls(here: str, in_one_pass: int, calls: int) -> None:
    """Check that a function was checkpointed: called in both passes, however it gets gradients."""
    if here.endswith("inner"):
        check(
            calls == 3,
            f"{here}, in a checkpoint inside outer, should be called 3 times: in the first call of "
            f"outer, in its second call, and when the backward pass arrives at inner. It was "
            f"called {counted(calls, 'time')}. In the second call of outer, inner is checkpointed "
            "too.",
        )
        return
    check(
        calls == 2 * in_one_pass,
        f"{here} should be called as often in the backward pass as in the forward pass, "
        f"{2 * in_one_pass} times in all; it was called {counted(calls, 'time')}. fn is called "
        "plainly only where gradients are disabled, and where it is a module and neither its "
        "parameters nor its arguments require a gradient.",
    )


def check_gradients(here: str, expected: Any, found: Any, cause: str) -> None:
    """Compare loss and gradients with those of a run without checkpointing."""
    check(
        is_close(expected["loss"], found["loss"], 1e-10),
        f"{here}: without checkpointing the loss is {expected['loss']:.9f}; it is "
        f"{found['loss']:.9f}. The results should be exactly those of the plain call.",
    )
    for name, gradient in expected["gradients"].items():
        got = found["gradients"][name]
        check(
            distance(gradient, got) <= 1e-10,
            f"{here}: the gradient of {name} should be {short(gradient)}; it is {short(got)}. "
            f"{_factor(gradient, got)}{cause}",
        )


def _factor(expected: list[float], got: list[float]) -> str:
    if not any(got):
        return "There is none at all. "
    return "It is twice what it should be. " if is_close([2 * x for x in expected], got) else ""


@task("2.6")
def test_fn_is_called_twice_with_arguments_of_one_kind(grade: Grade) -> None:
    for found in grade.call(b.watch_calls):
        calls, expected = found["calls"], [*found["needing"], False]
        check(
            not found["is_of_torch"],
            "fn was called by torch.utils.checkpoint: write the recomputation yourself.",
        )
        check(
            len(calls) == 2,
            "fn should be called twice, once in each pass; the number of its calls is "
            f"{len(calls)}.",
        )
        check(
            calls == [expected] * 2,
            "fn(x, y, ids, 2.0): whether x, y and ids require a gradient should be "
            f"{expected} in both calls; it was {calls}. A gradient that nobody needs costs time "
            "and memory, and integers cannot have one.",
        )


@task("2.6")
def test_without_anything_to_differentiate_fn_is_called_once(grade: Grade) -> None:
    for situation, (calls, needs) in grade.call(b.call_without_gradients).items():
        check(
            calls == 1,
            f"a module that is {situation}: it should be called once; it was called "
            f"{counted(calls, 'time')}.",
        )
        check(
            not needs,
            f"a module that is {situation}, and an argument that requires no gradient: the result "
            "should not require one, but does. Then every later layer keeps activations for it.",
        )


@task("2.6")
def test_a_changed_argument_is_an_error(grade: Grade) -> None:
    for which, error in grade.call(b.change_argument).items():
        check(
            error,
            f"{which} was changed in place between the passes: the second call would compute with "
            "other numbers than the first, so the backward pass should raise a RuntimeError; it "
            "raised nothing. autograd notices by itself if the tensor was kept by "
            "save_for_backward.",
        )


@task("2.6", real=True)
@pytest.mark.parametrize("n", [3])
def test_the_same_random_numbers_are_drawn_twice(grade: Grade, n: int) -> None:
    seed = grade.random.randrange(2**31)
    for rank, found in enumerate(grade.run(b.draw, n, seed).results):
        with torch.random.fork_rng():
            expected = b.draw_with(b.plain, seed + rank)
        _check_draws(f"dropout and noise, rank {rank} of {n}", expected, found)


def _check_draws(here: str, expected: Any, found: Any) -> None:
    check(
        is_close(expected["y"], found["y"]) and is_close(expected["between"], found["between"]),
        f"{here}: the forward pass should draw the same random numbers as without checkpointing, "
        f"and leave the generator where it would be then: the next numbers are "
        f"{short(found['between'])} and should be {short(expected['between'])}. Set the generator "
        "to an earlier state in the backward pass only.",
    )
    for name, what, cause in (
        (
            "gradient",
            "the gradient of x",
            "Does the second call draw the numbers of the first? With others, dropout drops other "
            "elements than in the forward pass.",
        ),
        (
            "after",
            "the list of random numbers drawn after the backward pass",
            "After the second call, set the generator back to where it was before it.",
        ),
    ):
        check_equal(here, what, expected[name], found[name], cause, 1e-9)


@task("2.6")
def test_autocast_is_as_in_the_first_call(grade: Grade) -> None:
    seed = grade.random.randrange(2**31)
    found = grade.call(b.cast, seed)
    for (forward, backward), one, expected in zip(b.CASTS, found, alone(b.cast, seed), strict=True):
        _check_cast(forward, backward, expected, one)


def _check_cast(forward: b.Autocast, backward: b.Autocast, expected: Any, found: Any) -> None:
    here = f"forward pass with {_text(forward)}, backward pass with {_text(backward)}"
    seen = [tuple(state) for state in found["seen"]]
    check(
        seen == [forward] * 2,
        f"{here}: both calls of fn should see {_text(forward)}; they see "
        f"{' and '.join(map(_text, seen))}. The backward pass may run anywhere: note the dtype and "
        "whether autocast is enabled in the forward pass, and bring them back with torch.autocast.",
    )
    check(
        tuple(found["after"]) == tuple(expected["after"]),
        f"{here}: after the backward pass there should be {_text(expected['after'])} again; there "
        f"is {_text(found['after'])}.",
    )
    check_equal(here, "the dtype of the result", expected["dtype"], found["dtype"])
    check_equal(here, "the gradient of x", *(expected["gradient"], found["gradient"]), "", 1e-6)


def _text(state: b.Autocast) -> str:
    return f"autocast to {state[0]}" if state[1] else "autocast disabled"


@task("2.6")
def test_only_the_arguments_are_held_between_the_passes(grade: Grade) -> None:
    run = grade.run(b.hold, 1, options=MEASURED)
    found = run.results[0]
    held, most = found["held"] / b.UNIT, 1 + SLACK / b.UNIT
    check(
        found["needs"],
        "a result through which a gradient has to come should require one, but does not.",
    )
    check(
        held <= most,
        f"{b.LAYERS} layers in one checkpoint: between the passes 1 argument of {b.UNIT:,} bytes "
        f"should be held, but no result that the caller has deleted; {held:.1f} times these bytes "
        "are. Does the forward pass record a graph, or keep what it computes?",
    )
    # During the forward pass a layer's input and its two results are there besides the argument.
    peak = (run.peak_bytes[0] - found["before"]) / b.UNIT
    check(
        peak <= 5 + SLACK / b.UNIT,
        f"{b.LAYERS} layers in one checkpoint: what fn computes on the way should be freed at "
        f"once, but in the forward pass {peak:.1f} activations are held at one moment. Call fn so "
        "that autograd records nothing.",
    )


@task("2.6")
def test_a_chain_takes_little_memory_and_one_more_forward_pass(grade: Grade) -> None:
    run = grade.run(b.train_chain, 1, cluster=COUNTING, options=MEASURED)
    parameters = run.results[0]
    # Arguments of all blocks; activations of one block; and gradients on their way.
    most = b.BLOCKS + b.LAYERS + 4
    held = (run.peak_bytes[0] - 2 * parameters) / b.UNIT
    check(
        held <= most + SLACK / b.UNIT,
        f"{b.BLOCKS} blocks of {b.LAYERS} layers, each block in a checkpoint: about {most} "
        f"activations should be held at once, the argument of each block and what one block needs; "
        f"{held:.1f} were. {_why_more(held)}",
    )
    forward = b.BLOCKS * b.LAYERS * b.LAYER_FLOPS
    check(
        flops_of(run) <= 4 * forward,
        f"a step without checkpointing costs three forward passes, and one with it four; this one "
        f"cost {flops_of(run) / forward:.2f} of them. The backward pass should call fn once for "
        "all gradients, and the forward pass should compute none.",
    )


def _why_more(held: float) -> str:
    if held > b.BLOCKS * b.LAYERS:
        return "That is as many as without checkpointing."
    return "Is what the second call has computed freed before the next block's turn?"


@task("2.6", real=True)
@pytest.mark.parametrize("n", [3])
def test_messages_of_fn_are_sent_once_in_each_pass(grade: Grade, n: int) -> None:
    run = grade.run(b.send_inside, n)
    total = float(sum(number + rank for rank in range(n) for number in range(4)))
    for rank, found in enumerate(run.results):
        here = f"rank {rank}, fn multiplies by a sum over {n} ranks"
        check_equal(here, "the gradient", [total] * 4, found["gradient"], tolerance=1e-9)
    if grade.is_simulated:
        check(
            run.collectives == [2] * n,
            "fn makes one all-reduce, and is called once in each pass: that makes 2 on every rank. "
            f"The numbers of collectives by rank are {run.collectives}.",
        )


# 2.7

NUM_LAYERS = 36  # where memory is measured
SIZES = [(10, 4), (6, 1), (8, 8), (8, 2)]  # numbers of layers and of segments
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
    what = "the random numbers drawn after the backward pass"
    check_equal(here, what, expected["after"], found["after"], tolerance=1e-9)
    check(
        not found["changed"],
        f"{here}: x belongs to the caller, and has changed, or whether it requires a gradient.",
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
