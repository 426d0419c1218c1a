"""The key-value store of a simulated world: waiting for a key is waiting for a rank."""

import difflib
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import NEVER
from distlab.sim.messages.limits import limit_s, store_error
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import CallSite, Places, Site

NEAR = 0.7  # how alike two keys are that may be meant to be one; 1: equal


class Change(NamedTuple):
    """The last time that a key was set or deleted."""

    rank: int
    site: Site
    is_deletion: bool

    def text(self) -> str:
        """Write ``rank 0 has set at trainer.py:12 in main``."""
        done = "deleted" if self.is_deletion else "set"
        return f"rank {self.rank} has {done} at {place(self.site)}"


class KeyWait(Pending):
    """A rank that waits for keys that no rank has set yet.

    Attributes:
        keys: that are not set.
        changes: of all keys of the store.
    """

    __slots__ = ("changes", "keys")
    kind = "store"
    is_recorded = False

    def __init__(
        self, clock: Clock, keys: Sequence[str], changes: Mapping[str, Change], call: CallSite
    ) -> None:
        super().__init__(clock, "store.wait", tuple(range(clock.num_ranks)), 0, call)
        self.keys, self.changes = list(keys), changes

    def waits_for(self) -> Sequence[int]:
        """Return every other rank: any could set the key."""
        return [rank for rank in self.group if rank != self.rank]

    def expired(self, limit_s: float) -> Exception:
        """Return the error for keys that were not set in time."""
        self.is_done = True
        return store_error(self.keys, limit_s)

    def fate(self) -> str:
        """Write ``which no rank has set``, or who has deleted it."""
        change = self.changes.get(self.keys[0])
        return f"which {change.text()}" if change else "which no rank has set"

    def advice(self) -> str:
        """Say what to do about a deleted key, or one that is spelled like another; else ""."""
        if self.keys[0] in self.changes:
            return "Delete a key only when all ranks that need it have read it."
        there = [key for key, change in self.changes.items() if not change.is_deletion]
        for key in difflib.get_close_matches(self.keys[0], there, n=1, cutoff=NEAR):
            return f"There is a key {key!r}, which {self.changes[key].text()}: is one misspelled?"
        return ""

    def text(self) -> str:
        """Write ``store.wait for 'ready'``."""
        return f"store.wait for {', '.join(map(repr, self.keys))}"


class SimStore(Store):
    """A store that all ranks share. Only asking whether a key is there costs virtual time."""

    timeout: timedelta  # torch's stub lacks it

    def __init__(self, clock: Clock, places: Places) -> None:
        super().__init__()
        self._clock, self._places = clock, places
        self._no_limit = self.timeout  # what torch sets, until a program says something else
        self._values: dict[str, bytes] = {}
        self._changes: dict[str, Change] = {}
        self._waits: list[KeyWait] = []

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key, and wake the ranks that wait for it."""
        self._clock.act()
        self._set(key, value)

    def _set(self, key: str, value: bytes | str) -> None:
        self._note_change(key, is_deletion=False)
        self._values[key] = value if isinstance(value, bytes) else value.encode()
        self._wake()

    def _note_change(self, key: str, *, is_deletion: bool) -> None:
        if self._changes.get(key) is None or is_deletion or key not in self._values:
            site, _ = self._places.call_site(sys._getframe(2))
            self._changes[key] = Change(self._clock.current.number, site, is_deletion)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting for it."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        self._clock.act()
        value = int(self._values.get(key, b"0")) + amount
        self._set(key, str(value))
        return value

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set a key if it has the expected value; return what it has afterwards."""
        self._clock.act()
        old = expected if isinstance(expected, bytes) else expected.encode()
        if self._values.get(key, b"") == old:
            self._set(key, desired)
        return self._values.get(key, old)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are set; a microsecond passes, or asking again would not help."""
        self._clock.poll(lambda: self._key_wait(keys))
        return self._has(keys)

    def _has(self, keys: Sequence[str]) -> bool:
        return not self._missing(keys)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. A key that never comes is found at once, without a limit."""
        self._clock.act(is_progress=self._has(keys))
        if not self._has(keys):
            waiting = self._key_wait(keys)
            self._waits.append(waiting)
            try:
                waiting.wait(self._limit_s() if timeout is None else limit_s(timeout))
            finally:
                self._waits = [wait for wait in self._waits if wait is not waiting]

    def _limit_s(self) -> float:
        """Return the limit that ``set_timeout`` has set, also that of a PrefixStore around it."""
        return NEVER if self.timeout == self._no_limit else limit_s(self.timeout)

    def _key_wait(self, keys: Sequence[str]) -> KeyWait:
        call = self._places.call_site(sys._getframe(2))
        return KeyWait(self._clock, self._missing(keys), self._changes, call)

    def num_keys(self) -> int:
        """Return how many keys are set."""
        self._clock.act()
        return len(self._values)

    def delete_key(self, key: str) -> bool:
        """Delete a key; tell whether it was there."""
        self._clock.act()
        if key in self._values:
            self._note_change(key, is_deletion=True)
        return self._values.pop(key, None) is not None

    getNumKeys, deleteKey = num_keys, delete_key  # what C++ calls: a PrefixStore around this one

    def _wake(self) -> None:
        now_s = self._clock.current.clock_s
        for waiting in self._waits:
            waiting.keys = self._missing(waiting.keys)
            if not waiting.keys and not waiting.is_done:
                waiting.finish(now_s)
