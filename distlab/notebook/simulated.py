"""Simulated ranks of a notebook: threads of its own process."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from distlab.notebook.cells import Cell
from distlab.notebook.lanes import lanes
from distlab.notebook.names import kinds, variable_lines
from distlab.notebook.output import RankOutput, shown_in
from distlab.notebook.reloading import ReloadError, Watch, reload
from distlab.notebook.shared import SharedTorch
from distlab.notebook.world import Ran
from distlab.sim import Cluster, Deadlock, Lap, Options, Session
from distlab.sim.postmortem.standstill import ABSENT
from distlab.sim.results.summary import settings
from distlab.util.text import bytes_text, counted, joined, rank_names, seconds_text, verb

T = TypeVar("T")


class SimulatedRanks:
    """Ranks of a simulated cluster, each with its own variables.

    Args:
        num_ranks: Number of ranks.
        cluster: Cluster.
        options: Settings of the simulation.
    """

    def __init__(self, num_ranks: int, cluster: Cluster, options: Options) -> None:
        self.num_ranks = num_ranks
        self._session = Session(num_ranks, cluster, options)
        title = (
            f"{counted(num_ranks, 'simulated rank')} of {cluster.name}, with the semantics of "
            f"{options.semantics}"
        )
        self.title = "\n  ".join([title, *settings(cluster, replace(options, semantics="gloo"))])
        self._watch = Watch()
        self._names = [vars(main) for main in self._session.make_mains()]
        self._session.run(self._begin)
        self._last: Lap[Any] | None = None
        self._last_name = ""  # of the cell
        self._shared: SharedTorch | None = None  # until a cell runs, and earlier ranks have ended

    def _begin(self, rank: int) -> None:
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        self._names[rank].update(
            rank=rank,
            world_size=self.num_ranks,
            device=torch.device("cuda", torch.cuda.current_device()) if has_gpu else CPU,
            torch=torch,
            dist=dist,
            exit=sys.exit,  # for the ranks, as the shell takes Python's own away
            quit=sys.exit,
        )

    def run(self, cell: Cell, outputs: Mapping[int, RankOutput]) -> Ran:
        """Run a cell on the ranks that have an output."""
        shared = self._shared = self._shared or SharedTorch()
        shared.begin()
        try:
            self._reload(outputs)
        except ReloadError as failed:
            return Ran(f"{failed}\nThe cell did not run: an edited file cannot be loaded.")

        def on_rank(rank: int) -> None:
            with shown_in(outputs[rank]):
                outputs[rank].keep(cell.run(self._names[rank]))

        lap = self._last = self._session.run(on_rank, outputs)
        self._last_name = cell.name
        error = str(lap.error or "")
        if isinstance(lap.error, Deadlock) and ABSENT in error:
            error += "\n%%ranks alone runs a cell on all ranks."
        return Ran(error, [*lap.wrong, *shared.news()], _cost(lap))

    def _reload(self, outputs: Mapping[int, RankOutput]) -> None:
        """Load edited files again, on all ranks that have imported them.

        Raises:
            ReloadError: A file cannot be loaded; all ranks keep what they have.
        """
        modules = self._session.modules()

        def on_rank(rank: int) -> str:
            with shown_in(outputs.get(rank, RankOutput())):
                try:
                    reload(modules[rank], codes, self._names[rank])
                except ReloadError as error:
                    return str(error)
            return ""

        every_module = (module for of_rank in modules for module in of_rank.values())
        with self._watch.edited(every_module) as codes:
            if codes and (living := self._session.living()):
                _raise_first(self._session.run(on_rank, living))

    def push(self, values: Mapping[str, Any]) -> None:
        """Give copies of values to all ranks, as variables.

        Raises:
            ValueError: A value cannot be copied.
        """
        copies = [_copies(values) for _ in self._names]
        for names, of_rank in zip(self._names, copies, strict=True):
            names.update(of_rank)

    def pull(self, name: str) -> list[Any]:
        """Return copies of a variable's values on all ranks.

        Raises:
            NameError: Ranks have no such variable.
            ValueError: A value cannot be copied.
        """
        if missing := [rank for rank, names in enumerate(self._names) if name not in names]:
            raise NameError(f"{rank_names(missing)} {verb(missing, 'have', 'has')} no {name}")
        lap = self._session.run(lambda rank: _copied(self._names[rank][name]))
        if isinstance(lap.error, KeyboardInterrupt):
            raise lap.error
        if lap.error:
            raise ValueError(f"{name} cannot be copied: {str(lap.error).splitlines()[0]}")
        return [lap.results[rank] for rank in range(self.num_ranks)]

    def ask(self, ranks: Sequence[int], question: Callable[..., T], *args: Any) -> list[T]:
        """Call a function with the variables of each rank and with arguments."""
        return [question(self._names[rank], *args) for rank in ranks]

    def state(self) -> list[str]:
        """Return lines on what the ranks hold and what is unfinished."""
        held = max(self._session.live_bytes(), default=0)
        lines = [f"virtual time: {seconds_text(self._session.now_s)}"]
        lines += [f"memory: up to {bytes_text(held)} on a rank"] * bool(held)
        lines += _titled("variables:", [*variable_lines([*map(kinds, self._names)])])
        return [*lines, *_titled("unfinished:", self._session.unfinished())]

    def lanes(self) -> Figure:
        """Draw what the ranks did in the last cell over time."""
        if self._last is None:
            raise ValueError("no cell has run yet")
        return lanes(self._session, self._last, self._last_name)

    def close(self) -> None:
        """End the ranks, and give torch back what they have replaced."""
        self._session.close()
        if self._shared:
            self._shared.restore()


CPU = torch.device("cpu")
SHORTEST_S = 1e-9  # a cell that takes less is not worth a line


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy values together, so that those that share something still do."""
    try:
        return copy.deepcopy(dict(values))
    except Exception as error:  # an object's own methods may raise anything
        raise ValueError(f"{joined([*values])} cannot be copied: {error}") from None


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _raise_first(lap: Lap[str]) -> None:
    """Raise an error if edited files could not be loaded on some rank."""
    reasons = {rank: reason for rank, reason in lap.results.items() if reason}
    if reasons:
        first = next(iter(reasons.values()))
        where = rank_names(rank for rank, reason in reasons.items() if reason == first)
        raise ReloadError(f"{first} ({where})")
    if lap.error:
        raise ReloadError(str(lap.error))


def _cost(lap: Lap[Any]) -> str:
    parts = [seconds_text(lap.seconds)] if lap.seconds >= SHORTEST_S else []
    if lap.num_messages:
        messages = counted(lap.num_messages, "message")
        parts.append(f"{bytes_text(lap.num_bytes)} in {messages}")
    if (longest_s := max(lap.exposed_s)) > 0:
        longest = seconds_text(longest_s)  # waits that differ by rounding read the same
        slowest = [rank for rank, s in enumerate(lap.exposed_s) if seconds_text(s) == longest]
        parts.append(f"waited up to {longest} ({rank_names(slowest)})")
    return " · ".join(parts)
