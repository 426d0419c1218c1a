"""Judges tasks 3.20 and 3.21: the formulas of memory and time."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import bytes_text, joined, seconds_text
from phase3 import estimates as b
from phase3 import planner_reference as reference
from phase3_multi_node.given import CHECKPOINTING, Layout, Transformer

EXACT = 3e-8  # tolerance for rounding, including to whole bytes


class Formula(NamedTuple):
    """The reference, cases and texts for judging one of the lesson's functions.

    Attributes:
        right: The graders' version of the function. It returns a number, or an estimate's parts.
        cases: Draws the arguments.
        text: Formats a number with its unit.
        causes: The likely cause of a wrong number, by part; the key is "" if there are no parts.
        terms: Returns the terms of the number by name, of which one may be missing.
    """

    right: Callable[..., Any]
    cases: Callable[[Grade], list[Any]]
    text: Callable[[float], str]
    causes: Mapping[str, str]
    terms: Callable[..., Mapping[str, float]] | None = None


def _check_formula(grade: Grade, function: str, formula: Formula) -> None:
    cases = formula.cases(grade)
    found = grade.call(b.numbers_of, function, cases)
    term = _term(formula, cases, found)
    for case, numbers in zip(cases, found, strict=True):
        right = formula.right(*case)
        parts = right if isinstance(right, tuple) else (right,)
        for name, expected, number in zip(formula.causes, parts, numbers, strict=True):
            what = f"{function}, {name}" if name else function
            check(
                _is_right(number, expected),
                f"{what}, {reference.case_text(*case)}, should be {formula.text(expected)}; it is "
                f"{formula.text(number)}.{reference.factor_text(number, expected, *case)}{term} "
                f"{formula.causes[name]}",
            )


def _is_right(number: float, expected: float) -> bool:
    return abs(number - expected) <= EXACT * abs(expected) + 1e-12


def _term(formula: Formula, cases: list[Any], found: list[list[float]]) -> str:
    """Name the terms that explain all wrong numbers, each alone: one is left out, or too much."""
    if formula.terms is None:
        return ""
    explained = [
        reference.explained(number, expected, formula.terms(*case))
        for case, [number] in zip(cases, found, strict=True)
        if not _is_right(number, expected := formula.right(*case))
    ]
    named = (
        [text for text in explained[0] if all(text in of for of in explained)] if explained else []
    )
    return f" In all cases, the difference is {joined(named, ', or ')}." if named else ""


# Task 3.20: memory


def _of_a_layer(grade: Grade) -> list[Any]:
    example = Transformer(4, 64, 4, 128, 128), Layout(), 1  # the example from the lesson's TODO
    cases = [example, *reference.cases(grade.random, 6)]
    return [(model, layout, kind) for model, layout, _ in cases for kind in CHECKPOINTING]


MEMORY = {
    "parameters_per_rank": Formula(
        reference.parameters,
        lambda grade: [case[:2] for case in reference.cases(grade.random)],
        "{:,.0f}".format,
        {
            "": "A stage has l/p layers, each with four products and two norms, the first one also "
            "(V + s) · h of embeddings, and t ranks share all of them. ZeRO and the micro-batch "
            "change nothing here."
        },
        reference.parameter_terms,
    ),
    "activation_bytes_per_layer": Formula(
        reference.activations,
        _of_a_layer,
        "{:,.0f} bytes".format,
        {
            "": "What lies between the two products of attention, or of the MLP, is split by t, "
            "all else only by sequence parallelism; full checkpointing keeps the input. The "
            "argument says what is recomputed, and the layout whether the sequence is split."
        },
        reference.activation_terms,
    ),
    "layers_in_flight": Formula(
        reference.in_flight,
        lambda grade: reference.cases(grade.random),
        "{:g} layers".format,
        {
            "": "The first stage is p forward passes ahead, or vp + p - 1 if v > 1, or all vm of "
            "them if there are fewer, and each goes through a chunk of l/(pv) layers."
        },
    ),
    "estimate_memory": Formula(
        reference.memory,
        lambda grade: reference.cases(grade.random),
        bytes_text,
        {
            "parameters": "They take 2 bytes each, and only ZeRO 3 shards them.",
            "gradients": "They take 2 bytes each, and ZeRO 2 and 3 shard them.",
            "optimizer": "A copy in float32 and two moments take 12 bytes, and ZeRO 1, 2 and 3 "
            "shard them.",
            "activations": "They are what a layer keeps, as the layout says, times the layers in "
            "flight.",
            "recomputed": "A layer that is recomputed holds all that it would keep without "
            "checkpointing; what it has kept is counted already. One layer is recomputed at a "
            "time.",
            "logits": "They take 4bsV/t bytes, and the first stage has them only if it is the last "
            "too.",
        },
    ),
}


@task("3.20")
@pytest.mark.parametrize("function", [*MEMORY])
def test_memory_is_that_of_the_formulas(grade: Grade, function: str) -> None:
    _check_formula(grade, function, MEMORY[function])


# Task 3.21: time


def _timed(grade: Grade) -> list[Any]:
    """Draw cases, each on two machines for which the right answers differ.

    The second machine's nodes are so small that tensor groups span several of them.
    """
    cases = reference.cases(grade.random)
    machines = [reference.drawn_machine(grade.random) for _ in cases]
    small = [machine._replace(gpus_per_node=2) for machine in machines]
    return [(*case, of) for case, *two in zip(cases, machines, small, strict=True) for of in two]


def _timed_layers(grade: Grade) -> list[Any]:
    return [(model, layout, machine) for model, layout, _, machine in _timed(grade)]


TIME = {
    "attention_seconds": Formula(
        reference.attention,
        _timed_layers,
        seconds_text,
        {
            "": "A rank computes ba/t heads, and each has two products, a softmax and a dropout, "
            "which read and write all scores."
        },
        reference.attention_terms,
    ),
    "forward_seconds": Formula(
        reference.forward,
        _timed_layers,
        seconds_text,
        {
            "": "Beside attention there are four products, two norms, two dropouts with sums, and "
            "GELU."
        },
        reference.forward_terms,
    ),
    "estimate_step_time": Formula(
        reference.step_time,
        _timed,
        seconds_text,
        {
            "compute": "Each of m micro-batches goes through l/p layers, three times as long as "
            "forward, and longer by what is recomputed; the logits come on top, once for each "
            "micro-batch.",
            "tensor": "For each micro-batch, attention and MLP of each layer have an all-reduce of "
            "2bsh bytes forward, and one backward; what full checkpointing repeats has them once "
            "more. They are between t neighbouring ranks, and an all-reduce is two rings.",
            "pipeline": "A stage passes on each micro-batch after each chunk, forward and "
            "backward, in messages of 2bsh/t bytes; pipelines span dtp GPUs, and without one there "
            "are none.",
            "bubble": "Stages wait for p - 1 passes through a chunk, a v-th of what one "
            "micro-batch takes in the l/p layers of a stage, messages between tensor ranks "
            "included, logits not.",
            "data": "The rings of ZeRO's stage, of 2Ψ bytes among d ranks that span dt GPUs, count "
            "only as far as they take longer than what hides them: twice the forward time of the "
            "stage's layers for one micro-batch, without logits and messages.",
        },
    ),
}


@task("3.21")
@pytest.mark.parametrize("function", [*TIME])
def test_time_is_that_of_the_formulas(grade: Grade, function: str) -> None:
    _check_formula(grade, function, TIME[function])
