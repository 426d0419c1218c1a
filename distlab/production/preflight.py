"""Checks GPUs and links before a training, and names the nodes that are bad.

    torchrun --standalone --nproc-per-node 8 -m … [CLUSTER]              one node, alone
    torchrun --nnodes 4 … --nproc-per-node 8 -m … [CLUSTER]              the links between nodes

Alone, each GPU multiplies matrices for some seconds, and a node's GPUs add up tensors. Together,
each node does so with each of its two neighbours in a ring of all nodes: a node that is slow with
both is bad. Its name goes to the standard output, a line each, and everything else to the other.

CLUSTER is a preset of ``distlab sim``, such as dgx-h100: a rate below --share of its numbers is
bad. Without CLUSTER, only wrong results are, and whatever hangs or crashes.

Exit codes: 0 nothing is wrong · 1 something is, and the output says what
"""

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab.sim.hardware.presets import CLUSTERS, GPUS

ALL_REDUCES = 5  # timed, after two that make the connections
AT_ONCE = 10  # products between two looks at the clock
Pair = tuple[str, str]


class Sizes(NamedTuple):
    """How much work the device gets: sides of matrices, and elements of tensors."""

    side: int
    numel: int


SIZES = {"cuda": Sizes(8192, 2**26), "cpu": Sizes(256, 2**18)}


class Rates(NamedTuple):
    """What a healthy node reaches; 0: anything will do."""

    flops_per_s: float  # of a GPU, in bfloat16
    inside: float  # bus bandwidth of an all-reduce in a node, in bytes/s
    between: float  # between two nodes


def rates_of(cluster: str | None, ranks: int) -> Rates:
    """Return the rates of a preset for so many ranks in a node; of no cluster, zeros."""
    if cluster is None:
        return Rates(0.0, 0.0, 0.0)
    preset = CLUSTERS[cluster]
    flops = GPUS[preset.gpu]["achievable_flops.bfloat16"].value if preset.gpu else 0.0
    inside = preset.nvlink_bytes_per_s.value
    nics = max(1.0, preset.nics_per_node.value * ranks / preset.gpus_per_node.value)
    return Rates(flops, inside, min(inside, nics * preset.nic_bytes_per_s.value))


def alone(device: torch.device, least: Rates, seconds: float) -> list[str]:
    """Return what is wrong with this node, on all ranks."""
    found = _shortfall("products per GPU", burned(device, seconds), least.flops_per_s, "FLOP/s")
    of_all: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, [f"GPU {dist.get_rank()}: {text}" for text in found])
    links = []
    if dist.get_world_size() > 1:
        bandwidth = bus_bytes_per_s(device, None)
        links = _shortfall("all-reduce inside the node", bandwidth, least.inside, "bytes/s")
    return [*(text for texts in of_all for text in texts), *links]


def burned(device: torch.device, seconds: float) -> float:
    """Multiply matrices for some seconds; return FLOP/s, or -1 if two products differ."""
    side = SIZES[device.type].side
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    expected, count = a @ a, 0
    differ = torch.zeros((), device=device, dtype=torch.bool)
    _wait_for(device)
    begun_s = perf_counter()
    while count == 0 or perf_counter() < begun_s + seconds:
        for _ in range(AT_ONCE):
            differ |= (a @ a != expected).any()
        _wait_for(device)
        count += AT_ONCE
    rate = 2.0 * side**3 * count / (perf_counter() - begun_s)
    return -1.0 if differ else rate


def bus_bytes_per_s(device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return an all-reduce's bus bandwidth on the slowest rank, or -1 if a sum is wrong."""
    x, size = torch.empty(SIZES[device.type].numel, device=device), dist.get_world_size(group)
    for _ in range(2):
        x.fill_(1.0)
        dist.all_reduce(x, group=group)
    is_right = bool((x == size).all())
    _wait_for(device)
    begun_s = perf_counter()
    for _ in range(ALL_REDUCES):
        dist.all_reduce(x, group=group)
    _wait_for(device)
    seconds = (perf_counter() - begun_s) / ALL_REDUCES
    rate = 2.0 * (size - 1) / size * x.nbytes / seconds if is_right else -1.0
    slowest = torch.tensor(rate, device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group)
    return slowest.item()


def between(device: torch.device, least: Rates) -> dict[Pair, list[str]]:
    """Return what is wrong between neighbours, on all ranks; there is a list for each pair."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    found = {}
    for pair in pairs_of(list(dict.fromkeys(names))):
        ranks = [rank for rank, name in enumerate(names) if name in pair]
        group = dist.new_group(ranks)
        rate = bus_bytes_per_s(device, group) if dist.get_rank() in ranks else 0.0
        rates = [0.0] * dist.get_world_size()
        dist.all_gather_object(rates, rate)
        what = f"all-reduce of {' and '.join(pair)}"
        found[pair] = _shortfall(what, rates[ranks[0]], least.between, "bytes/s")
    return found


def pairs_of(nodes: Sequence[str]) -> list[Pair]:
    """Return the neighbours in a ring of two or more nodes, each pair once."""
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return ring if len(nodes) > 2 else ring[:1]


def bad_nodes(found: Mapping[Pair, Sequence[str]]) -> list[str]:
    """Return the nodes with which every neighbour is slow; of two nodes, neither can be blamed."""
    nodes = dict.fromkeys(name for pair in found for name in pair)
    own = {name: [texts for pair, texts in found.items() if name in pair] for name in nodes}
    return [name for name, lists in own.items() if len(lists) > 1 and all(lists)]


def _shortfall(what: str, rate: float, least: float, unit: str) -> list[str]:
    if rate < 0:
        return [f"{what}: wrong results"]
    return [f"{what}: {rate:.3g} {unit}, expected {least:.3g}"] if rate < least else []


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device() -> torch.device:
    """Return this rank's device: a GPU if there is any, or if Slurm has given GPUs to the node."""
    if not torch.cuda.is_available() and "SLURM_GPUS_ON_NODE" not in os.environ:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this node or the links between all; return the exit code."""
    parser = argparse.ArgumentParser(description="Are the GPUs and links of these nodes well?")
    parser.add_argument("cluster", nargs="?", choices=CLUSTERS, help="a preset of distlab sim")
    parser.add_argument("--share", type=float, default=0.5, help="of the preset's rates")
    parser.add_argument("--seconds", type=float, default=5.0, help="of multiplying, on each GPU")
    given = parser.parse_args(arguments)
    device = _device()
    rates = rates_of(given.cluster, int(os.environ["LOCAL_WORLD_SIZE"]))
    least = Rates(*(given.share * rate for rate in rates))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if os.environ["GROUP_WORLD_SIZE"] == "1":
            found, names = alone(device, least, given.seconds), []
        else:
            by_pair = between(device, least)
            found, names = (
                [text for texts in by_pair.values() for text in texts],
                bad_nodes(by_pair),
            )
    finally:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print("\n".join(found), file=sys.stderr)
        print("\n".join(names))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
