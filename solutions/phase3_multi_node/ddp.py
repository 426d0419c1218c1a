"""Data parallelism that sums gradients in buckets while the backward pass is still running."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase3_multi_node.given import (
    AllReduce,
    Group,
    StartAllReduce,
    Started,
    all_reduce,
    broadcast_module,
    group_device,
    laid_out_like,
    start_all_reduce,
)

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


def assign_buckets(
    params: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int
) -> list[list[int]]:
    """Assign parameters to buckets; the gradients of a bucket travel in one message.

    The backward pass computes the gradients of the last parameters first, so buckets are filled
    from the last parameter to the first. In this example, sizes are in kB; a bucket holds up to 8
    kB, and the first one up to 2 kB:
        params     4 float32   3 float32   6 float32   1 float32   1 float32
        buckets    ──── [1, 0]: 7 kB ───    ─ [2] ─     ─── [4, 3]: 2 kB ───

    Args:
        params: tensors; the same one may occur twice. Only their dtypes, devices and sizes matter
            (for a view, its own size, not that of the storage that it shares). The sequence is not
            changed.
        bucket_bytes: maximum size of a bucket; a larger parameter has a bucket to itself.
        first_bucket_bytes: maximum size of the first bucket of each dtype and device; it may be
            smaller or larger than ``bucket_bytes``. A small first bucket is sent early.

    Returns:
        Buckets of indices into ``params``; every index is in exactly one bucket. All parameters of
        a bucket have the same dtype and device. The parameters of each dtype and device are taken
        in reverse order; each goes into the current bucket if it fits there, otherwise into a new
        one. The list of buckets is in the order in which the backward pass completes them: sorted
        by their smallest index, in descending order. If there are no parameters, the list is empty.

    Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.
    """
    alike = defaultdict(list)
    for index in reversed(range(len(params))):
        alike[params[index].dtype, params[index].device].append(index)

    buckets = [
        bucket
        for indices in alike.values()
        for bucket in _fill(params, indices, bucket_bytes, first_bucket_bytes)
    ]
    return sorted(buckets, key=lambda bucket: bucket[-1], reverse=True)


def _fill(
    params: Sequence[Tensor], indices: Sequence[int], bucket_bytes: int, room: int
) -> list[list[int]]:
    """Fill one bucket after another; ``room`` is the capacity of the first."""
    buckets: list[list[int]] = [[]]
    for index in indices:
        if buckets[-1] and params[index].nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(index)
        room -= params[index].nbytes
    return buckets


# Three versions of one idea; the first two are given for comparison.


class FlatDataParallel(nn.Module):
    """Sums all gradients in one message after the backward pass, so nothing overlaps.

    All gradients have the same dtype, and all ranks use the same parameters.
    """

    def __init__(
        self, module: nn.Module, *, all_reduce: AllReduce = all_reduce, group: Group = None
    ) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks."""
        super().__init__()
        self.module, self.all_reduce, self.group = module, all_reduce, group
        broadcast_module(module, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Replace each gradient with its mean over all ranks."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.all_reduce(flat, self.group)
        flat /= dist.get_world_size(self.group)
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


class PerParameterDataParallel(nn.Module):
    """Sums each gradient as soon as it exists: all sums overlap, but each has its own latency.

    All ranks use the same parameters, in the same order.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        all_reduce: StartAllReduce = start_all_reduce,
        group: Group = None,
    ) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks, and register gradient hooks."""
        super().__init__()
        self.module, self.all_reduce, self.group = module, all_reduce, group
        self._under_way: list[tuple[Tensor, Started]] = []
        broadcast_module(module, group)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._send)

    def _send(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            work = self.all_reduce(parameter.grad, self.group)
            self._under_way.append((parameter.grad, work))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient has been replaced with its mean over all ranks."""
        for gradient, work in self._under_way:
            work.wait()
            gradient /= dist.get_world_size(self.group)
        self._under_way.clear()


class DistributedDataParallel(nn.Module):
    """Sums gradients in buckets, each bucket as soon as the backward pass has filled it.

    B0 … B2 are the all-reduces of three buckets; a step waits only for the last one:
        computing    forward     backward                     step
        link                         ├─ B0 ─┤├── B1 ──┤├─ B2 ─┤

    A step has the same result as a step on one process with the batches of all ranks combined:
        optimizer.zero_grad()
        loss_of(ddp(inputs)).backward()          # mean loss over this rank's equal share
        ddp.finish_gradient_synchronization()
        optimizer.step()

    A rank that has not computed the gradient of a trainable parameter contributes zeros for it. So
    ranks may use different parameters, and they may compute gradients in different orders.

    Args:
        module: module with the same architecture on all ranks, on any device. The ``requires_grad``
            of its parameters is not changed. A parameter that two layers share counts once.
        bucket_bytes: maximum size of a bucket, as for ``assign_buckets``.
        first_bucket_bytes: maximum size of the first bucket.
        all_reduce: function that starts to sum a bucket, in place; gradients are sent only through
            it.
        group: the ranks that train together; all by default.

    Attributes:
        module: the module that was passed in.

    Cost: in each step, one all-reduce per bucket, of the bucket's bytes. Let r_i be the time at
        which all gradients of buckets 0 … i exist, c_i the seconds that the all-reduce of bucket i
        takes on its own, k the index of the last bucket, and T the time at which the backward pass
        ends. Then a step waits max_i(r_i + c_i + … + c_k) - T seconds, or not at all if that is
        negative.
        Memory: gradients are views of the buckets, which stay allocated between steps. Apart from
        buckets, parameters and activations, a rank holds at most the gradient of one parameter.
    Source: Li et al. 2020 (arXiv 2006.15704), sections 3 and 4.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        all_reduce: StartAllReduce = start_all_reduce,
        group: Group = None,
    ) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks, and register gradient hooks.

        The buckets of the first step are those of ``assign_buckets``.

        Cost: one broadcast per parameter and per buffer.
        """
        super().__init__()
        self.module = module
        self._limits = bucket_bytes, first_bucket_bytes
        self._all_reduce, self._group = all_reduce, group
        broadcast_module(module, group)

        self._params = [p for p in module.parameters() if p.requires_grad]
        self._arrived: list[Tensor] = []  # parameters, in the order in which their gradients arrive
        self._is_synchronizing = True
        self._is_ordered = False  # whether the buckets follow the order in which gradients arrive
        self._buckets: list[_Bucket]
        self._bucket_of: dict[Tensor, _Bucket]
        self._waiting: deque[_Bucket]  # buckets whose all-reduce has not started in this step
        self._under_way: list[tuple[_Bucket, Started]]
        self._make_buckets()
        for parameter in self._params:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with all arguments, and return what it returns.

        Nothing is sent, so one rank may evaluate on its own. Under ``torch.no_grad``, gradients
        stay unchanged.
        """
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward passes add to the gradients of this rank only; nothing is sent.

            with ddp.no_sync():
                loss_of(ddp(first)).backward()
            loss_of(ddp(second)).backward()
            ddp.finish_gradient_synchronization()    # mean over ranks of the sum of both

        Only the backward pass has to run inside the block; the forward pass may have run anywhere.
        An error inside the block ends it as usual, and propagates.
        """
        before = self._is_synchronizing
        self._is_synchronizing = False
        try:
            yield
        finally:
            self._is_synchronizing = before  # still False inside another no_sync

    def finish_gradient_synchronization(self) -> None:
        """Wait until each gradient holds its mean over all ranks, bit for bit the same everywhere.

        Buckets may be divided by the number of ranks before or after they are summed.

        Every rank calls this once per step, after at most one backward pass outside ``no_sync``.
        The call first starts to sum the buckets that still lack gradients: this rank may have used
        only some parameters, or run no backward pass outside ``no_sync``. Afterwards, a trainable
        parameter that no rank used has a gradient of zeros, not None; a frozen parameter has no
        gradient. The gradients are still views of the buckets that were summed.

        The first call also determines the buckets of all later steps, which replace the others when
        the next backward pass begins. To get them, ``assign_buckets`` is given the parameters in
        the reverse of the order in which their gradients arrived on rank 0, outside ``no_sync``.
        Gradients that did not arrive there count as the last to arrive, in the order that was
        assumed for the first step (the reverse of the module's).

        Cost: in the first call, one broadcast of 8 bytes per trainable parameter.
        """
        self._replace_old_buckets()
        while self._waiting:
            self._start(self._waiting.popleft())
        for bucket, work in self._under_way:
            work.wait()
            bucket.flat /= dist.get_world_size(self._group)
        if not self._is_ordered:
            self._order_by_arrival()
        self._begin_step()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's ``state_dict``, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state that the module's ``state_dict`` returned."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _make_buckets(self) -> None:
        """Allocate buckets for ``self._params``; ``hold`` later moves the gradients into them."""
        self._buckets, self._bucket_of, self._waiting = [], {}, deque()  # frees the old ones
        for indices in assign_buckets(self._params, *self._limits):
            self._buckets.append(_Bucket([self._params[index] for index in indices]))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.params}
        self._has_old_buckets = False
        self._begin_step()

    def _replace_old_buckets(self) -> None:
        """Replace old buckets at the start of a step, when zero_grad has dropped their views."""
        if self._has_old_buckets:
            self._make_buckets()

    def _begin_step(self) -> None:
        self._waiting, self._under_way = deque(self._buckets), []
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.params)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Move a gradient into its bucket; start to sum full buckets, always in the same order."""
        self._replace_old_buckets()
        self._bucket_of[parameter].hold(parameter)
        if not self._is_synchronizing:
            return
        self._arrived.append(parameter)
        self._bucket_of[parameter].num_missing -= 1
        while self._waiting and not self._waiting[0].num_missing:
            self._start(self._waiting.popleft())

    def _start(self, bucket: "_Bucket") -> None:
        bucket.hold_gradients()
        self._under_way.append((bucket, self._all_reduce(bucket.flat, self._group)))

    def _order_by_arrival(self) -> None:
        """Sort the parameters into the reverse of the order in which rank 0's gradients arrived."""
        places: dict[Tensor, int] = {p: place for place, p in enumerate(self._params)}
        arrived = dict.fromkeys([*self._arrived, *reversed(self._params)])  # each once
        order = torch.tensor([places[p] for p in arrived], device=group_device(self._group))
        dist.broadcast(order, group=self._group, group_src=0)
        self._params = [self._params[place] for place in reversed(order.tolist())]
        self._is_ordered = self._has_old_buckets = True


class _Bucket:
    """Parameters whose gradients are views of one flat tensor."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self.num_missing = params, len(params)
        sizes = [parameter.numel() for parameter in params]
        self.flat = torch.zeros(sum(sizes), dtype=params[0].dtype, device=params[0].device)
        parts = self.flat.split(sizes)
        self._views = {p: laid_out_like(p, part) for part, p in zip(parts, params, strict=True)}

    def hold_gradients(self) -> None:
        """Make each gradient a view of this bucket; a missing one becomes zeros."""
        for parameter in self.params:
            self.hold(parameter)

    def hold(self, parameter: Tensor) -> None:
        """Make the parameter's gradient a view of this bucket, copying its values if necessary."""
        view = self._views[parameter]
        if parameter.grad is None:
            parameter.grad = view.zero_()
        elif parameter.grad is not view:
            # The sum over the ranks has no graph, not even after backward(create_graph=True).
            parameter.grad = view.copy_(parameter.grad.detach())
