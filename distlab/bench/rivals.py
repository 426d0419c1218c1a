"""Ours beside torch's own: steps in turn, what they allocate, and which collectives they call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distlab.bench.collectives import Collectives
from distlab.sim.device.device import Device
from distlab.util.text import bytes_text, seconds_text

WHOSE = {
    "solution": "Ours: the solutions; --impl mine takes what you have written.",
    "mine": "Ours: what you have written.",
}
PARENTHESES = "In parentheses: ours as a multiple of it. Below 1, ours is faster or needs less."
PEAK_MEMORY = (
    "Peak memory: most bytes alive at once, beside parameters and data, on the rank with most."
)
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # tolerances: float32, summed in another order


@dataclass(frozen=True)
class Contestant:
    """A model, and a way to train it.

    Attributes:
        model: this rank's part; after a step, its parameters have their gradients.
        step: goes forward and backward once; returns the mean loss, None on a rank without it.
    """

    model: nn.Module
    step: Callable[[], float | None]

    def run(self) -> float | None:
        """Do a step that finds no gradients from before it."""
        self.model.zero_grad()
        return self.step()


@dataclass(frozen=True)
class Measured:
    """A step of a contestant, of the slowest rank and of the rank that needs most.

    Attributes:
        seconds: the median of the timed steps.
        peak_bytes: most bytes alive at once, without parameters and data. Buffers that are kept
            from step to step are included.
        collectives: number of a rank's calls.
        collective_bytes: of the tensors that these are called with.
        quartiles_s: between which half of the timed steps are.
    """

    seconds: float
    peak_bytes: int
    collectives: int
    collective_bytes: int
    quartiles_s: tuple[float, float]


Counts = tuple[int, int, int]  # peak_bytes, collectives, collective_bytes
M = TypeVar("M", bound=Measured)
Column = tuple[str, Callable[[M], float], Callable[[float], str]]
STEP: Column[Measured] = ("step", lambda measured: measured.seconds, seconds_text)
PEAK: Column[Measured] = ("peak memory", lambda measured: measured.peak_bytes, bytes_text)
COLLECTIVES: Column[Measured] = (
    "collectives",
    lambda measured: measured.collectives,
    "{:.0f}".format,
)
BYTES: Column[Measured] = ("bytes", lambda measured: measured.collective_bytes, bytes_text)


def measure(
    contestants: Mapping[str, Contestant], rivals: Mapping[str, str], repeats: int
) -> dict[str, Measured]:
    """Measure contestants in the world of this rank.

    Args:
        contestants: by name; they have not run yet, and train the same model on the same data.
        rivals: name of a contestant -> name of ours, which must compute the same.
        repeats: number of timed steps of each contestant.

    Raises:
        ValueError: ours computes another loss or other gradients than its rival.
    """
    losses, counts = {}, []
    for name, contestant in contestants.items():  # warms up, too
        losses[name], count = _count(contestant)
        counts.append(count)
    for rival, ours in rivals.items():
        who = f"{ours} and {rival} do not compute the same"
        _check_losses(losses[ours], losses[rival], who)
        _check_gradients(contestants[ours].model, contestants[rival].model, who)
    return timed(contestants, counts, repeats)


def _count(contestant: Contestant) -> tuple[float | None, Counts]:
    """Return the loss, and the peak over two steps and the collectives of the second."""
    with Device(None, advance=lambda *_: None) as device:
        contestant.run()
        with Collectives() as collectives:
            loss = contestant.run()
    return loss, (device.memory.peak_bytes, collectives.calls, collectives.num_bytes)


def _check_losses(ours: float | None, theirs: float | None, who: str) -> None:
    if ours is not None and theirs is not None and abs(ours - theirs) > RELATIVE * abs(theirs):
        raise ValueError(f"{who}: the losses are {ours:.6g} and {theirs:.6g}")


def _check_gradients(ours: nn.Module, theirs: nn.Module, who: str) -> None:
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    for (name, mine), rival in pairs:
        found, wanted = _local(mine.grad), _local(rival.grad)
        if not torch.allclose(found, wanted, RELATIVE, ABSOLUTE):
            raise ValueError(
                f"{who}: on rank {dist.get_rank()}, the gradients of {name} have the norms "
                f"{found.norm():.6g} and {wanted.norm():.6g}"
            )


def _local(gradient: Any) -> Tensor:
    """Return what this rank holds of a gradient; nothing for none."""
    local: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return torch.zeros(()) if local is None else local


def timed(
    contestants: Mapping[str, Contestant], counts: Sequence[Counts], repeats: int
) -> dict[str, Measured]:
    """Time steps of contestants; return that with their counts, of the rank with most of each."""
    seconds = _largest(_times(contestants, repeats))
    cuts = seconds.quantile(seconds.new_tensor([0.25, 0.5, 0.75]), dim=1).T.tolist()
    rows = zip(contestants, cuts, _largest(torch.tensor(counts)).tolist(), strict=True)
    return {
        name: Measured(median, peak_bytes, calls, num_bytes, (q1, q3))
        for name, (q1, median, q3), (peak_bytes, calls, num_bytes) in rows
    }


def _times(contestants: Mapping[str, Contestant], repeats: int) -> Tensor:
    """Return this rank's seconds (contestants, repeats); every second time the last goes first."""
    seconds = torch.zeros(len(contestants), repeats, dtype=torch.float64)
    in_turn = list(enumerate(contestants.values()))
    for repeat in range(repeats):
        for row, contestant in in_turn[:: -1 if repeat % 2 else 1]:
            contestant.model.zero_grad()
            dist.barrier()  # start together
            start = perf_counter()
            contestant.step()
            seconds[row, repeat] = perf_counter() - start
    return seconds


def _largest(mine: Tensor) -> Tensor:
    """Return the largest of all ranks, element by element."""
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine


def table(
    title: str,
    measured: Mapping[str, M],
    rivals: Mapping[str, str],
    columns: tuple[Column[M], ...],
) -> Table:
    """Lay out what ``measure`` has returned: a row for each contestant."""
    rows = Table(title=title)
    rows.add_column("", no_wrap=True)
    for heading, _, _ in columns:
        rows.add_column(heading, justify="right")
    for name, found in measured.items():
        ours = measured[rivals[name]] if name in rivals else None
        rows.add_row(name, *(_cell(column, found, ours) for column in columns))
    return rows


def _cell(column: Column[M], found: M, ours: M | None) -> str:
    _, number_of, text = column
    number = number_of(found)
    return f"{text(number)} ({number_of(ours) / number:.2f})" if ours else text(number)
