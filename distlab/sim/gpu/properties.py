"""What ``torch.cuda.get_device_properties`` says of a simulated GPU."""

from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

_MIB = 2**20


class Chip(NamedTuple):
    """Numbers of a kind of GPU, from NVIDIA's data sheets and white papers.

    Attributes:
        clock_mhz: Highest clock. ``torch.cuda._sleep`` counts its cycles.
        shared_kib: Shared memory of each multiprocessor.
    """

    capability: tuple[int, int]
    num_multiprocessors: int
    clock_mhz: int
    cache_mib: int
    shared_kib: int
    bus_bits: int


_CHIPS = {  # by a part of the name; that of the H100 stands for others
    "V100": Chip((7, 0), 80, 1530, 6, 96, 4096),
    "A100": Chip((8, 0), 108, 1410, 40, 164, 5120),
    "H100": Chip((9, 0), 132, 1980, 50, 228, 5120),
    "H200": Chip((9, 0), 132, 1980, 60, 228, 6144),
    "B200": Chip((10, 0), 148, 1965, 126, 228, 8192),
}


def chip_of(name: str) -> Chip:
    """Return the numbers of the GPUs of a name."""
    return next((chip for part, chip in _CHIPS.items() if part in name), _CHIPS["H100"])


@dataclass(frozen=True, repr=False)
class Properties:
    """Properties under the names of torch 2.13; clocks are in kHz, sizes in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: UUID
    pci_bus_id: int
    L2_cache_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    gcnArchName: str
    shared_memory_per_block: int = 48 * 1024
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // _MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // _MIB}MB)"
        )


def properties(
    name: str, memory_bytes: int, memory_bytes_per_s: float, uuid: UUID, number: int
) -> Properties:
    """Return the properties of a GPU.

    Args:
        number: Number of the GPU on its node.
    """
    chip = chip_of(name)
    return Properties(
        name,
        *chip.capability,
        memory_bytes,
        chip.num_multiprocessors,
        uuid,
        number,
        chip.cache_mib * _MIB,
        clock_rate=chip.clock_mhz * 1000,
        memory_clock_rate=round(memory_bytes_per_s * 4 / chip.bus_bits / 1000),  # two per cycle
        memory_bus_width=chip.bus_bits,
        shared_memory_per_multiprocessor=chip.shared_kib * 1024,
        shared_memory_per_block_optin=(chip.shared_kib - 1) * 1024,
        gcnArchName=name,
    )
