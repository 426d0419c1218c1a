"""Reproduce published tables with measurements on the simulated cluster.

    python benchmarks/simulated_tables.py zero            memory with ZeRO on 1 to 64 ranks
    python benchmarks/simulated_tables.py pipeline        bubbles of GPipe and 1F1B
    python benchmarks/simulated_tables.py seven_billion   a step of a 7B model on 64 H100

The programs are in tests/lab/sim, where the same numbers are tested.
"""

import gc
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab" / "sim"))

import pipelines
import seven_billion as large
import zero_states

from distlab.bench import harness
from distlab.sim import Cluster, Options, simulate

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
Ranks = Annotated[int, typer.Option("--ranks", help="how many simulated GPUs")]


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f}"


# --- ZeRO ----------------------------------------------------------------------------------------

STAGES = {1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}


@app.command()
def zero(
    most_ranks: Annotated[int, typer.Option(help="up to 1024, in steps of 4 times")] = 64,
) -> None:
    """Print a rank's memory for 7.5 billion parameters, as in Rajbhandari et al. 2020, table 1."""
    rows = []
    for num_ranks in [n for n in (1, 4, 16, 64, 256, 1024) if n <= most_ranks]:
        row = [str(num_ranks)]
        for stage in STAGES:
            run = simulate(
                zero_states.model_states,
                num_ranks,
                stage,
                cluster=Cluster(1, num_ranks),
                options=Options(has_devices=True),
            )
            live, peak = run.results[0]
            row += [gigabytes(sum(live.values())), gigabytes(sum(peak.values()))]
        rows.append(row)
    columns = [f"{name}{what}" for name in STAGES.values() for what in ("", ", peak")]
    harness.print_table(
        "GB on each rank after a step of 7.5 billion parameters", ["ranks", *columns], rows
    )


# --- pipelines -----------------------------------------------------------------------------------


@app.command()
def pipeline() -> None:
    """Print for how much of the time pipelines are idle, and how many micro-batches they hold."""
    rows = []
    for schedule, (_, stages) in pipelines.SCHEDULES.items():
        for p in (2, 4, 8):
            for m in (1, 4, 8, 32):
                if m >= p or schedule == "GPipe":
                    rows.append(pipeline_row(schedule, stages, p, m))
    columns = ["schedule", "p", "m", "idle / total", "formula", "held by rank 0", "by the last"]
    harness.print_table("Pipelines of p ranks, m micro-batches", columns, rows)


def pipeline_row(schedule: str, stages: int, p: int, m: int) -> list[str]:
    """Return one pipeline's row; with v stages per rank, (p - 1) / (v m + p - 1) should be idle."""
    run = pipelines.measure(schedule, p, m)
    formula = (p - 1) / (stages * m + p - 1)
    held = (f"{count:.2f}" for count in (run.in_flight[0], run.in_flight[-1]))
    return [schedule, str(p), str(m), f"{run.idle_of_total:.12f}", f"{formula:.12f}", *held]


# --- 7 billion parameters ------------------------------------------------------------------------


@app.command("seven_billion")
def seven_billion(ranks: Ranks = 64, layers: int = large.LAYERS) -> None:
    """Time a training step of a 32-layer transformer of width 4096 on DGX H100 nodes."""
    rows = []
    for way in large.WAYS:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        gc.disable()  # scanning all ranks' objects would take a third of the time
        step = large.measure(way, ranks, layers)
        gc.enable()
        gc.collect()
        took = [time.process_time() - start_cpu_s, time.perf_counter() - start_s]
        share = step.flops / large.expected_flops(step.parameters, layers)
        rows.append(
            [
                way,
                f"{step.seconds:.4f}",
                f"{step.utilisation:.1%}",
                f"{share:.4f}",
                *(gigabytes(num_bytes) for num_bytes in step.peak_by_category.values()),
                *(f"{seconds:.0f}" for seconds in took),
            ]
        )
    columns = ["way", "simulated s", "MFU", "FLOPs / formula", *step.peak_by_category]
    title = (
        f"One step of {step.parameters / 1e9:.2f} billion parameters on {ranks} H100; GB at peak"
    )
    harness.print_table(title, [*columns, "CPU s", "real s"], rows)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning)
    app()
