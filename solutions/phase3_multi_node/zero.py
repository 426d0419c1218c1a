"""ZeRO: optimizer state, gradients and parameters, each held once by all ranks together."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from phase3_multi_node.given import (
    Flat,
    Group,
    Place,
    all_gather_shards,
    cut_into_buckets,
    reduce_scatter_shards,
    same_kind,
    units_of,
)

BUCKET_BYTES = 25 * 2**20


class ShardedOptimizer:
    """Keeps 1/N of the optimizer's state on each rank: ZeRO stage 1."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: Group = None,
        **kwargs: Any,
    ) -> None:
        self.group = group
        self.parts = self._cut(param for param in params if param.requires_grad)
        self.flats = [Flat(part, group) for part in self.parts]
        self.masters = [flat.shard.to(torch.float32, copy=True) for flat in self.flats]
        self.optimizer = optimizer_cls(self.masters, **kwargs)
        for part, flat in zip(self.parts, self.flats, strict=True):
            for param, view in zip(part, flat.views(flat.data), strict=True):
                param.data = view
        self._hold_gradients()

    def _cut(self, params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        return same_kind(params)

    def _hold_gradients(self) -> None:
        self.gradients = [torch.zeros_like(flat.data) for flat in self.flats]
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set all gradients to zero; they stay where they are."""
        for part, flat, gradient in zip(self.parts, self.flats, self.gradients, strict=True):
            gradient.zero_()
            for param, view in zip(part, flat.views(gradient), strict=True):
                param.grad = view

    def step(self) -> None:
        """Average the gradients, update this rank's shard, and collect the shards of all."""
        for master, gradient in zip(self.masters, self._summed_shards(), strict=True):
            master.grad = gradient.float() / dist.get_world_size(self.group)
        self.optimizer.step()
        for flat, master in zip(self.flats, self.masters, strict=True):
            master.grad = None
            flat.shard.copy_(master)
            all_gather_shards(flat.data, flat.shard, self.group)

    def _summed_shards(self) -> list[Tensor]:
        shards = [torch.empty_like(flat.shard) for flat in self.flats]
        for shard, gradient in zip(shards, self.gradients, strict=True):
            reduce_scatter_shards(shard, gradient, self.group)
        return shards


class ShardedGradientOptimizer(ShardedOptimizer):
    """Keeps 1/N of the gradients on each rank, too: ZeRO stage 2."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        group: Group = None,
        **kwargs: Any,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        super().__init__(params, optimizer_cls, group=group, **kwargs)

    def _cut(self, params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        return cut_into_buckets(params, self.bucket_bytes)

    def _hold_gradients(self) -> None:
        self.reduction = _Reduction(self.group)
        self.buckets = [_Bucket(*both) for both in zip(self.parts, self.flats, strict=True)]
        for bucket in self.buckets:
            for place, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(partial(self._take, bucket, place))

    def zero_grad(self) -> None:
        """Set this rank's shard of the gradients to zero."""
        for bucket in self.buckets:
            bucket.shard.zero_()

    def _take(self, bucket: "_Bucket", place: int, param: Tensor) -> None:
        """Move a gradient into its bucket, which leaves when it is full."""
        bucket.put(place, param)
        if not bucket.missing:
            self.reduction.start(bucket.take(), bucket.shard.add_)

    def _summed_shards(self) -> list[Tensor]:
        for bucket in self.buckets:
            if bucket.whole is not None:  # some parameter was not used
                self.reduction.start(bucket.take(), bucket.shard.add_)
        self.reduction.finish()
        return [bucket.shard for bucket in self.buckets]


class _Bucket:
    """Gradients that are reduced together; it takes memory only while it fills."""

    def __init__(self, params: Sequence[nn.Parameter], flat: Flat) -> None:
        self.params, self.flat = params, flat
        self.shard = torch.zeros_like(flat.shard)  # of the sum over all backward passes
        self.whole: Tensor | None = None
        self.missing = {*range(len(params))}

    def put(self, place: int, param: Tensor) -> None:
        """Take over the gradient of a parameter."""
        if self.whole is None:
            self.whole = torch.zeros_like(self.flat.data)
        self.flat.views(self.whole)[place].add_(param.grad)
        param.grad = None
        self.missing.discard(place)

    def take(self) -> Tensor:
        """Return the gradients, and begin anew."""
        whole, self.whole = self.whole, None
        self.missing = {*range(len(self.params))}
        return whole


class _Reduction:
    """A reduce-scatter that is under way: one at a time, or whole gradients would pile up."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.pending: tuple[dist.Work, Tensor, Callable[[Tensor], object]] | None = None

    def start(self, whole: Tensor, use: Callable[[Tensor], object]) -> None:
        """Let this rank's shard of the sum of ``whole`` be used when it is there."""
        self.finish()
        shard = whole.new_empty(len(whole) // dist.get_world_size(self.group))
        work = reduce_scatter_shards(shard, whole, self.group, async_op=True)
        self.pending = work, shard, use  # the work keeps ``whole``

    def finish(self) -> None:
        """Wait for it."""
        if self.pending:
            work, shard, use = self.pending
            self.pending = None
            work.wait()
            use(shard)


class FullyShardedDataParallel(nn.Module):
    """Keeps 1/N of everything on each rank: ZeRO stage 3.

    A unit is gathered before it computes and freed afterwards, forward and backward:
        forward     gather 0 │ compute 0 │ compute 1 │ compute 2
                             │ gather 1  │ gather 2  │
        backward    gather 2 │ compute 2 │ compute 1 │ compute 0
                             │ gather 1  │ gather 0  │
                                         │ reduce 2  │ reduce 1  │ reduce 0
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        self.order = _Order(group)
        for owner, places in units_of(module).items():
            self.order.units.append(_Unit(owner, places, compute_dtype, self.order))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on inputs in the dtype in which it computes."""
        args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        self.order.to_come.clear()
        try:
            return self.module(*args, **kwargs)
        finally:
            self.order.free_all()

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype) if x.is_floating_point() else x

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and buffers, whole, under the names that they had in the module."""
        prefixes = {each: f"{name}." if name else "" for name, each in self.module.named_modules()}
        state = dict(self.module.named_buffers())
        for unit in self.order.units:
            for place, value in zip(unit.places, unit.whole_values(), strict=True):
                state[prefixes[place.module] + place.name] = value
        return state


class _Unit:
    """Part of a model: whole while it computes; otherwise, each rank has a shard of it."""

    def __init__(
        self, owner: nn.Module, places: Sequence[Place], dtype: torch.dtype, order: "_Order"
    ) -> None:
        self.places, self.dtype, self.order, self.group = places, dtype, order, order.group
        kinds = same_kind(place.param for place in places)
        self.flats = [Flat(same, self.group) for same in kinds]
        params = [param for same in kinds for param in same]
        self.slots = [next(i for i, p in enumerate(params) if p is place.param) for place in places]
        self.shards = [
            nn.Parameter(flat.shard.to(torch.float32, copy=True), same[0].requires_grad)
            for flat, same in zip(self.flats, kinds, strict=True)
        ]
        for number, (flat, shard) in enumerate(zip(self.flats, self.shards, strict=True)):
            del flat.data, flat.shard
            owner.register_parameter(f"shard{number}", shard)
        self.whole: list[Tensor] = []  # while it is gathered
        self.works: list[dist.Work] = []
        self._put([None] * len(places))
        owner.forward = partial(self.forward, owner.forward)  # type: ignore[method-assign]

    def forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute with whole parameters, which are freed afterwards."""
        self.order.goes_forward(self)
        with saved_tensors_hooks(self._pack, self._unpack):
            self._put(self._views(_Whole.apply(self, *self.shards)))
            try:
                return forward(*args, **kwargs)
            finally:
                self._put([None] * len(self.places))
                self.free()

    def _views(self, whole: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.flats, whole, strict=True)
        views = [view for flat, one in pairs for view in flat.views(one)]
        return [views[slot] for slot in self.slots]

    def _put(self, values: Sequence[Tensor | None]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place.module._parameters[place.name] = value  # type: ignore[assignment]

    def _pack(self, x: Tensor) -> Any:
        """Of a parameter, keep for the backward pass only where it stands."""
        for number, whole in enumerate(self.whole):
            if x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
                return number, x.size(), x.stride(), x.storage_offset()
        return x

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.order.goes_back(self)
        number, *where = packed
        return self.whole[number].as_strided(*where)

    def start_to_gather(self) -> None:
        """Let the shards of all ranks come here, unless they are here or on their way."""
        if not self.whole:
            shards = [shard.detach().to(self.dtype) for shard in self.shards]
            world_size = dist.get_world_size(self.group)
            self.whole = [shard.new_empty(len(shard) * world_size) for shard in shards]
            self.works = [
                all_gather_shards(whole, shard, self.group, async_op=True)
                for whole, shard in zip(self.whole, shards, strict=True)
            ]

    def gather(self) -> None:
        """Wait until all parameters are here."""
        self.start_to_gather()
        for work in self.works:
            work.wait()
        self.works = []

    def free(self) -> None:
        """Keep the shards alone."""
        for work in self.works:
            work.wait()
        self.whole, self.works = [], []

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Send off whole gradients: the backward pass through the unit has ended."""
        self.free()
        for shard, gradient in zip(self.shards, gradients, strict=True):
            if shard.requires_grad:
                self.order.reduction.start(gradient, partial(self._accumulate, shard))

    def _accumulate(self, shard: nn.Parameter, summed: Tensor) -> None:
        mean = summed.float() / dist.get_world_size(self.group)
        shard.grad = mean if shard.grad is None else shard.grad.add_(mean)

    def whole_values(self) -> list[Tensor]:
        """Return every parameter in float32, one for each place."""
        world_size = dist.get_world_size(self.group)
        whole = [shard.new_empty(len(shard) * world_size) for shard in self.shards]
        for one, shard in zip(whole, self.shards, strict=True):
            all_gather_shards(one, shard.detach(), self.group)
        return self._views(whole)


class _Order:
    """Which unit comes next, so that it is on its way in time."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.units: list[_Unit] = []
        self.to_come: list[_Unit] = []  # in the backward pass; the next one last
        self.reduction = _Reduction(group)

    def goes_forward(self, unit: _Unit) -> None:
        """Gather a unit for its forward pass, and start to gather the one after it."""
        unit.gather()
        if torch.is_grad_enabled():
            self.to_come.append(unit)
        after = self.units.index(unit) + 1
        for following in self.units[after : after + 1]:
            following.start_to_gather()

    def goes_back(self, unit: _Unit) -> None:
        """Gather a unit for its backward pass, and start to gather the one before it."""
        unit.gather()
        if unit in self.to_come:
            Variable._execution_engine.queue_callback(self._finish_backward)
            self.to_come.remove(unit)
            for previous in self.to_come[-1:]:
                previous.start_to_gather()

    def _finish_backward(self) -> None:
        self.reduction.finish()
        self.free_all()

    def free_all(self) -> None:
        """Free what is left: units without trained parameters, or that were not used."""
        for unit in self.units:
            unit.free()


class _Whole(torch.autograd.Function):
    """From shards to whole parameters; back, from whole gradients to shards of their mean."""

    @staticmethod
    def forward(ctx: Any, unit: _Unit, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return tuple(whole.view_as(whole) for whole in unit.whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.unit.reduce(gradients)
        return (None,) * (1 + len(gradients))
