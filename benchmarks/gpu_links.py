"""Bus bandwidths of collectives on all GPUs of a host, beside the simulator's for a preset.

The same function runs in both worlds; in the simulated one, ``perf_counter`` reads the virtual
clock, and tensors have no content.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from fidelity import BUS_FACTORS
from torch import Tensor

from distlab import launch
from distlab.sim import Cluster
from distlab.sim.hardware.presets import CLUSTERS

MIB = 2**20
SIZES = (MIB // 16, MIB, 16 * MIB, 256 * MIB, 1024 * MIB)  # bytes of the larger tensor on each rank
PCIE_3_BYTES_PER_S = 15.75e9  # 16 lanes of 8 GT/s, of whose 130 bits 128 are data
TIMED = 20  # calls, after three that make connections


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    # Each is called with a whole tensor, and with one of its equal parts.
    "all_reduce": lambda x, _: dist.all_reduce(x),
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": lambda x, part: dist.reduce_scatter_tensor(part, x),
    "all_to_all": lambda x, _: dist.all_to_all_single(torch.empty_like(x), x),
    "broadcast": lambda x, _: dist.broadcast(x, 0),
}


def bus_gb_per_s(device: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Return each collective's bus bandwidth for each size, as the slowest rank sees it."""
    found = {}
    for name, collective in COLLECTIVES.items():
        for num_bytes in sizes:
            seconds = _spent_s(collective, num_bytes, device)
            rate = BUS_FACTORS[name](dist.get_world_size()) * num_bytes / seconds / 1e9
            found[f"{name}, {num_bytes // 1024} KiB"] = rate
    return found


def _spent_s(collective: Callable[[Tensor, Tensor], object], num_bytes: int, device: str) -> float:
    """Return the time of one call on the slowest rank."""
    p = dist.get_world_size()
    part = torch.zeros(num_bytes // 4 // p, device=device)
    call = partial(collective, torch.zeros(p * len(part), device=device), part)
    for _ in range(3):
        call()
    _wait(device)
    start = perf_counter()
    for _ in range(TIMED):
        call()
    _wait(device)
    spent: list[float] = [0.0] * p
    dist.all_gather_object(spent, (perf_counter() - start) / TIMED)
    return max(spent)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def preset_of(gpu: str) -> str | None:
    """Return the preset of a host whose GPUs have this name and NVLink; None if there is none.

    NVIDIA H100 80GB HBM3    dgx-h100
    NVIDIA H100 PCIe         None
    """
    hosts = [name for name in CLUSTERS if name.startswith(("dgx", "hgx"))]
    fitting = [name for name in hosts if re.search(rf"\b{name[4:]}\b", gpu, re.IGNORECASE)]
    return fitting[0] if fitting and "PCIe" not in gpu else None


def cluster_of(gpu: str, ranks: int) -> Cluster | None:
    """Return a host with GPUs of this name, or None if its links are unknown.

    T4s have no NVLink. Their cluster has the bandwidth of PCIe and no protocol of NCCL, so that it
    gives an upper bound.
    """
    if preset := preset_of(gpu):
        return Cluster.preset(preset)
    if gpu == "Tesla T4":
        return replace(
            Cluster.preset("ethernet-10g"),
            gpus_per_node=ranks,
            nvlink_bytes_per_s=PCIE_3_BYTES_PER_S,
        )
    return None


def beside_the_simulator(
    ranks: int, backend: str, sizes: tuple[int, ...] = SIZES
) -> dict[str, list[float | None]]:
    """Return for each collective and size GB/s as measured, and as simulated.

    Args:
        ranks: Number of ranks, at least 2.
        backend: "nccl", beside the simulator's host with these GPUs if there is one, or "gloo",
            beside its laptop.
        sizes: Bytes of the larger tensor on each rank.
    """
    device = "cuda" if backend == "nccl" else "cpu"
    measured = launch.run(bus_gb_per_s, ranks, device, sizes, backend=backend, timeout_s=None)[0]
    cluster = Cluster.preset("laptop")
    if backend == "nccl":
        cluster = cluster_of(torch.cuda.get_device_name(), ranks)
    if cluster is None:
        return {name: [rate, None] for name, rate in measured.items()}
    simulated = launch.simulate(bus_gb_per_s, ranks, "meta", sizes, cluster=cluster).results[0]
    return {name: [rate, simulated[name]] for name, rate in measured.items()}
