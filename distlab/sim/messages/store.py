"""The key-value store of a simulated world, and the ranks' waits for its keys."""

import difflib
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import NEVER, Strand
from distlab.sim.messages.limits import limit_s, store_error
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import CallSite, Places, Site
from distlab.util.text import joined, verb

MAX_KEYS = 4  # maximum number of keys shown in a report
FREE_ANSWERS = 1000  # number of equal answers in a row that cost no virtual time
MAX_ANSWERS = 200_000  # further equal answers until a deadlock; they take 1 to 2 s of real time
MAX_ASKED = 8  # keys per thread whose last answers are kept
MAX_VALUE_BYTES = 20  # maximum number of bytes of a value shown in a report
_DIGITS = re.compile(r"\d+")
NEAR = 0.7  # similarity above which a key may be a misspelling of another; equal keys have 1


class Change(NamedTuple):
    """The latest change to a key: who set or deleted it, and where."""

    rank: int
    site: Site
    is_deletion: bool

    def text(self) -> str:
        """Return text to follow "which", such as ``rank 0 has set at trainer.py:12 in main``."""
        action = "deleted" if self.is_deletion else "set"
        return f"rank {self.rank} has {action} at {place(self.site)}"


class KeyWait(Pending):
    """A rank's wait for keys to be set, or for the value of a key to change.

    Attributes:
        keys: Keys that are not set, or the one whose value has to change.
        changes: Latest change to each key of the store.
        values: Values of the store's keys.
    """

    __slots__ = ("changes", "keys", "values")
    kind = "store"
    is_recorded = False

    def __init__(
        self,
        clock: Clock,
        name: str,
        keys: Sequence[str],
        changes: Mapping[str, Change],
        values: Mapping[str, bytes],
        call: CallSite,
    ) -> None:
        super().__init__(clock, f"store.{name}", tuple(range(clock.num_ranks)), 0, call)
        self.keys, self.changes, self.values = list(keys), changes, values

    def waits_for(self) -> Sequence[int]:
        """Return every other rank, because any could set the key."""
        return [rank for rank in self.group if rank != self.rank]

    def expired(self, limit_s: float) -> Exception:
        """Return the error for keys that were not set in time."""
        self.is_done = True
        return store_error(self.keys, limit_s)

    def fate(self) -> str:
        """Return a clause on the first key: its value, who deleted it, or that no rank set it."""
        key = self.keys[0]
        change = self.changes.get(key)
        if change and key in self.values:
            return (
                f"which stays {_shown(self.values[key])}: rank {change.rank} was the last to set "
                f"it, at {place(change.site)}"
            )
        return f"which {change.text()}" if change else "which no rank has set"

    def advice(self) -> str:
        """Return advice on a stale value, a deleted key or a misspelled key; else list the keys."""
        key = self.keys[0]
        if key in self.values:
            return "Which rank should change it, and does that rank wait for something else first?"
        if key in self.changes:
            return "Delete a key only when all ranks that need it have read it."
        for near in difflib.get_close_matches(key, self.values, n=1, cutoff=NEAR):
            is_other_number = _DIGITS.sub("", near) == _DIGITS.sub("", key)
            guess = "does a rank set one key less" if is_other_number else "is one misspelled"
            return f"There is a key {near!r}, which {self.changes[near].text()}: {guess}?"
        if not self.values:
            return ""
        there = [f"{key!r} ({_shown(value)})" for key, value in self.values.items()]
        return (
            f"There {verb(there, 'are keys', 'is a key')} {joined(there[-MAX_KEYS:])}: is "
            f"{verb(there, 'one of them', 'it')} meant, or does the rank that should set {key!r} "
            "not come to it?"
        )

    def text(self) -> str:
        """Return text such as ``store.get for 'ready'``."""
        return f"{self.name} for {', '.join(map(repr, self.keys))}"


def _shown(value: bytes) -> str:
    """Return a value for a report, such as ``2`` or ``'cpu'``; truncate it if it is long."""
    text = value[:MAX_VALUE_BYTES].decode(errors="replace")
    return text if text.isdecimal() else repr(text)


class SimStore(Store):
    """A store that all ranks share. Only ``check`` and repeated queries cost virtual time."""

    timeout: timedelta  # missing from torch's stub

    def __init__(self, clock: Clock, places: Places) -> None:
        super().__init__()
        self._clock, self._places = clock, places
        self._no_limit = self.timeout  # torch's default, which means no limit here
        self._values: dict[str, bytes] = {}
        self._changes: dict[str, Change] = {}
        self._waits: list[KeyWait] = []
        # For each (rank, thread) and key, the last answer and the number of equal ones before it.
        self._asked: dict[tuple[int, int], dict[str, tuple[bytes, int]]] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key, and wake the ranks that wait for it."""
        self._clock.act()
        self._set(key, value)

    def _set(self, key: str, value: bytes | str) -> None:
        self._note_change(key, is_deletion=False)
        self._values[key] = value if isinstance(value, bytes) else value.encode()
        self._wake()

    def _note_change(self, key: str, *, is_deletion: bool) -> None:
        site, *_ = self._places.call_site()
        self._changes[key] = Change(self._clock.current.number, site, is_deletion)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting until it is set."""
        if key in self._values:
            self._ask("get", key)
        if key not in self._values:
            self._wait("get", [key])
        return self._values[key]

    def _ask(self, name: str, key: str) -> None:
        """Let earlier ranks go first; a rank that keeps getting the same answer counts as waiting.

        A program is free to read a key many times. But after FREE_ANSWERS equal answers in a row,
        each answer takes virtual time, so that another rank can change the key. After MAX_ANSWERS
        more, the world is deadlocked if no other rank can continue.
        """
        strand, value = self._clock.current, self._values[key]
        answers = self._asked.setdefault((strand.number, strand.order), {})
        before, times = answers.pop(key, (value, 0))
        answers[key] = value, times + 1 if before == value else 0  # moves the key to the end
        if len(answers) > MAX_ASKED:
            del answers[next(iter(answers))]
        if answers[key][1] > FREE_ANSWERS:
            call = self._places.call_site()
            self._clock.poll(lambda: self._wait_of(strand, name, [key], call), MAX_ANSWERS)
        else:
            self._clock.act()

    def _wait_of(self, strand: Strand, name: str, keys: Sequence[str], call: CallSite) -> KeyWait:
        """Return a strand's wait for keys; the strand need not be the running one."""
        waiting = KeyWait(self._clock, name, keys, self._changes, self._values, call)
        waiting.rank = strand.number
        return waiting

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value; adding 0 only reads it."""
        if amount == 0 and key in self._values:
            self._ask("add", key)
            if key in self._values:  # unless another rank has deleted it meanwhile
                return int(self._values[key])
        else:
            self._clock.act()
        value = int(self._values.get(key, b"0")) + amount
        self._set(key, str(value))
        return value

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set a key if it has the expected value; return the value that it has afterwards."""
        old = expected if isinstance(expected, bytes) else expected.encode()
        if self._values.get(key, old) != old:
            self._ask("compare_set", key)  # the rank may be waiting for another rank to set it
        else:
            self._clock.act()
        if self._values.get(key, b"") == old:
            self._set(key, desired)
        return self._values.get(key, old)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set; each call takes a microsecond of virtual time."""
        strand, call = self._clock.current, self._places.call_site()
        self._clock.poll(lambda: self._wait_of(strand, "check", self._missing(keys), call))
        return self._has(keys)

    def _has(self, keys: Sequence[str]) -> bool:
        return not self._missing(keys)

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Without a limit, a key that is never set is a deadlock."""
        self._wait("wait", keys, timeout)

    def _wait(self, name: str, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._clock.act(is_progress=self._has(keys))
        if not self._has(keys):
            call = self._places.call_site()
            waiting = self._wait_of(self._clock.current, name, self._missing(keys), call)
            self._waits.append(waiting)
            try:
                waiting.wait(self._limit_s() if timeout is None else limit_s(timeout))
            finally:
                self._waits = [wait for wait in self._waits if wait is not waiting]

    def _limit_s(self) -> float:
        """Return the limit that ``set_timeout`` set, here or on a PrefixStore around this store."""
        return NEVER if self.timeout == self._no_limit else limit_s(self.timeout)

    def num_keys(self) -> int:
        """Return the number of keys that are set."""
        self._clock.act()
        return len(self._values)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        self._clock.act()
        if key in self._values:
            self._note_change(key, is_deletion=True)
        return self._values.pop(key, None) is not None

    getNumKeys, deleteKey = num_keys, delete_key  # names that a PrefixStore's C++ code calls

    def _wake(self) -> None:
        now_s = self._clock.current.clock_s
        for waiting in self._waits:
            waiting.keys = self._missing(waiting.keys)
            if not waiting.keys and not waiting.is_done:
                waiting.finish(now_s)
