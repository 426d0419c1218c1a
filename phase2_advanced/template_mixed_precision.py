"""Mixed precision: compute in 16 bits, keep and update the weights in 32.

Tasks 2.3 and 2.4. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 2.3``.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from phase2_advanced.given import (
    AllReduce,
    Batch,
    Group,
    LossSum,
    StepResult,
    all_reduce,
    cross_entropy_sum,
)


class LossScaler:
    """Scales gradients into the range of float16 and back; skips a step if any is not finite.

    Multiplying the loss by a scale multiplies every gradient by it too. The scale falls after an
    overflow, and rises after many steps without one. All ranks have the same scale:
        scale 65536, an inf on rank 1 only    no rank steps, then the scale is 32768 on all ranks
        2000 updates without an overflow      the scale is 65536 again

    In each training step, call ``scale``, run the backward pass, call ``unscale`` if anything reads
    the gradients, and finally call ``step`` and ``update``.

    Args:
        init_scale: initial scale.
        growth_factor: factor by which the scale is multiplied when it grows.
        backoff_factor: factor by which the scale is multiplied after an overflow.
        growth_interval: number of consecutive updates without an overflow before the scale grows.
        all_reduce: function that sums a tensor over the group, in place.
        group: the ranks that train together; all by default.

    Attributes:
        value: the scale.
        good_steps: updates without an overflow since the scale last changed.
        is_finite: results of ``unscale`` since the last update, by optimizer.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        all_reduce: AllReduce = all_reduce,
        group: Group = None,
    ) -> None:
        self.value = init_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.all_reduce, self.group = all_reduce, group
        self.good_steps = 0
        self.is_finite: dict[Optimizer, bool] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, for the backward pass.

        Args:
            loss: a scalar of any floating-point dtype; it is not changed. The gradient of a float16
                loss is the scale itself. A scale of 65536 is inf in float16, so with such a loss,
                the step will be skipped.

        Returns:
            The scaled loss, in float64 if the loss is in float64, otherwise in float32, because it
            may exceed 65504, the largest finite float16 value.
        """
        # TODO 2.3: the loss times the scale, as a tensor through which backward can go.
        #   Example: a float16 loss of 3.0 with the first scale: 196608.0 in float32 (not inf).
        #   About 1 to 3 lines.
        raise NotImplementedError("Task 2.3: LossScaler.scale, see guidelines.md#23-scale-the-loss")

    def unscale(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of ``optimizer`` by the scale, and return whether all are finite.

        A second call for the same optimizer before ``update`` changes nothing, sends nothing, and
        returns the same result.

        Args:
            optimizer: optimizer whose parameters' gradients are divided in place. A parameter
                without a gradient still has none afterwards; different ranks may lack the gradients
                of different parameters.

        Returns:
            Whether every element of all ranks' gradients is finite; the same on all ranks.

        Cost: one all-reduce of one number, on the device of the parameters.
        """
        # TODO 2.3: divide all gradients once in each step; the same answer on all ranks.
        #   Example: scale 4, gradients [8.0, 2.0] on rank 0 and [inf] on rank 1: rank 0 then has
        #   [2.0, 0.5], and both ranks return False.
        #   About 12 lines; write a helper method.
        raise NotImplementedError(
            "Task 2.3: LossScaler.unscale, see guidelines.md#23-scale-the-loss"
        )

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step on all ranks if all gradients are finite, otherwise on none.

        The gradients are unscaled first, unless ``unscale`` has been called since the last update.
        Gradients that were clipped after ``unscale`` are used as they are.

        Returns:
            Whether the step was taken. If it was not, the parameters and the optimizer's state are
            unchanged.
        """
        # TODO 2.3: the optimizer steps on every rank, or on none.
        #   Example: 3 ranks, a nan on rank 2: no parameter moves, and all 3 return False.
        #   About 4 lines.
        raise NotImplementedError("Task 2.3: LossScaler.step, see guidelines.md#23-scale-the-loss")

    def update(self) -> None:
        """Adapt the scale to the results of ``unscale`` since the last update.

        If any optimizer's gradients were not finite, the scale is multiplied by ``backoff_factor``,
        and the count of good steps restarts at 0. Otherwise the count grows by 1; when it reaches
        ``growth_interval``, the scale is multiplied by ``growth_factor``, and the count restarts at
        0. If ``unscale`` has not been called since the last update, the step counts as good. In any
        case, the next ``unscale`` divides the gradients again.
        """
        # TODO 2.3: the scale and the count as they should be for the next step.
        #   Example: scale 8, interval 2, found good, bad, good, good: 8, 4, 4, 8.
        #   About 8 lines.
        raise NotImplementedError(
            "Task 2.3: LossScaler.update, see guidelines.md#23-scale-the-loss"
        )

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint must hold, as plain numbers by name.

        Later calls do not change the returned dict. Results of ``unscale`` since the last update
        are not saved.
        """
        # TODO 2.3: all that a run which is resumed cannot know from the arguments.
        #   Example: interval 2000, saved after 1,999 good updates: the next good one after loading
        #   doubles the scale.
        #   About 1 to 3 lines.
        raise NotImplementedError(
            "Task 2.3: LossScaler.state_dict, see guidelines.md#23-scale-the-loss"
        )

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore ``state``, to continue exactly as the scaler that returned it would have.

        Earlier results of ``unscale`` are discarded.

        Args:
            state: dict returned by ``state_dict`` of a scaler created with the same arguments.
        """
        # TODO 2.3: this scaler is where the saved one was.
        #   Example: saved with scale 1024 after 7 good updates: the scale is 1024, and with
        #   interval 10 the third good update from here doubles it.
        #   About 1 to 2 lines.
        raise NotImplementedError(
            "Task 2.3: LossScaler.load_state_dict, see guidelines.md#23-scale-the-loss"
        )


def mixed_precision_step(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: LossScaler,
    batch: Batch,
    *,
    dtype: torch.dtype = torch.float16,
    reduce_dtype: torch.dtype = torch.float32,
    max_norm: float = inf,
    loss_sum: LossSum = cross_entropy_sum,
    all_reduce: AllReduce = all_reduce,
    group: Group = None,
) -> StepResult:
    """Take one step on the batches of all ranks: compute in 16 bits, update the weights in 32.

    The parameters are the master weights. They and their gradients stay in float32, while autocast
    computes with 16-bit copies of the weights. Weights in 16 bits would lose small updates:
        weight 1.0, update 0.0001    float32: 0.9999    float16: 1.0, the update is lost

    With B targets on all ranks together, the gradient is that of (sum of all losses) / B. Each rank
    divides its loss by B before the backward pass, because undivided gradients may overflow.

    Args:
        model: the model, equal on all ranks, with trainable parameters in float32.
        optimizer: optimizer of all trainable parameters of ``model``. Gradients left over from
            before the step are discarded.
        scaler: the loss scaler, equal on all ranks, created with the same group; updated once.
        batch: this rank's tensors; ranks may have different numbers of rows and targets, or none.
        dtype: dtype that autocast computes in, float16 or bfloat16.
        reduce_dtype: dtype in which the gradients are sent and summed, still scaled but already
            divided by B. A sum that overflows in this dtype counts as a non-finite gradient.
        max_norm: the largest norm allowed for the unscaled gradient, over all parameters together;
            a larger gradient is scaled down to this norm.
        loss_sum: returns the sum of this rank's losses and the number of its targets; called once
            on every rank, under autocast. ``loss_sum.count(batch)`` counts targets without a pass.
        all_reduce: function that sums a tensor over the group, in place.
        group: the ranks that train together; all by default.

    Returns:
        The loss, whether the step was skipped, and the norm. A step is skipped on all ranks or on
        none. If it is skipped, the parameters and the optimizer's state are unchanged, the scale
        has fallen, and the loss is reported as usual.

    Raises:
        ValueError: the same on every rank, if no rank has any targets; the parameters are left
            unchanged. It may be raised before the forward pass or after an all-reduce.

    Cost: one all-reduce of the gradients of all trainable parameters, in one bucket of
        ``reduce_dtype``, with zeros in place of missing gradients; the all-reduce of ``scaler``;
        and the number of targets and the sum of the losses, in float32 or float64, in one
        all-reduce of two numbers or in two of one number each. The number of targets may be an
        int64.
    """
    # TODO 2.4: one step as one process would do it on all batches, computed in 16 bits.
    #   Example: two ranks with a target and a gradient of 0.75 each, scale 65536, a sum in float16:
    #   it is 49152 (not 98304, which is inf), and both step. A scaled gradient of 131072 that rank
    #   1 computes in float16 is inf: both skip, and both scales fall from 65536 to 32768.
    #   About 25 lines; write a helper for the bucket.
    raise NotImplementedError(
        "Task 2.4: mixed_precision_step, see guidelines.md#24-a-step-in-mixed-precision"
    )
