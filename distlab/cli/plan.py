"""`distlab plan`: find a model's fastest layouts on a cluster, with the planner of Phase 3."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distlab.cli.bench import Impl

if TYPE_CHECKING:
    from distlab.planning import Shape
    from distlab.sim import Cluster

HELP_MODEL = "Such as gpt3-175b, gpt-1t, megatron-530b, llama-2-70b."
ZERO = ("no sharding", "optimizer state sharded", "gradients sharded too", "all sharded")
WORDS = ("recomputed", "SP")
BOUNDS = {
    "compute": "computing",
    "tensor": "tensor",
    "pipeline": "stages",
    "bubble": "bubble",
    "data": "gradients",
}


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=HELP_MODEL)] = "gpt3-175b",
    cluster: Annotated[
        str, typer.Option(help="Preset, such as dgx-a100, dgx-h100, p4d.")
    ] = "dgx-a100",
    nodes: Annotated[int, typer.Option(min=1, help="How many.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 1536,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a sequence.  [default: the model's]"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 8,
    impl: Annotated[
        Impl, typer.Option(help="Whose planner; mine: what you have written.")
    ] = "solution",
) -> None:
    """Print the fastest layouts that fit: data, tensor and pipeline parallelism, ZeRO and more.

    Nothing is run or simulated: the functions of tasks 3.20 to 3.22 compute the time and memory.
    """
    from distlab import planning
    from distlab.sim import Cluster

    try:
        shape = planning.shape_of(model)
        machine = Cluster.preset(cluster, nodes)
        numbers = planning.numbers_of(machine)
    except ValueError as error:
        raise typer.BadParameter(str(error), ctx=context) from None
    shape = shape._replace(length=length or shape.length)
    planner = planning.load(impl)
    try:
        plans = planner.plan(shape, numbers, batch)
    except ValueError as error:
        raise typer.BadParameter(
            f"{error}. Try more --nodes, or another --batch", ctx=context
        ) from None
    _print(model, shape, machine, batch, plans, top)


def _print(
    model: str, shape: "Shape", cluster: "Cluster", batch: int, plans: list[Any], top: int
) -> None:
    from rich.console import Console

    from distlab.util.text import counted

    gpus = cluster.num_gpus
    console = Console(highlight=False)
    typer.echo(
        f"{model} on {counted(gpus, 'GPU')} of {cluster.name}, {batch:,} sequences of "
        f"{shape.length:,} tokens: {counted(len(plans), 'layout fits', 'layouts fit')}.\n"
    )
    typer.echo(f"{_sentence(plans[0])}\n")
    console.print(_table(shape, cluster, batch, plans[:top]))
    typer.echo(
        "\nd copies, t GPUs for each layer, p stages of v chunks, micro-batches of b; SP: sequence "
        f"parallelism; then: what takes most time after computing.\n{_assumptions(shape)}"
    )


def _sentence(best: Any) -> str:
    """Return a sentence that describes the best layout."""
    d, t, p, v, b, zero, checkpointing, is_split = best.layout
    parts = [
        f"{d} copies ({ZERO[zero]})" if d > 1 else "one copy",
        *([f"each layer on {t} GPUs{' with sequence parallelism' * is_split}"] if t > 1 else []),
        *([f"{p} stages of {v} chunk{'s' * (v > 1)}"] if p > 1 else []),
        f"micro-batches of {b}",
        f"checkpointing {checkpointing}",
    ]
    return f"Fastest: {', '.join(parts)}."


def _table(shape: "Shape", cluster: "Cluster", batch: int, plans: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("d·t·p", "v", "b", "ZeRO", "recomputed", "SP", "time", "memory", "MFU"):
        table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True)
    table.add_column("then", no_wrap=True)
    for layout_plan in plans:
        *sizes, v, b, zero, checkpointing, is_split = layout_plan.layout
        layout = ("·".join(map(str, sizes)), f"{v}", f"{b}", f"{zero}", checkpointing)
        table.add_row(*layout, "yes" * is_split, *_figures(shape, cluster, batch, layout_plan))
    return table


def _figures(shape: "Shape", cluster: "Cluster", batch: int, best: Any) -> list[str]:
    """Return time, memory, share of the peak FLOP/s, and the largest cost other than computing."""
    from distlab.planning import model_flops
    from distlab.util.text import bytes_text, seconds_text

    peak = cluster.gpu.peak_flops["float16"] if cluster.gpu else 1.0
    share = model_flops(shape, batch) / (best.time.total * cluster.num_gpus * peak)
    costs = {name: value for name, value in best.time._asdict().items() if name != "compute"}
    largest = max(costs, key=lambda name: costs[name])
    part = costs[largest] / best.time.total
    bound = f"{BOUNDS[largest]} {part:.0%}" if part >= 0.005 else "nothing"
    return [seconds_text(best.time.total), bytes_text(best.memory.total), f"{share:.0%}", bound]


def _assumptions(shape: "Shape") -> str:
    """Return a sentence with the assumptions behind the figures."""
    from distlab.planning import MATMUL_EFFICIENCY, MATMUL_PADDING

    counted_as = "" if shape.is_gpt else "the model counted as a GPT of its layers and width, "
    return (
        f"Assumed: {counted_as}16 bits with Adam, products at {MATMUL_EFFICIENCY:.0%} of the peak "
        f"with sides {MATMUL_PADDING:g} longer than they are, workspace of libraries left out; "
        "docs/plan_fidelity.md."
    )
