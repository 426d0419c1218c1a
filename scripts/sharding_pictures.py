"""A picture of what a rank holds of a sharded unit, for ``scripts/figures.py``."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from drawing import BLUE, FAINT, GREEN, INK, PURPLE, arrow, box, canvas, line, matrix, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from distlab.sim import simulate
from solutions.phase3_multi_node.zero import FullyShardedDataParallel, Order, Saved, Unit


class Held(NamedTuple):
    """What a rank holds of a unit after something has happened to it."""

    shard: int  # elements
    whole: int  # elements, 0 unless gathered
    is_set: bool  # whether the model has the parameter
    is_noted: bool  # whether autograd has saved a note of it


class _Observer:
    """Notes what rank 0 holds of the second unit after each method that changes it."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.is_noted = False

    def wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that also notes what is held after its first call."""

        def call(this: Any, *arguments: Any) -> Any:
            result = method(this, *arguments)
            units = this.units if isinstance(this, Order) else this.order.units
            note = result if name == "pack" else arguments[0] if name == "unpack" else None
            unit = note.unit if isinstance(note, Saved) else this
            if dist.get_rank() == 0 and len(units) > 1 and unit is units[1]:
                self._note(name, units[1])
            return result

        return call

    def _note(self, name: str, unit: Unit) -> None:
        self.is_noted = name == "pack" or (self.is_noted and name != "reduce")
        module, attribute = unit.places[0]
        whole = sum(one.numel() for one in unit.whole)
        is_set = module._parameters[attribute] is not None
        now = Held(len(unit.shards[0]), whole, is_set, self.is_noted)
        self.held.setdefault(name, now)


def shard_and_gather() -> dict[str, Held]:
    """Run a pass of two sharded layers on two ranks; return what is held after each event."""
    observer = _Observer()
    methods = {"gather": Unit, "free": Unit, "reduce": Unit, "pack": Order, "unpack": Order}
    with ExitStack() as stack:
        for name, owner in methods.items():
            wrapped = observer.wrapped(name, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, wrapped))
        simulate(_pass, 2)
    return observer.held


def _pass() -> None:
    """Run a forward and a backward pass."""
    layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    model = FullyShardedDataParallel(layers, compute_dtype=torch.float32)
    model(torch.ones(1, 2)).sum().backward()


MOMENTS = {
    "gather": "gather",
    "pack": "forward",
    "free": "free",
    "unpack": "backward",
    "reduce": "reduce",
}
HELD_LEFT, HELD_COLUMN, ELEMENT = 92, 97, 19  # left of the first column; widths
HELD_ROWS = {"shard": 48, "whole": 92, "model": 144, "autograd": 196}  # middles


def draw_sharded_unit() -> Figure:
    """Draw a column for each moment of a unit: what the rank holds, and who refers to it."""
    figure, axes = canvas(height=220)
    for name, y in HELD_ROWS.items():
        write(axes, 4, y, name, ha="left", bold=True)
    for number, (event, held) in enumerate(shard_and_gather().items()):
        middle = HELD_LEFT + (number + 0.5) * HELD_COLUMN
        write(axes, middle, 14, f"{number + 1}. {MOMENTS[event]}", size=13, colour=FAINT)
        _draw_held(axes, middle, held, reads_note=event == "unpack")
    return figure


def _draw_held(axes: Axes, middle: float, held: Held, reads_note: bool) -> None:
    """Draw what a rank holds at a moment."""
    shard, whole, model, autograd = HELD_ROWS.values()
    shapes = torch.Size((1, held.shard)), torch.Size((1, held.whole))
    left = middle - held.shard * ELEMENT
    matrix(axes, left, shard, shapes[0], ELEMENT, GREEN)
    if held.whole:
        matrix(axes, left, whole, shapes[1], ELEMENT, BLUE)
    else:
        write(axes, middle, whole, "–", colour=FAINT)
    write(
        axes, middle, model, "view" if held.is_set else "None", colour=INK if held.is_set else FAINT
    )
    if held.is_set:
        arrow(axes, (middle, model - 12), (middle, whole + 12))
    if held.is_noted:
        box(axes, middle - 24, autograd - 12, 48, 24, "note", fill=PURPLE)
    else:
        write(axes, middle, autograd, "–", colour=FAINT)
    if reads_note:
        x = middle + 30
        line(axes, [middle + 24, x, x], [autograd, autograd, whole + 20])
        arrow(axes, (x, whole + 24), (x, whole + 12))
