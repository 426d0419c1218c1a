"""Computation slowed by concurrent collectives, which use processors and memory bandwidth.

    rank 0    computes ───────────────┬──── the rest   ends 0.15 s later, if the cost is 0.15
    collective       ├──── 1 s ───────┤

The loss is charged when the collective ends, and the rank pays for it at its next call. If the rank
is already waiting by then, its wait counts as having begun that much later.

Source: a cost of 0.15 on NVLink and 0.02 between nodes is what Calculon assumes for H100 (Isaev et
al. 2023); NCCL runs on 16 to 32 of the H100's 132 processors.
"""

from collections import deque


class Overlap:
    """Each rank's computation intervals, and the seconds that the rank owes.

    Args:
        cost: Seconds lost per second of computation, while the rank takes part in a collective.
    """

    def __init__(self, num_ranks: int, cost: float) -> None:
        self._cost = cost
        self._computed: list[deque[tuple[float, float]]] = [deque() for _ in range(num_ranks)]
        self._under_way = [0] * num_ranks
        self._charged_until_s = [0.0] * num_ranks  # computation before this is not charged again
        self._owed_s = [0.0] * num_ranks

    def computed(self, rank: int, start_s: float, end_s: float, now_s: float) -> None:
        """Record when a rank computed; ``now_s`` is the world's time."""
        intervals = self._computed[rank]
        # No collective can add a charge for intervals that end before `done_s`.
        done_s = self._charged_until_s[rank] if self._under_way[rank] else now_s
        while intervals and intervals[0][1] <= done_s:
            intervals.popleft()
        if intervals and intervals[-1][1] == start_s:
            start_s = intervals.pop()[0]
        intervals.append((start_s, end_s))

    def begins(self, rank: int, at_s: float) -> None:
        """Note that one of a rank's collectives begins."""
        if not self._under_way[rank]:
            self._charged_until_s[rank] = at_s
        self._under_way[rank] += 1

    def ends(self, rank: int, at_s: float) -> None:
        """Charge a rank for its computation during a collective that ends at ``at_s``.

        Computation that an overlapping collective has already charged for is not charged again.
        """
        self._under_way[rank] -= 1
        begin_s, self._charged_until_s[rank] = self._charged_until_s[rank], at_s
        self._owed_s[rank] += self._cost * sum(
            max(0.0, min(at_s, until_s) - max(begin_s, since_s))
            for since_s, until_s in self._computed[rank]
        )

    def pay(self, rank: int) -> float:
        """Return the seconds that a rank owes, and clear the debt."""
        owed_s, self._owed_s[rank] = self._owed_s[rank], 0.0
        return owed_s
