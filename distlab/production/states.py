"""States that differ from rank to rank: small ones, which rank 0 gets, and large ones."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_map_only,
    tree_map_with_path,
)

from distlab.production.types import Group, HasState


def on_cpu(state: Any) -> Any:
    """Return a state with all tensors on the CPU; loading pickled GPU tensors would need a GPU."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), state)


class PerRank:
    """A part with a small state that differs from rank to rank.

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


class Own(PerRank):
    """A part whose tensors only this rank has, such as a shard or a stage; each rank saves its own.

    Its state, which all ranks get, says how the tensors of each rank are laid out.

    Attributes:
        tensors: Tensors by their places in the part's state, such as ``[0]['momentum_buffer']``:
            those of the last ``state_dict``, or those that ``expect`` has made.
    """

    def __init__(self, part: HasState, *, is_optional: bool = False) -> None:
        super().__init__(part, is_optional=is_optional)
        self.tensors: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the layouts by rank."""
        layout, self.tensors = cut(self.part.state_dict())
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, layout)
        return {str(rank): layout for rank, layout in enumerate(layouts)}

    def expect(self, state: Mapping[str, Any]) -> None:
        """Make tensors for this rank's numbers; none if a different number of ranks saved them."""
        fits = len(state) == dist.get_world_size()
        self.tensors = empty_tensors(state[str(dist.get_rank())]) if fits else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state with the numbers in ``tensors``; errors as of ``PerRank``."""
        filled = {rank: with_tensors(layout, self.tensors) for rank, layout in state.items()}
        super().load_state_dict(filled)
        self.tensors = {}


def cut(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state's layout, in which tensors hold no numbers, and the tensors by place."""
    tensors: dict[str, Tensor] = {}

    def without_numbers(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        tensors[keystr(path)] = value.detach()
        return torch.empty_like(value, device="meta")

    return tree_map_with_path(without_numbers, state), tensors


def empty_tensors(layout: Any) -> dict[str, Tensor]:
    """Return tensors on the CPU, by place, for the numbers that a layout lacks."""
    leaves, _ = tree_flatten_with_path(layout)
    return {
        keystr(path): torch.empty(value.shape, dtype=value.dtype)
        for path, value in leaves
        if isinstance(value, Tensor)
    }


def with_tensors(layout: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a layout with tensors in their places; places without one stay as they are."""
    return tree_map_with_path(lambda path, value: tensors.get(keystr(path), value), layout)


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
