"""Things that go wrong on purpose: slow ranks and links, lost ranks, delays, jitter.

Faults(slow_ranks={3: 2.0}, kill_ranks={5: 0.010}, jitter_s=1e-6, seed=7)
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Faults:
    """What to do to a simulated world.

    Attributes:
        slow_ranks: rank -> factor by which its computation takes longer.
        slow_links: pattern of link names -> factor by which their bandwidth is smaller.
        kill_ranks: rank -> virtual second from which on it is dead, at its next call.
        delays_s: (source, destination) -> seconds added to every message between them.
        jitter_s: before every communication call a rank loses up to so many seconds; every seed
            is another order of events, which is how schedules are fuzzed.
        seed: of the jitter.
    """

    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[str, float] = field(default_factory=dict)
    kill_ranks: Mapping[int, float] = field(default_factory=dict)
    delays_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    jitter_s: float = 0.0
    seed: int = 0

    def delay_s(self, src: int, dst: int) -> float:
        """Return the seconds added to a message from ``src`` to ``dst``."""
        return self.delays_s.get((src, dst), 0.0)

    def jitter(self, rank: int) -> random.Random:
        """Return the rank's own source of jitter."""
        return random.Random(self.seed * 1_000_003 + rank)
