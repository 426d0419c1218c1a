"""Programs whose ranks have a simulated GPU each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sim import Options, RankError, simulate


def run(main: Callable[[], Any], num_ranks: int = 2, cluster: str = "dgx-h100") -> list[Any]:
    """Run a program on simulated GPUs, a rank on each, and return the ranks' results."""
    options = Options(semantics="nccl")
    ran = simulate(on_own_gpu, num_ranks, main, cluster=cluster, options=options)
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
    return ran.results


def on_own_gpu(main: Callable[[], Any]) -> Any:
    torch.cuda.set_device(dist.get_rank())
    return main()


def ones(size: int = 1) -> Tensor:
    return torch.ones(size, device="cuda")


def refusal(main: Callable[[], Any]) -> str:
    """Return the first line of the error with which a program ends."""
    with pytest.raises(RankError) as caught:
        run(main)
    return str(caught.value).splitlines()[0]
