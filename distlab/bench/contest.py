"""Compare our training steps with torch's own, by time, memory and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distlab import chosen, launch
from distlab.bench import harness
from distlab.sim.device.device import Device
from distlab.util.text import bytes_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOSE = {
    "solution": "Ours: the solutions; --impl mine takes what you have written.",
    "mine": "Ours: what you have written.",
}
PARENTHESES = "In parentheses: ours as a multiple of it. Below 1, ours is faster or needs less."
PEAK_MEMORY = (
    "Peak memory: most bytes alive at once, beside parameters and data, on the rank with most."
)
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # tolerances for float32 sums in a different order
OURS_COLOR, RIVAL_COLOR = "C0", "C7"

Column = tuple[str, str, Callable[[float], str]]  # (heading, key of the result, formatter)
Measured = dict[str, Any]  # results by key: time of the slowest rank, largest count of any rank
Lesson = Callable[[str], Any]  # imports a lesson by its name
STEP: Column = ("step", "seconds", seconds_text)
PEAK: Column = ("peak memory", "peak_bytes", bytes_text)
COLLECTIVES: Column = ("collectives", "collectives", "{:.0f}".format)
BYTES: Column = ("bytes", "collective_bytes", bytes_text)


@dataclass(frozen=True)
class Contestant:
    """A model, and the function that trains it.

    Attributes:
        model: This rank's part of the model; a step leaves gradients on its parameters.
        step: Function that runs a forward and a backward pass, and returns the mean loss, or
            None on ranks that do not have it.
    """

    model: nn.Module
    step: Callable[[], float | None]

    def run(self) -> float | None:
        """Clear the gradients, and take a step."""
        self.model.zero_grad()
        return self.step()


def plain(
    model: nn.Module,
    x: Tensor,
    finish: Callable[[], object] = lambda: None,
    forward: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
) -> Contestant:
    """Return a contestant whose loss is the mean square of the outputs."""

    def step() -> float:
        loss = forward(model, x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        finish()
        return loss.item()

    return Contestant(model, step)


@dataclass(frozen=True)
class Contest:
    """A table of ``distlab bench``.

    Attributes:
        name: Name of the command and of the saved files.
        tasks: Ids of the tasks that are measured.
        rivals: Name of torch's contestant -> name of ours to compare it with.
        sizes: NamedTuple with the sizes of the model.
        title: Function that returns a table's title, given sizes, number of ranks and repeats.
        measure: Function that measures all contestants on a rank, given lessons, sizes and repeats.
        tables: Columns of each table.
        notes: Lines below the tables.
        complete: Function that adds results measured in separate worlds, or None.
    """

    name: str
    tasks: tuple[str, ...]
    rivals: Mapping[str, str]
    sizes: Any
    title: Callable[[Any, int, int], str]
    measure: Callable[[Lesson, Any, int], dict[str, Measured]]
    tables: tuple[tuple[Column, ...], ...]
    notes: tuple[str, ...]
    complete: Callable[[dict[str, Measured], int, Lesson, Any], None] | None = None

    def hold(
        self, ranks: int, repeats: int, impl: str, folder: Path | None = None, **sizes: int
    ) -> None:
        """Measure and print the tables; save JSON and a figure if there is a folder.

        Args:
            ranks: Number of gloo ranks.
            repeats: Number of timed steps per contestant.
            impl: "solution" or "mine".
            folder: Folder for the files; None to save nothing.
            sizes: Sizes that replace those of the contest.

        Raises:
            NotThereError: There are no solutions here, or one of the functions is a TODO.
            LearnerError: ``impl`` is "mine" outside the course's folder.
            LaunchError: A rank failed, or ours and torch's compute different results.
        """
        lesson: Lesson = partial(chosen.lesson, chosen.find(impl, self.tasks))
        chosen_sizes = self.sizes._replace(**sizes)
        arguments = (lesson, chosen_sizes, repeats)
        measured, *_ = launch.run(self.measure, ranks, *arguments, backend="gloo")
        if self.complete:
            self.complete(measured, ranks, lesson, chosen_sizes)
        title = self.title(chosen_sizes, ranks, repeats)
        for columns in self.tables:
            headings = ("", *(heading for heading, _, _ in columns))
            harness.print_table(title, headings, self.rows(measured, columns))
        print(WHOSE[impl], *self.notes, sep="\n")
        if folder:
            run = {"ranks": ranks, "repeats": repeats, "impl": impl, **chosen_sizes._asdict()}
            results = {"title": title, "arguments": run, "measured": measured}
            harness.save(folder, self.name, results, self.figure(title, measured))

    def rows(
        self, measured: Mapping[str, Measured], columns: tuple[Column, ...]
    ) -> list[tuple[str, ...]]:
        """Return a row per contestant; rivals' cells also show the ratio of our value to theirs."""
        return [
            (name, *(self._cell(measured, name, column) for column in columns)) for name in measured
        ]

    def _cell(self, measured: Mapping[str, Measured], name: str, column: Column) -> str:
        _, key, text = column
        number = measured[name][key]
        if name not in self.rivals:
            return text(number)
        return f"{text(number)} ({measured[self.rivals[name]][key] / number:.2f})"

    def figure(self, title: str, measured: Mapping[str, Measured]) -> Figure:
        """Draw a panel for each column of the first table, with a bar for each contestant."""
        from matplotlib.figure import Figure

        columns = self.tables[0]
        figure = Figure(figsize=(2 + 2.5 * len(columns), 3.2), layout="constrained")
        figure.suptitle(title)
        colors = [RIVAL_COLOR if name in self.rivals else OURS_COLOR for name in measured]
        axes = figure.subplots(1, len(columns), sharey=True)
        for ax, (heading, key, text) in zip(axes, columns, strict=True):
            numbers = [result[key] for result in measured.values()]
            bars = ax.barh([*measured], numbers, color=colors)
            ax.bar_label(bars, [text(number) for number in numbers], padding=2)
            ax.set_title(heading, fontsize="medium")
            ax.set_xticks([])  # the bars are labelled, in units that are easy to read
            ax.margins(x=0.4)
        axes[0].invert_yaxis()
        return figure


# Code that runs on every rank

NAMESPACES = ("c10d", "_c10d_functional")  # of torch.distributed's operations, and of DTensor's
RECEIVING = ("recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd")
NO_COLLECTIVES = ("send", *RECEIVING)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of the thread that enters it.

    Args:
        without: Names of torch.distributed's operations that do not count.

    Attributes:
        calls: Number of calls.
        num_bytes: Total size of their tensors, results included.
    """

    def __init__(self, without: Sequence[str] = NO_COLLECTIVES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.num_bytes = 0
        self._without = without

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count it if it is a collective."""
        if DTensor in types:
            return NotImplemented  # a DTensor's local tensors are dispatched separately
        if func.namespace in NAMESPACES and func._opname not in self._without:
            self.calls += 1
            self.num_bytes += sum(
                leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
            )
        return func(*args, **(kwargs or {}))


def measure(
    contestants: Mapping[str, Contestant], rivals: Mapping[str, str], repeats: int
) -> dict[str, Measured]:
    """Measure contestants that train the same model on the same data and have not run yet.

    Args:
        contestants: Contestants by name.
        rivals: Name of a rival -> name of ours, which must compute the same results.
        repeats: Number of timed steps per contestant.

    Raises:
        ValueError: Our loss or gradients differ from the rival's.
    """
    losses, counts = {}, {}
    for name, contestant in contestants.items():  # these runs also warm up
        with Device(None, advance=lambda *_: None) as device:
            contestant.run()
            with Collectives() as collectives:
                losses[name] = contestant.run()
        counts[name] = counts_of(device, collectives)
    for rival, ours in rivals.items():
        reason = f"{ours} and {rival} do not compute the same"
        _check_losses(losses[ours], losses[rival], reason)
        _check_gradients(contestants[ours].model, contestants[rival].model, reason)
    return timed(contestants, counts, repeats)


def counts_of(device: Device, collectives: Collectives) -> Measured:
    """Return the peak memory, the number of collectives, and their bytes."""
    return {
        "peak_bytes": device.memory.peak_bytes,
        "collectives": collectives.calls,
        "collective_bytes": collectives.num_bytes,
    }


def _check_losses(ours: float | None, theirs: float | None, reason: str) -> None:
    if ours is not None and theirs is not None and abs(ours - theirs) > RELATIVE * abs(theirs):
        raise ValueError(f"{reason}: the losses are {ours:.6g} and {theirs:.6g}")


def _check_gradients(ours: nn.Module, theirs: nn.Module, reason: str) -> None:
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    for (name, mine), rival in pairs:
        gradient, wanted = _local(mine.grad), _local(rival.grad)
        if not torch.allclose(gradient, wanted, RELATIVE, ABSOLUTE):
            raise ValueError(
                f"{reason}: on rank {dist.get_rank()}, the gradients of {name} have the norms "
                f"{gradient.norm():.6g} and {wanted.norm():.6g}"
            )


def _local(gradient: Any) -> Tensor:
    """Return this rank's part of a gradient, or a zero if there is none."""
    local: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return torch.zeros(()) if local is None else local


def timed(
    contestants: Mapping[str, Contestant], counts: Mapping[str, Measured], repeats: int
) -> dict[str, Measured]:
    """Time the contestants' steps in turns; add each count's maximum over all ranks."""

    def start(name: str) -> float:
        contestants[name].model.zero_grad()
        dist.barrier()
        return perf_counter()

    steps = {name: contestant.step for name, contestant in contestants.items()}
    seconds = harness.of_all_ranks(harness.in_turns(steps, repeats, start)).tolist()
    rows = torch.tensor([[*counts[name].values()] for name in contestants], dtype=torch.float64)
    most = harness.of_all_ranks(rows).tolist()
    measured = {}
    for name, times, row in zip(contestants, seconds, most, strict=True):
        cuts = harness.quartiles(times)
        largest = dict(zip(counts[name], (int(number) for number in row), strict=True))
        spread = [cuts["q1"], cuts["q3"]]
        measured[name] = {"seconds": cuts["median"], **largest, "quartiles_s": spread}
    return measured
