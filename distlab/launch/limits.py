"""What a world may use before it is stopped, and which of these limits stopped it."""

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from distlab.launch.errors import SetupError

FOREVER_S = 20 * 24 * 3600.0  # clocks can count to it; torch's own limit of a collective is 30 min


@dataclass(frozen=True)
class Limits:
    """What a world may use, from the moment all its ranks are up.

        launch.run(fn, 4, limits=Limits(timeout_s=60, cpu_s=10))

    Args:
        timeout_s: by the clock; None or inf waits forever.
        cpu_s: that each process may compute. It finds an endless loop before ``timeout_s`` does,
            which also counts what a busy machine takes; with it, a process that waits for a
            processor when ``timeout_s`` is over may go on. None: no limit.
        idle_s: that may pass with no rank computing, not even its share of a collective. It finds
            ranks that wait for each other before ``timeout_s`` does; None: no limit.
        memory_bytes: that all ranks together may allocate, the processes that they start not
            counted; None: 90 % of what is free.

    Raises:
        SetupError: one of them is not positive.
    """

    timeout_s: float | None = 300.0
    cpu_s: float | None = None
    idle_s: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not _is_positive(value):
                raise SetupError(f"{name} must be positive or None, got {value!r}")

    @property
    def finite_timeout_s(self) -> float | None:
        """``timeout_s``, or None if no clock counts that far."""
        is_finite = self.timeout_s is not None and self.timeout_s < FOREVER_S
        return self.timeout_s if is_finite else None


def _is_positive(value: object) -> bool:
    return isinstance(value, Real) and float(value) > 0


@dataclass(frozen=True)
class Exceeded:
    """The limit that ended a world: ``str()`` is "2 s of computing"."""

    limit: Literal["start", "time", "computing", "idle"]
    seconds: float

    def __str__(self) -> str:
        behind = {
            "start": " to start",
            "time": "",
            "computing": " of computing",
            "idle": " in which no rank computed",
        }
        return f"{self.seconds:g} s{behind[self.limit]}"
