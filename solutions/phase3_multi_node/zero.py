"""ZeRO: optimizer state, gradients and parameters, each stored only once across all ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from phase3_multi_node.given import (
    Bucket,
    Flat,
    Group,
    Place,
    SavesShard,
    Started,
    all_gather,
    at_end_of_backward,
    cast_floats,
    check_has_values,
    own_chunk,
    reduce_scatter,
    same_kind,
    start_all_gather,
    start_reduce_scatter,
    units_of,
)
from solutions.phase3_multi_node.ddp import assign_buckets

BUCKET_BYTES = 25 * 2**20


class ShardedOptimizer(SavesShard):
    """Keeps 1/N of the optimizer state on each rank: ZeRO stage 1.

    Parameters of the same dtype lie in one flat tensor, and their gradients in another. Rank r
    updates shard r of the N shards, and gets the others from the other ranks. For Ψ 16-bit
    parameters and Adam, whose state is two numbers per parameter, a rank holds between calls:
        parameters 2Ψ + gradients 2Ψ + (master 4Ψ + state 8Ψ) / N  =  4Ψ + 12Ψ/N bytes

    The master is this rank's shard of the parameters in float32, so that updates too small for 16
    bits are not lost.

    Attributes:
        group: the ranks that share the state.
        parts: the trained parameters, one list per dtype.
        flats: flat memory of each part.
        gradients: gradients of each part, in a tensor (padded,) laid out like its flat memory; only
            in stage 1.
        masters: this rank's shard (padded / N,) of each part, in float32; if the part is already in
            float32, the shard itself instead of a copy.
        optimizer: instance of ``optimizer_cls`` that updates the masters. A learning rate set in
            it, for example by a scheduler, applies to all later steps.

    Source: Rajbhandari et al. 2020, sections 3.1 and 5.1.
    """

    group: Group
    parts: list[list[nn.Parameter]]
    flats: list[Flat]
    gradients: list[Tensor]
    masters: list[Tensor]
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: Group = None,
        **kwargs: Any,
    ) -> None:
        """Move the parameters into flat memory, where all ranks get the values of rank 0.

        Args:
            params: parameters with the same shapes and dtypes on all ranks; their values may
                differ. The tensor objects stay the same, but get new memory. Parameters that need
                no gradient are left alone, and a tied parameter may be listed twice.
                Dicts of groups are not taken: make one optimizer for each group with options of its
                own, such as its ``weight_decay``.
            optimizer_cls: class of an optimizer that updates each element independently, as SGD and
                Adam do; an optimizer that looks at whole tensors, as LAMB does, would see only
                shards.
            group: the ranks that share the state; all by default.
            kwargs: keyword arguments of ``optimizer_cls``.

        Cost: one broadcast per part: Ψ elements received, in their own dtype.
        """
        self.group = group
        self.parts = self.cut(param for param in params if param.requires_grad)
        self.flats = [Flat(part, group) for part in self.parts]
        for part, flat in zip(self.parts, self.flats, strict=True):
            dist.broadcast(flat.data, group=group, group_src=0)
            for param, view in zip(part, flat.views(flat.data), strict=True):
                param.data = view
        self.masters = [_master_of(flat) for flat in self.flats]
        self.optimizer = optimizer_cls(self.masters, **kwargs)
        self.hold_gradients()

    def cut(self, params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Group the parameters into parts, each of which becomes one flat tensor."""
        return same_kind(params)

    def hold_gradients(self) -> None:
        """Allocate memory for the gradients, one flat tensor per part, filled with 0."""
        self.gradients = [torch.zeros_like(flat.data) for flat in self.flats]
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set all gradients to 0, in the flat tensors, where backward passes add to them.

        Call this instead of the module's own ``zero_grad``, which would detach the gradients from
        the flat tensors.
        """
        for part, flat, gradient in zip(self.parts, self.flats, self.gradients, strict=True):
            gradient.zero_()
            for param, view in zip(part, flat.views(gradient), strict=True):
                param.grad = view

    def reduce_gradients(self) -> list[Tensor]:
        """Return this rank's shard of the gradients' mean over the ranks, for each part.

        This uses up the gradients: call ``zero_grad`` before the next backward pass.

        Returns:
            One tensor (padded / N,) per part, in the dtype of the gradients.

        Cost: one reduce-scatter per part: (N-1)/N·Ψ elements sent, in their own dtype.
        """
        world_size = dist.get_world_size(self.group)
        return [
            reduce_scatter(gradient, self.group).div_(world_size) for gradient in self.gradients
        ]

    def step(self) -> None:
        """Update all parameters with the mean of their gradients over the ranks.

        Every parameter is updated as ``optimizer_cls`` would update it with that mean, up to
        rounding. The gradient of a parameter that no backward pass has used counts as 0.
        Afterwards, the parameters are bit for bit the same on all ranks. The gradients of several
        backward passes are added up.

        Cost: ``reduce_gradients`` and one all-gather per part: 2(N-1)/N·Ψ elements sent in all, as
            many as in an all-reduce of the gradients. Each rank updates Ψ/N elements.
        """
        for master, gradient in zip(self.masters, self.reduce_gradients(), strict=True):
            master.grad = gradient.to(master.dtype)
        self.optimizer.step()
        for flat, master in zip(self.flats, self.masters, strict=True):
            master.grad = None
            flat.shard.copy_(master)
            all_gather(flat.data, self.group)


def _master_of(flat: Flat) -> Tensor:
    """Return this rank's shard in float32 or wider: a copy, unless it already has that width."""
    return flat.shard.to(torch.promote_types(flat.shard.dtype, torch.float32))


class Reduction:
    """A reduce-scatter that runs while the backward pass continues.

    Only one runs at a time; otherwise, all gradients might have to wait in memory together.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.pending: tuple[Started, Tensor, Callable[[Tensor], object]] | None = None

    def start(self, whole: Tensor, use: Callable[[Tensor], object]) -> None:
        """Start to reduce-scatter ``whole``, once the previous reduce-scatter has finished.

        Args:
            whole: tensor (N·k,), which nothing else writes to any more.
            use: function to call later with this rank's shard (k,) of the mean over the ranks.
        """
        self.finish()
        work = start_reduce_scatter(whole, self.group)
        self.pending = work, own_chunk(whole, self.group), use

    def finish(self) -> None:
        """Wait for the reduce-scatter in progress, if any, and pass its shard to ``use``."""
        if self.pending:
            work, shard, use = self.pending
            self.pending = None
            work.wait()
            use(shard.div_(dist.get_world_size(self.group)))


class ShardedGradientOptimizer(ShardedOptimizer):
    """Also keeps only 1/N of the gradients on each rank: ZeRO stage 2.

    As soon as a bucket has all its gradients, it is reduce-scattered while the backward pass
    continues, and then freed: of the gradients, a rank keeps only its shard of the mean.
        backward    layer 3 │ layer 2 │ layer 1 │ layer 0
        reduce                3 ────────2 ────────1 ────────0 ───

    For Ψ 16-bit parameters and Adam, a rank holds between calls:
        parameters 2Ψ + (gradients 2Ψ + master 4Ψ + state 8Ψ) / N  =  2Ψ + 14Ψ/N bytes

    During the backward pass, it also holds up to three buckets' worth of gradients: a bucket that
    is being filled, a bucket that is being reduced, and a gradient that has just been computed.

    Attributes: those of ``ShardedOptimizer``, where each part is a bucket, and
        buckets: bucket with the gradients of each part.
        reduction: the reduce-scatter in progress.

    Source: Rajbhandari et al. 2020, sections 3.1 and 5.2.
    """

    buckets: list[Bucket]
    reduction: Reduction

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        group: Group = None,
        **kwargs: Any,
    ) -> None:
        """Move the parameters into flat memory, bucket by bucket, with the values of rank 0.

        Args:
            params: as for ``ShardedOptimizer``. In each backward pass, all ranks must use the same
                parameters.
            optimizer_cls: as for ``ShardedOptimizer``.
            bucket_bytes: maximum size of each bucket, including the first; a larger gradient has a
                bucket to itself.
            group: the ranks that share the state; all by default.
            kwargs: keyword arguments of ``optimizer_cls``.
        """
        self.bucket_bytes = bucket_bytes
        super().__init__(params, optimizer_cls, group=group, **kwargs)

    def cut(self, params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the parameters bucket by bucket, the last parameters first."""
        once = [*dict.fromkeys(params)]
        buckets = assign_buckets(once, self.bucket_bytes, self.bucket_bytes)
        return [[once[index] for index in bucket] for bucket in buckets]

    def hold_gradients(self) -> None:
        """Make an empty bucket for each part, and register ``take`` as a hook of each parameter."""
        self.reduction = Reduction(self.group)
        self.buckets = [Bucket(*both) for both in zip(self.parts, self.flats, strict=True)]
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(partial(self.take, bucket))

    def zero_grad(self) -> None:
        """Set this rank's shards of the gradients to 0."""
        for bucket in self.buckets:
            bucket.shard.zero_()

    def take(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Move a new gradient into its bucket; start to reduce the bucket if it is full.

        Cost: one reduce-scatter per bucket and backward pass: (N-1)/N·Ψ elements sent.
        """
        bucket.put(param)
        if bucket.is_full:
            self.reduction.start(bucket.take(), bucket.shard.add_)
        at_end_of_backward(self.end_backward)

    def end_backward(self) -> None:
        """Reduce the buckets that are not full because some parameters were not used.

        Afterwards, no bucket holds a gradient, and no reduce-scatter is in progress.
        """
        for bucket in self.buckets:
            if not bucket.is_empty:
                self.reduction.start(bucket.take(), bucket.shard.add_)
        self.reduction.finish()

    def reduce_gradients(self) -> list[Tensor]:
        """Return this rank's shard of the gradients of each part, which is already reduced."""
        return [bucket.shard for bucket in self.buckets]


class FullyShardedDataParallel(nn.Module):
    """Keeps 1/N of everything on each rank: ZeRO stage 3.

    The model is cut into units, such as its layers. A unit's parameters are gathered before it
    computes and freed afterwards, in both passes. While one unit computes, the parameters of the
    next one are gathered:
        forward     gather 0 │ compute 0 │ compute 1 │ compute 2
                             │ gather 1  │ gather 2  │
        backward    gather 2 │ compute 2 │ compute 1 │ compute 0
                             │ gather 1  │ gather 0  │
                                         │ reduce 2  │ reduce 1  │ reduce 0

    An optimizer sees only the shards and their gradients, in float32 (or in float64 if the
    parameters already were). For Ψ parameters and Adam, a rank holds between calls:
        (parameters 4Ψ + gradients 4Ψ + state 8Ψ) / N  =  16Ψ/N bytes

    During a pass, a rank also holds at most two whole units in ``compute_dtype``, the one that
    computes and the next one, plus the parameters that belong to the model itself. In the backward
    pass, it also holds the gradients of at most three units. After a forward pass, even a failed
    one, and after a successful backward pass, no unit is whole. After a failed backward pass, the
    model must not be used any more.

    Tied parameters of the module are gathered once. Frozen parameters stay frozen, and no gradients
    are sent for them. Each rank keeps its own buffers.

    Attributes:
        module: the module, whose parameters are now shards; its ``forward`` is used as before.
        order: the units, and the order in which they compute.

    Source: Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, PyTorch FSDP, section 3.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        reduce_dtype: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        """Shard the parameters of a module; all ranks get the values of rank 0.

        Args:
            module: module whose parameters have the same shapes and dtypes on all ranks. Its units
                are those of ``units_of``; all ranks use the units in the same order, each one
                through its ``forward``.
            compute_dtype: dtype of the whole parameters and of their gradients.
            reduce_dtype: dtype in which gradients are sent and summed; by default, that of the
                gradients. In bfloat16, a sum of 256 and 1 is 256, so sums over many ranks need
                float32, for twice the bytes.
            group: the ranks that share the model; all by default.

        Raises:
            ValueError: a parameter or buffer is on the ``meta`` device; the message names it.

        Cost: one broadcast per flat of each unit, so every parameter is sent once.
        """
        super().__init__()
        check_has_values(module)
        self.module, self.compute_dtype = module, compute_dtype
        self.order = Order(group)
        dtypes = compute_dtype, reduce_dtype or compute_dtype
        for owner, places in units_of(module).items():
            self.order.units.append(Unit(owner, places, dtypes, self.order))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Args:
            args: arguments of the module; floating-point tensors are cast to ``compute_dtype``.
            kwargs: keyword arguments of the module, cast likewise.

        Returns:
            What the module returns. A backward pass that starts from it adds the mean of the
            gradients over the ranks to the ``grad`` of each shard.

        Cost: (N-1)/N·Ψ parameters sent in ``compute_dtype``. The backward pass sends at most as
            many again, and as many gradients in ``reduce_dtype``: 3(N-1)/N·Ψ elements in all.
            Gradients of frozen parameters are not sent, and parameters that the backward pass does
            not need are not gathered for it.
        """
        args, kwargs = cast_floats((args, kwargs), self.compute_dtype)
        self.order.to_come.clear()
        with saved_tensors_hooks(self.order.pack, self.order.unpack):
            try:
                return self.module(*args, **kwargs)
            finally:
                self.order.free_all()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole parameters and the buffers, under their names in the module.

        A module of the original class can load them. ``state_dict`` holds only this rank's shards.

        Returns:
            Tensors by name. The parameters are in the dtype of the shards, and the same on all
            ranks; a tied parameter is under each of its names.

        Cost: (N-1)/N·Ψ elements sent in that dtype. All ranks must call this.
        """
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        state = self.module.state_dict()
        whole = {name: value for name, value in state.items() if name in buffers}
        for unit in self.order.units:
            whole |= unit.whole_state()
        return whole

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a result of ``full_state_dict``, which may come from a different number of ranks.

        Args:
            state: tensors by name, the same on all ranks, in any dtype. Not changed.

        Raises:
            KeyError: a parameter is missing; the message names it. Other units may already have
                been loaded.
        """
        for unit in self.order.units:
            unit.load(state)
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        for name in buffers.keys() & state.keys():
            buffers[name].copy_(state[name])


class Unit:
    """Part of a model; it is whole while it computes, and sharded over the ranks otherwise.

    Attributes:
        dtype: dtype of the whole parameters.
        reduce_dtype: dtype in which their gradients are summed.
        places: module and attribute name of each place where a parameter occurs in the model.
        paths: name of each place in the model's ``state_dict``.
        slots: index of the parameter at each place; the places of a tied parameter have the same
            index.
        flats: layouts of the parameters: one flat per dtype, with separate ones for trained and
            frozen parameters.
        shards: this rank's shard (padded / N,) of each flat, in float32, or in float64 if the
            parameters were. Each is registered as a parameter of the owner.
        whole: each flat in full (padded,), in the compute dtype, from the moment when gathering
            starts until the unit is freed; otherwise [].
        works: the all-gathers in progress.
        number: number of forward passes through the unit so far, which tells its uses apart; failed
            passes may or may not count.
    """

    def __init__(
        self,
        owner: nn.Module,
        places: Sequence[Place],
        dtypes: tuple[torch.dtype, torch.dtype],
        order: "Order",
    ) -> None:
        self.dtype, self.reduce_dtype = dtypes
        self.order, self.group = order, order.group
        self.places = [(place.module, place.name) for place in places]  # without the parameters
        self.paths = [place.path for place in places]
        kinds = same_kind(place.param for place in places)
        params = [param for same in kinds for param in same]
        self.slots = [next(i for i, p in enumerate(params) if p is place.param) for place in places]
        self.flats = [Flat(same, self.group) for same in kinds]
        self.shards = []
        for number, (flat, same) in enumerate(zip(self.flats, kinds, strict=True)):
            dist.broadcast(flat.data, group=self.group, group_src=0)
            values = _master_of(flat).clone()  # so that the flat can be freed
            shard = nn.Parameter(values, requires_grad=same[0].requires_grad)
            flat.forget()
            owner.register_parameter(f"shard{number}", shard)
            self.shards.append(shard)
        self.whole: list[Tensor] = []
        self.works: list[Started] = []
        self.number = 0
        self.put([None] * len(params))
        owner.forward = partial(self.forward, owner.forward)

    def put(self, params: Sequence[Tensor | None]) -> None:
        """Set each parameter of the unit in the model to a tensor, or to None."""
        for (module, name), slot in zip(self.places, self.slots, strict=True):
            module._parameters[name] = params[slot]  # type: ignore[assignment]

    def views(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters as views of ``whole``, which holds one tensor per flat."""
        pairs = zip(self.flats, whole, strict=True)
        return [view for flat, one in pairs for view in flat.views(one)]

    def by_flat(self, params: Iterable[Any]) -> list[list[Any]]:
        """Split one value per parameter into one list per flat."""
        rest = iter(params)
        return [[*islice(rest, len(flat.shapes))] for flat in self.flats]

    def forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the unit's own ``forward`` with whole parameters, which are freed afterwards."""
        self.number += 1
        self.order.goes_forward(self)
        try:
            self.put(Whole.apply(self, *self.shards))
            return forward(*args, **kwargs)
        finally:
            self.put([None] * (1 + max(self.slots)))
            self.free()

    def start_to_gather(self) -> None:
        """Start to gather all shards, unless they are already gathered or being gathered.

        Cost: one all-gather per flat, in the compute dtype.
        """
        if not self.whole:
            self.whole = [self._room_for(shard, self.dtype) for shard in self.shards]
            self.works = [start_all_gather(whole, self.group) for whole in self.whole]

    def gather(self) -> None:
        """Make all parameters whole: start to gather them if necessary, and wait."""
        self.start_to_gather()
        self._wait()

    def free(self) -> None:
        """Free the whole parameters; only the shards remain."""
        self._wait()  # memory that is still being written must not be freed
        self.whole = []

    def _wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def _room_for(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate memory for all shards (padded,), and copy this rank's shard into it."""
        world_size = dist.get_world_size(self.group)
        whole = shard.new_empty(len(shard) * world_size, dtype=dtype, requires_grad=False)
        own_chunk(whole, self.group).copy_(shard.detach())
        return whole

    def reduce(self, gradients: Sequence[Tensor | None]) -> None:
        """End the unit's backward pass: free the parameters, and start to reduce their gradients.

        The gradients are summed in ``reduce_dtype``.

        Args:
            gradients: gradients of the whole parameters; None for parameters that were not used or
                are frozen.
        """
        self.free()
        for flat, shard, mine in zip(self.flats, self.shards, self.by_flat(gradients), strict=True):
            if shard.requires_grad:
                self.order.reduction.finish()  # frees its memory before more is allocated
                whole = flat.packed(mine, self.reduce_dtype)
                self.order.reduction.start(whole, partial(self._accumulate, shard))
        at_end_of_backward(self.order.end_backward)

    def _accumulate(self, shard: nn.Parameter, mean: Tensor) -> None:
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
        shard.grad.add_(mean)

    def whole_state(self) -> dict[str, Tensor]:
        """Return the whole parameters, in the dtype of the shards, by their names in the model."""
        whole = [self._room_for(shard, shard.dtype) for shard in self.shards]
        for one in whole:
            all_gather(one, self.group)
        params = self.views(whole)
        return {path: params[i] for path, i in zip(self.paths, self.slots, strict=True)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards out of whole parameters."""
        by_slot = {i: state[path] for path, i in zip(self.paths, self.slots, strict=True)}
        params = [by_slot[i] for i in sorted(by_slot)]
        for shard, mine in zip(self.shards, self.by_flat(params), strict=True):
            shard.data.copy_(Flat(mine, self.group).shard)


class Whole(torch.autograd.Function):
    """Turns shards into whole parameters; backward turns gradients into shards of their mean."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *shards: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of a gathered unit: views of ``unit.whole``."""
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        params = unit.views(unit.whole)
        by_shard = zip(shards, unit.by_flat(params), strict=True)
        frozen = [param for shard, some in by_shard if not shard.requires_grad for param in some]
        ctx.mark_non_differentiable(*frozen)
        return tuple(params)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Pass one gradient per parameter to the unit, which later sets the shards' gradients."""
        ctx.unit.reduce(gradients)
        return (None,) * len(ctx.needs_input_grad)


def _memory_of(unit: Unit, flat: int) -> int:
    return unit.whole[flat].untyped_storage().data_ptr()


class Saved(NamedTuple):
    """Location of a parameter or its view in ``unit.whole``; autograd saves it, not the tensor."""

    unit: Unit
    number: int  # unit.number at the time of this use
    flat: int  # index of the flat in the unit
    where: tuple[Any, ...]  # size, stride, offset


class Order:
    """Knows the order of the units, so that the next one is gathered in time.

    Attributes:
        units: units in the order in which they compute.
        to_come: uses of units, each with the unit and its ``number``, whose parameters the backward
            pass will need, in the order of the forward pass.
        reduction: the reduce-scatter in progress.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.units: list[Unit] = []
        self.to_come: list[tuple[Unit, int]] = []
        self.reduction = Reduction(group)

    def goes_forward(self, unit: Unit) -> None:
        """Gather a unit for its forward pass, and start to gather the one after it."""
        unit.gather()
        after = self.units.index(unit) + 1
        for following in self.units[after : after + 1]:
            following.start_to_gather()

    def goes_back(self, unit: Unit, number: int) -> None:
        """Gather a unit for its backward pass, and start to gather the one before it.

        This is called for each tensor that autograd has saved. Only the first call for a use of the
        unit starts to gather the previous unit; it also frees the other units if they are frozen,
        because no gradient signals that their backward pass has ended.
        """
        unit.gather()
        at_end_of_backward(self.end_backward)
        if (unit, number) in self.to_come:
            index = self.to_come.index((unit, number))
            del self.to_come[index]
            for other in self.units:
                if other is not unit and not any(shard.requires_grad for shard in other.shards):
                    other.free()
            if self.to_come:
                previous, _ = self.to_come[index - 1]  # index 0 wraps around to the enclosing unit
                previous.start_to_gather()

    def pack(self, x: Tensor) -> Tensor | Saved:
        """Save only the position of a parameter for autograd: a saved tensor could not be freed."""
        home = self._home_of(x)
        if home is None:
            return x
        unit, flat = home
        if (unit, unit.number) not in self.to_come:
            self.to_come.append((unit, unit.number))
        return Saved(unit, unit.number, flat, (x.size(), x.stride(), x.storage_offset()))

    def _home_of(self, x: Tensor) -> tuple[Unit, int] | None:
        """Return the unit and the index of the flat whose memory holds ``x``, or None."""
        memory = x.untyped_storage().data_ptr() if x.numel() else None
        homes = ((unit, i) for unit in self.units for i in range(len(unit.whole)))
        return next((home for home in homes if _memory_of(*home) == memory), None)

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        """Return a saved tensor; given a position, gather its unit, and return the parameter."""
        if isinstance(saved, Tensor):
            return saved
        self.goes_back(saved.unit, saved.number)
        return saved.unit.whole[saved.flat].as_strided(*saved.where)

    def end_backward(self) -> None:
        """Finish the reduction and free all units, because the backward pass has ended."""
        self.reduction.finish()
        self.free_all()

    def free_all(self) -> None:
        """Free the remaining units: those that were not used, or have no trained parameters."""
        for unit in self.units:
            unit.free()
