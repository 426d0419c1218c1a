"""Bodies for task 2.18: an embedding and a cross-entropy, split by the vocabulary."""

import gc
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned
from phase2.sharded_layers import is_untouched_by
from phase2.sharding import (
    drawn,
    group_argument,
    laid_out,
    listed,
    own,
    place,
    state_of,
    with_drawn_parameters,
)

IGNORED = -100
EMBEDDING, LOSS = "VocabParallelEmbedding", "vocab_parallel_cross_entropy"


@dataclass(frozen=True)
class Tokens:
    """A vocabulary, and as many tokens of it as ``shape`` says; each occurs, if there is room."""

    vocabulary: int
    width: int
    shape: tuple[int, ...]
    is_frozen: bool = False
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        """What a message calls it."""
        extras = [f"Embedding({self.vocabulary}, {self.width})", *["frozen"] * self.is_frozen]
        extras += [str(self.dtype)] * (self.dtype != torch.float64)
        return ", ".join([*extras, f"tokens {[*self.shape]}"])

    def full(self) -> nn.Embedding:
        """Build the full embedding."""
        full: nn.Embedding = with_drawn_parameters(nn.Embedding(self.vocabulary, self.width))
        return full.to(self.dtype).requires_grad_(not self.is_frozen)

    def tokens(self) -> Tensor:
        """All tokens in turn, from the last to the first."""
        count = torch.Size(self.shape).numel()
        return (-1 - torch.arange(count)).remainder(self.vocabulary).view(self.shape)

    def weights(self) -> Tensor:
        """What the output is multiplied by in the loss."""
        return drawn(*self.shape, self.width, seed=72).to(self.dtype)


def embedding_case(lesson: Any, case: Tokens, group: Any = None) -> dict[str, Any]:
    """Make a layer and look tokens up, and pass a gradient back; barriers lie between."""
    torch.manual_seed(place(group)[0])
    full = case.full()
    before, watched = listed(full.weight), ref(full.weight)
    made = lesson.VocabParallelEmbedding(full, **group_argument(group))
    is_kept = before == listed(full.weight)
    is_own = is_untouched_by(full, made)
    del full
    gc.collect()
    tokens = case.tokens()
    dist.barrier(group)
    output = returned(f"{EMBEDDING}.forward", made(tokens))
    dist.barrier(group)
    if not case.is_frozen:
        (output * laid_out(case.weights(), True)).sum().backward()
    return {
        "output": listed(output),
        "state": state_of(made),
        "is_kept": is_kept,
        "is_own": is_own,
        "is_freed": watched() is None,
        "are_tokens_kept": torch.equal(tokens, case.tokens()),
    }


@dataclass(frozen=True)
class Scores:
    """Logits and targets of a vocabulary; some targets may be ignored."""

    vocabulary: int
    shape: tuple[int, ...]
    scale: float = 1.0
    has_ignored: bool = False
    is_transposed: bool = False
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        """What a message calls it."""
        extras = [f"up to ±{self.scale:g}"] * (self.scale > 1)
        extras += ["some targets -100"] * self.has_ignored
        extras += ["transposed logits"] * self.is_transposed
        extras += [str(self.dtype)] * (self.dtype != torch.float64)
        return ", ".join([f"{[*self.shape]} targets of {self.vocabulary} tokens", *extras])

    def logits(self) -> Tensor:
        """The full logits."""
        shape = *self.shape, self.vocabulary
        if not self.is_transposed:
            return (self.scale * drawn(*shape, seed=81)).to(self.dtype)
        flipped = shape[1], shape[0], *shape[2:]
        return (self.scale * drawn(*flipped, seed=81)).to(self.dtype).transpose(0, 1)

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
    """Compute the losses, and pass a gradient back; barriers lie between."""
    logits = _of_rank(case, group)
    targets = case.targets()
    dist.barrier(group)
    function = lesson.vocab_parallel_cross_entropy
    losses = returned(LOSS, function(logits, targets, **group_argument(group)))
    dist.barrier(group)
    if (losses.shape, losses.dtype) != (targets.shape, logits.dtype):
        raise WrongResult(
            f"there should be a loss for each target, {[*targets.shape]} in {logits.dtype}; the "
            f"losses have the shape {[*losses.shape]} and are {losses.dtype}"
        )
    (losses * case.weights()).sum().backward()
    return {
        "losses": listed(losses),
        "logits": listed(logits.grad),
        "are_inputs_kept": torch.equal(logits, _of_rank(case, group))
        and torch.equal(targets, case.targets()),
    }


def _of_rank(case: Scores, group: Any) -> Tensor:
    part = own(case.logits(), *place(group), -1)
    part = part if case.is_transposed else part.clone()
    return part.detach().requires_grad_()


def refused_embedding(lesson: Any, vocabulary: int) -> dict[str, str]:
    """How a vocabulary that cannot be split evenly is refused."""
    return refusal_of(lambda: lesson.VocabParallelEmbedding(nn.Embedding(vocabulary, 4)))
