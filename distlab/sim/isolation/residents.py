"""Who is at home in the process: one rank at a time, with what is its own."""

import os
import threading
from collections import Counter
from collections.abc import MutableSequence, Sequence
from typing import Any

from distlab.sim.engine.scheduler import Strand
from distlab.sim.hardware.topology import Place
from distlab.sim.isolation.rank_state import RankState, RankWorld

_chdir = os.chdir


class Residents:
    """The ranks of a world, each with its state; the running one's is the process's.

    Args:
        places: of the ranks, in the cluster.
        seed: of the ranks' generators.
        running: where to note the rank that runs, followed by the thread of every rank, for a
            supervisor in another process; None: nowhere else.

    Attributes:
        num_ranks: of the world.
        num_local_ranks: those of the fullest node.
        tables: what torch takes for its table of process groups: the running rank's.
    """

    def __init__(
        self,
        places: Sequence[Place],
        seed: int,
        running: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self.num_ranks = num_ranks = len(places)
        self.num_local_ranks = max(Counter(place.node for place in places).values())
        self.tables = RankWorld()
        self._running: MutableSequence[int] | memoryview = (
            [0] * (1 + num_ranks) if running is None else running
        )
        self._folder = self._home = ""  # where the process is, if a rank has gone there; before
        self._states = [RankState(rank, place, seed) for rank, place in enumerate(places)]

    def forget(self) -> None:
        """Be no home any more: this is a process that a rank has forked."""
        self._running = [0] * (1 + self.num_ranks)

    def begin(self) -> None:
        """Let rank 0 be the first."""
        self._running[0] = 0
        self._states[0].bring_out(self.tables)

    def move_in(self, rank: Strand) -> None:
        """Note that the calling thread is a rank's."""
        self._running[1 + rank.number] = threading.get_ident()

    def switch(self, strand: Strand, next_strand: Strand) -> None:
        """Put away what is the rank's, and bring out what is the next one's."""
        states, number = self._states, next_strand.number
        if strand.number != number:
            states[strand.number].put_away()
            state = states[number]
            state.bring_out(self.tables)
            if state.folder != self._folder:
                self._go_to(state.folder)
            self._running[0] = number
        self._running[1 + number] = next_strand.ident

    def change_folder(self, path: Any) -> None:
        """Do what ``os.chdir`` does, for the running rank alone."""
        self._home = self._home or os.getcwd()
        _chdir(path)
        self.state().folder = self._folder = os.getcwd()

    def _go_to(self, folder: str) -> None:
        _chdir(folder or self._home)
        self._folder = folder

    def leave(self) -> None:
        """Go back to where the world began."""
        if self._folder:
            self._go_to("")

    @property
    def current(self) -> int:
        """The number of the running rank."""
        return self._running[0]

    def state(self) -> RankState:
        """Return the state of the running rank."""
        return self._states[self._running[0]]

    def is_in_rank(self) -> bool:
        """Whether the calling thread is the rank that runs."""
        return self._running[1 + self._running[0]] == threading.get_ident()
