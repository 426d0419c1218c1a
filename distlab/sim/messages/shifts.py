"""Collective calls that ranks made at different lines: some may have made an extra call.

    call 1   ranks 0-3 at line 20
    call 2   ranks 0-1 at line 20, ranks 2-3 at line 22     an extra call on ranks 2 and 3
    call 3   ranks 0-1 at line 20, ranks 2-3 at line 20     pairs are off by one from here on

A correct program may also make one call at two lines, for instance if the root has a line of its
own. In such a program, however, either no rank uses another rank's line, or all ranks take turns
and use both lines equally often.

Ranks with unequal numbers of batches make a call at one line, in a loop, more often than others.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.util.text import clauses, joined, rank_names

MODULE = "<module>"
MAX_KEPT = 8  # calls kept per group, each made at a different set of lines


Lines = tuple[Site, Site]  # of the call, and of the call of the function that contains it


class Split(NamedTuple):
    """A collective call that ranks made at different lines.

    Attributes:
        number: Number of the call in its group, from 0.
        sites: Line on which each rank made the call or, if it is the same on all ranks, called the
            function that made it.
    """

    number: int
    sites: Mapping[int, Site]

    def text(self) -> str:
        """Return text that says which ranks called where, and asks about extra or missing calls."""
        by_site: dict[Site, list[int]] = {}
        for rank, site in self.sites.items():
            by_site.setdefault(site, []).append(rank)
        texts = [f"by {rank_names(ranks)} at {place(site)}" for site, ranks in by_site.items()]
        return (
            f"Call {self.number + 1} of the group was made {clauses(texts)}: do some ranks make a "
            "call more there, or one less?"
        )

    def is_shifted(self, rank: int, lines: Lines) -> bool:
        """Return whether a rank that made this call at one line is now at another rank's line."""
        return any(
            site in self.sites.values() and self.sites.get(rank, site) != site for site in lines
        )


class Splits:
    """For each group, the first calls that ranks made at different lines, and how often at each."""

    def __init__(self) -> None:
        self._by_group: dict[object, dict[frozenset[Site], Split]] = {}
        # For each group and rank, how often the rank made such a call at each line.
        self._uses: dict[object, dict[int, Counter[Site]]] = {}
        # For each group and place, how often each rank made any call there.
        self._counts: defaultdict[object, defaultdict[Lines, Counter[int]]] = defaultdict(
            lambda: defaultdict(Counter)
        )

    def forget(self, but: Collection[object]) -> None:
        """Forget the calls of all groups but these."""
        by_group: dict[object, Any]
        for by_group in (self._by_group, self._uses, self._counts):
            for key in by_group.keys() - but:
                del by_group[key]

    def count(self, key: object, rank: int, lines: Lines) -> None:
        """Count a call that a rank makes."""
        self._counts[key][lines][rank] += 1

    def uneven(self, key: object, ranks: Sequence[int]) -> str:
        """Return a note on the only place at which all ranks call, but not equally often; or ""."""
        uneven = [
            (lines, by_rank)
            for lines, by_rank in self._counts[key].items()
            if all(by_rank[rank] for rank in ranks) and len({by_rank[rank] for rank in ranks}) > 1
        ]
        if len(uneven) != 1:
            return ""
        (site, caller), counts = uneven[0]
        by_count: dict[int, list[int]] = {}
        for rank in sorted(ranks, key=lambda rank: -counts[rank]):
            by_count.setdefault(counts[rank], []).append(rank)
        times = [
            f"{'once' if count == 1 else f'{count} times'} on {rank_names(of)}"
            for count, of in by_count.items()
        ]
        is_told = caller[2] != MODULE and caller != site
        called = f", called at {place(caller)}," if is_told else ""
        return (
            f"The call at {place(site)}{called} was made {joined(times)}: do they have equally "
            "many batches, or does a `continue`, an `if` or an early return leave some out?"
        )

    def note(self, key: object, number: int, lines: Mapping[int, Lines]) -> None:
        """Record a call made at different lines; keep only the first call for each set of lines."""
        is_inner = len({inner for inner, _ in lines.values()}) > 1
        sites = {rank: inner if is_inner else outer for rank, (inner, outer) in lines.items()}
        uses = self._uses.setdefault(key, {})
        for rank, site in sites.items():
            uses.setdefault(rank, Counter())[site] += 1
        splits = self._by_group.setdefault(key, {})
        different = frozenset(sites.values())
        if different not in splits and len(splits) < MAX_KEPT:
            splits[different] = Split(number, sites)

    def shift(self, key: object, now: Iterable[tuple[int, Lines]]) -> str:
        """Return a note on the call at which ranks may have got out of step; "" if none did.

        Args:
            key: Identity of the group.
            now: Ranks, each with the lines of its current or last call on the group.
        """
        here, uses = list(now), [*self._uses.get(key, {}).values()]
        if all(use == uses[0] for use in uses):
            return ""
        for split in self._by_group.get(key, {}).values():
            if any(split.is_shifted(rank, lines) for rank, lines in here):
                return split.text()
        return ""
