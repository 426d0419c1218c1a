"""Cases of the estimates: models, layouts and machines."""

from random import Random

from phase3_multi_node.given import CHECKPOINTING, Layout, Machine, Transformer

GPT3 = Transformer(96, 12288, 96, 2048, 51200)
A100 = Machine(16, 8, 80 * 2**30, 2.039e12, 312e12, 228e9, 5.6e-6, 25e9, 10e-6, 0.81, 190.0)

Case = tuple[Transformer, Layout, int]


def drawn_model(random: Random) -> Transformer:
    """Draw a model with heads divisible by 2, 3, 4 and 8, and layers by all stages and chunks.

    Nothing need divide the vocabulary.
    """
    heads = random.choice((24, 48, 72))
    width = heads * random.choice((64, 80, 128))
    layers, length = random.choice((72, 144)), random.choice((1200, 2040, 4104))
    return Transformer(layers, width, heads, length, random.randint(24_000, 72_000))


def drawn_layout(random: Random) -> tuple[Layout, int]:
    """Draw a valid layout of such a model, and a batch size."""
    d, t, p = (random.choice(sizes) for sizes in ((1, 2, 3, 5, 8), (1, 2, 3, 4, 8), (1, 2, 3, 4)))
    v, b = random.choice((1, 2, 3)) if p > 1 else 1, random.choice((1, 2, 3, 4))
    m = p * random.randint(1, 6) if v > 1 else random.randint(1, 12)
    zero = random.randint(0, 0 if d == 1 else 1 if p > 1 else 3)
    is_split = t > 1 and random.random() < 0.5
    return Layout(d, t, p, v, b, zero, random.choice(CHECKPOINTING), is_split), d * b * m


def fixed_layouts() -> list[tuple[Layout, int]]:
    """Return layouts that each show one thing, with batch sizes."""
    by_zero = [(Layout(8, micro_batch=2, zero_stage=stage), 64) for stage in range(4)]
    by_memory = [(Layout(2, 4, checkpointing=kind), 8) for kind in CHECKPOINTING]
    split = [(Layout(2, 4, 1, 1, 2, 1, kind, True), 8) for kind in CHECKPOINTING]
    pipelines = [(Layout(1, 2, 4, v), 16) for v in (1, 2, 3)] + [(Layout(1, 2, 4), 2)]
    far = [(Layout(4, 8, 2, 2, 1, 1, "full"), 32), (Layout(16, 8, zero_stage=1), 16)]
    return by_zero + by_memory + split + pipelines + far


def cases(random: Random, num_drawn: int = 20) -> list[Case]:
    """Return fixed and drawn cases, and the drawn ones with twice the batch."""
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


def case_text(model: Transformer, layout: Layout, batch_size: int = 0) -> str:
    """Write a case in the letters of the docstrings."""
    letters = dict(zip("dtpvb", layout[:5], strict=True))
    words = (
        ", ".join(f"{name} = {size}" for name, size in letters.items() if size > 1) or "one GPU",
        f"m = {layout.micro_batches(batch_size)}" if batch_size else "",
        f"ZeRO {layout.zero_stage}" if layout.data > 1 else "",
        f"checkpointing {layout.checkpointing}",
        "sequence parallelism" if layout.sequence_parallel else "",
    )
    of = f"l = {model.layers}, h = {model.width}, a = {model.heads}, s = {model.length}"
    return f"{', '.join(filter(None, words))} ({of}, V = {model.vocabulary})"


def factor_text(number: float, expected: float, layout: Layout, batch_size: int = 0) -> str:
    """Say how a number is related to the expected one, if that is one of the case's sizes."""
    if not number or not expected:
        return ""
    sizes = dict(zip("dtpvb", layout[:5], strict=True))
    sizes |= {"m": layout.micro_batches(batch_size)} if batch_size else {}
    for name, size in sizes.items():
        for factor, words in (
            (size, f"{name} = {size:g} times too much"),
            (1 / size, f"1/{name} of it, with {name} = {size:g}"),
        ):
            if size > 1 and abs(number / expected / factor - 1) < 1e-6:
                return f" That is {words}."
    return f" That is {number / expected:.3g} times as much."
