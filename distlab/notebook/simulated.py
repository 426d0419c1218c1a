"""Simulated ranks of a notebook: threads of its own process."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.notebook.cells import Cell
from distlab.notebook.output import RankOutput, shown_in
from distlab.notebook.world import Ran
from distlab.sim import Cluster, Deadlock, Lap, Options, Session
from distlab.util.text import bytes_text, counted, rank_names, seconds_text


class SimulatedRanks:
    """Ranks of a simulated cluster, each with its own variables.

    Args:
        num_ranks: Number of ranks.
        cluster: Cluster, or the name of a preset; None for one node with a GPU per rank.
        options: Settings of the simulation.
    """

    def __init__(self, num_ranks: int, cluster: Cluster | str | None, options: Options) -> None:
        self.num_ranks = num_ranks
        options = replace(options, given=(str(Path(__file__).parent),))
        self._session = Session(num_ranks, cluster, options)
        where = self._session.cluster.name
        self.title = (
            f"{counted(num_ranks, 'simulated rank')}{f' of {where}' if where else ''}, with the "
            f"semantics of {options.semantics}"
        )
        self._names: list[dict[str, Any]] = [{} for _ in range(num_ranks)]
        self._session.run(self._begin)
        self.last: Lap[Any] | None = None

    def _begin(self, rank: int) -> None:
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        self._names[rank].update(
            __name__="__main__",
            rank=rank,
            world_size=self.num_ranks,
            device=torch.device("cuda", torch.cuda.current_device()) if has_gpu else CPU,
            torch=torch,
            dist=dist,
        )

    def run(self, cell: Cell, ranks: Collection[int]) -> Ran:
        """Run a cell on ranks."""
        outputs = {rank: RankOutput() for rank in ranks}

        def on_rank(rank: int) -> None:
            with shown_in(outputs[rank]):
                outputs[rank].value = cell.run(self._names[rank])

        lap = self.last = self._session.run(on_rank, ranks)
        absent = [rank for rank in range(self.num_ranks) if rank not in ranks]
        error = str(lap.error or "")
        if absent and isinstance(lap.error, Deadlock):
            error += f"\nOnly {rank_names(ranks)} ran this cell; %%ranks alone means all."
        return Ran(outputs, error, lap.wrong, _cost(lap))

    def push(self, values: Mapping[str, Any], ranks: Collection[int]) -> None:
        """Give copies of values to ranks, as variables."""
        for rank in ranks:
            self._names[rank].update(copy.deepcopy(dict(values)))

    def pull(self, name: str, ranks: Collection[int]) -> dict[int, Any]:
        """Return copies of a variable's values, by rank."""
        missing = [rank for rank in ranks if name not in self._names[rank]]
        if missing:
            raise NameError(
                f"{rank_names(missing)} {'has' if len(missing) == 1 else 'have'} no {name}"
            )

        def copied(rank: int) -> Any:
            value = self._names[rank][name]
            return (
                value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            )

        lap = self._session.run(copied, ranks)
        if lap.error:
            raise lap.error
        return lap.results

    def names(self, rank: int) -> Mapping[str, Any]:
        """Return the variables of a rank."""
        return self._names[rank]

    def state(self) -> list[str]:
        """Return lines on what the ranks hold and what is unfinished."""
        lines = [f"virtual time: {seconds_text(self._session.now_s)}"]
        if held := self._session.live_bytes():
            lines.append(f"memory: up to {bytes_text(max(held))} on a rank")
        lines += [f"  {line}" for line in _variables(self._names)]
        unfinished = self._session.unfinished()
        return [*lines, *["unfinished:"] * bool(unfinished), *(f"  {line}" for line in unfinished)]

    def close(self) -> None:
        """End the ranks."""
        self._session.close()


CPU = torch.device("cpu")
GIVEN = ("rank", "world_size", "device", "torch", "dist")  # variables with which ranks begin


def _variables(names: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each variable that cells have made: its name, and what it is where."""
    for name in dict.fromkeys(name for of_rank in names for name in of_rank):
        if name.startswith("_") or name in GIVEN:
            continue
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(names):
            if name in of_rank and not isinstance(of_rank[name], ModuleType):
                ranks.setdefault(_kind(of_rank[name]), []).append(rank)
        for kind, holders in ranks.items():
            where = "" if len(holders) == len(names) else f" ({rank_names(holders)})"
            yield f"{name}  {kind}{where}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def _cost(lap: Lap[Any]) -> str:
    parts = [seconds_text(lap.seconds)] if lap.seconds else []
    if lap.num_messages:
        messages = counted(lap.num_messages, "message")
        parts.append(f"{bytes_text(lap.num_bytes)} in {messages}")
    if (longest_s := max(lap.exposed_s)) > 0:
        slowest = [rank for rank, s in enumerate(lap.exposed_s) if s == longest_s]
        parts.append(f"waited up to {seconds_text(longest_s)} ({rank_names(slowest)})")
    return " · ".join(parts)
