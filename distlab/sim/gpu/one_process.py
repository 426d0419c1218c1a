"""Refuses to drive several GPUs from one process, where ranks have one GPU each."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.cuda.comm
from torch.nn.parallel import comm

_OF_NCCL = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
_OF_DATA_PARALLEL = ("broadcast", "broadcast_coalesced", "reduce_add", "gather")


def install(of_ranks: Callable[[Any, str, Any], None]) -> None:
    """Refuse the calls of ``torch.cuda.nccl``, and those below ``nn.DataParallel``.

    Args:
        of_ranks: Function that replaces a function for the threads of ranks.
    """
    for name in _OF_NCCL:
        of_ranks(torch.cuda.nccl, name, _refuse_call(name))
    for owner in (comm, torch.cuda.comm):
        for name in _OF_DATA_PARALLEL:
            of_ranks(owner, name, _refuse_model)
        of_ranks(owner, "scatter", _scatter)


def _refuse_call(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"torch.cuda.nccl.{name} works on several GPUs of one process, and a simulated rank "
            f"computes on one: let each rank call torch.distributed.{name} on its own GPU"
        )

    return refuse


def _refuse_model(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "nn.DataParallel computes on several GPUs of one process, and a simulated rank on one: "
        "give each rank one GPU, and wrap the model in nn.parallel.DistributedDataParallel"
    )


def _scatter(tensor: torch.Tensor, devices: Any = None, *_: Any, **__: Any) -> Any:
    if devices is None or len(devices) > 1:
        _refuse_model()
    return (tensor.cuda(devices[0]),)
