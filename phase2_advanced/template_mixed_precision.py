"""Mixed precision: compute in 16 bits, keep and update the weights in 32.

Tasks 2.4 and 2.5. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 2.4``.
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
    """Moves gradients into the range of float16 and back, and skips a step if one is not finite.

    Multiplying the loss by a scale multiplies every gradient by it, too. The scale falls after an
    overflow, and rises after many steps without one. All ranks have the same scale:
        scale 65536, an inf on rank 1 only    no rank steps, then the scale is 32768 on all ranks
        2000 updates without an overflow      the scale is 65536 again

    In each step: ``scale``, backward, ``unscale`` if anything needs the gradients, ``step``,
    ``update``.

    Args:
        init_scale: the scale at the beginning.
        growth_factor: factor by which the scale grows after ``growth_interval`` good updates.
        backoff_factor: factor by which it shrinks after an overflow.
        growth_interval: how many updates in a row must be good before the scale grows.
        all_reduce: sums a tensor over the group, in place.
        group: the ranks that train together; all by default.

    Attributes:
        value: the scale.
        good_steps: updates without an overflow since the scale last changed.
        is_finite: result of ``unscale`` by optimizer, since the last update.
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
        """Return the loss times the scale, for backward.

        Args:
            loss: a scalar of any floating dtype; it is not changed. The gradient that reaches a
                float16 loss is the scale: 65536 is inf there, and the step will be skipped.

        Returns:
            In float64 if the loss is in float64, otherwise in float32: a scaled loss may exceed
            65504, where float16 ends.
        """
        # TODO 2.4: the loss times the scale, as a tensor through which backward can go.
        #   Tools: self.value, Tensor.to, torch.promote_types.
        #   Example: a float16 loss of 3.0 with the first scale: 196608.0 in float32 (not inf).
        #   About 1 to 3 lines.
        raise NotImplementedError("Task 2.4: LossScaler.scale, see guidelines.md#24-scale-the-loss")

    def unscale(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of ``optimizer`` by the scale, and return whether all are finite.

        A second call before ``update`` changes nothing, sends nothing, and returns the same.

        Args:
            optimizer: its parameters' gradients are divided in place. A parameter without a
                gradient stays without; ranks may differ in which have one.

        Returns:
            Whether every number in the gradients of all ranks is finite; the same on all ranks.

        Cost: one all-reduce of one number.
        """
        # TODO 2.4: divide all gradients once in each step; the same answer on all ranks.
        #   Tools: optimizer.param_groups, Tensor.isfinite, div_, self.all_reduce with self.group,
        #   self.is_finite.
        #   Example: scale 4, gradients [8.0, 2.0] on rank 0 and [inf] on rank 1: rank 0 then has
        #   [2.0, 0.5], and both ranks return False.
        #   About 12 lines; write a helper method.
        raise NotImplementedError(
            "Task 2.4: LossScaler.unscale, see guidelines.md#24-scale-the-loss"
        )

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step if all gradients are finite, on all ranks or on none.

        Unscales first, unless that was done since the last update. Gradients that were clipped
        after ``unscale`` are used as they are.

        Returns:
            Whether the step was taken. If it was not, the parameters and the optimizer's state are
            as before.
        """
        # TODO 2.4: the optimizer steps on every rank, or on none.
        #   Tools: what you have written above, optimizer.step.
        #   Example: 3 ranks, a nan on rank 2: no parameter moves, and all 3 return False.
        #   About 4 lines.
        raise NotImplementedError("Task 2.4: LossScaler.step, see guidelines.md#24-scale-the-loss")

    def update(self) -> None:
        """Adapt the scale to what was found since the last update.

        If the gradients of any optimizer were not finite: the scale times ``backoff_factor``, and
        the count of good steps begins again. Otherwise one more good step; the last of
        ``growth_interval`` multiplies the scale by ``growth_factor``, and the count begins again.
        An update without any ``unscale`` since the last one counts as a good step. Either way
        ``unscale`` will divide again.
        """
        # TODO 2.4: the scale and the count as they should be for the next step.
        #   Tools: the attributes that __init__ sets.
        #   Example: scale 8, interval 2, found good, bad, good, good: 8, 4, 4, 8.
        #   About 8 lines.
        raise NotImplementedError(
            "Task 2.4: LossScaler.update, see guidelines.md#24-scale-the-loss"
        )

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must hold of this scaler, as plain numbers by name.

        Later calls do not change what was returned. What ``unscale`` has found since the last
        update is not saved.
        """
        # TODO 2.4: all that a run which is resumed cannot know from the arguments.
        #   Tools: the attributes that __init__ sets.
        #   Example: interval 2000, saved after 1,999 good updates: the next good one after loading
        #   doubles the scale.
        #   About 1 to 3 lines.
        raise NotImplementedError(
            "Task 2.4: LossScaler.state_dict, see guidelines.md#24-scale-the-loss"
        )

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on exactly as the scaler that returned ``state`` would have.

        What ``unscale`` has found before does not count.

        Args:
            state: result of ``state_dict`` of a scaler made with the same arguments.
        """
        # TODO 2.4: this scaler is where the saved one was.
        #   Tools: the attributes that __init__ sets.
        #   Example: saved with scale 1024 after 7 good updates: the scale is 1024, and with
        #   interval 10 the third good update from here doubles it.
        #   About 1 to 2 lines.
        raise NotImplementedError(
            "Task 2.4: LossScaler.load_state_dict, see guidelines.md#24-scale-the-loss"
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
    """Do one step on the batches of all ranks: compute in 16 bits, update weights of 32 bits.

    The parameters are the master weights. They and their gradients stay in float32, while autocast
    computes with 16-bit copies of them:
        weight 1.0, update 0.0001    float32: 0.9999    float16: 1.0, the update is lost

    With B targets on all ranks, the gradient is that of (sum of all losses) / B.

    Args:
        model: equal on all ranks; trainable parameters in float32.
        optimizer: optimizer of all trainable parameters of ``model``. Gradients left from before
            the step do not count.
        scaler: equal on all ranks, with the same group; updated once.
        batch: this rank's tensors; ranks may have different numbers of rows and targets, or none.
        dtype: dtype that autocast computes in, float16 or bfloat16.
        reduce_dtype: dtype in which gradients are sent and summed, while they are scaled, but
            already divided by B. A sum that overflows there counts as a gradient that is not
            finite.
        max_norm: the largest norm of the unscaled gradient, taken over all parameters; a larger
            gradient is scaled down to it.
        loss_sum: returns the sum of this rank's losses and the number of its targets; called once
            on every rank, under autocast.
        all_reduce: sums a tensor over the group, in place.
        group: the ranks that train together; all by default.

    Returns:
        Loss, decision and norm. If the step is skipped, it is skipped on all ranks: the parameters
        and the optimizer's state are as before, and the scale has fallen. Its loss is reported
        as that of any other step.

    Raises:
        ValueError: the same on every rank, if no rank has any target; the parameters are left
            unchanged.

    Cost: one all-reduce of two numbers, in float32 or float64; one of the gradients of all
        trainable parameters, in one bucket of ``reduce_dtype``, in which a parameter without a
        gradient counts as zero; and that of ``scaler``.
    """
    # TODO 2.5: one step as one process would do it on all batches, computed in 16 bits.
    #   Tools: torch.autocast, the arguments scaler, loss_sum and all_reduce, torch.cat,
    #   torch.split, clip_grad_norm_.
    #   Example: losses 1, 2, 3 on rank 0 and 6 on rank 1: a loss of 3.0 on both (not 4.0, the mean
    #   of the means 2 and 6). A scaled gradient of 131072 that rank 1 computes in float16, where it
    #   is inf: both ranks skip, and both scales fall from 65536 to 32768.
    #   About 25 lines; write a helper for the bucket.
    raise NotImplementedError(
        "Task 2.5: mixed_precision_step, see guidelines.md#25-a-step-in-mixed-precision"
    )
