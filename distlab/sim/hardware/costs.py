"""What it costs the host to put work on a GPU; none of these numbers is published."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes/s that streams and the host need besides the GPU's own numbers.

    Attributes:
        launch_s: Time of the host per kernel: Python, torch's dispatcher and the driver.
        communication_launch_s: Time of the host per collective, message or batch of messages.
        shortest_kernel_s: Duration of a kernel on little data.
        copy_bytes_per_s: Bandwidth between pinned memory of the host and a GPU.
    """

    launch_s: float = 5e-6
    communication_launch_s: float = 15e-6
    shortest_kernel_s: float = 2e-6
    copy_bytes_per_s: float = 55e9

    def lines(self) -> list[str]:
        """Return a line for each number, with the reason for it."""
        by_hand = dict.fromkeys(self._changed(), "set by hand")
        return [
            f"host.{name} = {value:g} (assumed: {by_hand.get(name, _REASONS[name])})"
            for name, value in vars(self).items()
        ]

    def changed(self) -> list[str]:
        """Return a line for each number that differs from its default."""
        return [
            f"host.{name} = {getattr(self, name):g} instead of {getattr(Costs, name):g}"
            for name in self._changed()
        ]

    def _changed(self) -> list[str]:
        return [name for name, value in vars(self).items() if value != getattr(Costs, name)]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Costs":
        """Return the costs that texts such as "launch_s=3e-6" give; the others have defaults.

        Raises:
            ValueError: There is no cost of that name, or its value is not a number above 0.
        """
        names = [field.name for field in fields(cls)]
        values = {}
        for text in texts:
            name, _, value = (part.strip() for part in text.partition("="))
            if name not in names:
                raise ValueError(f"{text!r} sets no cost of the host; valid: {', '.join(names)}")
            values[name] = _positive(text, value)
        return cls(**values)


def _positive(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{text!r} must give a number above 0, as in launch_s=3e-6")
    return number


_REASONS = {
    "launch_s": "eager torch on a server CPU takes about 5 µs per operation",
    "communication_launch_s": "torch's process group, and the start of NCCL's kernel",
    "shortest_kernel_s": "start and end of an empty kernel",
    "copy_bytes_per_s": "PCIe 5 with 16 lanes: 63 GB/s, less its protocol",
}
