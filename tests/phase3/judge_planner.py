"""Judges tasks 3.21 and 3.22: the formulas of memory and time."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import bytes_text, seconds_text
from phase3 import estimates as b
from phase3 import planner_cases as c
from phase3 import planner_reference as reference
from phase3_multi_node.given import CHECKPOINTING, Layout, Transformer

EXACT = 3e-8  # tolerance of rounding, also to whole bytes
CAUSES_OF_MEMORY = {
    "parameters": "They take 2 bytes each, and only ZeRO 3 shards them.",
    "gradients": "They take 2 bytes each, and ZeRO 2 and 3 shard them.",
    "optimizer": "A copy in float32 and two moments take 12 bytes, and ZeRO 1, 2 and 3 shard them.",
    "activations": "They are what a layer keeps, as the layout says, times the layers in flight.",
    "recomputed": "A layer that is recomputed holds all that it would keep without checkpointing; "
    "what it has kept is counted already. One layer is recomputed at a time.",
    "logits": "They take 4bsV/t bytes, and the first stage has them only if it is the last too.",
}
CAUSES_OF_TIME = {
    "compute": "Each of m micro-batches goes through l/p layers, three times as long as forward, "
    "and longer by what is recomputed; the logits come on top, once for each micro-batch.",
    "tensor": "Each layer has 4 all-reduces of 2bsh bytes for each micro-batch, 6 with full "
    "checkpointing, between t neighbouring ranks; an all-reduce is two rings.",
    "pipeline": "A stage passes on 2vm messages of 2bsh/t bytes; pipelines span dtp GPUs, and "
    "without one there are none.",
    "bubble": "Stages wait for p - 1 passes through a chunk, a v-th of what one micro-batch takes "
    "in the l/p layers of a stage, messages between tensor ranks included, logits not.",
    "data": "The rings of ZeRO's stage, of 2Ψ bytes among d ranks that span dt GPUs, count only as "
    "far as they take longer than what hides them, 2kF.",
}


def _is_close(number: float, expected: float) -> bool:
    return abs(number - expected) <= EXACT * abs(expected) + 1e-12


def _check_number(
    what: str,
    case: Sequence[Any],
    expected: float,
    number: float,
    text: Callable[[float], str],
    cause: str,
) -> None:
    """Check a number for a case: a model, a layout, and perhaps a batch size."""
    model, layout = case[:2]
    batch_size = case[2] if len(case) > 2 and isinstance(case[2], int) else 0
    factor = c.factor_text(number, expected, layout, batch_size)
    check(
        _is_close(number, expected),
        f"{what}, {c.case_text(model, layout, batch_size)}, should be {text(expected)}; it is "
        f"{text(number)}.{factor} {cause}",
    )


def _check_parts(
    grade: Grade,
    function: str,
    right: Callable[..., Sequence[float]],
    cases: list[Any],
    causes: dict[str, str],
    text: Callable[[float], str],
) -> None:
    results = grade.call(b.parts_of, function, cases)
    for case, numbers in zip(cases, results, strict=True):
        for name, wanted, number in zip(causes, right(*case), numbers, strict=True):
            _check_number(f"{function}, {name}", case, wanted, number, text, causes[name])


# 3.21


@task("3.21")
def test_parameters_of_a_rank(grade: Grade) -> None:
    cases = [(model, layout) for model, layout, _ in c.cases(grade.random)]
    results = grade.call(b.numbers_of, "parameters_per_rank", cases)
    for case, number in zip(cases, results, strict=True):
        _check_number(
            *("parameters_per_rank", case, reference.parameters(*case), number, "{:,.0f}".format),
            "A stage has l/p layers of 12h² + 13h parameters, the first one also (V + s) · h of "
            "embeddings, and t ranks share all of them. ZeRO and the micro-batch change nothing "
            "here.",
        )


@task("3.21")
def test_activations_of_a_layer(grade: Grade) -> None:
    example = Transformer(4, 64, 4, 128, 128), Layout(), 1  # example of the TODO
    cases = [
        (model, layout, kind)
        for model, layout, _ in [example, *c.cases(grade.random, 6)]
        for kind in CHECKPOINTING
    ]
    results = grade.call(b.numbers_of, "activation_bytes_per_layer", cases)
    for (model, layout, kind), number in zip(cases, results, strict=True):
        asked = layout._replace(checkpointing=kind)
        expected = reference.activations(model, layout, kind)
        cause = _of_activations(model, layout, number)
        what = f"activation_bytes_per_layer(…, {kind!r})"
        _check_number(what, (model, asked), expected, number, "{:,.0f} bytes".format, cause)


def _of_activations(model: Transformer, layout: Layout, number: float) -> str:
    """Return the likely cause, such as another case with this number."""
    for is_split in (False, True):
        for kind in CHECKPOINTING:
            other = layout._replace(sequence_parallel=is_split)
            if _is_close(number, reference.activations(model, other, kind)):
                with_or_not = "with" if is_split else "without"
                return (
                    f"That is what {kind!r} keeps {with_or_not} sequence parallelism: the argument "
                    "says what is recomputed, and the layout whether the sequence is split."
                )
    return (
        "Of a micro-batch, 10sbh bytes are split only by sequence parallelism, 24sbh and the "
        "scores, 5as²b, by t; full checkpointing keeps 2sbh, the input."
    )


@task("3.21")
def test_layers_in_flight(grade: Grade) -> None:
    cases = c.cases(grade.random)
    results = grade.call(b.numbers_of, "layers_in_flight", cases)
    for case, number in zip(cases, results, strict=True):
        model, layout, _ = case
        v = layout.chunks
        passes, of_chunk = "p" if v == 1 else "vp + p - 1", model.layers / layout.pipeline / v
        _check_number(
            *("layers_in_flight", case, reference.in_flight(*case), number, "{:g} layers".format),
            f"The first stage is {passes} forward passes ahead, or all {v} · m of them if there "
            f"are fewer, and each goes through a chunk of l/(pv) = {of_chunk:g} layers.",
        )


@task("3.21")
def test_memory_part_by_part(grade: Grade) -> None:
    cases = c.cases(grade.random)
    _check_parts(*(grade, "estimate_memory", reference.memory, cases, CAUSES_OF_MEMORY, bytes_text))


# 3.22


def _timed(grade: Grade) -> list[Any]:
    """Draw cases, each on two machines: the answer for one is wrong for the other.

    The nodes of the second are so small that tensor groups span several.
    """
    cases = c.cases(grade.random)
    machines = [c.drawn_machine(grade.random) for _ in cases]
    small = [machine._replace(gpus_per_node=2) for machine in machines]
    return [(*case, of) for case, *two in zip(cases, machines, small, strict=True) for of in two]


@task("3.22")
@pytest.mark.parametrize("function", ["attention_seconds", "forward_seconds"])
def test_forward_pass_of_a_layer(grade: Grade, function: str) -> None:
    cases = [(model, layout, machine) for model, layout, _, machine in _timed(grade)]
    results = grade.call(b.numbers_of, function, cases)
    for case, number in zip(cases, results, strict=True):
        attention_s = expected_s = reference.attention(*case)
        cause = (
            "A rank computes ba/t heads, and each has two products and 9s² bytes that go through "
            "memory."
        )
        if function == "forward_seconds":
            expected_s = reference.forward(*case)
            cause = (
                f"Attention takes {seconds_text(attention_s)} of it; beside it there are four "
                "products, and bsh · (22/u + 16/t) bytes go through memory."
            )
        _check_number(function, case, expected_s, number, seconds_text, cause)


@task("3.22")
def test_step_time_part_by_part(grade: Grade) -> None:
    cases = _timed(grade)
    _check_parts(
        *(grade, "estimate_step_time", reference.step_time, cases, CAUSES_OF_TIME, seconds_text)
    )
