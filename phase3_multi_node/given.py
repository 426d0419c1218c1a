"""What phase 3 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Group = dist.ProcessGroup | None  # None: all ranks


class AllReduce(Protocol):
    """Sums a tensor over the group, in place."""

    def __call__(self, x: Tensor, /, group: Group = None) -> None: ...


class ReduceScatter(Protocol):
    """Sums a tensor over the group, and returns rank r's chunk of the sum, a view of the tensor.

    The chunks are those of ``x.view(-1).tensor_split``; of ``x``, only this one is defined then.
    """

    def __call__(self, x: Tensor, /, group: Group = None) -> Tensor: ...


class AllGather(Protocol):
    """Collects in a tensor the chunks of all ranks of the group; rank r brings chunk r."""

    def __call__(self, x: Tensor, /, group: Group = None) -> None: ...


def all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over the ranks of ``group``, in place: torch's own, as lessons take it."""
    dist.all_reduce(x, group=group)


def reduce_scatter(x: Tensor, group: Group = None) -> Tensor:
    """Sum ``x`` over ``group``, and return this rank's chunk: torch's own, as lessons take it.

    torch wants chunks of one size, so those that are shorter travel with an element more.
    """
    chunks = x.view(-1).tensor_split(dist.get_world_size(group))
    total = torch.empty_like(chunks[0])
    dist.reduce_scatter(total, [_padded(chunk, len(total)) for chunk in chunks], group=group)
    mine = chunks[dist.get_rank(group)]
    return mine.copy_(total[: len(mine)])


def all_gather(x: Tensor, group: Group = None) -> None:
    """Collect in ``x`` the chunks of all ranks of ``group``: torch's own, as lessons take it."""
    chunks = x.view(-1).tensor_split(dist.get_world_size(group))
    arrived = [torch.empty_like(chunks[0]) for _ in chunks]
    dist.all_gather(arrived, _padded(chunks[dist.get_rank(group)], len(chunks[0])), group=group)
    for chunk, padded in zip(chunks, arrived, strict=True):
        chunk.copy_(padded[: len(chunk)])


def _padded(chunk: Tensor, length: int) -> Tensor:
    return F.pad(chunk, (0, length - len(chunk)))


def start_exchange(
    outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None
) -> Sequence[dist.Work]:
    """Start to send ``outgoing`` to ``dst`` and to receive ``incoming`` from ``src``.

    The two start together, so that ranks cannot deadlock, not even on NCCL. Until both are done,
    ``outgoing`` must not be written, and ``incoming`` neither read nor written.

    Args:
        outgoing: contiguous.
        dst: the rank inside ``group`` that receives ``outgoing``; not this rank.
        incoming: contiguous, with the shape and dtype of what ``src`` sends.
        src: the rank inside ``group`` that sends ``incoming``; not this rank.
        group: the ranks that take part; all by default.

    Returns:
        The works, to ``wait`` for.
    """
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst)
    recv = dist.P2POp(dist.irecv, incoming, group=group, group_peer=src)
    works: list[dist.Work] = dist.batch_isend_irecv([send, recv])
    return works


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``, as in task 1.4."""
    for work in start_exchange(outgoing, dst, incoming, src, group):
        work.wait()


def group_device(group: Group = None) -> torch.device:
    """Return where tensors must be to travel in ``group``: this rank's GPU with NCCL, else CPU."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


# Links of two speeds


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to do: a GPU works on by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class LinkCost:
    """What a message costs: one of n bytes takes ``alpha_s + n * beta_s_per_byte`` seconds."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """Return how long a message of so many bytes takes."""
        return self.alpha_s + num_bytes * self.beta_s_per_byte


@dataclass(frozen=True)
class Topology:
    """Which ranks share a host, and what messages cost inside the hosts and between them.

    Attributes:
        hosts: by rank: the name of its host.
        inside: what a message between two ranks of a host costs; None: no host has two.
        between: the same for ranks of different hosts; None: there is one host.
    """

    hosts: tuple[str, ...]
    inside: LinkCost | None
    between: LinkCost | None

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, in the order of their first ranks."""
        return ranks_by_host(self.hosts)


def ranks_by_host(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in the order of their first ranks.

    ("a", "b", "a") -> ((0, 2), (1,))
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())


def node_groups(hosts: Sequence[str]) -> tuple[Group, Group]:
    """Make this rank's two groups: its own host, and its counterparts on all hosts.

        hosts     a  a  b  b
        rank      0  1  2  3     inside: 0 1 | 2 3     across: 0 2 | 1 3

    All ranks of the world call this together, once: a group is expensive to make.

    Args:
        hosts: the host of each rank of the world, equally many ranks on each.

    Raises:
        ValueError: the hosts have different numbers of ranks.
    """
    nodes = ranks_by_host(hosts)
    if len({len(ranks) for ranks in nodes}) > 1:
        raise ValueError(f"hosts must have equally many ranks, got {[*map(len, nodes)]}")
    inside, _ = dist.new_subgroups_by_enumeration([[*ranks] for ranks in nodes])
    across, _ = dist.new_subgroups_by_enumeration([[*ranks] for ranks in zip(*nodes, strict=True)])
    return inside, across


# Gradients that travel during the backward pass


class Started(Protocol):
    """Something that is under way; torch's ``Work`` is one."""

    def wait(self) -> Any:
        """Return when it is done."""
        ...


class StartAllReduce(Protocol):
    """Starts to sum a tensor over the group, in place, and returns at once.

    All ranks start the same sums in the same order. Until ``wait`` has returned, the tensor must
    be neither read nor written.
    """

    def __call__(self, x: Tensor, /, group: Group = None) -> Started: ...


def start_all_reduce(x: Tensor, group: Group = None) -> Started:
    """Start to sum ``x`` over the ranks of ``group``, in place: torch's own, as lessons take it."""
    work: Started = dist.all_reduce(x, group=group, async_op=True)
    return work


def in_background(all_reduce: AllReduce) -> StartAllReduce:
    """Make an all-reduce that starts and is waited for later from one that blocks, such as yours.

        ddp = DistributedDataParallel(model, all_reduce=in_background(ring_all_reduce))

    One thread runs the calls, one after the other, so all ranks sum in the order in which they
    started. Call it on every rank, and do not communicate in ``group`` while a sum is under way. On
    a GPU, this thread shares a stream with the backward pass: right, but nothing overlaps.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce")

    def start(x: Tensor, group: Group = None) -> Started:
        return _InBackground(thread.submit(all_reduce, x, group))

    return start


class _InBackground:
    """A call in another thread."""

    def __init__(self, call: "Future[None]") -> None:
        self._call = call

    def wait(self) -> None:
        """Return when it is done; raise what it has raised."""
        self._call.result()


def broadcast_module(module: nn.Module, group: Group = None) -> None:
    """Make the parameters and buffers of all ranks equal to those of rank 0, in place: task 1.9."""
    for tensor in [*module.parameters(), *module.buffers()]:
        values = tensor.detach().contiguous()  # itself, unless laid out otherwise (channels_last)
        dist.broadcast(values, group=group, group_src=0)
        tensor.detach().copy_(values)
