"""What the bodies of tasks 2.2 to 2.5 give to a step: optimizers and an all-reduce."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

OTHERS_HAVE_TARGETS = {
    "": "This rank's batch is empty, but other ranks have targets: decide after the all-reduce, "
    "when all ranks know the same."
}


class NotedAllReduce:
    """An all-reduce that notes sizes, dtypes and groups; ``group`` may come by name or place."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.dtypes: list[str] = []
        self.groups: list[Any] = []

    def __call__(self, x: Tensor, group: Any = None) -> None:
        self.sizes.append(x.numel())
        self.dtypes.append(str(x.dtype).removeprefix("torch."))
        self.groups.append(group)
        dist.all_reduce(x, group=group)
