"""Real ranks of a notebook: processes that ipyparallel starts.

If a rank fails, the others may wait for it in C code. After a while they are interrupted, so that
every cell ends; then all ranks join anew, and keep their variables.
"""

import importlib.util
import math
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch
from ipyparallel.error import RemoteError
from matplotlib.figure import Figure

from distlab.doctor import find_mpirun
from distlab.launch.external_launchers import MPI_FIX
from distlab.notebook import engine
from distlab.notebook.cells import Cell
from distlab.notebook.names import kinds, variable_lines
from distlab.notebook.output import RankOutput
from distlab.notebook.processes import Processes
from distlab.notebook.under_way import UnderWay
from distlab.notebook.verdict import verdict
from distlab.notebook.world import Ran
from distlab.util.text import counted, joined, rank_names, seconds_text, verb

LOOPBACK = "127.0.0.1"
JOIN_S = 60.0  # longest time for which ranks may wait for each other to join
PERIOD_S = 0.1  # between two looks at processes that are waited for
GONE = "Groups and DistributedDataParallel of earlier cells are gone: make them again."
T = TypeVar("T")


class Engines:
    """Ranks that are processes of this machine.

    Args:
        num_ranks: Number of ranks.
        backend: "gloo", "nccl" or "mpi".

    Raises:
        ValueError: This machine can't run them.
    """

    def __init__(self, num_ranks: int, backend: str) -> None:
        _check(num_ranks, backend)
        self.num_ranks, self._backend = num_ranks, backend
        self._everyone = range(num_ranks)
        self.title = f"{counted(num_ranks, 'process', 'processes')} with {backend}"
        self._processes = Processes(num_ranks, find_mpirun() if backend == "mpi" else None)
        self._num_joins = self._num_cells = 0
        self._news: list[str] = []  # lines for the report on a cell
        self._is_broken = False  # whether the ranks must join anew
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Let all ranks join, and those that have ended begin anew."""
        if new := self._processes.replace_dead():
            does = verb(new, "begin", "begins")
            self._news.append(f"{rank_names(new)} {does} anew, without variables.")
        folder, join, master = self._processes.folder, self._num_joins, (LOOPBACK, _free_port())
        places = [
            engine.Place(rank, self.num_ranks, self._backend, master, folder, join, sys.path)
            for rank in self._everyone
        ]
        self._num_joins, self._is_broken = join + 1, True
        calls = {
            place.rank: self._processes.call(place.rank, engine.join, place) for place in places
        }
        try:
            have_made = self._results(calls, within_s=JOIN_S)
        except BaseException:  # KeyboardInterrupt, too: a rank may wait for one that never joins
            self._processes.signal(calls, signal.SIGKILL)
            raise
        self._news += [GONE] * any(have_made)
        self._is_broken = False

    def _mend(self) -> None:
        if self._is_broken or self._processes.dead():
            self._join()

    def _on(self, ranks: Collection[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on ranks; return its results.

        Raises:
            NameError, ValueError: A rank raised this, or another error.
        """
        self._mend()
        return self._results(self._processes.calls(ranks, function, *args))

    def _results(self, calls: Mapping[int, Any], within_s: float = math.inf) -> list[Any]:
        end_s = time.monotonic() + within_s
        while wait(calls.values(), PERIOD_S).not_done:
            if time.monotonic() > end_s:
                raise ValueError(f"the ranks did not join within {within_s:g} s and were killed")
            if dead := self._processes.dead() & calls.keys():
                raise ValueError(f"{rank_names(dead)} ended: the next cell begins it anew")
        try:
            return [call.get() for call in calls.values()]
        except RemoteError as error:
            kind = NameError if error.ename == "NameError" else ValueError
            raise kind(error.evalue) from None

    def run(self, cell: Cell, outputs: Mapping[int, RankOutput]) -> Ran:
        """Run a cell on the ranks that have an output."""
        self._mend()
        self._num_cells += 1
        hang, start_s = self._processes.folder / f"cell{self._num_cells}", time.monotonic()
        calls = self._processes.calls(outputs, engine.run, cell.source, cell.name, hang)
        ended = UnderWay(calls, outputs, self._processes, hang)
        ended.finish()
        self._is_broken = ended.is_unusable
        cost = seconds_text(time.monotonic() - start_s)
        if ended.interrupted:
            self._let_others_tell(ended, hang)
        error = verdict(ended, [*outputs], self.num_ranks, hang)
        self._mend()
        news, self._news = self._news, []
        return Ran(error, news, cost)

    def _let_others_tell(self, cell: UnderWay, hang: Path) -> None:
        """Let the ranks without a cell write which collectives they have called."""
        others = {*self._everyone} - cell.interrupted - self._processes.dead()
        self._results(self._processes.calls(others, engine.write_evidence, hang))

    def push(self, values: Mapping[str, Any]) -> None:
        """Give copies of values to all ranks, as variables.

        Raises:
            ValueError: A value cannot be pickled.
        """
        try:
            pickled = cloudpickle.dumps(dict(values))
        except (TypeError, pickle.PicklingError) as error:
            raise ValueError(f"{joined([*values])} cannot be sent to a process: {error}") from None
        self._on(self._everyone, engine.push, pickled)

    def pull(self, name: str) -> list[Any]:
        """Return copies of a variable's values on all ranks."""
        pickled = self._on(self._everyone, engine.pull, name)
        if missing := [rank for rank in self._everyone if not pickled[rank]]:
            raise NameError(f"{rank_names(missing)} {verb(missing, 'have', 'has')} no {name}")
        return [pickle.loads(value) for value in pickled]

    def ask(self, ranks: Sequence[int], question: Callable[..., T], *args: Any) -> list[T]:
        """Call a function with the variables of each rank and with arguments."""
        return self._on(ranks, engine.ask, question, *args)

    def state(self) -> list[str]:
        """Return lines on what the ranks hold."""
        held = self.ask(self._everyone, kinds)
        return [f"  {line}" for line in variable_lines(held)]

    def lanes(self) -> Figure:
        """Raise ValueError: only the simulation knows when each rank did what."""
        raise ValueError(
            f"real ranks have no lanes: simulate the cell, by %cluster {self.num_ranks}"
        )

    def close(self) -> None:
        """End the ranks."""
        self._processes.close()


def _check(num_ranks: int, backend: str) -> None:
    """Raise ValueError if this machine lacks what a backend needs."""
    if backend == "nccl" and (count := torch.cuda.device_count()) < num_ranks:
        has = counted(count, "GPU")
        raise ValueError(
            f"{counted(num_ranks, 'rank')} with nccl need a GPU each, and this machine has {has}: "
            f"write %cluster {num_ranks} --world gloo"
        )
    if backend == "mpi" and not (find_mpirun() and importlib.util.find_spec("mpi4py")):
        raise ValueError(f"ranks with mpi need mpi4py and mpirun: {MPI_FIX}")


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listening:
        return int(listening.getsockname()[1])
