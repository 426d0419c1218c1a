"""Gradient accumulation: many micro-batches, one optimizer step, one all-reduce.

Tasks 2.1 and 2.2. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 2.1``.
"""

from math import inf

import torch
from torch import Tensor, nn

from phase2_advanced.given import (
    AllReduce,
    Batch,
    Group,
    LossSum,
    all_reduce,
    cross_entropy_sum,
)


def split_micro_batches(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into micro-batches of ``size`` rows, without copying anything.

    7 rows, size 3:  rows 0 1 2 | 3 4 5 | 6

    Args:
        batch: tensors of any shape and dtype, with the same number of rows (their first dim).
        size: rows per micro-batch; the last micro-batch may have fewer.

    Returns:
        The micro-batches in the order of their rows, each a tuple with a view of every tensor; an
        empty list if the batch has no rows.

    Raises:
        ValueError: ``size`` is below 1 (the message gives the size), or the tensors have different
            numbers of rows (the message gives these numbers).
    """
    # TODO 2.1: return consecutive rows, at most size at a time, as views of all tensors.
    #   Example: 7 rows of inputs (7, 4) and targets (7,), size 3: shapes (3, 4) and (3,) twice,
    #   then (1, 4) and (1,).
    #   About 8 lines.
    raise NotImplementedError(
        "Task 2.1: split_micro_batches, see guidelines.md#21-accumulate-gradients"
    )


def accumulate_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    size: int,
    loss_sum: LossSum = cross_entropy_sum,
) -> float:
    """Take one optimizer step on the whole batch, with one micro-batch's activations in memory.

    With B targets in the batch, an ordinary step minimises (sum of all losses) / B. So does this
    one, however the targets are spread over micro-batches. Averaging the means of the micro-batches
    would give the targets the wrong weights:
        3 targets in the first, 1 in the second:  1/6 1/6 1/6 | 1/2  instead of 1/4 each

    Args:
        model: any model without BatchNorm, which would normalise each micro-batch by itself.
            Dropout draws a new mask for each micro-batch.
        optimizer: optimizer of all trainable parameters of ``model``. Gradients left over from
            before the step are discarded. A parameter that no micro-batch uses gets no gradient, so
            the optimizer leaves it alone. Gradients may be kept or cleared after the step.
        batch: inputs, targets, and whatever else ``loss_sum`` reads. It is not changed.
        size: rows per micro-batch, as for ``split_micro_batches``.
        loss_sum: called once for each micro-batch, in order, with the model and all tensors of the
            micro-batch. It returns the sum of the losses, which may be of several kinds, and the
            number of targets. A micro-batch without targets may still have a loss, and then this
            loss and its gradient count too. ``loss_sum.count(batch)`` counts targets without a
            pass, and may be called any number of times.

    Returns:
        The mean loss per target of the batch, before the step.

    Raises:
        ValueError: the batch has no targets; the parameters are left unchanged. It may be raised
            before the first pass or after the last one.

    Cost: one forward and one backward pass over each micro-batch. Memory: parameters, gradients,
        optimizer state, the batch, and the activations of one micro-batch, which are freed before
        the next forward pass.
    """
    # TODO 2.1: do one step as if the whole batch had gone through the model at once, and return the
    #   loss; never hold the activations of two micro-batches.
    #   Example: losses 1, 2, 3 in one micro-batch and 6 in the next: return 3.0 (not 4.0, the mean
    #   of the means 2 and 6), and each of the four targets weighs 1/4 in the gradient.
    #   About 14 lines.
    raise NotImplementedError(
        "Task 2.1: accumulate_step, see guidelines.md#21-accumulate-gradients"
    )


def accumulate_step_over_ranks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    size: int,
    *,
    max_norm: float = inf,
    loss_sum: LossSum = cross_entropy_sum,
    all_reduce: AllReduce = all_reduce,
    group: Group = None,
) -> float:
    """Take one optimizer step on the batches of all ranks, each processed in micro-batches.

    Ranks may have different numbers of micro-batches and targets:
        rank 0   forward backward  forward backward  forward backward  all-reduce  step
        rank 1   forward backward                                      all-reduce  step

    Args:
        model: the model, as for ``accumulate_step``, with at least one trainable parameter; equal
            on all ranks. All gradients are dense, and of one dtype, float32 or float64. A trainable
            parameter without a gradient on this rank gets zeros, because other ranks may have a
            gradient for it. (As a result, a parameter that no rank uses has a gradient of zero
            instead of none, so weight decay changes it.)
        optimizer: the optimizer, as for ``accumulate_step``, with the same settings on all ranks.
        batch: this rank's batch, which may be empty; not changed.
        size: rows per micro-batch; may differ between ranks.
        max_norm: the largest norm allowed for the gradient, over all parameters together; a larger
            gradient is scaled down to this norm. The gradient is that of the mean loss over the
            targets of all ranks, so all ranks scale by the same factor.
        loss_sum: the loss, as for ``accumulate_step``.
        all_reduce: function that sums a tensor over the group, in place.
        group: the ranks that train together; all by default.

    Returns:
        The mean loss per target of all batches, before the step; the same float on all ranks.

    Raises:
        ValueError: the same on every rank, if no rank has any targets; the parameters are left
            unchanged. It may be raised before the first pass or after the all-reduce.

    Cost: the passes of ``accumulate_step``, and one all-reduce of the gradients of all trainable
        parameters in one flat bucket, however many micro-batches there are; a parameter that two
        layers share counts once. The number of targets and the sum of the losses are one number
        each. Before the first pass or after the last one, they may travel in the bucket, share an
        all-reduce or have one each; nothing else is sent. Memory: as for ``accumulate_step``, but
        with a bucket as large as the gradients instead of the activations if the bucket is larger.
    """
    # TODO 2.2: do one clipped step as one process would on all batches, and return the loss.
    #   Example: rank 0 has 2 targets, each with the gradient (3, 0), and rank 1 one with (0, 12):
    #   the mean is (2, 4), of norm 4.47. With max_norm = 1 the step uses (0.447, 0.894) on both.
    #   About 25 lines; write helper functions.
    raise NotImplementedError(
        "Task 2.2: accumulate_step_over_ranks, see guidelines.md#22-accumulate-over-ranks"
    )
