"""Draw where a GPU's memory goes, for ``scripts/figures.py``."""

from collections.abc import Mapping, Sequence
from typing import Any

from drawing import FAINT, INK
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlab.planning import shape_of
from phase3_multi_node.given import Layout, Transformer
from solutions.phase3_multi_node.auto_sharding import estimate_memory

Moment = tuple[float, Mapping[str, int]]  # seconds, and live bytes by category

MODEL = Transformer(*shape_of("gpt3-13b")[:5])
GPUS, GPU_GB = 8, 80
WAYS = {  # how the GPUs compute a batch of as many sequences, in micro-batches of one
    "plain": Layout(GPUS),
    "checkpointing": Layout(GPUS, checkpointing="full"),
    "ZeRO 1": Layout(GPUS, zero_stage=1),
    "ZeRO 2": Layout(GPUS, zero_stage=2),
    "ZeRO 3": Layout(GPUS, zero_stage=3),
    "tensor\nparallel": Layout(tensor=GPUS),
    "ZeRO 1 and\ncheckpointing": Layout(GPUS, zero_stage=1, checkpointing="full"),
}
COLOURS = {
    "parameters": "#7fb0e6",
    "gradients": "#f6c48a",
    "optimizer state": "#a8d8a8",
    "activations": "#dfb3dc",
    "attention's scores": "#b98ac0",
    "other": "#c4ccd4",
}
SIZE = 15  # of letters, in points; a screen of 400 pixels shows a point as 0.7 of a pixel


def parts_gb(layout: Layout) -> dict[str, float]:
    """Return the estimated memory of a GPU by kind, in GB; without heads there are no scores."""
    memory = estimate_memory(MODEL, layout, batch_size=GPUS)
    without_scores = estimate_memory(MODEL._replace(heads=0), layout, batch_size=GPUS)
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": sum(without_scores[3:]),
        "attention's scores": memory.total - without_scores.total,
    }
    return {kind: num_bytes / 1e9 for kind, num_bytes in parts.items()}


def picture(step: Sequence[Moment]) -> Figure:
    """Return a picture of the estimates above and a measured step below."""
    figure = Figure(figsize=(8, 9.6))
    figure.set_layout_engine("constrained", w_pad=0.12)
    above, below = figure.subplots(2, height_ratios=(1.15, 1))
    _draw_ways(above)
    _draw_step(below, step)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SIZE, colors=INK)
        axes.title.set(size=SIZE + 1, color=INK)
    figure.legend(
        *above.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=3,
        fontsize=SIZE,
        frameon=False,
        columnspacing=1.0,
    )
    return figure


def _draw_ways(axes: Axes) -> None:
    """Draw a stacked bar for each way, and the limit of a GPU."""
    for row, layout in enumerate(WAYS.values()):
        left = 0.0
        for kind, gb in parts_gb(layout).items():
            axes.barh(row, gb, left=left, height=0.7, color=COLOURS[kind], label=_once(row, kind))
            left += gb
        total = axes.text(left + 3, row, f"{left:.0f}", va="center", size=SIZE, color=INK)
        total.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.barh(0, 0, color=COLOURS["other"], label="other")
    axes.axvline(GPU_GB, color=FAINT, linestyle="--")
    axes.text(GPU_GB + 3, -0.65, f"a GPU has {GPU_GB} GB", size=SIZE, color=FAINT, va="bottom")
    axes.set_yticks(range(len(WAYS)), [*WAYS])
    axes.set(
        xlim=(0, 275), ylim=(len(WAYS) - 0.5, -1.2), title="13 billion parameters, GB on a GPU"
    )


def _once(row: int, kind: str) -> str:
    """Return the name for the legend in the first row, and none in others."""
    return kind if row == 0 else ""


def _draw_step(axes: Axes, step: Sequence[Moment]) -> None:
    """Draw the kinds of live memory over time, and say what the top of the curve is."""
    step, start_s = _thinned(step), step[0][0]
    times = [1e3 * (seconds - start_s) for seconds, _ in step]
    kinds = {kind.replace("_", " "): kind for kind in step[0][1]}
    order = [kind for kind in COLOURS if kind in kinds]
    stack = [[held[kinds[kind]] / 1e9 for _, held in step] for kind in order]
    axes.stackplot(times, *stack, colors=[COLOURS[kind] for kind in order])
    totals = [sum(moment) for moment in zip(*stack, strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    axes.plot([times[peak]] * 2, [0, totals[peak]], color=FAINT, linestyle="--")
    words: dict[str, Any] = {"ha": "center", "size": SIZE, "color": INK}
    axes.text(times[peak], totals[peak] * 1.03, f"{totals[peak]:.2f} GB", **words)
    axes.text(times[peak] * 0.35, totals[peak] * 0.93, "forward", **words)
    axes.text(times[-1] - (times[-1] - times[peak]) * 0.4, totals[peak] * 0.93, "backward", **words)
    axes.set(xlim=(0, times[-1]), ylim=(0, totals[peak] * 1.18))
    axes.set_title("A measured step of a GPT, GB over virtual ms")


def _thinned(step: Sequence[Moment], period_s: float = 1e-4) -> list[Moment]:
    """Return the moment of the most memory in each period: more points would not be seen."""
    most: dict[int, Moment] = {}
    for moment in step:
        period = int(moment[0] / period_s)
        if period not in most or sum(moment[1].values()) > sum(most[period][1].values()):
            most[period] = moment
    return [*most.values()]
