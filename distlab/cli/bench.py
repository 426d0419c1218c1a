"""`distlab bench`: measure the course's own machinery and torch's counterparts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distlab.cli.whole_help import Group

if TYPE_CHECKING:
    from distlab.bench.contest import Contest

Impl = Literal["solution", "mine"]
Whose = Annotated[
    Impl, typer.Option("--impl", help="Whose functions; mine: what you have written.")
]
Folder = Annotated[
    Path | None,
    typer.Option("--save", help="Folder for a JSON file with all figures, and for a picture."),
]
STEPS = "Number of timed steps; the median counts."

app = typer.Typer(cls=Group, no_args_is_help=True, help="Measure the course's own machinery.")


@app.callback()
def _root() -> None:
    """Measure the course's own machinery and torch's counterparts."""


@app.command("launch")
def launch(
    ranks: int = typer.Option(4, min=1),
    repeats: int = typer.Option(9, min=1, help="Number of runs; the median counts."),
) -> None:
    """Measure the time until every rank has returned: cold start, warm start, and torch's spawn."""
    from distlab.bench import launch as measurement

    measurement.print_table(ranks, repeats)


@app.command("all_reduce")
def all_reduce(
    phase: Annotated[
        Literal["1", "3"], typer.Option(help="Whose tasks; 3 has shared memory, too.")
    ] = "1",
    ranks: int = typer.Option(4, min=2),
    repeats: int = typer.Option(21, min=1, help="Number of timed runs; the median counts."),
    impl: Annotated[
        Impl, typer.Option(help="Whose all-reduces; mine: what you have written.")
    ] = "solution",
    max_mib: float = typer.Option(
        100, min=0, help="Leave out larger tensors; there are some of up to 256 MiB."
    ),
    save: Folder = None,
) -> None:
    """Time a phase's all-reduces and the library's own, and measure α and β of one message."""
    from distlab.bench import all_reduce as measurement

    measure = measurement.phase_1 if phase == "1" else measurement.phase_3
    measure(ranks, repeats, impl, int(max_mib * 2**20), save)


@app.command("sim")
def sim() -> None:
    """Measure the real time and memory of simulated rings, collectives and idle ranks."""
    from distlab.bench import sim as measurement

    measurement.print_table()


# Contests: our training steps against torch's

COMPARISONS = {
    "pipeline": "the pipelines of Phase 2 with torch.distributed.pipelining: time and memory",
    "tensor_parallel": "tensor parallelism of Phase 2 with torch's: time, collectives, their bytes",
    "ddp": "data parallelism of Phase 3 with torch's: time, collectives, bytes and memory",
    "zero": "ZeRO of Phase 3 with torch's: time, memory, collectives and bytes",
    "compression": "compressed gradients of Phase 4 with torch's hooks: time, bytes and loss",
}
NUM_RANKS = {"pipeline": 4}  # default numbers of ranks; 2 for all other comparisons
LEAST_RANKS = {"pipeline": 2, "compression": 2}  # minimum numbers of ranks; 1 for the others
NUM_STEPS = {"pipeline": 11, "tensor_parallel": 11}  # defaults; 21 for all other comparisons


def _contest(name: str) -> "Contest":
    from distlab.bench import compression, ddp, phase2, zero

    contests = (
        *(phase2.PIPELINE, phase2.MEMORY, phase2.TENSOR_PARALLEL),
        *(ddp.CONTEST, zero.CONTEST, compression.CONTEST),
    )
    return next(contest for contest in contests if contest.name == name)


def _add_comparison(name: str) -> None:
    least = LEAST_RANKS.get(name, 1)

    @app.command(name, help=f"Compare {COMPARISONS[name]}.")
    def hold(
        ranks: Annotated[int, typer.Option(min=least)] = NUM_RANKS.get(name, 2),
        repeats: Annotated[int, typer.Option(min=1, help=STEPS)] = NUM_STEPS.get(name, 21),
        impl: Whose = "solution",
        save: Folder = None,
    ) -> None:
        _contest(name).hold(ranks, repeats, impl, save)


for comparison in COMPARISONS:
    _add_comparison(comparison)


@app.command("memory")
def memory(
    layers: int = typer.Option(36, min=1, help="Number of layers, √L segments."),
    repeats: Annotated[int, typer.Option(min=1, help=STEPS)] = 11,
    impl: Whose = "solution",
    save: Folder = None,
) -> None:
    """Compare time and memory with Phase 2's checkpointing, with torch's, and without any."""
    _contest("memory").hold(1, repeats, impl, save, layers=layers)


@app.command("trainer")
def trainer(
    context: typer.Context,
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Further keys of the trainer's configuration, such as layers=12."),
    ] = None,
    ranks: int = typer.Option(2, min=1),
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 11,
    impl: Whose = "solution",
    save: Folder = None,
    model: Annotated[
        str, typer.Option(help="transformer, resnet18, resnet50, vit_s16, vit_b16 or gpt.")
    ] = "transformer",
    image_size: Annotated[int, typer.Option(min=8, help="Not of a gpt.")] = 16,
    batch_size: int = typer.Option(64, min=1, help="Of all ranks together."),
    steps: int = typer.Option(16, min=1, help="Of each in a round."),
    precision: str = typer.Option("fp32", help="fp32 or bf16."),
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="cuda: a GPU for each rank.")
    ] = "cpu",
    only: Annotated[
        list[str] | None,
        typer.Option(help="A way of the trainer, as the table calls it; repeat it."),
    ] = None,
) -> None:
    """Compare the production trainer with plain loops that use torch's own strategies."""
    from distlab.bench import trainer as measurement
    from distlab.production.errors import ConfigError

    sizes = measurement.Sizes(model, image_size, batch_size, precision, device, steps, keys or ())
    try:
        measurement.print_table(ranks, repeats, impl, sizes, save, only or ())
    except ConfigError as error:
        raise typer.BadParameter(str(error), ctx=context) from None
