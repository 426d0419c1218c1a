"""Data parallelism that sums gradients in buckets, while the backward pass still computes."""

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
    start_all_reduce,
)

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


def assign_buckets(
    params: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int
) -> list[list[int]]:
    """Assign parameters to buckets whose gradients travel in one message.

    The backward pass computes the gradients of the last parameters first, so buckets are filled
    from the last parameter to the first. Sizes in kB, ``bucket_bytes`` 8 kB, first 2 kB:
        params     4 float32   3 float32   6 float32   1 float32   1 float32
        buckets    ──── [1, 0]: 7 kB ───    ─ [2] ─     ─── [4, 3]: 2 kB ───

    Args:
        params: any tensors, the same one perhaps twice; only their own bytes (a view's, not those
            of the storage that it shares), dtypes and devices count. The sequence is only read.
        bucket_bytes: the most that a bucket holds; a larger parameter has a bucket to itself.
        first_bucket_bytes: the same for the first bucket of each dtype and device, be it less or
            more. A small one leaves early.

    Returns:
        Buckets of indices into ``params``; every index is in one bucket. A bucket holds one dtype
        on one device, and parameters of one dtype and device stand in their order, reversed. Each
        goes into the bucket of the one before it if it fits, otherwise into a new one. Buckets are
        in the order in which they become complete: the one whose smallest index is largest comes
        first. For no parameters, an empty list.

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
    """Fill one bucket after the other; ``room`` is that of the first."""
    buckets: list[list[int]] = [[]]
    for index in indices:
        if buckets[-1] and params[index].nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(index)
        room -= params[index].nbytes
    return buckets


# Three stages of one idea. The first two are given, to compare with.


class FlatDataParallel(nn.Module):
    """Sums all gradients at once, after the backward pass: nothing overlaps.

    Gradients have one dtype, and all ranks use the same parameters.
    """

    def __init__(
        self, module: nn.Module, *, all_reduce: AllReduce = all_reduce, group: Group = None
    ) -> None:
        """Make all ranks equal to rank 0."""
        super().__init__()
        self.module, self.all_reduce, self.group = module, all_reduce, group
        broadcast_module(module, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Replace the gradients by their means over all ranks."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.all_reduce(flat, self.group)
        flat /= dist.get_world_size(self.group)
        means = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


class PerParameterDataParallel(nn.Module):
    """Sums every gradient as soon as it exists: all overlaps, but each message costs a latency.

    All ranks use the same parameters, in the same order.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        all_reduce: StartAllReduce = start_all_reduce,
        group: Group = None,
    ) -> None:
        """Make all ranks equal to rank 0, and wait for gradients."""
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
        """Wait until the gradients are their means over all ranks."""
        for gradient, work in self._under_way:
            work.wait()
            gradient /= dist.get_world_size(self.group)
        self._under_way.clear()


class DistributedDataParallel(nn.Module):
    """Sums gradients in buckets, each as soon as the backward pass has computed all of it.

    B0 … B2 are the all-reduces of three buckets; the last one is all that a step waits for:
        computing    forward     backward                     step
        link                         ├─ B0 ─┤├── B1 ──┤├─ B2 ─┤

    A step is the same as on one process with the batches of all ranks:
        optimizer.zero_grad()
        loss_of(ddp(inputs)).backward()          # the mean over this rank's equal share
        ddp.finish_gradient_synchronization()
        optimizer.step()

    Where a rank has not computed the gradient of a trainable parameter, zeros take part instead. So
    ranks may use different parameters, and compute gradients in different orders.

    Args:
        module: same architecture on all ranks, on any device. What is trainable stays so. A
            parameter that two layers share counts once.
        bucket_bytes: the most that a bucket holds, as for ``assign_buckets``.
        first_bucket_bytes: the same for the first bucket.
        all_reduce: starts the sum of a bucket, in place; gradients travel through nothing else.
        group: the ranks that train together; all by default.

    Attributes:
        module: the module that was passed in.

    Cost: in each step one all-reduce per bucket, of its bytes. With r_i the time at which the last
        gradient of buckets 0 … i exists, c_i the seconds that the all-reduce of bucket i takes by
        itself, and T the end of the backward pass, a step waits max_i(r_i + c_i + … + c_k) - T
        seconds, or not at all if that is below 0. Memory: gradients are views of the buckets, which
        exist in all steps. Besides these, parameters and activations, there is no more than the
        gradient of one parameter.
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
        """Make parameters and buffers of all ranks equal to rank 0's, and wait for gradients.

        The buckets of the first step are those of ``assign_buckets``.

        Cost: one broadcast of each parameter and each buffer.
        """
        super().__init__()
        self.module = module
        self._limits = bucket_bytes, first_bucket_bytes
        self._all_reduce, self._group = all_reduce, group
        broadcast_module(module, group)

        self._params = [p for p in module.parameters() if p.requires_grad]
        self._arrived: list[Tensor] = []  # parameters, as their gradients came in this step
        self._is_synchronizing = True
        self._is_ordered = False  # buckets follow the order in which the gradients of a step came
        self._buckets: list[_Bucket]
        self._bucket_of: dict[Tensor, _Bucket]
        self._waiting: deque[_Bucket]  # buckets that have not started in this step
        self._under_way: list[tuple[_Bucket, Started]]
        self._make_buckets()
        for parameter in self._params:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with all arguments, and return what it returns.

        Sends nothing, so that a rank may evaluate alone. Under ``torch.no_grad``, gradients stay as
        they are.
        """
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add to the gradients of this rank alone; nothing is sent.

            with ddp.no_sync():
                loss_of(ddp(first)).backward()
            loss_of(ddp(second)).backward()
            ddp.finish_gradient_synchronization()    # the mean over ranks of both, added up

        The backward pass counts, wherever the forward pass was. An error inside ends it, too,
        and comes out of it.
        """
        before = self._is_synchronizing
        self._is_synchronizing = False
        try:
            yield
        finally:
            self._is_synchronizing = before  # still False inside of another no_sync

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients of all ranks are their means; the same bit for bit on all ranks.

        Buckets may be divided before they are summed or after.

        Every rank calls it once after at most one backward pass outside of ``no_sync``. It first
        starts the buckets that still lack a gradient: the rank did not use a parameter, or has
        computed nothing, or only inside of ``no_sync``. Afterwards, the gradient of a parameter
        that no rank used is zero (not None), and what is frozen has none.

        The first call also orders the buckets of all later steps: they are those of
        ``assign_buckets`` for the reverse of the order in which rank 0's gradients came outside of
        ``no_sync``, and those that did not come there count as last, in the order of the first
        step.

        Cost: the first time, one broadcast of 8 bytes per trainable parameter.
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
        """Return that of the module, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what the module's ``state_dict`` returned."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _make_buckets(self) -> None:
        """Lay out buckets for ``self._params``; gradients move there when they are held."""
        self._buckets, self._bucket_of, self._waiting = [], {}, deque()  # frees the old ones
        for indices in assign_buckets(self._params, *self._limits):
            self._buckets.append(_Bucket([self._params[index] for index in indices]))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.params}
        self._has_old_buckets = False
        self._begin_step()

    def _replace_old_buckets(self) -> None:
        """Lay out buckets in the new order, not before a step begins: zero_grad frees the old."""
        if self._has_old_buckets:
            self._make_buckets()

    def _begin_step(self) -> None:
        self._waiting, self._under_way = deque(self._buckets), []
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.params)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Start the buckets that are complete now, in the one order that all ranks share."""
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
        """Order the parameters so that, reversed, they stand as their gradients came on rank 0."""
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
        self._views = {p: part.view(p.shape) for part, p in zip(parts, params, strict=True)}

    def hold_gradients(self) -> None:
        """Make each gradient the view it should be; zeros where there is none."""
        for parameter in self.params:
            self.hold(parameter)

    def hold(self, parameter: Tensor) -> None:
        """Make a gradient the view it should be; copy it if it lies elsewhere."""
        view = self._views[parameter]
        if parameter.grad is None:
            parameter.grad = view.zero_()
        elif parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)
