"""The formulas of tasks 3.21 to 3.23, as the graders compute them."""

from collections.abc import Iterator
from itertools import product

from phase3_multi_node.given import (
    CHECKPOINTING,
    Checkpointing,
    Layout,
    Machine,
    Memory,
    Plan,
    StepTime,
    Transformer,
    matmul_seconds,
    ring_seconds,
    send_seconds,
)


def unsplit(layout: Layout) -> int:
    """Return the divisor of the activations that only sequence parallelism splits."""
    return layout.tensor if layout.sequence_parallel else 1


def parameters(model: Transformer, layout: Layout) -> float:
    layer = 12 * model.width**2 + 13 * model.width
    ends = model.width * model.vocabulary + model.width * model.length
    return (model.layers * layer / layout.pipeline + ends) / layout.tensor


def activations(model: Transformer, layout: Layout, checkpointing: Checkpointing) -> float:
    stream = layout.micro_batch * model.length * model.width
    inside = 24 * stream / layout.tensor + 10 * stream / unsplit(layout)
    scores = layout.micro_batch * model.length**2 * model.heads / layout.tensor
    kinds: dict[Checkpointing, float] = {
        "none": inside + 5 * scores,
        "selective": inside,
        "full": 2 * stream / unsplit(layout),
    }
    return kinds[checkpointing]


def in_flight(model: Transformer, layout: Layout, batch_size: int) -> float:
    p, v, m = layout.pipeline, layout.chunks, layout.micro_batches(batch_size)
    ahead = p if v == 1 else v * p + p - 1
    return min(ahead, m * v) * (model.layers / p / v)


def memory(model: Transformer, layout: Layout, batch_size: int) -> Memory:
    states = parameters(model, layout)
    by_stage = [states / layout.data if layout.zero_stage >= k else states for k in (3, 2, 1)]
    kept = activations(model, layout, layout.checkpointing)
    logits = 4 * layout.micro_batch * model.length * model.vocabulary / layout.tensor
    return Memory(
        2 * by_stage[0],
        2 * by_stage[1],
        12 * by_stage[2],
        kept * in_flight(model, layout, batch_size),
        activations(model, layout, "none") - kept,
        logits if layout.pipeline == 1 else 0.0,
    )


def attention(model: Transformer, layout: Layout, machine: Machine) -> float:
    heads = model.heads * layout.micro_batch / layout.tensor
    inner, s = model.width / model.heads, model.length
    products = matmul_seconds(machine, s, inner, s) + matmul_seconds(machine, s, s, inner)
    return heads * (products + 9 * s * s / machine.memory_bytes_per_s)


def forward(model: Transformer, layout: Layout, machine: Machine) -> float:
    tokens, h, share = model.length * layout.micro_batch, model.width, model.width / layout.tensor
    products = (
        matmul_seconds(machine, tokens, h, 3 * share)
        + matmul_seconds(machine, tokens, share, h)
        + matmul_seconds(machine, tokens, h, 4 * share)
        + matmul_seconds(machine, tokens, 4 * share, h)
    )
    moved = 22 * tokens * h / unsplit(layout) + 16 * tokens * share
    return products + moved / machine.memory_bytes_per_s + attention(model, layout, machine)


def step_time(model: Transformer, layout: Layout, batch_size: int, machine: Machine) -> StepTime:
    d, t, p, v, b = layout[:5]
    m, k = layout.micro_batches(batch_size), model.layers / p
    once, stream = forward(model, layout, machine), 2 * b * model.length * model.width
    again = {"none": 0.0, "selective": attention(model, layout, machine), "full": once}
    layer = 3 * once + again[layout.checkpointing]
    rings = 12 if layout.checkpointing == "full" else 8
    messages = rings * ring_seconds(machine, stream, t, t)
    logits = 3 * matmul_seconds(machine, b * model.length, model.width, model.vocabulary / t)
    of_data = [2, 2, m + 1, 3 * m][layout.zero_stage]
    sent = of_data * ring_seconds(machine, 2 * parameters(model, layout), d, d * t)
    between = 2 * v * m * send_seconds(machine, stream / t, d * t * p) if p > 1 else 0.0
    return StepTime(
        m * k * layer + m * logits,
        m * k * messages,
        between,
        (p - 1) * k * (layer + messages) / v,
        max(0.0, sent - 2 * k * once),
    )


def is_valid(model: Transformer, machine: Machine, batch_size: int, layout: Layout) -> bool:
    d, t, p, v, b, zero, _, is_split = layout
    m, rest = divmod(batch_size, d * b)
    return (
        d * t * p == machine.nodes * machine.gpus_per_node
        and not (machine.gpus_per_node % t or model.heads % t)
        and not (model.layers % (p * v) or rest)
        and (v == 1 or (p > 1 and m % p == 0))
        and zero <= (0 if d == 1 else 1 if p > 1 else 3)
        and not (is_split and (t == 1 or model.length % t))
    )


def layouts(model: Transformer, machine: Machine, batch_size: int) -> Iterator[Layout]:
    gpus = machine.nodes * machine.gpus_per_node
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    chunks = [v for v in range(1, model.layers + 1) if model.layers % v == 0]
    batches = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    for t, p in product(sizes, sizes):
        if gpus % (t * p) == 0:
            rest = product(chunks, batches, range(4), CHECKPOINTING, (False, True))
            for sizes_of_rest in rest:
                layout = Layout(gpus // (t * p), t, p, *sizes_of_rest)
                if is_valid(model, machine, batch_size, layout):
                    yield layout


def plans(model: Transformer, machine: Machine, batch_size: int) -> list[Plan]:
    """Return the plans of all valid layouts, also of those that do not fit."""
    return [
        Plan(
            layout, memory(model, layout, batch_size), step_time(model, layout, batch_size, machine)
        )
        for layout in layouts(model, machine, batch_size)
    ]
