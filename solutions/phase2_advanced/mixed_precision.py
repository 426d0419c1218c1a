"""Mixed precision: compute in 16 bits, keep and update the weights in 32."""

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
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value

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
        if optimizer not in self.is_finite:
            self.is_finite[optimizer] = self._divide(optimizer)
        return self.is_finite[optimizer]

    def _divide(self, optimizer: Optimizer) -> bool:
        parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
        num_bad = torch.zeros(1, device=parameters[0].device)
        for gradient in (p.grad for p in parameters if p.grad is not None):
            num_bad += gradient.isfinite().logical_not().sum()
            gradient.div_(self.value)
        self.all_reduce(num_bad, self.group)
        return num_bad.item() == 0

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step on all ranks if all gradients are finite, otherwise on none.

        The gradients are unscaled first, unless ``unscale`` has been called since the last update.
        Gradients that were clipped after ``unscale`` are used as they are.

        Returns:
            Whether the step was taken. If it was not, the parameters and the optimizer's state are
            unchanged.
        """
        is_finite = self.unscale(optimizer)
        if is_finite:
            optimizer.step()
        return is_finite

    def update(self) -> None:
        """Adapt the scale to the results of ``unscale`` since the last update.

        If any optimizer's gradients were not finite, the scale is multiplied by ``backoff_factor``,
        and the count of good steps restarts at 0. Otherwise the count grows by 1; when it reaches
        ``growth_interval``, the scale is multiplied by ``growth_factor``, and the count restarts at
        0. If ``unscale`` has not been called since the last update, the step counts as good. In any
        case, the next ``unscale`` divides the gradients again.
        """
        is_good = all(self.is_finite.values())
        self.is_finite.clear()
        self.good_steps = self.good_steps + 1 if is_good else 0
        if not is_good:
            self.value *= self.backoff_factor
        elif self.good_steps == self.growth_interval:
            self.value *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint must hold, as plain numbers by name.

        Later calls do not change the returned dict. Results of ``unscale`` since the last update
        are not saved.
        """
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore ``state``, to continue exactly as the scaler that returned it would have.

        Earlier results of ``unscale`` are discarded.

        Args:
            state: dict returned by ``state_dict`` of a scaler created with the same arguments.
        """
        self.value, self.good_steps = state["value"], int(state["good_steps"])
        self.is_finite.clear()


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
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    count = torch.zeros(1, dtype=torch.int64, device=device)
    count += loss_sum.count(batch)
    all_reduce(count, group)
    num_targets = int(count)  # waits for a GPU before it has any pass to run
    if not num_targets:
        raise ValueError("mixed_precision_step: no rank has any target")

    optimizer.zero_grad()
    with torch.autocast(device.type, dtype):
        loss, _ = loss_sum(model, batch)
    (scaler.scale(loss) / num_targets).backward()
    mean = loss.detach().double().view(1) / num_targets
    all_reduce(mean, group)
    _sum_gradients(parameters, reduce_dtype, all_reduce, group)

    scaler.unscale(optimizer)
    norm = clip_grad_norm_(parameters, max_norm)
    is_skipped = not scaler.step(optimizer)
    scaler.update()
    mean_loss, length = torch.cat([mean, norm.view(1)]).tolist()  # one wait for both
    return StepResult(mean_loss, is_skipped, length)


def _sum_gradients(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype, all_reduce: AllReduce, group: Group
) -> None:
    """Sum the gradients over the ranks in one bucket of ``dtype``; a missing one becomes zeros."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    bucket = torch.cat([gradient.flatten().to(dtype) for gradient in gradients])
    all_reduce(bucket, group)
    sums = torch.split(bucket, [gradient.numel() for gradient in gradients])
    for parameter, gradient, total in zip(parameters, gradients, sums, strict=True):
        parameter.grad = gradient.copy_(total.view_as(gradient))
