"""What a world may use before it is stopped, and which of these limits stopped it."""

from dataclasses import dataclass
from typing import Literal

from distlab.launch.protocol import MAX_REPORT_BYTES


@dataclass(frozen=True)
class Limits:
    """What a world may use, from the moment all its ranks are up."""

    timeout_s: float | None
    cpu_s: float | None  # of processor time, each rank
    idle_s: float | None  # on end, in which no rank computes
    memory_bytes: int  # all ranks together
    report_bytes: int = MAX_REPORT_BYTES  # each rank's
    output_bytes: int | None = None  # shown of what all ranks print


@dataclass(frozen=True)
class Exceeded:
    """The limit that ended a world: ``str()`` is "2 s of computing"."""

    limit: Literal["time", "computing", "idle"]
    seconds: float

    def __str__(self) -> str:
        behind = {"time": "", "computing": " of computing", "idle": " in which no rank computed"}
        return f"{self.seconds:g} s{behind[self.limit]}"
