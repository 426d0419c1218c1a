"""Pictures of numbers in 16 and 32 bits, for ``scripts/figures.py``."""

import math
import re
from typing import Any

import torch
from drawing import BLUE, EMPTY, FAINT, GREEN, INK, RED, WIDTH
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab.data import load
from distlab.models import build

# --- 2.3: gradients and the range of float16 ------------------------------------------------------

SCALE = 2.0**16
SMALLEST, LARGEST, PER_DECADE = -17, 9, 4  # powers of ten that are shown, and bars in each
NUM_IMAGES, BATCH, NUM_STEPS = 256, 64, 20
DTYPES = {torch.float16: BLUE, torch.bfloat16: GREEN, torch.float32: GREEN}


def gradients() -> Tensor:
    """Return all gradients that a small CNN on the digits sends from layer to layer.

    They belong to the mean loss of ``NUM_IMAGES`` images, after some steps of training.
    """
    data = load("digits")
    images, labels = zip(*(data.train[number] for number in range(NUM_IMAGES)), strict=True)
    x, y = torch.stack(images), torch.tensor(labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build("cnn", image_shape=data.image_shape, num_classes=data.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(NUM_STEPS):
        batch = slice(step * BATCH % NUM_IMAGES, step * BATCH % NUM_IMAGES + BATCH)
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _gradients_of(model, x.requires_grad_(), y)


def _gradients_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradients of the outputs of all layers, except those that are 0."""
    found: list[Tensor] = []

    def keep(_layer: nn.Module, _of_inputs: Any, of_outputs: Any) -> None:
        found.append(of_outputs[0])

    for layer in model.modules():
        if not list(layer.children()):
            layer.register_full_backward_hook(keep)
    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    every = torch.cat([gradient.flatten().abs() for gradient in found])
    return every[every > 0]


def draw_ranges() -> Figure:
    """Draw the gradients before and after scaling, above the ranges of three types."""
    figure = Figure(figsize=(WIDTH / 72, 400 / 72), layout="constrained")
    before, after, ranges = figure.subplots(3, sharex=True, height_ratios=(3, 3, 2.2))
    found = gradients()
    _draw_histogram(before, found, "gradients")
    _draw_histogram(after, SCALE * found, f"{SCALE:.0f} · gradients")
    _draw_ranges(ranges)
    return figure


def _draw_histogram(axes: Axes, numbers: Tensor, title: str) -> None:
    """Draw how many numbers there are of each size; those that float16 makes 0 are red."""
    bins = (LARGEST - SMALLEST) * PER_DECADE
    counts = torch.histc(numbers.log10(), bins, SMALLEST, LARGEST).tolist()
    edges = [SMALLEST + number / PER_DECADE for number in range(bins + 1)]
    becomes_0 = math.log10(_smallest(torch.float16) / 2)
    for left, count in zip(edges, counts, strict=False):
        is_lost = left + 0.5 / PER_DECADE < becomes_0
        axes.bar(left, count, 1 / PER_DECADE, align="edge", color="#e79c90" if is_lost else BLUE)
    lost = float((numbers.half() == 0).double().mean())
    look: dict[str, Any] = {"size": 14, "transform": axes.transAxes, "va": "top"}
    axes.text(0.0, 1.0, title, color=INK, weight="bold", **look)
    axes.text(0.0, 0.82, f"float16: {100 * lost:.0f} % become 0", color=RED, **look)
    axes.set(yticks=[], xlim=(SMALLEST, LARGEST))
    axes.spines[["top", "right", "left"]].set_visible(False)


def _smallest(dtype: torch.dtype) -> float:
    """Return the smallest number above 0."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _text_of(number: float) -> str:
    """Return a number with two digits, or in full if it is short."""
    return f"{number:.0f}" if 1 < number < 1e6 else re.sub(r"e\+?(-?)0?", r"e\1", f"{number:.1e}")


def _draw_ranges(axes: Axes) -> None:
    """Draw the range of each type, as far as it is shown."""
    for row, (dtype, colour) in enumerate(DTYPES.items()):
        ends = _smallest(dtype), torch.finfo(dtype).max
        shown = max(math.log10(ends[0]), SMALLEST), min(math.log10(ends[1]), LARGEST)
        width = shown[1] - shown[0]
        axes.barh(row, width, left=shown[0], height=0.7, color=colour, edgecolor=FAINT)
        text = f"{str(dtype).removeprefix('torch.')}, {_text_of(ends[0])} to {_text_of(ends[1])}"
        if width == LARGEST - SMALLEST:  # beyond what is shown
            text = f"←  {text}  →"
        axes.text(sum(shown) / 2, row, text, size=14, color=INK, ha="center", va="center")
    ticks = range(-16, LARGEST, 4)
    axes.set_xticks(ticks, [f"1e{tick}" if tick else "1" for tick in ticks], size=14)
    axes.set(ylim=(2.5, -0.5), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=EMPTY)
    axes.set_axisbelow(True)
