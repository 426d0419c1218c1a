"""torch's profiler on simulated ranks: it runs on one of them at a time.

A process has only one profiler, and starting it in two threads crashes the process (SIGSEGV). What
runs is right: it records the operations of the thread that has started it, and of no other rank.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.autograd.profiler

from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.reporting.sites import Places
from distlab.util.replacing import Replace


class NoProfile:
    """A result without events, in place of torch's ``_ProfilerResult``."""

    def events(self) -> list[Any]:
        """Return no events."""
        return []

    experimental_event_tree = events

    def trace_start_ns(self) -> int:
        """Return the time of the start, which nothing is measured from."""
        return 0

    def save(self, path: str) -> None:
        """Write a Chrome trace without events, which the program may read again.

        A file with content stays: torch names files after the process and the time, so it may be
        the trace of the rank that profiles.
        """
        file = Path(path)
        if not file.exists() or not file.stat().st_size:
            file.write_text('{"traceEvents": []}', encoding="utf-8")


class SharedProfiler:
    """Lets the first rank profile; ranks that start meanwhile get empty profiles from then on.

    So a program whose ranks all profile runs as written, and the same rank has the profile in each
    cycle of its schedule. Ranks that take turns have one each.
    """

    def __init__(self, rank_states: RankStates, places: Places) -> None:
        self._rank_states, self._places = rank_states, places
        self._owner: int | None = None  # rank that uses the profiler
        self._without: set[int] = set()  # ranks whose profiles stay empty

    def install(self, replace: Replace) -> None:
        """Make torch's ``profile`` ask for the profiler before it starts or stops it."""
        profiler: Any = torch.autograd.profiler
        for name in ("_prepare_profiler", "_enable_profiler"):
            replace(profiler, name, self._taking(getattr(profiler, name)))
        replace(profiler, "_disable_profiler", self._giving_back(profiler._disable_profiler))
        add: Any = torch.autograd._add_metadata_json  # type: ignore[attr-defined]
        replace(torch.autograd, "_add_metadata_json", self._if_owner(add))

    def _taking(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def begin_alone(*args: Any, **kwargs: Any) -> Any:
            rank = self._rank_states.current
            if self._owner not in (None, rank):
                self._leave_without(rank)
            if rank in self._without:
                return None
            self._owner = rank
            return begin(*args, **kwargs)

        return begin_alone

    def _giving_back(self, end: Callable[..., Any]) -> Callable[..., Any]:
        def end_or_skip(*args: Any, **kwargs: Any) -> Any:
            if self._rank_states.current in self._without:
                return NoProfile()
            self._owner = None
            return end(*args, **kwargs)

        return end_or_skip

    def _if_owner(self, add: Callable[..., Any]) -> Callable[..., Any]:
        """Keep other ranks from writing their numbers into the trace of the rank that profiles."""

        def add_or_skip(*args: Any, **kwargs: Any) -> Any:
            if self._rank_states.current not in self._without:
                add(*args, **kwargs)

        return add_or_skip

    def _leave_without(self, rank: int) -> None:
        """Give the rank empty profiles from now on; say so, once in the world."""
        if not self._without:
            file, line, _ = self._places.call_site()[0]
            warnings.warn_explicit(
                f"only rank {self._owner} profiles, and the other ranks' profiles are empty: "
                "simulated ranks are threads of a process, which has one torch.profiler. "
                "distlab sim --trace FILE.json writes a timeline of all ranks",
                UserWarning,
                file or "given code",
                line,
            )
        self._without.add(rank)
