"""Per-rank process state, swapped when the scheduler switches ranks.

Ranks are threads of one process. Because of the swap, ``torch.manual_seed(0)`` on one rank does not
affect another, and ``os.environ["RANK"]`` is correct on each.
"""

import contextlib
import functools
import os
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import _random as sharded_random

from distlab.sim.engine.scheduler import Strand
from distlab.sim.hardware.topology import Place

_warnings: Any = warnings  # untyped, because the stubs lack its private names
_environ: Any = os.environ

# Functions called at every hand-over, and therefore looked up only once.
_get_torch_rng = torch.default_generator.get_state
_set_torch_rng = torch.default_generator.set_state
_get_dtype = torch.get_default_dtype


class RankWorld:
    """Stands in for c10d's table of process groups; all its attributes are swapped together."""

    default_pg: Any

    def __init__(self) -> None:
        self.__dict__.update(new_tables())


def new_tables() -> dict[str, Any]:
    """Return the tables of a rank that is in no process group."""
    return {
        "default_pg": None,
        "pg_map": {},
        "pg_names": {},
        "pg_group_ranks": {},
        "pg_backend_config": {},
        "group_count": 0,
        "tags_to_pg": {},
        "pg_to_tag": {},
        "pg_coalesce_state": {},
        "comms": [],
        "pg_config_info": [],
    }


WarningState = tuple[Any, Any, Any]


def warning_state() -> WarningState:
    """Return the state that ``warnings.catch_warnings`` changes."""
    return _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl


def set_warning_state(state: WarningState) -> None:
    """Restore a state that ``warning_state`` returned."""
    _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl = state


class RankState:
    """One rank's share of the process-wide state, kept here while another rank runs.

    There is only one torch generator, so its state is copied at every hand-over. Each rank has its
    own objects for everything else: the generators of ``random`` and numpy, the environment, its
    host name, the state that ``warnings.catch_warnings`` changes, ``sys.stdout`` if redirected,
    ``sys.argv``, the default dtype, DTensor's tracker of random numbers, and the program's modules
    (see ``modules``).
    """

    def __init__(self, rank: int, place: Place, seed: int, common: Mapping[bytes, bytes]) -> None:
        self.tables = new_tables()
        # As in separate processes, ranks that set no seed draw different numbers.
        self.torch_rng = torch.Generator().manual_seed(seed * 1_000_003 + rank).get_state()
        node, local = place
        self.host = f"node{node}"
        numbers = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "ROLE_RANK": rank}
        self.variables = {**common, **_encoded(numbers)}
        self.warnings: WarningState = ([*warnings.filters], *warning_state()[1:])
        self.streams = sys.stdout, sys.stderr
        self.arguments = [*sys.argv]
        self.dtype = torch.get_default_dtype()
        self.rng_tracker: Any = None
        self.folder = ""  # current folder; "" for the process's original one
        self.own_modules: set[str] = set()  # names of modules of which the rank has its own copy
        self.modules: dict[str, ModuleType] = {}  # these copies, while another rank runs
        self._seed = (seed, rank)

    @functools.cached_property
    def python_rng(self) -> random.Random:
        """The generator that ``random.random`` and similar functions use."""
        return random.Random(repr(self._seed))

    @functools.cached_property
    def numpy_rng(self) -> np.random.RandomState:
        """The generator that ``np.random.rand`` and similar functions use."""
        return np.random.RandomState(self._seed)

    def put_away(self) -> None:
        """Save the process's current state as this rank's state."""
        self.torch_rng = _get_torch_rng()
        self.warnings = _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl
        self.streams, self.arguments = (sys.stdout, sys.stderr), sys.argv
        self.dtype = _get_dtype()
        self.rng_tracker = sharded_random._rng_tracker
        if self.own_modules:
            self.modules = self.take_modules()

    def take_modules(self) -> dict[str, ModuleType]:
        """Remove the rank's own modules from ``sys.modules``, and return them."""
        present = self.own_modules & sys.modules.keys()
        return {name: sys.modules.pop(name) for name in present}

    def bring_out(self, world: RankWorld) -> None:
        """Load this rank's state into the process."""
        world.__dict__, _environ._data = self.tables, self.variables
        _set_torch_rng(self.torch_rng)
        _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl = self.warnings
        (sys.stdout, sys.stderr), sys.argv = self.streams, self.arguments
        sharded_random._rng_tracker = self.rng_tracker
        if _get_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        if self.modules:
            sys.modules.update(self.modules)


def functions_of(module: ModuleType, owner: object) -> list[str]:
    """Return the names of a module's functions that are bound methods of ``owner``."""
    owners = {name: getattr(value, "__self__", None) for name, value in vars(module).items()}
    return sorted(name for name in owners if owners[name] is owner)


PYTHON_FUNCTIONS = functions_of(random, random._inst)
# np.random.seed is not a bound method, so `functions_of` does not find it.
NUMPY_FUNCTIONS = [*functions_of(np.random, np.random.mtrand._rand), "seed"]


_chdir = os.chdir
MAIN = "__main__"


def _encoded(variables: Mapping[str, object]) -> dict[bytes, bytes]:
    return {name.encode(): str(value).encode() for name, value in variables.items()}


class RankStates:
    """The states of a world's ranks; the process takes on the state of the running rank.

    Args:
        places: Node and local rank of each rank.
        seed: Seed for the ranks' generators.
        running: Memory shared with a supervisor process, or None. It holds the number of the
            running rank, followed by the thread identifier of every rank.

    Attributes:
        num_local_ranks: Largest number of ranks on any node.
        tables: Stand-in for torch's table of process groups, with the running rank's groups.
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
        self._streams = sys.stdout, sys.stderr
        self._folder = self._home = ""  # the running rank's folder, and the original one
        torchrun = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": self.num_local_ranks,
            "MASTER_ADDR": "simulated",
            "MASTER_PORT": 0,
        }
        common = {**_environ._data, **_encoded(torchrun)}
        self._states = [RankState(rank, place, seed, common) for rank, place in enumerate(places)]

    def forget(self) -> None:
        """Stop hosting ranks; called in a process that a rank has forked."""
        self._running = [0] * (1 + self.num_ranks)

    def begin(self, strand: Strand) -> None:
        """Make a strand the running one, whose rank's state the process takes on.

        Ranks print where the process does now, unless they have redirected their streams.
        """
        streams = sys.stdout, sys.stderr
        for state in self._states:
            if state.streams == self._streams:
                state.streams = streams
        self._streams, self._running[0] = streams, strand.number
        self._running[1 + strand.number] = strand.ident
        state = self._states[strand.number]
        state.bring_out(self.tables)
        if state.folder != self._folder:
            self._go_to(state.folder)

    def groups(self) -> Iterator[Any]:
        """Yield each rank's view of each of its process groups."""
        for state in self._states:
            yield from state.tables["pg_names"]

    def modules(self) -> list[Mapping[str, ModuleType]]:
        """Return each rank's own modules by name, while no rank runs."""
        return [state.modules for state in self._states]

    def make_mains(self) -> list[ModuleType]:
        """Give each rank a new ``__main__`` of its own, while no rank runs."""
        mains = [ModuleType(MAIN) for _ in self._states]
        for state, main in zip(self._states, mains, strict=True):
            state.own_modules.add(MAIN)
            state.modules[MAIN] = main
        return mains

    def count_groups_alike(self) -> None:
        """Let all ranks give their next group the same number, as if all had made the same."""
        count = max(state.tables["group_count"] for state in self._states)
        for state in self._states:
            state.tables["group_count"] = count

    def rest(self) -> None:
        """Save the running rank's state, to take it up again in another run."""
        self.state().put_away()

    def move_in(self, rank: Strand) -> None:
        """Record the calling thread as a rank's first thread."""
        self._running[1 + rank.number] = threading.get_ident()

    def switch(self, strand: Strand, next_strand: Strand) -> None:
        """Switch to the next strand; if it belongs to another rank, swap the process's state."""
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
        """Like ``os.chdir``, but for the running rank only."""
        self._home = self._home or os.getcwd()
        _chdir(path)
        self.state().folder = self._folder = os.getcwd()

    def _go_to(self, folder: str) -> None:
        """Change to a rank's folder, or to the original one if that has been removed meanwhile."""
        try:
            _chdir(folder or self._home)
        except OSError:
            with contextlib.suppress(OSError):
                _chdir(self._home)
        self._folder = folder

    def leave(self, process: dict[bytes, bytes]) -> None:
        """Restore the folder and the environment that the process had before the world began.

        Child processes inherit the real environment, which changes whenever a rank sets a variable,
        so it is restored together with ``os.environ``.
        """
        if self._folder:
            self._go_to("")
        _environ._data = process
        changes = (state.variables.items() ^ process.items() for state in self._states)
        for name in {name for change in changes for name, _ in change}:
            if name in process:
                os.putenv(name, process[name])
            else:
                os.unsetenv(name)

    @property
    def current(self) -> int:
        """The number of the running rank."""
        return self._running[0]

    def state(self) -> RankState:
        """Return the state of the running rank."""
        return self._states[self._running[0]]

    def is_in_rank(self) -> bool:
        """Return whether the calling thread belongs to the running rank."""
        return self._running[1 + self._running[0]] == threading.get_ident()
