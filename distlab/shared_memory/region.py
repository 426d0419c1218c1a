"""Memory that all ranks of a host have mapped; it disappears when the last of them has ended."""

import mmap
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.util.text import counted, rank_names

Group = dist.ProcessGroup | None  # None stands for all ranks
TOKEN_BYTES = 16


@dataclass(frozen=True)
class Region:
    """Memory with a part for each rank, mapped by all.

    Attributes:
        parts: Parts by rank, (part_bytes,), uint8, initially zero; every rank may use all parts.
        file: Descriptor of the memory's file, which the caller has to close.
    """

    parts: tuple[Tensor, ...]
    file: int


def check_host(group: Group) -> None:
    """Check that the ranks of a group can share memory; all ranks raise the same error.

    Raises:
        ValueError: This is not Linux, the backend is not gloo, or ranks run on several hosts.
    """
    if sys.platform != "linux":
        raise ValueError(f"SharedMemory needs Linux, and this is {sys.platform}")
    if (backend := dist.get_backend(group)) != "gloo":
        raise ValueError(
            f"SharedMemory needs ranks that are processes with tensors on the CPU, so a group of "
            f"gloo; this one's backend is {backend}"
        )
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len({*hosts}) > 1:
        by_host: dict[str, list[int]] = {}
        for rank, host in zip(world_ranks(group), hosts, strict=True):
            by_host.setdefault(host, []).append(rank)
        where = [f"{host} ({rank_names(ranks)})" for host, ranks in by_host.items()]
        raise ValueError(
            f"SharedMemory needs ranks of one host, and these run on {', '.join(where)}. Make one "
            f"for the group of each host: given.node_groups returns it first"
        )


def map_region(part_bytes: int, group: Group) -> Region:
    """Map memory with ``part_bytes`` for each rank; all ranks must call this together.

    The memory's file has no name: rank 0 creates it, and the others open it through rank 0's
    descriptor. So there is nothing to remove, even if ranks are killed in this function.

    Raises:
        RuntimeError: A rank cannot map the memory; raised on all ranks, with the reason.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    part_bytes = -(-part_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    token = secrets.token_bytes(TOKEN_BYTES)
    file = os.memfd_create("distlab") if rank == 0 else -1
    offer = [(f"/proc/{os.getpid()}/fd/{file}", token, part_bytes)]
    if rank == 0:
        os.ftruncate(file, world_size * part_bytes)  # zeros, which take up no memory yet
        os.write(file, token)
    dist.broadcast_object_list(offer, group=group, group_src=0)
    path, token, expected_bytes = offer[0]
    problem, whole = "", torch.empty(0, dtype=torch.uint8)
    try:
        if part_bytes != expected_bytes:
            raise OSError(f"rank {world_ranks(group)[0]} maps {counted(expected_bytes, 'byte')}")
        file = file if rank == 0 else _open(path, token)
        # Memory that a rank allocates is placed near the rank's core.
        os.posix_fallocate(file, rank * part_bytes, part_bytes)
        whole = torch.frombuffer(mmap.mmap(file, world_size * part_bytes), dtype=torch.uint8)
    except OSError as error:
        problem = str(error)
    _agree(problem, counted(part_bytes, "byte"), group)
    parts = whole.view(world_size, part_bytes).unbind()
    if rank == 0:
        parts[0][:TOKEN_BYTES].zero_()
    return Region(parts, file)


def _open(path: str, token: bytes) -> int:
    """Open rank 0's file.

    Raises:
        OSError: The file is missing, or not rank 0's: ranks in different containers.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(file, TOKEN_BYTES, 0) != token:
        os.close(file)
        raise OSError(f"{path} is not rank 0's memory: do the ranks run in several containers?")
    return file


def _agree(problem: str, size: str, group: Group) -> None:
    """Raise RuntimeError on all ranks if one of them has a problem."""
    problems: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for rank, found in zip(world_ranks(group), problems, strict=True):
        if found:
            raise RuntimeError(f"rank {rank} cannot map {size} of shared memory: {found}")


def world_ranks(group: Group) -> Sequence[int]:
    """Return the global ranks of a group's members, in group order."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)
