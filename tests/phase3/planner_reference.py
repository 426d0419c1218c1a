"""The graders' versions of the formulas of tasks 3.20 to 3.22, and cases to try them on."""

from collections.abc import Iterator, Mapping
from itertools import product
from random import Random
from typing import Any

from distlab.util.text import counted
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

GPT3 = Transformer(96, 12288, 96, 2048, 51200)
A100 = Machine(16, 8, 80 * 2**30, 2.039e12, 312e12, 228e9, 5.6e-6, 25e9, 10e-6, 0.81, 190.0)

Case = tuple[Transformer, Layout, int]


def drawn_model(random: Random) -> Transformer:
    """Draw a model whose heads and layers can be split by the layouts of ``drawn_layout``.

    The vocabulary need not be divisible by anything.
    """
    heads = random.choice((24, 48, 72))
    width = heads * random.choice((64, 80, 128))
    layers, length = random.choice((72, 144)), random.choice((1200, 2040, 4104))
    return Transformer(layers, width, heads, length, random.randint(24_000, 72_000))


def drawn_layout(random: Random) -> tuple[Layout, int]:
    """Draw a layout that is valid for a model of ``drawn_model``, and a batch size."""
    d, t, p = (random.choice(sizes) for sizes in ((1, 2, 3, 5, 8), (1, 2, 3, 4, 8), (1, 2, 3, 4)))
    v, b = random.choice((1, 2, 3)) if p > 1 else 1, random.choice((1, 2, 3, 4))
    m = p * random.randint(1, 6) if v > 1 else random.randint(1, 12)
    zero = random.randint(0, 0 if d == 1 else 1 if p > 1 else 3)
    is_split = t > 1 and random.random() < 0.5
    return Layout(d, t, p, v, b, zero, random.choice(CHECKPOINTING), is_split), d * b * m


def fixed_layouts() -> list[tuple[Layout, int]]:
    """Return layouts that each exercise one feature, with batch sizes."""
    by_zero = [(Layout(8, micro_batch=2, zero_stage=stage), 64) for stage in range(4)]
    by_memory = [(Layout(2, 4, checkpointing=kind), 8) for kind in CHECKPOINTING]
    split = [(Layout(2, 4, 1, 1, 2, 1, kind, True), 8) for kind in CHECKPOINTING]
    pipelines = [(Layout(1, 2, 4, v), 16) for v in (1, 2, 3)] + [(Layout(1, 2, 4), 2)]
    far = [(Layout(4, 8, 2, 2, 1, 1, "full"), 32), (Layout(16, 8, zero_stage=1), 16)]
    return by_zero + by_memory + split + pipelines + far


def cases(random: Random, num_drawn: int = 20) -> list[Case]:
    """Return fixed and drawn cases, and the drawn ones again with twice the batch."""
    fixed = [(drawn_model(random), *layout) for layout in fixed_layouts()]
    drawn = [(drawn_model(random), *drawn_layout(random)) for _ in range(num_drawn)]
    return fixed + drawn + [(model, layout, 2 * size) for model, layout, size in drawn]


def drawn_machine(random: Random) -> Machine:
    """Draw a machine with links slow enough that messages are not always hidden."""
    return A100._replace(
        gpus_per_node=random.choice((4, 8, 16)),
        memory_bytes_per_s=random.uniform(1e12, 4e12),
        node_bytes_per_s=random.uniform(50e9, 300e9),
        node_latency_s=random.uniform(1e-6, 9e-6),
        network_bytes_per_s=random.uniform(1e9, 9e9),
        network_latency_s=random.uniform(1e-5, 9e-5),
        matmul_efficiency=random.uniform(0.5, 0.9),
        matmul_padding=float(random.randint(0, 200)),
    )


def case_text(model: Transformer, layout: Layout, third: Any = 0, *_: Any) -> str:
    """Describe a case in words, with the letters that the lesson's docstrings use.

    Args:
        model: The case's transformer.
        layout: The case's layout.
        third: The function's third argument: a batch size, a kind of checkpointing, or a machine.
    """
    letters = dict(zip("dtpvb", layout[:5], strict=True))
    words = (
        ", ".join(f"{name} = {size}" for name, size in letters.items() if size > 1) or "one GPU",
        f"m = {layout.micro_batches(third)}" if isinstance(third, int) and third else "",
        f"ZeRO {layout.zero_stage}" if layout.data > 1 else "",
        f"checkpointing {third if isinstance(third, str) else layout.checkpointing}",
        "sequence parallelism" if layout.sequence_parallel else "",
    )
    of = f"l = {model.layers}, h = {model.width}, a = {model.heads}, s = {model.length}"
    return f"{', '.join(filter(None, words))} ({of}, V = {model.vocabulary})"


def factor_text(
    number: float, expected: float, _: Transformer, layout: Layout, third: Any = 0, *__: Any
) -> str:
    """Describe ``number`` as a multiple of ``expected``; if the factor is a size, name it."""
    if not number or not expected:
        return ""
    sizes, times = dict(zip("dtpvb", layout[:5], strict=True)), number / expected
    sizes |= {"m": layout.micro_batches(third)} if isinstance(third, int) and third else {}
    for name, size in sizes.items():
        if size > 1 and abs(max(times, 1 / times) / size - 1) < 1e-6:
            part = name if times > 1 else f"1/{name}"
            return f" That is {part} times as much, with {name} = {size}."
    return f" That is {times:.3g} times as much."


def explained(number: float, expected: float, terms: Mapping[str, float]) -> list[str]:
    """Name the terms that explain the difference, each alone, and say whether one is missing."""
    difference = number - expected
    verb = "left out" if difference < 0 else "too much"
    return [
        f"{name}, {verb}"
        for name, term in terms.items()
        if term and abs(abs(difference) / term - 1) < 1e-6
    ]


def unsplit(layout: Layout) -> int:
    """Return the divisor for activations that only sequence parallelism splits."""
    return layout.tensor if layout.sequence_parallel else 1


def parameters(model: Transformer, layout: Layout) -> float:
    layer = 12 * model.width**2 + 13 * model.width
    ends = model.width * model.vocabulary + model.width * model.length
    return (model.layers * layer / layout.pipeline + ends) / layout.tensor


def parameter_terms(model: Transformer, layout: Layout) -> dict[str, float]:
    h, per_layer = model.width, model.layers / layout.pipeline / layout.tensor
    return {
        "the weights of queries, keys and values": 3 * h * h * per_layer,
        "the weights of the output product": h * h * per_layer,
        "the weights of a product of the MLP": 4 * h * h * per_layer,
        "the biases of queries, keys and values": 3 * h * per_layer,
        "the bias of the output, or of the MLP's second product": h * per_layer,
        "the biases of all products": 9 * h * per_layer,
        "both norms, or the biases of the MLP's first product": 4 * h * per_layer,
        "one of two norms": 2 * h * per_layer,
        "all biases and norms": 13 * h * per_layer,
        "the embeddings of tokens": model.vocabulary * h / layout.tensor,
        "the embeddings of positions": model.length * h / layout.tensor,
    }


def activation_terms(
    model: Transformer, layout: Layout, checkpointing: Checkpointing
) -> dict[str, float]:
    if checkpointing == "full":
        return {}
    stream = layout.micro_batch * model.length * model.width
    scores = layout.micro_batch * model.length**2 * model.heads / layout.tensor
    whole, share = stream / unsplit(layout), stream / layout.tensor
    inside = {"a mask of the dropout before a sum": whole, "both of these masks": 2 * whole}
    inside["the input of a norm, or of the first products of attention or MLP"] = 2 * whole
    inside["the inputs of both norms, or of both first products"] = 4 * whole
    inside["queries, keys, values or the input of the output product"] = 2 * share
    inside["the input of GELU or of the second product of the MLP"] = 8 * share
    pairs = {"the mask of the scores' dropout": scores, "all that belongs to scores": 5 * scores}
    pairs["the output of softmax or of the scores' dropout"] = 2 * scores
    return inside | pairs


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


def attention_terms(model: Transformer, layout: Layout, machine: Machine) -> dict[str, float]:
    heads = model.heads * layout.micro_batch / layout.tensor
    inner, s = model.width / model.heads, model.length
    byte_s = heads * s * s / machine.memory_bytes_per_s
    return {
        "one of two products": heads * matmul_seconds(machine, s, inner, s),
        "softmax": 4 * byte_s,
        "dropout": 5 * byte_s,
        "softmax and dropout": 9 * byte_s,
        "the mask of dropout": byte_s,
    }


def forward_terms(model: Transformer, layout: Layout, machine: Machine) -> dict[str, float]:
    tokens, h, t = model.length * layout.micro_batch, model.width, layout.tensor
    byte_s = tokens * h / machine.memory_bytes_per_s
    whole_s, share_s = byte_s / unsplit(layout), byte_s / t
    return {
        "the product for queries, keys and values": matmul_seconds(machine, tokens, h, 3 * h / t),
        "the output product": matmul_seconds(machine, tokens, h / t, h),
        "a product of the MLP": matmul_seconds(machine, tokens, h, 4 * h / t),
        "attention": attention(model, layout, machine),
        "one of two norms": 4 * whole_s,
        "both norms": 8 * whole_s,
        "one dropout with its sum": 7 * whole_s,
        "both dropouts with their sums": 14 * whole_s,
        "the masks": 2 * whole_s,
        "GELU": 16 * share_s,
        "all that goes through memory": 22 * whole_s + 16 * share_s,
    }


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


def broken_rule(model: Transformer, machine: Machine, batch_size: int, layout: Layout) -> str:
    """Return the first rule in the lesson's docstring that a layout breaks, or "" if none."""
    d, t, p, v, micro_batch, zero, _, is_split = layout
    if d * t * p != machine.gpus:
        return f"d · t · p = {d * t * p}, but there are {counted(machine.gpus, 'GPU')}."
    if machine.gpus_per_node % t or model.heads % t:
        node, heads = counted(machine.gpus_per_node, "GPU"), counted(model.heads, "head")
        return f"t = {t} should divide the {node} of a node and the {heads}."
    if model.layers % (p * v):
        return f"p · v = {p * v} should divide the {counted(model.layers, 'layer')}."
    if batch_size % (d * micro_batch):
        return f"d · b = {d * micro_batch} should divide the batch of {batch_size}."
    m = layout.micro_batches(batch_size)
    if v > 1 and (p == 1 or m % p):
        return f"v = {v} needs a pipeline, and m to be a multiple of p: here p = {p}, m = {m}."
    if is_split and (t == 1 or model.length % t):
        return f"Sequence parallelism needs t > 1 that divides the length: t = {t}, {model.length}."
    if zero > (0 if d == 1 else 1 if p > 1 else 3):
        return f"ZeRO {zero} does not go with d = {d} and p = {p}."
    return ""


def layouts(model: Transformer, machine: Machine, batch_size: int) -> Iterator[Layout]:
    sizes = _divisors(machine.gpus)
    for t, p in product(sizes, sizes):
        d = machine.gpus // (t * p)
        chunks, batches = _divisors(model.layers // p), _divisors(batch_size // d) if d else []
        for others in product(chunks, batches, range(4), CHECKPOINTING, (False, True)):
            layout = Layout(d, t, p, *others)
            if not broken_rule(model, machine, batch_size, layout):
                yield layout


def _divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


def plans(model: Transformer, machine: Machine, batch_size: int) -> list[Plan]:
    """Return the plans of all valid layouts, including those that do not fit."""
    return [
        Plan(
            layout, memory(model, layout, batch_size), step_time(model, layout, batch_size, machine)
        )
        for layout in layouts(model, machine, batch_size)
    ]
