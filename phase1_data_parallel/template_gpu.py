"""What a GPU does meanwhile: a step for which the host waits once, and batches copied ahead.

Tasks 1.14 and 1.15. Each docstring says what the function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 1.14``.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phase1_data_parallel.given import (
    Batch,
    Group,
    StepNumbers,
    count_targets,
    map_tensors,
    new_stream,
    summed_loss,
)


def train_step_ahead(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    max_norm: float = 1.0,
    group: Group = None,
) -> StepNumbers:
    """Take one optimizer step on the batches of all ranks, while the host runs ahead of the GPU.

    With B targets on all ranks, g is the gradient of (sum of all losses) / B, and ``norm`` is the
    square root of the sum of the squares of all its elements:
        norm is finite       the optimizer gets g, scaled down to max_norm if norm is larger
        norm is inf or NaN   the optimizer gets zeros, with which SGD changes no parameter (with
                             momentum or weight decay, it continues without this step's gradient)

    The host waits for the GPU once: it reads three numbers after it has launched everything, the
    optimizer's step included.

    Args:
        model: the model, equal on all ranks; maps inputs to logits (…, classes). Its trainable
            parameters have one dtype, float32 or float64.
        optimizer: optimizer of ``model``'s parameters, with the same settings on all ranks.
            Gradients left over from before the step are discarded.
        batch: this rank's inputs, and targets (…) int64, on the model's device; the ranks' batches
            may differ in size, and may be empty. The batch is not changed.
        max_norm: largest norm of the gradient that the optimizer gets.
        group: the ranks that train together; all by default.

    Returns:
        Loss and accuracy over the targets of all ranks, before the step, and the norm of g before
        it is scaled. An answer is right if the largest logit is that of the target. Without any
        target, all three are NaN, and the optimizer gets zeros.

    Cost: one forward and backward pass over this rank's batch, one all-reduce of P + 3 numbers, for
        P elements of trainable parameters, in their dtype; one host sync. A trainable parameter
        without a gradient on this rank counts as zeros; a frozen one is left as it is.
    """
    # TODO 1.14: do the step; the last line is the only one that needs a value from the GPU.
    #   Example: losses 1, 2, 3 on rank 0 and 6 on rank 1, whose gradients add up to (6, 0) and
    #   (6, 16): loss 3.0, g = (3, 4), norm 5.0. With max_norm=1, the optimizer gets (0.6, 0.8).
    #   About 22 lines.
    raise NotImplementedError(
        "Task 1.14: train_step_ahead, see guidelines.md#114-remove-the-host-syncs"
    )


class Prefetcher:
    """Iterates over a loader's batches on a GPU; the next one is copied while one is being used.

    The copies run on a stream of their own. The step on batch k, on the caller's stream, comes
    after copy k, and copy k+1 runs beside it:
        copies     ─ copy 0 ─┬─ copy 1 ────┬─ copy 2 ────┬─ copy 3 ──
        caller's             └─ step 0 ────┴─ step 1 ────┴─ step 2 ──

    Args:
        loader: any iterable of batches in the host's memory, pinned or not. A batch is a tensor, or
            a tuple, list or dict of batches; what else is in it is passed on as it is.
        device: the device to copy to.

    Attributes:
        stream: the stream of the copies; None if ``device`` is not a GPU.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str) -> None:
        self.loader, self.device = loader, torch.device(device)
        self.stream = new_stream(self.device)

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches in order, each on the device; every iteration reads it anew.

        On a GPU, when batch k is yielded, the copy of batch k+1 has been launched, and the loader
        has not been asked for any batch after k+1. The host never waits for the GPU. Work that the
        caller then puts on its current stream comes after the copy of batch k, but does not wait
        for that of batch k+1. When the caller drops a batch, its memory is not reused before that
        work is done. On any other device, the batches are yielded as they come.

        Cost: K batches that take c seconds to copy and s to be used take c + K · max(c, s) seconds
            instead of K · (c + s); memory for two batches, if the caller waits for the GPU once per
            batch (the copies of a host that is further ahead are further ahead, too).
        """
        # TODO 1.15: yield the batches, each ready for the caller's stream, and one copied ahead.
        #   Example: of 3 batches, 2 have been taken from the loader when the first is yielded, and
        #   3 when the second and the third are.
        #   About 20 lines, with helper methods.
        raise NotImplementedError(
            "Task 1.15: Prefetcher.__iter__, see guidelines.md#115-prefetch-on-a-stream"
        )
