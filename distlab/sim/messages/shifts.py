"""Calls that ranks made at different lines: where one of them made a call more than the others.

    call 1   ranks 0-3 at line 20
    call 2   ranks 0-1 at line 20, ranks 2-3 at line 22     an extra call on ranks 2 and 3
    call 3   ranks 0-1 at line 20, ranks 2-3 at line 20     their pairs are shifted since

A program may well make one call at two lines, say the root at its own. But then no rank uses the
line of the others, or all of them use both equally often, taking turns.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.util.text import clauses, rank_names

MAX_KEPT = 8  # calls of a group with different pairs of lines


class Split(NamedTuple):
    """A collective call that ranks made at different lines.

    Attributes:
        number: Number of the call in its group, from 0.
        sites: Places of the call by rank.
    """

    number: int
    sites: Mapping[int, Site]

    def text(self) -> str:
        """Write which ranks made it at which line, and ask."""
        by_site: dict[Site, list[int]] = {}
        for rank, site in self.sites.items():
            by_site.setdefault(site, []).append(rank)
        told = [f"by {rank_names(ranks)} at {place(site)}" for site, ranks in by_site.items()]
        return (
            f"Call {self.number + 1} of the group was made {clauses(told)}: do some ranks make a "
            "call more there, or one less?"
        )


class Splits:
    """The first such calls of each group."""

    def __init__(self) -> None:
        self._by_group: dict[object, dict[frozenset[Site], Split]] = {}
        self._uses: dict[
            object, dict[int, Counter[Site]]
        ] = {}  # uses of such lines, by group and rank

    def note(self, key: object, number: int, sites: Mapping[int, Site]) -> None:
        """Keep a call that ranks made at different lines, once for the same lines."""
        uses = self._uses.setdefault(key, {})
        for rank, site in sites.items():
            uses.setdefault(rank, Counter())[site] += 1
        kept = self._by_group.setdefault(key, {})
        lines = frozenset(sites.values())
        if lines not in kept and len(kept) < MAX_KEPT:
            kept[lines] = Split(number, sites)

    def shift(self, key: object, now: Iterable[tuple[int, Site]]) -> str:
        """Say since which call pairs may be shifted; "" if nothing points to it.

        Args:
            key: Identity of the group.
            now: Ranks, and the place of the current or last call of each on the group.
        """
        here, uses = list(now), [*self._uses.get(key, {}).values()]
        if all(use == uses[0] for use in uses):
            return ""
        for split in self._by_group.get(key, {}).values():
            lines = {*split.sites.values()}
            if any(site in lines and split.sites.get(rank, site) != site for rank, site in here):
                return split.text()
        return ""
