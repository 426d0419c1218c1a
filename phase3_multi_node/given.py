"""What phase 3 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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
