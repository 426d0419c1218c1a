"""Small programs whose traces several test files examine.

Their tensors are on ``meta``: they hold no data, but still cost GPU time.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sim import Cluster, Options, Simulated, simulate


def compute(rounds: int = 1) -> None:
    """Use some GPU time."""
    x = torch.empty(512, 512, device="meta")
    for _ in range(rounds):
        x = x @ x


def ring(num_elements: int = 4096) -> None:
    """All-reduce around a ring as a learner would: in each step, compute, send and receive."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunk = torch.empty(num_elements // size, device="meta")
    for _ in range(2 * (size - 1)):
        compute()
        exchange(chunk, (rank + 1) % size, (rank - 1) % size)


def exchange(chunk: Tensor, right: int, left: int) -> None:
    operations = [dist.P2POp(dist.isend, chunk, right), dist.P2POp(dist.irecv, chunk, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def overlapped() -> None:
    """Compute while two all-reduces are in flight."""
    compute(1 + dist.get_rank())
    works = [dist.all_reduce(torch.empty(1 << 20, device="meta"), async_op=True) for _ in range(2)]
    compute(3)
    for work in works:
        work.wait()


def run(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: object,
    cluster: Cluster | str | None = "dgx-h100",
    **options: Any,
) -> Simulated[Any]:
    """Simulate ``fn`` on a cluster with ``Options(**options)``."""
    return simulate(fn, num_ranks, *args, cluster=cluster, options=Options(**options))
