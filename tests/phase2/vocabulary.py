"""Bodies for the cross-entropy of task 2.18, whose logits are split by the vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from judging.calls import returned
from judging.comparing import noting_changes
from judging.models import IGNORED
from phase2.sharding import drawn, group_argument, listed, place, rank_part

LOSS = "vocab_parallel_cross_entropy"


@dataclass(frozen=True)
class Scores:
    """Logits and targets of a vocabulary; some targets may be ignored."""

    vocabulary: int
    shape: tuple[int, ...]
    scale: float = 1.0
    offset: float = 0.0
    has_ignored: bool = False
    is_transposed: bool = False
    dtype: str = "float64"

    def __str__(self) -> str:
        """What a message calls it."""
        extras = [f"up to ±{self.scale:g}"] * (self.scale > 1)
        extras += [f"about {self.offset:g}"] * bool(self.offset)
        extras += ["some targets -100"] * self.has_ignored
        extras += ["transposed logits"] * self.is_transposed
        extras += [self.dtype] * (self.dtype != "float64")
        return ", ".join([f"{[*self.shape]} targets of {self.vocabulary} tokens", *extras])

    def logits(self) -> Tensor:
        """The full logits."""
        shape = *self.shape, self.vocabulary
        if self.is_transposed:
            shape = shape[1], shape[0], *shape[2:]
        logits = self.scale * drawn(*shape, seed=81) + self.offset
        logits = logits.to(getattr(torch, self.dtype))
        return logits.transpose(0, 1) if self.is_transposed else logits

    def targets(self) -> Tensor:
        """All tokens in turn; every third is ignored."""
        targets = torch.arange(torch.Size(self.shape).numel()).remainder(self.vocabulary)
        if self.has_ignored:
            targets[::3] = IGNORED
        return targets.view(self.shape)

    def weights(self) -> Tensor:
        """What each loss is multiplied by."""
        return drawn(*self.shape, seed=82)


def loss_case(lesson: Any, case: Scores, group: Any = None) -> dict[str, Any]:
    """Compute the losses, and pass a gradient back; barriers lie between.

    Transposed logits are no leaf, so that nothing hinders a write into them.
    """
    part = rank_part(case.logits(), *place(group), -1)
    logits = (part if case.is_transposed else part.clone()).detach().requires_grad_()
    leaf, targets = logits, case.targets()
    logits = leaf.clone() if case.is_transposed else leaf
    with noting_changes(logits=logits, targets=targets) as changed:
        dist.barrier(group)
        function = lesson.vocab_parallel_cross_entropy
        losses = returned(LOSS, function(logits, targets, **group_argument(group)))
        dist.barrier(group)
        if (losses.shape, losses.dtype) != (targets.shape, logits.dtype):
            raise WrongResult(
                f"there should be a loss for each target, {[*targets.shape]} in {logits.dtype}; "
                f"the losses have the shape {[*losses.shape]} and are {losses.dtype}"
            )
        (losses * case.weights()).sum().backward()
    return {"losses": listed(losses), "logits": listed(leaf.grad), "changed": changed}
