"""Cut a GPT into stages, then train and call it on all ranks of a pipeline."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab import lessons
from distlab.models.gpt import GPT, Embedding

Lesson = Callable[[str], ModuleType]  # imports a lesson of Phase 2 by its name
MICRO_BATCHES_PER_STAGE = 4  # m = 4p: the bubble, (p-1)/(m+p-1), is less than 1/5 of the time


def cut_into_stages(gpt: GPT, num_stages: int, lesson: Lesson) -> list[nn.Sequential]:
    """Cut a GPT into stages of similar parameter counts, with at least one block each.

    The embedding goes with the first block; the norm and the head go with the last:
        4 blocks, 3 stages:  embedding 0 1 | 2 | 3 norm head

    Returns:
        The stages; they share the parameters of ``gpt`` and, run one after the other, give the
        same result.
    """
    blocks = [*gpt.blocks]
    costs = [num_parameters(block) for block in blocks]
    costs[0] += num_parameters(gpt.embedding)
    costs[-1] += num_parameters(gpt.norm) + num_parameters(gpt.head)
    ranges = lesson("model_parallel").partition_layers(costs, num_stages)
    stages = [nn.Sequential(*blocks[layers.start : layers.stop]) for layers in ranges]
    stages[0].insert(0, gpt.embedding)
    stages[-1].extend([gpt.norm, gpt.head])
    return stages


def num_parameters(module: nn.Module) -> int:
    """Count the parameters of a module; a parameter that two layers share counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


class Pipeline(nn.Module):
    """A GPT of which each rank holds one stage; its parameters are those of this rank's stage.

    Args:
        stage: This rank's stage, from ``cut_into_stages``.
        vocab_size: Number of different tokens.
        group: Ranks of the pipeline, in the order of their stages.
        ends: Group of the pipeline's first and last ranks; not used on the ranks in between.
        lesson: Function that imports the lessons that run the pipeline.
    """

    def __init__(
        self,
        stage: nn.Sequential,
        vocab_size: int,
        *,
        group: dist.ProcessGroup,
        ends: dist.ProcessGroup | None,
        lesson: Lesson,
    ) -> None:
        super().__init__()
        self.stage, self.vocab_size = stage, vocab_size
        self.group, self._ends, self._lesson = group, ends, lesson
        self.rank, self.num_stages = dist.get_rank(group), dist.get_world_size(group)
        self._runner = lesson("model_parallel").StageRunner(stage, group)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the whole model's logits on every rank of the pipeline, without gradients.

        Args:
            tokens: (B, T) int64, equal on all ranks of the pipeline.

        Returns:
            Logits, (B, T, V).

        Cost: one ``send_tensors`` from stage to stage, and one broadcast of the logits.
        """
        inputs = (tokens,) if self.rank == 0 else ()
        logits: Tensor | None = self._runner.forward(*inputs)
        if logits is None:
            dtype = next(self.parameters()).dtype
            logits = torch.empty(*tokens.shape, self.vocab_size, dtype=dtype, device=tokens.device)
        dist.broadcast(logits, group=self.group, group_src=self.num_stages - 1)
        return logits

    def micro_batch_size(self, num_samples: int) -> int:
        """Return the size of the micro-batches into which a replica's ``num_samples`` are cut."""
        return -(-num_samples // (MICRO_BATCHES_PER_STAGE * self.num_stages))

    def train_step(
        self,
        optimizer: torch.optim.Optimizer,
        batch: tuple[Tensor, ...],
        *,
        all_reduce: Any,
        average: Any,
        group: dist.ProcessGroup,
    ) -> float:
        """Take one optimizer step on the batches of all replicas, as Phase 1's ``train_step`` does.

        Args:
            optimizer: Optimizer of this rank's parameters.
            batch: Inputs and targets of this replica; all replicas have the same number of samples.
            all_reduce: Function that sums a tensor over a group, in place.
            average: Function that takes this module, ``all_reduce`` and ``group``, and averages the
                gradients.
            group: Ranks that hold the same parameters in other replicas.

        Returns:
            The mean loss over all targets, before the step; equal on all ranks.
        """
        loss = self._backward(batch)
        self._sum_tied_gradient()
        average(self, all_reduce, group)
        optimizer.step()
        total = torch.tensor([loss], dtype=torch.float64, device=batch[0].device)
        all_reduce(total, group)
        return total.item() / dist.get_world_size(group)

    def _backward(self, batch: tuple[Tensor, ...]) -> float:
        """Compute the gradients of this replica's mean loss for this stage, and return the loss."""
        size = self.micro_batch_size(len(batch[0]))
        micro_batches = self._lesson("gradient_accumulation").split_micro_batches(batch, size)
        pipeline = self._lesson("pipeline_parallel")
        schedule = pipeline.one_f_one_b_schedule(self.num_stages, len(micro_batches))
        loss: float = pipeline.run_schedule(
            schedule, [self.stage], micro_batches, lessons.given_2.cross_entropy_sum, self.group
        )
        return loss

    def _sum_tied_gradient(self) -> None:
        """Sum the gradients of the embedding and the head, which are one parameter in the model."""
        tied = self._tied_weight()
        if tied is not None:
            dist.all_reduce(tied.grad, group=self._ends)

    def _tied_weight(self) -> Tensor | None:
        first, last = self.stage[0], self.stage[-1]
        if isinstance(first, Embedding):
            return first.token.weight
        return last.weight if isinstance(last, nn.Linear) else None
