"""Model parallelism: every rank holds a stage, a run of layers, and one rank works at a time."""

import pickle
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from phase2_advanced.given import Group, group_device


def send_tensors(tensors: Sequence[Tensor], dst: int, group: Group = None) -> list[dist.Work]:
    """Start to send tensors that the receiver knows nothing about, and return without waiting.

    A header goes first. It tells how many tensors follow, and the dtype and the shape of each, and
    whether it requires a gradient.

    Args:
        tensors: any number, of any shapes and dtypes, contiguous or not; not changed. The caller
            leaves them as they are until all works are done, but need not hold on to them.
        dst: the rank inside ``group`` that calls ``recv_tensors``.
        group: the ranks among which ``dst`` is counted; all by default.

    Returns:
        The handles of all messages: ``wait`` for each of them.

    Cost: a message of its own size for each tensor, after a header of at most two messages, which
        take at most 1 kB together for up to four tensors. No collective.
    """
    device = group_device(group)
    header = pickle.dumps([(x.dtype, x.shape, x.requires_grad) for x in tensors])
    messages = [
        torch.tensor([len(header)], device=device),
        torch.tensor([*header], dtype=torch.uint8, device=device),
        *(x.detach().contiguous() for x in tensors),
    ]
    # Each work holds on to its tensor until it is done, also to the header and to a copy.
    return [dist.isend(x, group=group, group_dst=dst) for x in messages]  # type: ignore[misc]


def recv_tensors(src: int, group: Group = None) -> list[Tensor]:
    """Receive the tensors of one ``send_tensors`` of ``src``, and return them in its order.

    Args:
        src: the rank inside ``group`` that sends.
        group: the ranks among which ``src`` is counted; all by default.

    Returns:
        Tensors of the same values, shapes and dtypes, where ``group_device`` says. Each is a leaf
        of a new graph, and requires a gradient if the one that was sent does.
    """
    receive = partial(_receive, src=src, group=group)
    length = receive([1], torch.int64)
    header = receive([int(length)], torch.uint8)
    return [
        receive(shape, dtype).requires_grad_(requires_grad)
        for dtype, shape, requires_grad in pickle.loads(bytes(header.tolist()))
    ]


def _receive(shape: Sequence[int], dtype: torch.dtype, src: int, group: Group) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device=group_device(group))
    dist.recv(x, group=group, group_src=src)
    return x
