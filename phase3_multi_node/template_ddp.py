"""Data parallelism that sums gradients in buckets, while the backward pass still computes.

Tasks 3.11 and 3.12. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 3.11``.
"""

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
    # TODO 3.11: every index in one bucket, filled from the last parameter to the first.
    #   Tools: nbytes, dtype and device of a tensor, collections.defaultdict, sorted.
    #   Example: 10 float32 parameters of 1 kB each, buckets of 4 kB, the first of 2 kB: buckets of
    #   2, 4 and 4 parameters, of which the first is [9, 8].
    #   About 15 lines.
    raise NotImplementedError(
        "Task 3.11: assign_buckets, see guidelines.md#311-assign-gradients-to-buckets"
    )


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
        # TODO 3.12: the same start on all ranks, the first buckets, and a hook on every gradient,
        #   which moves it into its bucket.
        #   Tools: super().__init__, broadcast_module (given), assign_buckets (3.11),
        #   register_post_accumulate_grad_hook, parameter.grad, torch.zeros, split, view, copy_,
        #   zero_. AccumulateGrad adds in place to a gradient that exists, and makes a new tensor
        #   where it is None.
        #   Example: 10 float32 parameters of 1 MB, buckets of 4 MB, the first of 2 MB: tensors of
        #   2, 4 and 4 MB; of the 10 hooks, the 2nd, 6th and 10th call start an all-reduce.
        #   About 20 lines, and 35 for helper methods.
        raise NotImplementedError(
            "Task 3.12: DistributedDataParallel.__init__, "
            "see guidelines.md#312-overlap-the-backward-pass"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with all arguments, and return what it returns.

        Sends nothing, so that a rank may evaluate alone. Under ``torch.no_grad``, gradients stay as
        they are.
        """
        # TODO 3.12: the module's result.
        #   Tools: self.module.
        #   Example: forward(x, scale=2.0) returns module(x, scale=2.0).
        #   About 1 to 2 lines.
        raise NotImplementedError(
            "Task 3.12: DistributedDataParallel.forward, "
            "see guidelines.md#312-overlap-the-backward-pass"
        )

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
        # TODO 3.12: hooks that start nothing while the context is open.
        #   Tools: yield, try and finally.
        #   Example: 3 backward passes inside and 1 outside: the all-reduces of one backward pass.
        #   About 5 lines.
        raise NotImplementedError(
            "Task 3.12: DistributedDataParallel.no_sync, "
            "see guidelines.md#312-overlap-the-backward-pass"
        )

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
        # TODO 3.12: the means, also where gradients are missing; after the first step, new buckets.
        #   Tools: wait, dist.get_world_size, dist.broadcast with group_src=0, group_device (given).
        #   Example: 2 ranks, and a parameter with a gradient of 3.0 on rank 0 that rank 1 does not
        #   use: its gradient is 1.5 on both.
        #   About 8 lines, and 10 for helper methods.
        raise NotImplementedError(
            "Task 3.12: DistributedDataParallel.finish_gradient_synchronization, "
            "see guidelines.md#312-overlap-the-backward-pass"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of the module, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what the module's ``state_dict`` returned."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)
