"""Judges task 2.6: a checkpointed function has the results and gradients of the plain one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster
from distlab.util.text import counted
from judging.checks import MEASURED, distance, is_close, short
from phase2 import checkpoint_cases
from phase2 import checkpointing as b

FLOPS_PER_S = 1e12
# Computation takes as long as its FLOPs; memory traffic takes no time.
COUNTING = Cluster(
    1,
    1,
    gpu=GPU("toy", 1e15, 1e30, {"float32": FLOPS_PER_S}, {"float32": FLOPS_PER_S}),
)
SLACK = 0.5 * b.UNIT  # for generators' states, gradients of parameters and other small things
CAUSES = {
    "a_module": "Does the gradient reach the argument, and all parameters of fn?",
    "a_module_in_training": "fn is a module with dropout, in training. Does the second call draw "
    "the random numbers of the first, and is the module still in training?",
    "keyword_arguments": "Keyword arguments may be tensors, and may need a gradient.",
    "nested_arguments": "Tensors inside lists, tuples and dicts are arguments too: take_tensors "
    "finds them.",
    "several_results": "Every result has its own gradient, and some results have none: they are "
    "integers, or not used.",
    "a_tuple_of_one": "fn returns a tuple of one tensor.",
    "only_parameters": "No argument needs a gradient, but parameters that fn uses do. autograd "
    "records a Function only if one of its inputs requires a gradient.",
    "only_the_argument": "fn is a module whose parameters are frozen, but its argument needs a "
    "gradient.",
    "only_a_keyword_argument": "fn is a module whose parameters are frozen, but a keyword argument "
    "needs a gradient.",
    "some_need_none": "Is the gradient of every argument in its place?",
    "used_twice": "A tensor may be passed twice, and a module used in several places.",
    "argument_returned": "A result may be an argument itself.",
    "checkpoint_in_checkpoint": "Does the second call draw the random numbers of the first, also "
    "inside another second call?",
}


def alone(body: Callable[..., Any], *args: object) -> Any:
    """Return what a body finds without any checkpointing, in this process."""
    lesson = SimpleNamespace(checkpoint=b.plain, checkpoint_sequential=b.plain_sequential)
    with torch.random.fork_rng():
        return body(lesson, *args)


def flops_of(run: Run) -> int:
    """The FLOPs of a run on the cluster that counts them."""
    return round(run.seconds * FLOPS_PER_S)


@task("2.6")
@pytest.mark.parametrize("about", checkpoint_cases.CASES)
def test_gradients_are_those_of_the_plain_function(grade: Grade, about: str) -> None:
    seed = grade.random.randrange(2**31)
    expected = alone(checkpoint_cases.run_cases, about, seed)
    for case, found in grade.call(checkpoint_cases.run_cases, about, seed).items():
        here = case.replace("_", " ")
        check_gradients(here, expected[case], found, CAUSES[case])
        for name, in_one_pass in expected[case]["calls"].items():
            _check_calls(f"{here}: {name}", in_one_pass, found["calls"].get(name, 0))


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
    check(
        is_close(expected["gradient"], found["gradient"]),
        f"{here}: the gradient of x should be {short(expected['gradient'])}; it is "
        f"{short(found['gradient'])}. Does the second call draw the numbers of the first? With "
        "others, dropout drops other elements than in the forward pass.",
    )
    check(
        is_close(expected["after"], found["after"]),
        f"{here}: the random numbers drawn after the backward pass should be "
        f"{short(expected['after'])}, as without checkpointing; they are {short(found['after'])}. "
        "After the second call, set the generator back to where it was before it.",
    )


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
    check(
        found["dtype"] == expected["dtype"]
        and is_close(expected["gradient"], found["gradient"], 1e-6),
        f"{here}: the gradient of x should be {short(expected['gradient'][0])}; it is "
        f"{short(found['gradient'][0])}.",
    )


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
        check(
            is_close(found["gradient"], [total] * 4),
            f"fn multiplies by a sum over {n} ranks, {total}, so that is the gradient; on rank "
            f"{rank} it is {short(found['gradient'])}.",
        )
    if grade.is_simulated:
        check(
            run.collectives == [2] * n,
            "fn makes one all-reduce, and is called once in each pass: that makes 2 on every rank. "
            f"The numbers of collectives by rank are {run.collectives}.",
        )
