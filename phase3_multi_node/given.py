"""What phase 3 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = dist.ProcessGroup | None  # None: all ranks


class AllReduce(Protocol):
    """Sums a tensor over the group, in place."""

    def __call__(self, x: Tensor, /, group: Group = None) -> None: ...


def all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over the ranks of ``group``, in place: torch's own, as lessons take it."""
    dist.all_reduce(x, group=group)


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
    both = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=src),
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(both)
    return works


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``, as in task 1.4."""
    for work in start_exchange(outgoing, dst, incoming, src, group):
        work.wait()


def group_device(group: Group = None) -> torch.device:
    """Return where tensors must be to travel in ``group``: this rank's GPU with NCCL, else CPU."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


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
