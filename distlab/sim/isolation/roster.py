"""Which groups were made: all ranks must call ``new_group`` for all groups, in the same order.

torch counts the groups on each rank and uses the number as the name. If ranks call ``new_group``
for different groups, or not at all, different groups share a name: over gloo they hang, or talk to
the wrong ranks.
"""

from collections.abc import Hashable
from typing import NamedTuple

from distlab.sim.messages.made_group import MadeGroup
from distlab.sim.reporting.report import Row, mismatch, place
from distlab.sim.reporting.sites import Site
from distlab.util.text import rank_names


class Entry(NamedTuple):
    """One rank's call of ``new_group``."""

    rank: int
    members: tuple[int, ...]
    site: Site
    description: str

    def text(self) -> str:
        """Write ``new_group of ranks 0-3``."""
        return f"new_group of {rank_names(self.members)}"

    def row(self) -> Row:
        """Return its line of a report."""
        return Row((self.rank,), self.text(), place(self.site))


class Roster:
    """Compares the members that each rank names for a group with those that the first one named."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Entry] = {}

    def groups(self) -> dict[Hashable, MadeGroup]:
        """Return all groups that were made, by name, in this order."""
        return {
            name: MadeGroup(entry.members, entry.site, entry.description)
            for name, entry in self._first.items()
        }

    def enter(
        self,
        name: Hashable,
        rank: int,
        members: tuple[int, ...],
        site: Site,
        description: str = "",
    ) -> None:
        """Note that a rank makes the group of this name.

        Raises:
            Mismatch: another rank has made a group with other members under this name.
        """
        entry = Entry(rank, members, site, description)
        first = self._first.setdefault(name, entry)
        if first.members != members:
            raise mismatch(
                "operation mismatch",
                f"{first.text()} on rank {first.rank}, but {entry.text()} on rank {rank}",
                [first.row(), entry.row()],
                "Every rank has to call new_group for every group in the same order, even for "
                "groups that it is not in.",
            )
