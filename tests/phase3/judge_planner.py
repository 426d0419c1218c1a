"""Judges tasks 3.21 and 3.22: formulas, and figures that were published."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import bytes_text, seconds_text
from phase3 import estimates as b
from phase3 import planner_cases as c
from phase3 import planner_reference as reference
from phase3_multi_node.given import CHECKPOINTING, Layout, Transformer

EXACT = 3e-8  # tolerance of rounding, also to whole bytes
GIB = 2**30


def _is_close(number: float, expected: float, tolerance: float = EXACT) -> bool:
    return abs(number - expected) <= tolerance * abs(expected) + 1e-12


def _sizes_named(layout: Layout, batch_size: int = 0) -> dict[str, float]:
    sizes = dict(zip("dtpvb", map(float, layout[:5]), strict=True))
    return sizes | ({"m": float(layout.micro_batches(batch_size))} if batch_size else {})


# 3.21


@task("3.21")
def test_parameters_of_a_rank(grade: Grade) -> None:
    cases = [(model, layout) for model, layout, _ in c.cases(grade.random)]
    results = grade.call(b.numbers_of, "parameters_per_rank", cases)
    for (model, layout), number in zip(cases, results, strict=True):
        expected = reference.parameters(model, layout)
        check(
            _is_close(number, expected),
            f"parameters_per_rank, {c.case_text(model, layout)}: expected {expected:,.0f}, got "
            f"{number:,.0f}.{c.factor_text(number, expected, _sizes_named(layout))} A stage has "
            "l/p layers of 12h² + 13h parameters, the first one also (V + s) · h of embeddings, "
            "and t ranks share all of them. ZeRO and the micro-batch change nothing here.",
        )


@task("3.21")
def test_activations_of_a_layer(grade: Grade) -> None:
    example = (
        Transformer(4, 64, 4, 128, 128),
        Layout(),
        1,
    )  # the example of the TODO, where a single byte counts
    cases = [
        (model, layout, kind)
        for model, layout, _ in [example, *c.cases(grade.random, 6)]
        for kind in CHECKPOINTING
    ]
    results = grade.call(b.numbers_of, "activation_bytes_per_layer", cases)
    for (model, layout, kind), number in zip(cases, results, strict=True):
        expected = reference.activations(model, layout, kind)
        asked = layout._replace(checkpointing=kind)
        check(
            _is_close(number, expected),
            f"activation_bytes_per_layer(…, {kind!r}), {c.case_text(model, asked)}: expected "
            f"{expected:,.0f} bytes, got {number:,.0f}."
            f"{c.factor_text(number, expected, _sizes_named(layout))} "
            f"{_of_activations(model, layout, number, expected)}",
        )


def _of_activations(model: Transformer, layout: Layout, number: float, expected: float) -> str:
    """Return the likely cause: the case for which the number would be right."""
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
        model, layout = case[:2]
        expected, v = reference.in_flight(*case), layout.chunks
        passes, of_chunk = "p" if v == 1 else "vp + p - 1", model.layers / layout.pipeline / v
        check(
            _is_close(number, expected),
            f"layers_in_flight, {c.case_text(*case)}: expected {expected:g} layers, got {number:g}."
            f" The first stage is {passes} forward passes ahead, or all {v} · m of them if there "
            f"are fewer, and each goes through a chunk of l/(pv) = {of_chunk:g} layers.",
        )


CAUSES_OF_MEMORY = {
    "parameters": "They take 2 bytes each, and only ZeRO 3 shards them.",
    "gradients": "They take 2 bytes each, and ZeRO 2 and 3 shard them.",
    "optimizer": "A copy in float32 and two moments take 12 bytes, and ZeRO 1, 2 and 3 shard them.",
    "activations": "They are what a layer keeps, as the layout says, times the layers in flight.",
    "recomputed": "A layer that is recomputed holds all that it would keep without checkpointing; "
    "what it has kept is counted already. One layer is recomputed at a time.",
    "logits": "They take 4bsV/t bytes, and the first stage has them only if it is the last too.",
}


@task("3.21")
def test_memory_part_by_part(grade: Grade) -> None:
    _check_parts(grade, "estimate_memory", c.cases(grade.random), CAUSES_OF_MEMORY, bytes_text)


def _check_parts(
    grade: Grade, function: str, cases: list[Any], causes: dict[str, str], written: Any
) -> None:
    references = {"estimate_memory": reference.memory, "estimate_step_time": reference.step_time}
    results = grade.call(b.parts_of, function, cases)
    for case, numbers in zip(cases, results, strict=True):
        model, layout, batch_size = case[:3]
        expected = references[function](*case)
        for name, wanted, number in zip(causes, expected, numbers, strict=True):
            factor = c.factor_text(number, wanted, _sizes_named(layout, batch_size))
            check(
                _is_close(number, wanted),
                f"{function}, {c.case_text(model, layout, batch_size)}: {name} should be "
                f"{written(wanted)}, but it is {written(number)}.{factor} {causes[name]}",
            )


@task("3.21")
def test_memory_is_that_of_the_papers(grade: Grade) -> None:
    """Rajbhandari et al. 2020, figure 1, and Korthikanti et al. 2022, table 3."""
    split = {"checkpointing": "selective", "sequence_parallel": True}
    rows = [
        *((c.GPT_7B, Layout(64, zero_stage=stage), 64, gb * 1e9) for stage, gb in ZERO_GB.items()),
        *((*case, gib * GIB) for *case, gib, _ in ACTIVATIONS_GIB),
        *(
            (model, layout._replace(**split), m, gib * GIB)
            for model, layout, m, _, gib in ACTIVATIONS_GIB
        ),
    ]
    results = grade.call(b.parts_of, "estimate_memory", [row[:3] for row in rows])
    for (model, layout, size, published), parts in zip(rows, results, strict=True):
        is_of_states = model is c.GPT_7B
        got = sum(parts[:3]) if is_of_states else parts[3]
        what = "parameters, gradients and optimizer state" if is_of_states else "the activations"
        why = (
            f"Which of the three does stage {layout.zero_stage} shard?"
            if is_of_states
            else CAUSES_OF_MEMORY["activations"]
        )
        check(
            _is_close(got, published, 0.01),
            f"{c.case_text(model, layout, size)}: {what} should take {bytes_text(published)}, as "
            f"the paper says; they take {bytes_text(got)}. {why}",
        )


ZERO_GB = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.88}
ACTIVATIONS_GIB = (  # without recomputation, and with sequence parallelism and the selective one
    (c.MEGATRON_22B, Layout(1, 8, 1, 1, 4), 4, 59.25, 9.56),
    (c.GPT3, Layout(1, 8, 8, 3, 1), 64, 66.84, 12.35),
    (c.MEGATRON_530B, Layout(1, 8, 35, 3, 1), 280, 114.02, 23.08),
    (c.GPT_1T, Layout(1, 8, 64, 1, 1), 512, 131.25, 26.56),
)


# 3.22


def _timed(grade: Grade, num_drawn: int = 20) -> list[Any]:
    """Draw cases, each on two machines: the answer for one is wrong for the other.

    The nodes of the second are so small that tensor groups span several.
    """
    cases = c.cases(grade.random, num_drawn)
    machines = [c.drawn_machine(grade.random) for _ in cases]
    small = [machine._replace(gpus_per_node=2) for machine in machines]
    return [(*case, of) for case, *two in zip(cases, machines, small, strict=True) for of in two]


@task("3.22")
@pytest.mark.parametrize("function", ["attention_seconds", "forward_seconds"])
def test_forward_pass_of_a_layer(grade: Grade, function: str) -> None:
    is_whole = function == "forward_seconds"
    cases = [(model, layout, machine) for model, layout, _, machine in _timed(grade)]
    results = grade.call(b.numbers_of, function, cases)
    for (model, layout, machine), number in zip(cases, results, strict=True):
        seconds = reference.forward if is_whole else reference.attention
        expected = seconds(model, layout, machine)
        attention = reference.attention(model, layout, machine)
        cause = (
            f"Attention takes {seconds_text(attention)} of it; beside it there are four products, "
            "and bsh · (22/u + 16/t) bytes go through memory."
            if is_whole
            else "A rank computes ba/t heads, and each has two products and 9s² bytes that go "
            "through memory."
        )
        check(
            _is_close(number, expected),
            f"{function}, {c.case_text(model, layout)}: expected {seconds_text(expected)}, got "
            f"{seconds_text(number)}.{c.factor_text(number, expected, _sizes_named(layout))} "
            f"{cause}",
        )


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


@task("3.22")
def test_step_time_part_by_part(grade: Grade) -> None:
    _check_parts(grade, "estimate_step_time", _timed(grade), CAUSES_OF_TIME, seconds_text)
