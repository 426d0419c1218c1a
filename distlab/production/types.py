"""Types of the production trainer that its lessons use too."""

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks
Batch = tuple[Tensor, ...]  # inputs (B, …), targets (B, …), and any other tensors with B rows


class HasState(Protocol):
    """An object with a state that can be saved and loaded, such as a model or a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors may be the very ones that training goes on to change."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore a state that an object of the same kind has returned."""
