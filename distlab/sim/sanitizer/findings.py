"""What the sanitizer has found: one line for each mistake, however often it was made."""

from collections.abc import Hashable

from distlab.sim.reporting.report import WHO
from distlab.util.text import rank_names

MAX_SHOWN = 20
# Kinds of mistakes that lead to others.
CAUSES = ("alias", "order", "crossing", "cut", "in flight", "scaler", "declared")
Mistake = tuple[str, Hashable]


class Findings:
    """Lines about mistakes, in the order in which they were found."""

    def __init__(self) -> None:
        self._lines: dict[Mistake, str] = {}
        self._ranks: dict[Mistake, set[int]] = {}

    def add(self, mistake: Mistake, line: str, rank: int | None = None) -> None:
        """Add a line, unless there is one for the same mistake.

        Args:
            mistake: Its kind, and what else tells it apart, such as a line of the program.
            line: Text for the user; it names ranks, step, value and line. ``WHO`` stands for the
                ranks for which the mistake is added.
            rank: Rank that made the mistake, if each rank makes it by itself.
        """
        self._lines.setdefault(mistake, line)
        if rank is not None:
            self._ranks.setdefault(mistake, set()).add(rank)

    def has(self, *kinds: str) -> bool:
        """Return whether there is a mistake of one of these kinds."""
        return any(mistake[0] in kinds for mistake in self._lines)

    def lines(self) -> list[str]:
        """Return the first lines, causes before their consequences, and how many more there are."""
        mistakes = sorted(self._lines, key=lambda mistake: mistake[0] not in CAUSES)
        lines = [
            self._lines[mistake].replace(WHO, rank_names(self._ranks.get(mistake, ())))
            for mistake in mistakes
        ]
        more = len(lines) - MAX_SHOWN
        return [*lines[:MAX_SHOWN], f"… and {more} more"] if more > 0 else lines
