"""States that differ from rank to rank, in checkpoints that one rank writes."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from distlab.production.types import Group, HasState


def on_cpu(state: Any) -> Any:
    """Return a state with all tensors on the CPU; loading pickled GPU tensors would need a GPU."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), state)


class PerRank:
    """A part whose state differs from rank to rank, such as a shard or a stage.

    Cost: one all-gather, during which each rank holds the states of all ranks.
    """

    def __init__(self, part: HasState, *, is_optional: bool = False) -> None:
        """Wrap a part; if ``is_optional``, a state from another number of ranks is ignored."""
        self.part, self.is_optional = part, is_optional

    def state_dict(self) -> dict[str, Any]:
        """Return the states by rank."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, on_cpu(self.part.state_dict()))
        return {str(rank): state for rank, state in enumerate(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state.

        Raises:
            ValueError: The state was saved by a different number of ranks, and is not optional.
        """
        if len(state) == dist.get_world_size():
            self.part.load_state_dict(state[str(dist.get_rank())])
        elif not self.is_optional:
            raise ValueError(
                f"it has the shards of {len(state)} ranks, and here are {dist.get_world_size()}: "
                f"start {len(state)} ranks"
            )


class OwnBuffers:
    """The buffers of this rank, such as the running means of BatchNorm."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers by name."""
        return dict(self.module.named_buffers())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values into the buffers."""
        for name, value in self.module.named_buffers():
            value.copy_(state[name])


class Buffers(PerRank):
    """The buffers of all ranks; each rank computes its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(OwnBuffers(module))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's buffers, or rank 0's if a different number of ranks saved them."""
        rank = dist.get_rank() if len(state) == dist.get_world_size() else 0
        self.part.load_state_dict(state[str(rank)])


@torch.no_grad()
def average_buffers(module: nn.Module, group: Group) -> None:
    """Replace each buffer with its mean over the replicas, so that all evaluate the same model."""
    for value in module.buffers():
        if value.is_floating_point():
            dist.all_reduce(value, group=group)
            value /= dist.get_world_size(group)
