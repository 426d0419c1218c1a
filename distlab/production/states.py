"""States that differ from rank to rank, in checkpoints that one rank writes."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from phase4_production.given import Group, HasState


def on_cpu(state: Any) -> Any:
    """Return a state with all tensors on the CPU: pickled as they are, they would be a GPU's."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), state)


class PerRank:
    """A part whose state is another one on each rank: a shard, or a stage.

    Cost: one all-gather of all states; each rank holds all of them meanwhile.
    """

    def __init__(self, part: HasState) -> None:
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        """Return the states by rank."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, on_cpu(self.part.state_dict()))
        return {str(rank): state for rank, state in enumerate(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's.

        Raises:
            ValueError: it is of another number of ranks.
        """
        if len(state) != dist.get_world_size():
            raise ValueError(
                f"the checkpoint has the shards of {len(state)} ranks, and here are "
                f"{dist.get_world_size()}: start {len(state)}, or begin anew in another run_dir"
            )
        self.part.load_state_dict(state[str(dist.get_rank())])


class Buffers:
    """Buffers, such as the running means of BatchNorm, which each replica computes for itself."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self.module, self.group = module, group

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers of all ranks."""
        mine = {name: on_cpu(value) for name, value in self.module.named_buffers()}
        states: list[Any] = [mine]
        if mine:
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, mine)
        return {"by_rank": states}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's; on another number of ranks, rank 0's."""
        states = state["by_rank"]
        rank = dist.get_rank() if len(states) == dist.get_world_size() else 0
        own = states[rank] if states else {}
        for name, value in self.module.named_buffers():
            value.copy_(own[name])

    @torch.no_grad()
    def average(self) -> None:
        """Make the buffers of all replicas equal: their means, so that all evaluate one model."""
        for value in self.module.buffers():
            if value.is_floating_point():
                dist.all_reduce(value, group=self.group)
                value /= dist.get_world_size(self.group)
