"""Compare Phase 3's planner with published step times.

    python benchmarks/plan_fidelity.py        fits the constants; prints both halves' errors
    python benchmarks/plan_fidelity.py write  rewrites the tables of docs/plan_fidelity.md

The two constants of ``matmul_seconds`` are fitted to every second row of steps.csv; the other rows
only serve as a check. Rows with ZeRO 3 come from another library and belong to neither half.
"""

import csv
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from distlab.planning import MATMUL_EFFICIENCY, MATMUL_PADDING, numbers_of
from distlab.sim import Cluster
from phase3_multi_node.given import CHECKPOINTING, Layout, Machine, Transformer
from solutions.phase3_multi_node.auto_sharding import estimate_step_time

FIGURES = Path(__file__).parent / "plan_figures"
PAGE = Path(__file__).parents[1] / "docs/plan_fidelity.md"
MARK = "<!-- table -->\n"
LENGTH, VOCABULARY = 2048, 51200
SHOWN = "narayanan-2021-zero"
EFFICIENCIES = [k / 100 for k in range(40, 101)]
PADDINGS = [10.0 * k for k in range(41)]


class Row(NamedTuple):
    """A published step time."""

    source: str
    name: str
    model: Transformer
    layout: Layout
    batch_size: int
    seconds: float
    half: str  # "fitted", "checked", or "shown" for a row in neither half

    def predicted_s(self, efficiency: float, padding: float) -> float:
        """Return the planner's prediction."""
        numbers = numbers_of(Cluster.preset("dgx-a100", nodes=self._nodes))
        machine = Machine(**numbers)._replace(matmul_efficiency=efficiency, matmul_padding=padding)
        return estimate_step_time(self.model, self.layout, self.batch_size, machine).total

    def error(
        self, efficiency: float = MATMUL_EFFICIENCY, padding: float = MATMUL_PADDING
    ) -> float:
        """Return the relative error, predicted / published - 1."""
        return self.predicted_s(efficiency, padding) / self.seconds - 1

    @property
    def _nodes(self) -> int:
        return self.layout.data * self.layout.tensor * self.layout.pipeline // 8 or 1


def rows() -> list[Row]:
    """Return all published rows."""
    with (FIGURES / "steps.csv").open(encoding="utf-8") as file:
        return [_row(fields, place) for place, fields in enumerate(csv.DictReader(file))]


def _row(fields: dict[str, str], place: int) -> Row:
    names = ("layers", "width", "heads", "gpus", "tensor", "pipeline", "chunks", "batch")
    layers, width, heads, gpus, tensor, pipeline, chunks, batch = (int(fields[n]) for n in names)
    is_full, is_shown = fields["checkpointing"] == "full", fields["source"] == SHOWN
    half = "shown" if is_shown else ("fitted", "checked")[place % 2]
    model = Transformer(layers, width, heads, LENGTH, VOCABULARY)
    layout = Layout(
        *(gpus // (tensor * pipeline), tensor, pipeline, chunks, int(fields["micro_batch"])),
        zero_stage=3 if is_shown else 0,
        checkpointing="full" if is_full else "selective",
        sequence_parallel=fields["sequence_parallel"] == "yes",
    )
    seconds = float(fields["seconds"] or 0) or _seconds(model, batch, gpus, fields)
    return Row(fields["source"], fields["model"], model, layout, batch, seconds, half)


def _seconds(model: Transformer, batch: int, gpus: int, fields: dict[str, str]) -> float:
    """Convert FLOP/s back to seconds, by the source's equation 3 for the FLOPs of a step."""
    layers, h, _, s, vocabulary = model
    terms = 1 + s / (6 * h) + vocabulary / (16 * layers * h)
    flops = 96 * batch * s * layers * h**2 * terms
    return flops / (gpus * float(fields["tflops_per_gpu"]) * 1e12)


def of_half(every: Sequence[Row], half: str) -> list[Row]:
    """Return the rows of one half."""
    return [row for row in every if row.half == half]


def mean_error(some: Sequence[Row], efficiency: float, padding: float) -> float:
    """Return the mean of the rows' absolute errors."""
    return mean(abs(row.error(efficiency, padding)) for row in some)


def fit(some: Sequence[Row]) -> tuple[float, float]:
    """Return the efficiency and the padding with the smallest mean error."""
    return min(product(EFFICIENCIES, PADDINGS), key=lambda pair: mean_error(some, *pair))


def constant_errors(some: Sequence[Row], others: Sequence[Row]) -> float:
    """Fit one efficiency for all shapes to ``some`` rows; return its mean error on the others."""
    best = min(EFFICIENCIES, key=lambda efficiency: mean_error(some, efficiency, 0.0))
    return mean_error(others, best, 0.0)


def table(every: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| source | model | GPUs | t | p | v | checkpointing | half | published | ours | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in every:
        d, t, p, v, *_ = row.layout
        predicted = row.predicted_s(MATMUL_EFFICIENCY, MATMUL_PADDING)
        lines.append(
            f"| {row.source} | {row.name} | {d * t * p} | {t} | {p} | {v} | "
            f"{row.layout.checkpointing} | {row.half} | {row.seconds:.2f} s | {predicted:.2f} s | "
            f"{row.error():+.1%} |"
        )
    return "\n".join(lines)


class LayerRow(NamedTuple):
    """Published time of one layer's forward and backward pass."""

    model: Transformer
    layout: Layout
    seconds: float

    def predicted_s(self) -> float:
        """Return the planner's time per layer: (step - step without layers) / layers."""
        batch_size = self.layout.micro_batch
        machine = Machine(**numbers_of(Cluster.preset("dgx-a100")))
        whole, rest = (
            estimate_step_time(model, self.layout, batch_size, machine).total
            for model in (self.model, self.model._replace(layers=0))
        )
        return (whole - rest) / self.model.layers

    def error(self) -> float:
        """Return the relative error, predicted / published - 1."""
        return self.predicted_s() / self.seconds - 1


def layer_rows() -> list[LayerRow]:
    """Return the published times of one layer."""
    with (FIGURES / "layers.csv").open(encoding="utf-8") as file:
        return [_layer_row(fields) for fields in csv.DictReader(file)]


def _layer_row(fields: dict[str, str]) -> LayerRow:
    layers, width, heads = (int(fields[name]) for name in ("layers", "width", "heads"))
    checkpointing = next(kind for kind in CHECKPOINTING if kind == fields["checkpointing"])
    layout = Layout(
        tensor=int(fields["tensor"]),
        micro_batch=int(fields["micro_batch"]),
        checkpointing=checkpointing,
        sequence_parallel=fields["sequence_parallel"] == "yes",
    )
    model = Transformer(layers, width, heads, LENGTH, VOCABULARY)
    return LayerRow(model, layout, float(fields["milliseconds"]) / 1e3)


def layer_table() -> str:
    """Return the published times of one layer as a Markdown table."""
    lines = [
        "| one layer of 22b | sequence parallelism | published | ours | error |",
        "|---|---|---|---|---|",
    ]
    for row in layer_rows():
        split = "yes" if row.layout.sequence_parallel else "no"
        lines.append(
            f"| {row.layout.checkpointing} | {split} | {row.seconds * 1e3:.1f} ms | "
            f"{row.predicted_s() * 1e3:.1f} ms | {row.error():+.1%} |"
        )
    return "\n".join(lines)


def tables() -> str:
    """Return all tables in Markdown."""
    return f"{table(rows())}\n\n{layer_table()}"


def main() -> None:
    """Print the fit, or write the page."""
    every = rows()
    fitted, checked = of_half(every, "fitted"), of_half(every, "checked")
    if sys.argv[1:] == ["write"]:
        head, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
        PAGE.write_text(f"{head}{MARK}{tables()}\n", encoding="utf-8")
        return
    best = fit(fitted)
    print(f"fitted: efficiency {best[0]:.2f}, padding {best[1]:g}")
    for name, some in (("fitted", fitted), ("checked", checked)):
        worst = max(some, key=lambda row: abs(row.error()))
        print(
            f"{name}: {len(some)} rows, mean error {mean_error(some, *best):.1%}, "
            f"worst {worst.error():+.1%} ({worst.source} {worst.name})"
        )
    of_layers = mean(abs(row.error()) for row in layer_rows())
    print(f"one layer: {len(layer_rows())} rows, mean error {of_layers:.1%}")
    print(f"one efficiency for all shapes: mean error {constant_errors(fitted, checked):.1%}")


if __name__ == "__main__":
    main()
