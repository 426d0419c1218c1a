"""How long a submission may take: by the clock, in computing, in waiting.

A limit has to end a hang soon, but never a right answer. How long a right answer takes depends on
the machine, so exceeding a limit only raises a suspicion: whether the world really hangs depends on
what the reference needs for the same work at the same moment. In a copy of the course without
solutions, a piece of work whose usual time is known replaces the reference.
"""

from dataclasses import dataclass
from typing import Any

import torch

from distlab.launch.meter import Used

MEMORY_LIMIT_BYTES = 2 * 2**30
COMPUTING_SHARE = 0.2  # share of the limit by the clock; the solutions compute a twentieth of that
IDLE_SHARE = 0.2  # if no rank computes for this long, all wait for each other
REFERENCE_TIMEOUT_S = 120.0  # a machine on which the reference takes longer is of no use
TIMES_THE_REFERENCE = 10  # what a right answer may need, if it is far from the shortest one


USUAL_S = 0.1  # that ``work`` takes on two idle cores of 2024, by the clock and in computing


def work() -> None:
    """Compute something that takes ``USUAL_S`` on a machine of usual speed."""
    x = torch.zeros(10)
    for _ in range(40_000):
        x = x + 1


@dataclass(frozen=True)
class Limits:
    """Of one world.

    Attributes:
        timeout_s: by the clock.
        cpu_s: of computing, for each process.
        idle_s: in which no rank computes.
    """

    timeout_s: float
    cpu_s: float
    idle_s: float

    @classmethod
    def of(cls, timeout_s: float) -> "Limits":
        """Return the limits that go with a limit by the clock."""
        return cls(timeout_s, COMPUTING_SHARE * timeout_s, IDLE_SHARE * timeout_s)

    def raised_to(self, used: Used) -> "Limits | None":
        """Return limits that leave room for 10 times what the reference has used.

        None: these leave as much room already.
        """
        raised = Limits(
            max(self.timeout_s, TIMES_THE_REFERENCE * used.wall_s),
            max(self.cpu_s, TIMES_THE_REFERENCE * used.cpu_s),
            max(self.idle_s, 2 * used.wall_s),
        )
        return None if raised == self else raised

    def scaled_by(self, used: Used) -> "Limits | None":
        """Return limits for a machine on which ``work`` used this much; None: no larger ones."""
        clock, computing = used.wall_s / USUAL_S, used.cpu_s / USUAL_S
        if max(clock, computing) <= 1:
            return None
        return Limits(
            self.timeout_s * max(1.0, clock),
            self.cpu_s * max(1.0, computing),
            self.idle_s * max(1.0, clock),
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """As ``launch.run`` and ``launch.simulate`` take them."""
        return {
            "timeout_s": self.timeout_s,
            "cpu_limit_s": self.cpu_s,
            "idle_limit_s": self.idle_s,
            "memory_limit_bytes": MEMORY_LIMIT_BYTES,
            "plain_results": True,
        }
