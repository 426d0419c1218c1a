"""The virtual GPUs of all ranks, if computation and memory are accounted for."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from distlab.sim.device.device import Device, Gpu


class Devices:
    """One device for each rank.

    Args:
        num_ranks: of the world.
        gpu: which GPU they are; None: only their memory counts.
        advance: lets the running rank's clock go on, by seconds.
        capacity_bytes: of each; None: as much as the GPU has, or no limit.
        slow_ranks: rank -> factor by which its computation takes longer.
    """

    def __init__(
        self,
        num_ranks: int,
        gpu: Gpu | None,
        *,
        advance: Callable[[float], None],
        capacity_bytes: int | None,
        slow_ranks: Mapping[int, float],
    ) -> None:
        self._devices = [
            Device(
                gpu,
                advance=lambda seconds, _: advance(seconds),
                capacity_bytes=capacity_bytes,
                slowdown=slow_ranks.get(rank, 1.0),
            )
            for rank in range(num_ranks)
        ]

    def __getitem__(self, rank: int) -> Device:
        return self._devices[rank]

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices)

    def unnoticed(self, rank: int) -> contextlib.AbstractContextManager[object]:
        """Move data without the device counting it as the rank's work."""
        return self._devices[rank].unnoticed()
