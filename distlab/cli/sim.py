"""`distlab sim`: run any torch.distributed script on a simulated cluster, and profile it."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distlab.cli.streams import watched_stderr
from distlab.util.text import counted

if TYPE_CHECKING:
    from distlab.sim import Cluster, Options, Simulated
    from distlab.sim.sanitizer.against import Against

Algorithm = Literal[
    "auto",
    "ring",
    "tree",
    "recursive_doubling",
    "halving_doubling",
    "hierarchical",
    "hierarchical_overlapped",
    "direct",
    "nccl_ring",
    "nccl_tree",
    "nccl_nvls",
    "nccl_nvls_tree",
    "nccl_collnet",
]
PICTURES = (".png", ".svg", ".pdf")


def sim(
    context: typer.Context,
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="SCRIPT",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="A torch.distributed program; only --assumed works without one.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", show_default=False, help="The script's."),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="Preset, such as dgx-h100, p4d, laptop.")
    ] = "dgx-h100",
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="How many.  [default: 1, or as the ranks need]"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many.  [default: one per GPU]")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a .json for ui.perfetto.dev, or a folder with one per rank."),
    ] = None,
    links: Annotated[
        Path | None, typer.Option(help="Write a .csv with the bytes of every link.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw who did what when: .png, .svg or .pdf.")
    ] = None,
    gantt: Annotated[Path | None, typer.Option(help="Draw where each rank's time went.")] = None,
    title: Annotated[
        str | None,
        typer.Option(help="Of the pictures.  [default: the script's first line]"),
    ] = None,
    algorithm: Annotated[Algorithm, typer.Option(help="How built-in collectives work.")] = "auto",
    eager_bytes: Annotated[
        int,
        typer.Option(min=-1, help="Buffer sends up to this size; -1: none."),
    ] = -1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Report tensors changed while being sent.")
    ] = False,
    sanitize: Annotated[
        bool,
        typer.Option("--sanitize", help="Look for mistakes that end without an error."),
    ] = False,
    against: Annotated[
        Literal["one"] | None,
        typer.Option(
            show_default=False,
            help="'one': run SCRIPT on one rank first, and name the first tensor that differs.",
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KIND …'",
            help="Repeatable: 'slow_rank RANK FACTOR', 'slow_link PATTERN FACTOR', "
            "'kill_rank RANK SECONDS', 'kill_at_step RANK STEP', 'delay FROM TO SECONDS', "
            "'jitter SECONDS'.",
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Memory of each GPU.  [default: as the preset says]"),
    ] = None,
    overlap_cost: Annotated[
        float,
        typer.Option(
            min=0,
            help="Share of its speed that computation loses beside collectives, such as 0.15.",
        ),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Seeds random and numpy on the ranks, and the jitter.")
    ] = 0,
    assumed: Annotated[
        bool, typer.Option("--assumed", help="List the assumed numbers and their sources.")
    ] = False,
    watchdog: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            show_default=False,
            help="With nccl: after a hang, write the dumps of flight recorders, as on GPUs.",
        ),
    ] = None,
    p2p_order: Annotated[
        Literal["free", "pair"],
        typer.Option(
            help="'pair': messages of two ranks, unless batched, go one at a time, and their tags "
            "do not count, as on NCCL."
        ),
    ] = "free",
    semantics: Annotated[
        Literal["auto", "gloo", "nccl"],
        typer.Option(
            help="'nccl': ranks have GPUs (torch.cuda), whose streams compute and communicate "
            "while the host runs ahead. 'auto': nccl if SCRIPT names cuda or nccl."
        ),
    ] = "auto",
    host_cost: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Repeatable, with nccl: launch_s=5e-6 or another number of a host.",
        ),
    ] = None,
    no_devices: Annotated[
        bool, typer.Option("--no-devices", help="Computation takes no time; don't count memory.")
    ] = False,
) -> None:
    """Run SCRIPT on every rank of a simulated cluster, as torchrun would, and report what it took.

    Options of distlab come before SCRIPT; everything after it belongs to the script. If both have
    an option of the same name, put -- before the script's: distlab sim SCRIPT -- --seed 1
    """
    with _usage_errors(context):
        if script is None and assumed:
            _list_assumptions(cluster, nodes, ranks)
            return
        if script is None:
            context.fail("Missing argument 'SCRIPT'.")
        own_arguments = _own_arguments(context, script, arguments or ())
        outputs = {"--trace": trace, "--links": links, "--plot": plot, "--gantt": gantt}
        _check_outputs(outputs)
        from distlab.sim import configured

        world, num_ranks = configured.world(cluster, nodes, ranks)
        if semantics == "auto":
            unfit = configured.unfit_for_nccl(
                world, no_devices=no_devices, overlap_cost=overlap_cost, p2p_order=p2p_order
            )
            is_asked = bool(host_cost or watchdog)
            semantics = "gloo" if unfit else _fitting(script, is_asked=is_asked)
        options = configured.options(
            world,
            num_ranks,
            fault=fault or (),
            memory_gib=memory_gib,
            host_cost=host_cost or (),
            no_devices=no_devices,
            semantics=semantics,
            overlap_cost=overlap_cost,
            p2p_order=p2p_order,
            seed=seed,
            algorithm=algorithm,
            eager_bytes=eager_bytes,
            is_strict=strict,
            is_sanitized=sanitize,
            watchdog=str(watchdog or ""),
        )
    simulated, observer = _run(context, script, own_arguments, num_ranks, options, world, against)
    _report(simulated, script, ranks, has_sources=assumed)
    _write(simulated, title, script, outputs)
    _tell_findings(simulated, observer, is_sanitized=sanitize)


def _list_assumptions(preset: str, nodes: int | None, ranks: int | None) -> None:
    """Print the assumed numbers of a cluster, and their sources."""
    from distlab.sim import configured

    world, _ = configured.world(preset, nodes, ranks)
    lines = (f"  {line}" for line in world.assumptions())
    typer.echo("\n".join([f"assumed in {preset} (--cluster chooses another):", *lines]))


def _run(
    context: typer.Context,
    script: Path,
    arguments: Sequence[str],
    num_ranks: int,
    options: "Options",
    world: "Cluster",
    against: str | None,
) -> "tuple[Simulated[None], Against | None]":
    """Run a script; also return what has compared its ranks with one, if they were compared."""
    from distlab.sim.script import run_script

    observer = None
    with _exits_reported_once():
        if against:
            observer = _beside_one(context, script, arguments, num_ranks, options, world)
            options = replace(options, observer=observer)
    with _exits_reported_once(), _told_also_after_an_error(observer):
        return run_script(script, arguments, num_ranks, world, options), observer


def _report(
    simulated: "Simulated[None]", script: Path, ranks: int | None, *, has_sources: bool
) -> None:
    """Print what the run took."""
    from distlab.sim.results.summary import summary
    from distlab.sim.script import only_defines

    typer.echo(f"\n{summary(simulated, has_sources=has_sources)}\n")
    if ranks and len(simulated.results) != ranks:
        started = counted(len(simulated.results), "rank")
        typer.echo(f"{script} started {started} itself, whatever --ranks {ranks} says.\n")
    if only_defines(script):
        typer.echo(f"No rank did anything: {script} defines functions, but calls none.\n")


def _tell_findings(
    simulated: "Simulated[None]", observer: "Against | None", *, is_sanitized: bool
) -> None:
    """Print what was wrong; if anything was, exit with 1."""
    if observer:
        _tell_against(observer)
    is_wrong = simulated.gpu_time and simulated.gpu_time.wrong
    if is_sanitized:
        typer.echo("\n".join(_lines_of(simulated.findings, are_more=bool(is_wrong))))
    if is_wrong or simulated.findings or (observer and observer.differs):
        raise typer.Exit(1)


def _tell_against(observer: "Against") -> None:
    typer.echo("\n".join(["--against one:", *(f"  {line}" for line in observer.lines())]))


@contextmanager
def _told_also_after_an_error(observer: "Against | None") -> Iterator[None]:
    """If the program fails, say what differed up to then."""
    try:
        yield
    except Exception:
        if observer:
            _tell_against(observer)
        raise


def _lines_of(findings: Sequence[str], *, are_more: bool) -> list[str]:
    """Return lines about what the sanitizer found.

    Args:
        are_more: True if the report has named wrong uses of GPUs before.
    """
    if not findings:
        return [f"--sanitize: nothing {'else ' * are_more}found"]
    return ["found by --sanitize:", *(f"  {line}" for line in findings)]


def _beside_one(
    context: typer.Context,
    script: Path,
    arguments: Sequence[str],
    num_ranks: int,
    options: "Options",
    world: "Cluster",
) -> "Against":
    """Run a script on one rank, and return what compares other ranks with it."""
    from distlab.sim import Faults, SimulationError, choose_cluster
    from distlab.sim.sanitizer.against import Against, Reference
    from distlab.sim.script import chooses_its_ranks, run_script

    if chooses_its_ranks(script):
        reason = f"--against one: {script} starts its own ranks, and so never runs on one"
        raise typer.BadParameter(reason, ctx=context)
    reference = Reference()
    typer.echo("on one rank:")
    alone = replace(options, observer=reference, faults=Faults(), capacity_bytes=None)
    try:
        one = world if options.semantics == "nccl" else choose_cluster(None, 1)
        run_script(script, arguments, 1, one, alone)
    except SimulationError:
        typer.echo("--against one needs a program that also runs on one rank")
        raise
    typer.echo(f"\non {num_ranks} ranks:")
    return Against(reference, num_ranks)


@contextmanager
def _exits_reported_once() -> Iterator[None]:
    """Do not report a script's failed exit if the script has printed an error message itself."""
    from distlab.sim import RankError

    with watched_stderr() as watched:
        try:
            yield
        except RankError as error:
            if error.exception == SystemExit.__name__ and watched.has_text:
                raise typer.Exit(1) from None
            raise


@contextmanager
def _usage_errors(context: typer.Context) -> Iterator[None]:
    """Turn a ValueError into a usage error, a single line that names the command."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), ctx=context) from None


def _own_arguments(context: typer.Context, script: Path, arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments after the script; refuse options that are probably meant for distlab.

    An option named like one of ours belongs to the script if the script contains that name in
    quotes, or if the option comes after ``--``.
    """
    if arguments[:1] == ["--"]:
        return arguments[1:]
    ours = {name for param in context.command.params for name in param.opts} - {"-h", "--help"}
    text = script.read_text(encoding="utf-8", errors="replace")
    for argument in arguments:
        name = argument.partition("=")[0]
        is_ours = name.startswith("-") and _underscored(name) in map(_underscored, ours)
        if is_ours and not re.search(rf"""["']{re.escape(name)}["']""", text):
            raise ValueError(
                f"{name} comes after {script} and would be the script's: put it before {script}, "
                f"or if it is the script's own: distlab sim {script} -- {shlex.join(arguments)}"
            )
    return arguments


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _check_outputs(paths: dict[str, Path | None]) -> None:
    """Refuse outputs that could not be written, so that a long run is not wasted."""
    endings = {"--trace": (".json", ""), "--links": (".csv",)}
    for option, path in paths.items():
        allowed = endings.get(option, PICTURES)
        if path and path.suffix not in allowed:
            names = " or ".join(ending or "nothing (a folder)" for ending in allowed)
            raise ValueError(f"{option} {path} must end in {names}")
        if path and not path.parent.is_dir():
            raise ValueError(f"{option} {path}: there is no folder {path.parent}")


def _fitting(script: Path, *, is_asked: bool) -> Literal["gloo", "nccl"]:
    """Return the semantics that fit a script."""
    from distlab.sim.script import names_gpus

    return "nccl" if is_asked or names_gpus(script) else "gloo"


def _write(
    simulated: "Simulated[None]",
    title: str | None,
    script: Path,
    outputs: dict[str, Path | None],
) -> None:
    """Write the requested files, and say how to look at them."""
    from distlab.sim.results import diagram, exports
    from distlab.sim.script import title_of

    heading = title or title_of(script)
    trace, links, plot, gantt = outputs.values()
    if trace and trace.suffix:
        exports.write_trace(simulated, trace)
        typer.echo(f"{trace}: open it at https://ui.perfetto.dev")
    elif trace:
        exports.write_traces(simulated, trace)
        typer.echo(f"{trace}: a trace per rank, for Holistic Trace Analysis")
    if links:
        exports.write_links(simulated, links)
        typer.echo(f"{links}: bytes per link")
    if plot:
        diagram.space_time(simulated, heading).savefig(plot)
        typer.echo(f"{plot}: who did what when")
    if gantt:
        diagram.gantt(simulated, heading).savefig(gantt)
        typer.echo(f"{gantt}: where the time went")
