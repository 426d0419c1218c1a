"""Data-parallel training: equal parameters, averaged gradients, one step, exact evaluation."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from phase1_data_parallel.given import (
    AllReduce,
    Batch,
    EpochResult,
    Evaluation,
    Group,
    RankLog,
    Sample,
    ShardLoader,
    batches_on,
    count_targets,
    evaluation_mode,
    summed_loss,
)
from solutions.phase1_data_parallel.collectives import broadcast, native_all_reduce
from solutions.phase1_data_parallel.data_loader import build_loader


def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    """Make the parameters and buffers of all ranks equal to those of rank ``src``, in place.

    The tensor objects and their memory stay the same. Gradients are left as they are. Buffers are
    included: BatchNorm's running mean is part of the model, and averaging gradients never makes it
    equal on all ranks.

    Args:
        module: the model, with the same architecture on all ranks and tensors of any dtype;
            overwritten except on ``src``.
        src: the rank inside ``group`` whose values all ranks get.
        group: the ranks that train together; all by default.

    Cost: at most one broadcast per parameter and buffer, ⌈log2 N⌉ rounds each. A tensor that two
        layers share is sent once.
    """
    _broadcast_all([*module.parameters(), *module.buffers()], src, group)


def _broadcast_all(tensors: list[Tensor], src: int, group: Group) -> None:
    for tensor in tensors:
        values = tensor.detach().contiguous()  # copies only if not contiguous, as in channels_last
        broadcast(values, src, group)
        tensor.detach().copy_(values)


def average_gradients(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    """Replace every gradient with its mean over all ranks, in place.

    With 2 ranks and one weight, gradients of 1.0 and 3.0 become 2.0 on both ranks (not 4.0).

    Args:
        module: the model after the backward pass, with real, dense gradients. A trainable parameter
            without a gradient on this rank gets zeros, because other ranks may have a gradient for
            it, and every rank must make the same calls. (As a result, a parameter that no rank uses
            has a gradient of zero instead of none, so weight decay changes it.) A frozen parameter
            is left as it is, even if it has a gradient.
        all_reduce: function that sums a tensor over the group, in place.
        group: the ranks that train together; all by default.

    Cost: one all-reduce per trainable parameter, of the size of its gradient, and nothing else; a
        parameter shared by two layers counts once.
    """
    world_size = dist.get_world_size(group)
    for gradient in _gradients(module):
        total = gradient.contiguous()
        all_reduce(total, group)
        gradient.copy_(total.div_(world_size))  # copies only what was not contiguous


def average_gradients_flat(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    """Replace every gradient with its mean over all ranks, in one all-reduce instead of many.

    All gradients are copied into one flat bucket, end to end, and their means are copied back:
        w (2, 2) | b (2,)  ->  [w00 w01 w10 w11 b0 b1]  ->  all-reduce  ->  w | b

    Args:
        module: the model, as for ``average_gradients``; all gradients have the same dtype and are
            on the same device.
        all_reduce: function that sums a tensor over the group, in place.
        group: the ranks that train together; all by default.

    Cost: one all-reduce of all gradients, or none if nothing is trainable: α is paid once, not once
        per parameter. The bucket takes as much memory as the gradients. (However, nothing is sent
        before the backward pass has ended.)
    """
    gradients = _gradients(module)
    if not gradients:
        return
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce(bucket, group)
    bucket /= dist.get_world_size(group)
    means = torch.split(bucket, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view(gradient.shape))


def _gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of all trainable parameters."""
    return [_gradient(parameter) for parameter in module.parameters() if parameter.requires_grad]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter; zero if this rank has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


AverageGradients = Callable[[nn.Module, AllReduce, Group], None]
AVERAGE_GRADIENTS: dict[str, AverageGradients] = {
    "per_parameter": average_gradients,
    "flat": average_gradients_flat,
}


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    all_reduce: AllReduce = native_all_reduce,
    average: AverageGradients = average_gradients,
    group: Group = None,
) -> float:
    """Take one optimizer step on the batches of all ranks, as one process with all of them would.

    With B targets in all, one process minimises (sum of all losses) / B. If each rank took the mean
    over its own b targets instead, each of these would have a weight of 1/(N·b), which is wrong if
    the batches differ in size:
        rank 0 has 3 samples, rank 1 has 1:  weights 1/6 1/6 1/6 | 1/2  instead of 1/4 each

    Args:
        model: the model, equal on all ranks; maps inputs to logits (…, classes).
        optimizer: optimizer of ``model``'s parameters, with the same settings on all ranks.
            Gradients left over from before the step are discarded.
        batch: this rank's inputs, and targets (…) int64; the ranks' batches may differ in size, and
            may be empty. The batch is not changed.
        all_reduce: function that sums a tensor over the group, in place.
        average: function that averages the gradients, with one all-reduce per parameter or in one
            flat bucket. It is called once, with ``model``, ``all_reduce`` and ``group``.
        group: the ranks that train together; all by default.

    Returns:
        The mean loss over the targets of all ranks, before the step; the same float on all ranks.

    Raises:
        ValueError: the same on every rank, if no rank has any targets; the parameters are left
            unchanged.

    Cost: one forward pass over this rank's batch; one all-reduce of two numbers, in float32 or
        float64 whatever dtype the model computes in; and the all-reduces of ``average``.
    """
    inputs, targets = batch
    optimizer.zero_grad()
    loss_sum = summed_loss(model(inputs), targets)

    totals = torch.stack([loss_sum.detach().double(), count_targets(targets)])
    all_reduce(totals, group)
    (loss_sum * (dist.get_world_size(group) / totals[1])).backward()
    average(model, all_reduce, group)

    # Reading a number waits for a GPU, so it comes after all of the backward pass is queued.
    total_loss, num_targets = totals.tolist()
    if not num_targets:
        raise ValueError("train_step: the batches of all ranks are empty")
    optimizer.step()
    return float(total_loss / num_targets)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset[Sample],
    *,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> Evaluation:
    """Compute loss and accuracy over ``dataset``, counting every sample once.

    Rank r takes samples r, r+N, r+2N, … without padding, and the ranks' sums (not their means)
    are added up. With 10 samples, 4 ranks take 3, 3, 2 and 2. A sampler made for training would
    pad the 10 samples to 12, so two of them would count twice.

    Args:
        model: the model, equal on all ranks. It is in evaluation mode during the call; afterwards,
            each module is back in its previous mode.
        dataset: the whole data set, the same on all ranks, with at least one sample.
        batch_size: samples per forward pass on one rank (the last pass may have fewer); does not
            change the result.
        device: device of the model. Batches are moved there, and the sums are computed there.
        group: the ranks that share the work; all by default.

    Returns:
        On all ranks, the values that one process would get, up to rounding. The losses of a batch
        are summed in the dtype of its logits; the sums of batches and ranks are added in float32 or
        float64.

    Raises:
        ValueError: the same on every rank, if the data set is empty.

    Cost: one forward pass over this rank's samples, without gradients; one all-reduce of three
        numbers.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    num_samples = len(dataset)  # type: ignore[arg-type]
    if not num_samples:
        raise ValueError("evaluate: the data set is empty")
    mine = Subset(dataset, range(rank, num_samples, world_size))

    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, targets
    with evaluation_mode(model):
        for inputs, targets in batches_on(DataLoader(mine, batch_size=batch_size), device):
            logits = model(inputs)
            correct = (logits.argmax(dim=-1) == targets).sum()
            sums = [summed_loss(logits, targets).double(), correct, count_targets(targets)]
            totals += torch.stack(sums)

    dist.all_reduce(totals, group=group)  # 24 bytes once an epoch: any all-reduce is fast enough
    loss, num_correct, num_targets = totals.tolist()
    return Evaluation(loss / num_targets, num_correct / num_targets, int(num_targets))


class Trainer:
    """Trains one model on N ranks as one process would.

    (BatchNorm is the exception: each rank normalises with the statistics of its own batches. Before
    each evaluation, all ranks get rank 0's running statistics, and continue training with them.)

    Args:
        model: the model, already on ``device``; all ranks get rank 0's values when ``fit`` starts.
        optimizer: optimizer of the model's parameters.
        all_reduce: function that sums a tensor over the group, in place, such as any of this
            phase's all-reduces. It is used in each step.
        average: function that averages the gradients, one of AVERAGE_GRADIENTS. It is used in each
            step.
        device: this rank's device; batches are moved there.
        group: the ranks that train together; all by default.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        all_reduce: AllReduce = native_all_reduce,
        average: AverageGradients = average_gradients,
        device: torch.device | str = "cpu",
        group: Group = None,
    ) -> None:
        self.model, self.device, self.group = model, device, group
        self.step = partial(
            train_step, model, optimizer, all_reduce=all_reduce, average=average, group=group
        )
        self.log = RankLog(group)

    def fit(
        self,
        train_data: Dataset[Sample],
        test_data: Dataset[Sample],
        *,
        epochs: int,
        global_batch_size: int,
        seed: int = 0,
    ) -> list[EpochResult]:
        """Train for ``epochs`` epochs, evaluate after each, and return the history (on every rank).

        The whole model is in training mode in every step. After each epoch, rank 0 logs a line that
        contains the epoch number and the word "loss"; the rest of the wording is up to you. The
        other ranks print nothing. For example:
            rank 0/4  epoch 1  loss 1.8002  test loss 0.6068  accuracy 80.0%  2,057 images/s

        Args:
            train_data: the whole training set, the same on all ranks.
            test_data: the whole test set, the same on all ranks.
            epochs: number of passes over the training set, each in its own order and without the
                last, incomplete global batch. With 0, nothing is trained and the history is empty.
            global_batch_size: number of samples in one step, over all ranks; a multiple of N.
            seed: seed of the order of the samples, which does not depend on N.

        Returns:
            One ``EpochResult`` for each epoch of this call, numbered from 1. (Another call of
            ``fit`` continues from the current weights.) The results are the same on every rank,
            except for ``images_per_s``, which each rank measures with its own clock.

        Raises:
            ValueError: from ``build_loader``, if the global batch cannot be shared equally.

        Cost: one broadcast of the model; in each step, the cost of ``train_step``; in each epoch,
            one broadcast per buffer and the evaluation's all-reduce.
        """
        loader = build_loader(train_data, global_batch_size, seed=seed, group=self.group)
        broadcast_parameters(self.model, group=self.group)
        history = []
        for epoch in range(epochs):
            start = time.perf_counter()
            losses = self._train_epoch(loader, epoch)
            images_per_s = len(losses) * global_batch_size / (time.perf_counter() - start)
            history.append(self._finish_epoch(epoch, losses, test_data, images_per_s))
        return history

    def _train_epoch(self, loader: ShardLoader, epoch: int) -> tuple[float, ...]:
        self.model.train()
        loader.set_epoch(epoch)
        losses = []
        for batch in batches_on(loader, self.device):
            losses.append(self.step(batch))
            self.log.progress(f"epoch {epoch + 1}", len(losses), len(loader))
        return tuple(losses)

    def _finish_epoch(
        self,
        epoch: int,
        losses: tuple[float, ...],
        test_data: Dataset[Sample],
        images_per_s: float,
    ) -> EpochResult:
        # Running statistics depend on each rank's shard; all ranks must evaluate the same model.
        _broadcast_all(list(self.model.buffers()), 0, self.group)
        test = evaluate(self.model, test_data, device=self.device, group=self.group)
        result = EpochResult(epoch + 1, losses, test.loss, test.accuracy, images_per_s)
        self.log.info(
            f"epoch {result.epoch}  loss {result.train_loss:.4f}  test loss {test.loss:.4f}  "
            f"accuracy {test.accuracy:.1%}  {images_per_s:,.0f} images/s"
        )
        return result
