"""States that differ from rank to rank: small ones, which rank 0 gets, and large ones."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_map_only,
    tree_map_with_path,
)

from distlab.production.types import Group, HasState

Elements = tuple[Tensor, int, int]  # values (n,), their start in the flat whole, numel of the whole


def on_cpu(state: Any) -> Any:
    """Return a state with all tensors on the CPU; loading pickled GPU tensors would need a GPU."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), state)


class PerRank:
    """A part with a small state that differs from rank to rank.

    Cost: one all-gather, during which each rank holds the states of all ranks.
    """

    def __init__(self, part: HasState) -> None:
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        """Return the states by rank."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, on_cpu(self.part.state_dict()))
        return {str(rank): state for rank, state in enumerate(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state; ignore a state that a different number of ranks saved."""
        if len(state) == dist.get_world_size():
            self.part.load_state_dict(state[str(dist.get_rank())])


class Own:
    """A part whose tensors not all ranks have, such as a stage or shards; each rank saves its own.

    Ranks at one place of the model are replicas. Either the first of them saves the tensors, or
    each holds and saves a shard of them. Any number of replicas can load what others have saved:
        saved by 2     a b c d e │ f g h i ·       a flat tensor of 9 elements, and · fills it up
        loaded by 3    a b c │ d e f │ g h i

    The part's state, which all ranks get, says how the tensors of each place are laid out.
    """

    def __init__(
        self,
        part: HasState,
        place: str = "",
        *,
        replicas: Group = None,
        parameters: Mapping[str, Tensor] | None = None,
        is_alone: bool = False,
    ) -> None:
        """Wrap a part.

        Args:
            part: The part; its state holds no DTensors.
            place: Name of this rank's place.
            replicas: Ranks at this place.
            parameters: Parameter by the beginning of the paths of its tensors in the state, such as
                ``['state'][0]``, if each replica holds a shard: of flat tensors that are filled up
                to equal shards, or as fully_shard cuts them. None if replicas hold all elements.
            is_alone: True if no other rank is at this place; a state without it is ignored then.
        """
        self.part, self.place, self.replicas = part, place, replicas
        self.parameters, self.is_alone = parameters or {}, is_alone
        self._tensors: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of replicas, and the layouts by place."""
        layout, self._tensors = cut(self.part.state_dict())
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, (self.place, layout))
        return {"replicas": self.num_replicas, "layouts": dict(layouts)}

    def name(self, path: str, *, of: str) -> str:
        """Return the name of a tensor in a checkpoint, for the part ``of`` this name."""
        return f"{self.place} {of}{path}".strip()

    @property
    def num_replicas(self) -> int:
        """Number of ranks at this place; 1 for a rank that is in no group of replicas."""
        return max(dist.get_world_size(self.replicas), 1)

    def to_save(self) -> dict[str, Elements]:
        """Return what this rank saves of the last state, by path."""
        is_first = self.is_alone or dist.get_rank(self.replicas) <= 0
        if not self.parameters and not is_first:
            return {}
        return {
            path: self._shard(path, tensor, tensor.numel() * self.num_replicas)
            for path, tensor in self._tensors.items()
        }

    def to_load(self, state: Mapping[str, Any]) -> dict[str, Elements]:
        """Return shards to be filled before ``load_state_dict``, by path.

        Raises:
            ValueError: The state has no such place, or a flat tensor of another size.
        """
        layout = state["layouts"].get(self.place)
        if layout is None and not self.is_alone:
            places = ", ".join(sorted(state["layouts"]))
            raise ValueError(f"it has {places or 'the whole model'}, but not {self.place}")
        shards = dict[str, Elements]()
        for path, saved in tensors_of(layout).items():
            parameter = self._parameter(path) if saved.dim() else None
            shape = saved.shape if parameter is None else local(parameter).shape
            self._tensors[path] = torch.zeros(shape, dtype=saved.dtype)
            numel = saved.numel() * state["replicas"]
            shards[path] = self._shard(path, self._tensors[path], numel)
            # A flat tensor is filled up by less than one element for each rank.
            more = self._tensors[path].numel() * self.num_replicas - numel
            is_flat = parameter is not None and not isinstance(parameter, DTensor)
            if is_flat and not -state["replicas"] < more < self.num_replicas:
                raise ValueError(f"{path} has {numel:,} elements, and here {numel + more:,}")
        return shards

    def _parameter(self, path: str) -> Tensor | None:
        starts = (start for start in self.parameters if path.startswith(start))
        return self.parameters.get(next(starts, ""))

    def _shard(self, path: str, tensor: Tensor, flat_numel: int) -> Elements:
        """Return a tensor's elements as part of the whole one; a flat one has ``flat_numel``."""
        values, rank = tensor.flatten(), dist.get_rank(self.replicas)
        parameter = self._parameter(path) if tensor.dim() else None
        if parameter is None:
            return values, 0, len(values)
        if isinstance(parameter, DTensor):
            rows, row = parameter.shape[0], parameter.numel() // parameter.shape[0]
            start = min(rank * -(-rows // self.num_replicas), rows) * row
            return values, start, parameter.numel()
        start = rank * len(values)
        return values[: max(flat_numel - start, 0)], start, flat_numel

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state with the numbers in the shards of ``to_load``."""
        if self.place in state["layouts"]:
            self.part.load_state_dict(with_tensors(state["layouts"][self.place], self._tensors))
        self._tensors = {}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that fully_shard has sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state's layout, in which tensors hold no numbers, and the tensors by path."""
    tensors: dict[str, Tensor] = {}

    def without_numbers(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        tensors[keystr(path)] = value.detach()
        return torch.empty_like(value, device="meta")

    return tree_map_with_path(without_numbers, state), tensors


def tensors_of(state: Any) -> dict[str, Tensor]:
    """Return the tensors of a state or a layout by path."""
    leaves, _ = tree_flatten_with_path(state)
    return {keystr(path): value for path, value in leaves if isinstance(value, Tensor)}


def with_tensors(layout: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a layout with tensors at their paths; other paths stay as they are."""
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

    def __init__(self, module: nn.Module, ranks_of_a_replica: int = 1) -> None:
        super().__init__(OwnBuffers(module))
        self.ranks_of_a_replica = ranks_of_a_replica

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's buffers; on another number of ranks, those of the first replica."""
        rank = dist.get_rank()
        if len(state) != dist.get_world_size():
            rank %= self.ranks_of_a_replica
        self.part.load_state_dict(state[str(rank)])


@torch.no_grad()
def average_buffers(module: nn.Module, group: Group) -> None:
    """Replace each buffer with its mean over the replicas, so that all evaluate the same model."""
    if dist.get_rank(group) < 0:  # a parameter server evaluates nothing
        return
    for value in module.buffers():
        if value.is_floating_point():
            dist.all_reduce(value, group=group)
            value /= dist.get_world_size(group)
