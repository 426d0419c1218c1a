"""Names of groups in a report: a mesh axis, or an ordinal among groups of the same ranks."""

from collections.abc import Iterable, Mapping
from typing import TypeGuard

from distlab.sim.messages.meetings import Attendance, Founding
from distlab.sim.messages.pending import Pending
from distlab.sim.messages.roster import MadeGroup
from distlab.sim.reporting.report import place
from distlab.util.text import clauses, rank_names, verb

DEFAULT = "the default group"
MAX_GROUPS = 4  # maximum number of groups that a sentence names
_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


class GroupNames:
    """Names the groups of blocked calls, if their ranks alone do not identify them.

    Args:
        waits: Operations in the report.
        made: Groups that the program has made, by key, in order of creation.
    """

    def __init__(self, waits: Iterable[Pending], made: Mapping[object, MadeGroup]) -> None:
        self._made = made
        self._keys: dict[tuple[int, ...], set[object]] = {}  # members -> keys of their groups
        for wait in waits:
            if _is_collective(wait):
                self._keys.setdefault(wait.group, set()).add(wait.meeting.key)

    def name(self, wait: Pending) -> str:
        """Return a name such as ``axis tp`` or ``their 2nd group``; "" if none is needed."""
        if not _is_collective(wait):
            return ""
        made = self._made.get(wait.meeting.key)
        if made and made.name():
            return made.name()
        if len(self._keys.get(wait.group, ())) < 2:
            return ""
        return f"their {self._number(wait)} group" if made else DEFAULT

    def _number(self, wait: Attendance) -> str:
        """Return the group's ordinal among groups of the same ranks, such as ``2nd``."""
        twins = [key for key, made in self._made.items() if made.members == wait.group]
        number = twins.index(wait.meeting.key) + 1
        return f"{number}{_ENDINGS.get(number, 'th')}"

    def sentence(self, waits: Iterable[Pending]) -> str:
        """Say which ranks wait on which group; "" if there is only one group, or too many.

        For example: Ranks 0 and 3 wait on axis tp, and ranks 1 and 2 wait on axis dp.
        """
        on: dict[str, list[int]] = {}
        for wait in waits:
            if name := self._with_line(wait):
                on.setdefault(name, []).append(wait.rank)
        if not 2 <= len(on) <= MAX_GROUPS:
            return ""
        words = clauses(
            [f"{rank_names(who)} {verb(who, 'wait')} on {name}" for name, who in on.items()]
        )
        return f"{words[0].upper()}{words[1:]}."

    def _with_line(self, wait: Pending) -> str:
        """Return a group's name or, for lack of one, its ordinal, ranks and origin.

        For example: the 2nd group of ranks 0 and 1 (made at train.py:12 in main)
        """
        name = self.name(wait)
        if not name or not _is_collective(wait):
            return ""
        made = self._made.get(wait.meeting.key)
        if not made or made.name():
            return name
        number, members = self._number(wait), rank_names(wait.group)
        return f"the {number} group of {members} (made at {place(made.site)})"


def _is_collective(wait: Pending) -> TypeGuard[Attendance]:
    return isinstance(wait, Attendance) and not isinstance(wait, Founding)
