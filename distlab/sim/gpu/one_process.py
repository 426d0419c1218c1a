"""Refuses to drive several GPUs from one process, where ranks have one GPU each."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.cuda.comm
from torch.nn.parallel import comm, distributed

from distlab.sim.gpu.placement import index_of
from distlab.util.text import joined

_OF_NCCL = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
_VERIFY = "_verify_param_shape_across_processes"  # what DistributedDataParallel calls first
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
    verify: Callable[..., Any] = getattr(distributed, _VERIFY)

    def verify_one_gpu(group: Any, parameters: Sequence[torch.Tensor], *args: Any) -> Any:
        _refuse_two(parameters)
        return verify(group, parameters, *args)

    of_ranks(distributed, _VERIFY, verify_one_gpu)


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


def _refuse_two(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse a module whose parameters are on several GPUs."""
    indices = sorted({index_of(parameter) for parameter in parameters})
    if len(indices) > 1 and indices[0] >= 0:
        raise RuntimeError(
            f"DistributedDataParallel of a module on {joined([f'cuda:{k}' for k in indices])} is "
            "not simulated: give each rank one GPU, and each part of the model a rank, as in a "
            "pipeline"
        )


def _scatter(tensor: torch.Tensor, devices: Any = None, *_: Any, **__: Any) -> Any:
    if devices is None or len(devices) > 1:
        _refuse_model()
    return (tensor.cuda(devices[0]),)
