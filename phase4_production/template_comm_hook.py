"""A hook that lets data parallelism send compressed gradients without losing anything.

Task 4.13. The docstring says what a function promises, its TODO gives an example, and guidelines.md
explains why and how. To grade it: ``distlab check 4.13``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase4_production.given import Group, Piece, Reduce, Started


class CompressionHook:
    """Lets data parallelism send compressed gradients; what is left out is sent in later steps.

    For a gradient of 0.4 in each step, and a ``reduce`` that sends only whole numbers:
        step              1      2      3      4      5
        gradient        0.4    0.4    0.4    0.4    0.4
        + residual      0.4    0.8    0.2    0.6    0.0
        sent              0      1      0      1      0     2 in all, like the gradients
        residual        0.4   -0.2    0.2   -0.4    0.0

    The hook has two entry points: one for torch's DistributedDataParallel, and one for the class of
    task 3.11:
        ddp.register_comm_hook(None, hook)
        DistributedDataParallel(module, all_reduce=hook.all_reduce)

    In every step, ``reduce`` is called once per bucket, with this rank's gradients plus their
    residuals; the pieces are in the same order on all ranks. The ``mean`` that it returns replaces
    the gradients, and its input minus what this rank ``sent`` becomes the new residuals. Nothing
    else is sent.

    If the mean of a bucket holds a NaN or an infinity, the residuals of that bucket stay unchanged,
    because training skips that step. If it is finite as ``reduce`` returns it, and infinite only in
    a bucket of 16 bits, the residuals may change or not. No residual is ever NaN or infinite; such
    values become 0.

    A residual belongs to a parameter, not to a bucket: torch lays out new buckets after the first
    step, and a restarted program begins with the original ones.

    Args:
        module: module whose gradients are sent: the module itself, not the DistributedDataParallel
            around it. Pieces have the names and shapes of its ``named_parameters``. Each parameter
            fills its memory without gaps, as parameters of torch's layers do.
        reduce: compressor for the same ranks, such as a ``PowerSGD``. It gets float32 or float64,
            because 16-bit gradients are widened first; so residuals are never narrower than
            float32.

    Source: Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
    """

    def __init__(self, module: nn.Module, reduce: Reduce) -> None:
        """Start without residuals; nothing is sent."""
        # TODO 4.13: keep the arguments, and begin without residuals; torch asks a hook for
        #   __name__ and __qualname__, which an object has to be given.
        #   Example: for a Linear layer, there are 2 names, weight and bias, and 0 residuals.
        #   About 5 lines.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.__init__, see guidelines.md#413-compress-and-forget-nothing"
        )

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of torch's DistributedDataParallel, which calls this.

        Args:
            state: registered state, which is not used.
            bucket: bucket whose gradients are in the order of its parameters. Each gradient is laid
                out in memory like its parameter, for example in ``channels_last``. The tensors of
                ``bucket.gradients()`` do not show this: they have the parameters' shapes, but
                always the strides of rows.

        Returns:
            A future of the bucket's buffer, which then holds the mean; torch does not divide it
            again.
        """
        # TODO 4.13: average the gradients in the buffer, and return a future of the buffer.
        #   Example: 2 ranks have 0.4 and 1.4, and reduce sends whole numbers: both get 0.5.
        #   About 35 lines with what all_reduce needs, too.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.__call__, see guidelines.md#413-compress-and-forget-nothing"
        )

    def all_reduce(self, flat: Tensor, group: Group = None) -> Started:
        """Sum a bucket in place; task 3.11's DistributedDataParallel takes this as ``all_reduce``.

        Args:
            flat: the bucket; the gradients of its parameters are views of it.
            group: the ranks that train together; all by default.

        Returns:
            An object whose ``wait`` returns when ``flat`` holds the sum, that is, N times the mean.
            The caller divides it by N.

        Raises:
            ValueError: ``flat`` has elements that belong to no parameter's gradient.
        """
        # TODO 4.13: find the gradients in the bucket, average them, and make it a sum.
        #   Example: 2 ranks have 0.4 and 1.4, and reduce sends whole numbers: flat holds 1.0 then.
        #   About 16 lines with a helper.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.all_reduce, "
            "see guidelines.md#413-compress-and-forget-nothing"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what this rank needs to continue bit for bit in a later run.

        Residuals differ from rank to rank, so each rank saves its own state. The state includes
        that of ``reduce`` if ``reduce`` has a ``state_dict``.
        """
        # TODO 4.13: return copies of the residuals, with the state of reduce.
        #   Example: after a step with a Linear layer it holds 2 residuals.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.state_dict, "
            "see guidelines.md#413-compress-and-forget-nothing"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rank; the state is not changed."""
        # TODO 4.13: take copies of the residuals, and pass its part to reduce.
        #   Example: a state with 2 residuals is loaded: the next step adds these 2.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.load_state_dict, "
            "see guidelines.md#413-compress-and-forget-nothing"
        )
