"""A hook that lets data parallelism send compressed gradients, and forgets nothing of them.

Task 4.13. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade it: ``distlab check 4.13``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase4_production.given import Group, Piece, Reduce, Started


class CompressionHook:
    """Lets data parallelism send compressed gradients; what is left behind goes with the next ones.

    A gradient of 0.4 in each step, and a ``reduce`` that sends whole numbers only:
        step              1      2      3      4      5
        gradient        0.4    0.4    0.4    0.4    0.4
        + residual      0.4    0.8    0.2    0.6    0.0
        sent              0      1      0      1      0     2 in all, as of the gradients
        residual        0.4   -0.2    0.2   -0.4    0.0

    It has two doors, for torch's DistributedDataParallel and for that of task 3.12:
        ddp.register_comm_hook(None, hook)
        DistributedDataParallel(module, all_reduce=hook.all_reduce)

    In every step, what ``reduce`` gets, once for each bucket, is this rank's gradients plus their
    residuals, with pieces in one order on all ranks; what they become is its ``mean``; and the
    residuals are then what it got, less what this rank ``sent``. Nothing else is sent.

    If the mean of a bucket holds a NaN or an infinity, its residuals stay as they were: training
    skips that step. No residual is ever NaN or infinite; what would be so becomes 0.

    A residual belongs to a parameter, whichever bucket that is in: torch lays out new buckets after
    the first step, and a program that was restarted begins with the first ones again.

    Args:
        module: module whose gradients are sent: the module itself, not the DistributedDataParallel
            around it. Pieces have the names of its ``named_parameters``, and the shapes of these.
            Each parameter fills its memory without gaps, as those of torch's layers do.
        reduce: such as a ``PowerSGD``, for the same ranks. It gets float32 or float64: gradients of
            16 bits are widened, and so residuals are never narrower than float32.

    Source: Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
    """

    def __init__(self, module: nn.Module, reduce: Reduce) -> None:
        """Prepare: no residuals, and nothing is sent yet."""
        # TODO 4.13: keep the arguments, and begin without residuals; torch asks a hook for
        #   __name__ and __qualname__, which an object has to be given.
        #   Tools: module.named_parameters.
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
        """Average a bucket of torch's DistributedDataParallel, which calls it.

        Args:
            state: the state that was registered; it is not used.
            bucket: holds gradients in the order of its parameters, and each of them laid out in
                memory as its parameter is: ``channels_last``, for example.

        Returns:
            A future of the whole buffer with the mean, which torch does not divide any more.
        """
        # TODO 4.13: average the gradients in the buffer, and return a future of the buffer.
        #   Tools: bucket.buffer, bucket.parameters, as_strided, torch.futures.Future, set_result.
        #   Example: 2 ranks have 0.4 and 1.4, and reduce sends whole numbers: both get 0.5.
        #   About 35 lines with what all_reduce needs, too.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.__call__, see guidelines.md#413-compress-and-forget-nothing"
        )

    def all_reduce(self, flat: Tensor, group: Group = None) -> Started:
        """Sum a bucket in place, as the ``all_reduce`` of task 3.12's DistributedDataParallel.

        Args:
            flat: the bucket; the gradients of its parameters are views of it.
            group: the ranks that train together; all by default.

        Returns:
            Something whose ``wait`` returns when ``flat`` holds the sum: N times the mean, which
            the caller divides by N.

        Raises:
            ValueError: ``flat`` has elements that are the gradient of no parameter.
        """
        # TODO 4.13: find the gradients in the bucket, average them, and make it a sum.
        #   Tools: data_ptr, nbytes, dist.get_world_size.
        #   Example: 2 ranks have 0.4 and 1.4, and reduce sends whole numbers: flat holds 1.0 then.
        #   About 16 lines with a helper.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.all_reduce, "
            "see guidelines.md#413-compress-and-forget-nothing"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run of this rank needs to continue bit for bit: a copy.

        Residuals differ from rank to rank: each rank saves its own state. It holds that of
        ``reduce``, too, if that has a ``state_dict``.
        """
        # TODO 4.13: return copies of the residuals, with the state of reduce.
        #   Tools: clone, getattr or hasattr.
        #   Example: after a step with a Linear layer it holds 2 residuals.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.state_dict, "
            "see guidelines.md#413-compress-and-forget-nothing"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same rank, which is only read."""
        # TODO 4.13: take copies of the residuals, and pass its part to reduce.
        #   Tools: clone, hasattr.
        #   Example: a state with 2 residuals is loaded: the next step adds these 2.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.13: CompressionHook.load_state_dict, "
            "see guidelines.md#413-compress-and-forget-nothing"
        )
