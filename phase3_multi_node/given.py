"""What phase 3 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Mapping, Sequence
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


def receive_from_any(incoming: Tensor, group: Group = None) -> int:
    """Receive what any rank sends, and return who sent it, by its rank inside ``group``.

    If several ranks have sent, any of them may come first. NCCL cannot do this, so that parameter
    servers run on CPUs, over gloo or MPI.
    """
    src = dist.recv(incoming, group=group)  # a rank of the world, also inside a group
    return src if group is None else dist.get_group_rank(group, src)


def pack_by_server(tensors: Mapping[str, Tensor], servers: Mapping[str, int]) -> dict[int, Tensor]:
    """Copy tensors of one dtype into one flat tensor for each server, in the order of their names.

    Args:
        tensors: by name, such as the parameters of a model, or their gradients.
        servers: name -> server.
    """
    parts: dict[int, list[Tensor]] = {}
    for name in sorted(tensors):
        parts.setdefault(servers[name], []).append(tensors[name].detach().flatten())
    return {server: torch.cat(flat) for server, flat in parts.items()}


@torch.no_grad()
def unpack_by_server(
    packed: Mapping[int, Tensor], tensors: Mapping[str, Tensor], servers: Mapping[str, int]
) -> None:
    """Copy what ``pack_by_server`` has packed back into ``tensors``."""
    begins = dict.fromkeys(packed, 0)
    for name in sorted(tensors):
        server, size = servers[name], tensors[name].numel()
        part = packed[server][begins[server] : begins[server] + size]
        tensors[name].copy_(part.view_as(tensors[name]))
        begins[server] += size
