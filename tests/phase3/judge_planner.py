"""Judges tasks 3.21 and 3.22: formulas, published figures, and steps that are simulated."""

from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster, Options
from distlab.util.text import bytes_text, seconds_text
from phase3 import estimates as b
from phase3 import planner_cases as c
from phase3 import planner_reference as reference
from phase3.planned_steps import measured_step
from phase3_multi_node.given import CHECKPOINTING, Layout, Machine, Transformer

EXACT = 3e-8  # but for rounding, to whole bytes too
NEAR_SIMULATION = 0.05
GIB = 2**30


def _is_close(found: float, expected: float, tolerance: float = EXACT) -> bool:
    return abs(found - expected) <= tolerance * abs(expected) + 1e-12


def _sizes_named(layout: Layout, batch_size: int = 0) -> dict[str, float]:
    sizes = dict(zip("dtpvb", map(float, layout[:5]), strict=True))
    return sizes | ({"m": float(layout.micro_batches(batch_size))} if batch_size else {})


# 3.21


@task("3.21")
def test_parameters_of_a_rank(grade: Grade) -> None:
    cases = [(model, layout) for model, layout, _ in c.cases(grade.random)]
    found = grade.call(b.numbers_of, "parameters_per_rank", cases)
    for (model, layout), number in zip(cases, found, strict=True):
        expected = reference.parameters(model, layout)
        check(
            _is_close(number, expected),
            f"parameters_per_rank, {c.told(model, layout)}: expected {expected:,.0f}, got "
            f"{number:,.0f}.{c.factor_told(number, expected, _sizes_named(layout))} A stage has "
            "l/p layers of 12h² + 13h parameters, the first one also (V + s) · h of embeddings, "
            "and t ranks share all of them. ZeRO and the micro-batch change nothing here.",
        )


@task("3.21")
def test_activations_of_a_layer(grade: Grade) -> None:
    example = Transformer(4, 64, 4, 128, 128), Layout(), 1  # of the TODO; a single byte counts
    cases = [
        (model, layout, kind)
        for model, layout, _ in [example, *c.cases(grade.random, 6)]
        for kind in CHECKPOINTING
    ]
    found = grade.call(b.numbers_of, "activation_bytes_per_layer", cases)
    for (model, layout, kind), number in zip(cases, found, strict=True):
        expected = reference.activations(model, layout, kind)
        asked = layout._replace(checkpointing=kind)
        check(
            _is_close(number, expected),
            f"activation_bytes_per_layer(…, {kind!r}), {c.told(model, asked)}: expected "
            f"{expected:,.0f} bytes, got {number:,.0f}."
            f"{c.factor_told(number, expected, _sizes_named(layout))} "
            f"{_of_activations(model, layout, number, expected)}",
        )


def _of_activations(model: Transformer, layout: Layout, found: float, expected: float) -> str:
    """The likely cause: what the number would be right for."""
    for is_split in (False, True):
        for kind in CHECKPOINTING:
            other = layout._replace(sequence_parallel=is_split)
            if _is_close(found, reference.activations(model, other, kind)):
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
    found = grade.call(b.numbers_of, "layers_in_flight", cases)
    for case, number in zip(cases, found, strict=True):
        model, layout = case[:2]
        expected, v = reference.in_flight(*case), layout.chunks
        passes, of_chunk = "p" if v == 1 else "vp + p - 1", model.layers / layout.pipeline / v
        check(
            _is_close(number, expected),
            f"layers_in_flight, {c.told(*case)}: expected {expected:g} layers, got {number:g}. The "
            f"first stage is {passes} forward passes ahead, or all {v} · m of them if there are "
            f"fewer, and each goes through a chunk of l/(pv) = {of_chunk:g} layers.",
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
    found = grade.call(b.parts_of, function, cases)
    for case, numbers in zip(cases, found, strict=True):
        model, layout, batch_size = case[:3]
        expected = references[function](*case)
        for name, wanted, number in zip(causes, expected, numbers, strict=True):
            factor = c.factor_told(number, wanted, _sizes_named(layout, batch_size))
            check(
                _is_close(number, wanted),
                f"{function}, {c.told(model, layout, batch_size)}: {name} should be "
                f"{written(wanted)}, but it is {written(number)}.{factor} {causes[name]}",
            )


@task("3.21")
def test_states_are_those_of_the_zero_paper(grade: Grade) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 GPUs."""
    cases = [(c.GPT_7B, Layout(64, zero_stage=stage), 64) for stage in range(4)]
    found = grade.call(b.parts_of, "estimate_memory", cases)
    for stage, (published, parts) in enumerate(zip((120, 31.4, 16.6, 1.88), found, strict=True)):
        states = sum(parts[:3]) / 1e9
        check(
            _is_close(states, published, 0.01),
            f"7.5 billion parameters on 64 GPUs with ZeRO {stage}: parameters, gradients and "
            f"optimizer state should take {published} GB, as the paper says; they take "
            f"{states:.2f} GB. Which of the three does stage {stage} shard?",
        )


PUBLISHED_GIB = (  # without recomputation, and with sequence parallelism and the selective one
    (c.MEGATRON_22B, Layout(1, 8, 1, 1, 4), 4, 59.25, 9.56),
    (c.GPT3, Layout(1, 8, 8, 3, 1), 64, 66.84, 12.35),
    (c.MEGATRON_530B, Layout(1, 8, 35, 3, 1), 280, 114.02, 23.08),
    (c.GPT_1T, Layout(1, 8, 64, 1, 1), 512, 131.25, 26.56),
)


@task("3.21")
@pytest.mark.parametrize(
    ("model", "layout", "batch_size", "none", "selective"),
    PUBLISHED_GIB,
    ids=["22 billion", "175 billion", "530 billion", "a trillion"],
)
def test_activations_of_large_models(
    grade: Grade,
    model: Transformer,
    layout: Layout,
    batch_size: int,
    none: float,
    selective: float,
) -> None:
    """The models of Korthikanti et al. 2022, table 3."""
    split = layout._replace(checkpointing="selective", sequence_parallel=True)
    cases = [(model, layout, batch_size), (model, split, batch_size)]
    found = grade.call(b.parts_of, "estimate_memory", cases)
    for case, gib, parts in zip(cases, (none, selective), found, strict=True):
        kept = parts[3] / GIB
        check(
            _is_close(kept, gib, 0.002),
            f"{c.told(*case)}: the activations should take {gib} GiB, but it is {kept:.2f} GiB. "
            f"{CAUSES_OF_MEMORY['activations']}",
        )


# Steps that are simulated


FLOPS, BYTES_PER_S, LATENCY_S = 1e12, 2e9, 1e-6
RATES = {"float16": FLOPS, "float32": FLOPS}
TOY = GPU("toy", 1e15, 1e18, RATES, RATES)  # memory takes no time, so that only products count
SIMULATED = (
    (Transformer(6, 512, 8, 512, 64), Layout(), 2),
    (Transformer(8, 512, 8, 512, 64), Layout(tensor=2, pipeline=2, checkpointing="selective"), 3),
    (Transformer(12, 512, 8, 512, 64), Layout(pipeline=3, checkpointing="full"), 4),
)
each_step = pytest.mark.parametrize(
    ("model", "layout", "batch_size"), SIMULATED, ids=("one GPU", "t and p", "p, recomputed")
)


def _simulated(grade: Grade, model: Transformer, layout: Layout, batch_size: int) -> Run:
    ranks = layout.tensor * layout.pipeline
    cluster = Cluster(
        1, max(ranks, 2), gpu=TOY, latency_s=LATENCY_S, nvlink_bytes_per_s=BYTES_PER_S
    )
    options = Options(has_devices=True, algorithm="ring")
    return grade.run(
        measured_step, ranks, model, layout, batch_size, cluster=cluster, options=options
    )


@task("3.21")
@each_step
def test_memory_agrees_with_a_simulated_step(
    grade: Grade, model: Transformer, layout: Layout, batch_size: int
) -> None:
    (parts,) = grade.call(b.parts_of, "estimate_memory", [(model, layout, batch_size)])
    peak = _simulated(grade, model, layout, batch_size).peak_bytes[0]
    listed = _listed(b.PARTS["estimate_memory"], parts, bytes_text)
    check(
        _is_close(sum(parts), peak, NEAR_SIMULATION),
        f"{c.told(model, layout, batch_size)}: a step of such a GPT was simulated, and its first "
        f"rank held {bytes_text(peak)} at most; estimate_memory says {bytes_text(sum(parts))}, "
        f"{sum(parts) / peak - 1:+.0%}. It may be off by 5 %. Its parts: {listed}.",
    )


def _listed(names: Any, parts: list[float], written: Any) -> str:
    return ", ".join(f"{name} {written(part)}" for name, part in zip(names, parts, strict=True))


@task("3.22")
@each_step
def test_time_agrees_with_a_simulated_step(
    grade: Grade, model: Transformer, layout: Layout, batch_size: int
) -> None:
    ranks = layout.tensor * layout.pipeline
    links = (BYTES_PER_S, LATENCY_S) * 2
    machine = Machine(1, ranks, 1e15, 1e18, FLOPS, *links)
    cases = [(model, layout, batch_size, machine)]
    (parts,) = grade.call(b.parts_of, "estimate_step_time", cases)
    seconds = _simulated(grade, model, layout, batch_size).seconds
    check(
        _is_close(sum(parts), seconds, NEAR_SIMULATION),
        f"{c.told(model, layout, batch_size)}: a step of such a GPT was simulated and took "
        f"{seconds_text(seconds)}; estimate_step_time says {seconds_text(sum(parts))}, "
        f"{sum(parts) / seconds - 1:+.0%}. It may be off by 5 %. Its parts: "
        f"{_listed(b.PARTS['estimate_step_time'], parts, seconds_text)}.",
    )


# 3.22


def _timed(grade: Grade, num_drawn: int = 20) -> list[Any]:
    """Cases, each on two machines: what is returned for one is not right for the other.

    The nodes of the second are so small that tensor groups span several.
    """
    cases = c.cases(grade.random, num_drawn)
    machines = [c.drawn_machine(grade.random) for _ in cases]
    small = [machine._replace(gpus_per_node=2) for machine in machines]
    return [(*case, one) for case, *two in zip(cases, machines, small, strict=True) for one in two]


@task("3.22")
@pytest.mark.parametrize("function", ["attention_seconds", "forward_seconds"])
def test_forward_pass_of_a_layer(grade: Grade, function: str) -> None:
    is_whole = function == "forward_seconds"
    cases = [(model, layout, machine) for model, layout, _, machine in _timed(grade)]
    found = grade.call(b.numbers_of, function, cases)
    for (model, layout, machine), number in zip(cases, found, strict=True):
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
            f"{function}, {c.told(model, layout)}: expected {seconds_text(expected)}, got "
            f"{seconds_text(number)}.{c.factor_told(number, expected, _sizes_named(layout))} "
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


@task("3.22")
def test_interleaving_divides_the_bubble_of_a_step(grade: Grade) -> None:
    machine = c.drawn_machine(grade.random)
    cases = [(c.GPT3, Layout(1, 8, 8, v), 64, machine) for v in (1, 2, 3)]
    found = grade.call(b.parts_of, "estimate_step_time", cases)
    (_, _, between, bubble, _), *_ = found
    for (_, layout, *_), parts in zip(cases, found, strict=True):
        v = layout.chunks
        check(
            _is_close(parts[3] * v, bubble) and _is_close(parts[2], between * v),
            f"{c.told(c.GPT3, layout, 64)}: the bubble should be a v-th of that with v = 1, "
            f"{seconds_text(bubble)}, and messages between stages should take v times their "
            f"{seconds_text(between)}; they take {seconds_text(parts[3])} and "
            f"{seconds_text(parts[2])}.",
        )
