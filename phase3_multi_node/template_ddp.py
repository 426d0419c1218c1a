"""Data parallelism that sums gradients in buckets while the backward pass is still running.

Tasks 3.10 and 3.11. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 3.10``.
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
    # TODO 3.10: every index in one bucket, filled from the last parameter to the first.
    #   Example: 10 float32 parameters of 1 kB each, buckets of 4 kB, the first of 2 kB: buckets of
    #   2, 4 and 4 parameters, of which the first is [9, 8].
    #   About 15 lines.
    raise NotImplementedError(
        "Task 3.10: assign_buckets, see guidelines.md#310-assign-gradients-to-buckets"
    )


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
        # TODO 3.11: the same start on all ranks, the first buckets, and a hook on every gradient,
        #   which moves it into its bucket.
        #   Example: 10 float32 parameters of 1 MB, buckets of 4 MB, the first of 2 MB: tensors of
        #   2, 4 and 4 MB; of the 10 hooks, the 2nd, 6th and 10th call start an all-reduce.
        #   About 20 lines, and 35 for helper methods.
        raise NotImplementedError(
            "Task 3.11: DistributedDataParallel.__init__, "
            "see guidelines.md#311-overlap-the-backward-pass"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with all arguments, and return what it returns.

        Nothing is sent, so one rank may evaluate on its own. Under ``torch.no_grad``, gradients
        stay unchanged.
        """
        # TODO 3.11: the module's result.
        #   Example: forward(x, scale=2.0) returns module(x, scale=2.0).
        #   About 1 to 2 lines.
        raise NotImplementedError(
            "Task 3.11: DistributedDataParallel.forward, "
            "see guidelines.md#311-overlap-the-backward-pass"
        )

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
        # TODO 3.11: hooks that start nothing while the context is open.
        #   Example: 3 backward passes inside and 1 outside: the all-reduces of one backward pass.
        #   About 5 lines.
        raise NotImplementedError(
            "Task 3.11: DistributedDataParallel.no_sync, "
            "see guidelines.md#311-overlap-the-backward-pass"
        )

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
        # TODO 3.11: the means, also where gradients are missing; after the first step, new buckets.
        #   Example: 2 ranks, and a parameter with a gradient of 3.0 on rank 0 that rank 1 does not
        #   use: its gradient is 1.5 on both.
        #   About 8 lines, and 10 for helper methods.
        raise NotImplementedError(
            "Task 3.11: DistributedDataParallel.finish_gradient_synchronization, "
            "see guidelines.md#311-overlap-the-backward-pass"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's ``state_dict``, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state that the module's ``state_dict`` returned."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)
