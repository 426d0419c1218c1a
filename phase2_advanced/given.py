"""What phase 2 gives you: types, losses, and small models to split.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

Batch = tuple[Tensor, ...]  # inputs (B, …), targets (B, …), and whatever else has B rows
Group = dist.ProcessGroup | None  # None: all ranks
AllReduce = Callable[[Tensor, Group], None]  # sums a tensor over the group, in place
LossSum = Callable[[nn.Module, Batch], tuple[Tensor, int]]  # sum of losses, number of targets


def all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over the ranks of ``group``, in place: torch's own, as lessons take it."""
    dist.all_reduce(x, group=group)


def cross_entropy_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropies of a batch, and how many targets it has.

    Args:
        model: maps inputs to logits (…, classes).
        batch: inputs, and targets (…) int64; a target of -100 does not count.

    Returns:
        A scalar of the logits' dtype, through which backward can go; the number of targets.
    """
    inputs, targets = batch[:2]
    logits: Tensor = model(inputs)
    total = cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total, int(torch.count_nonzero(targets != -100))


# Gradient accumulation


# Mixed precision


# Activation checkpointing


# Model parallelism


# Pipeline parallelism


# Tensor parallelism


class MLP(nn.Module):
    """Work on each position alone: up to four times the width, a non-linearity, and down again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        y: Tensor = self.down(gelu(self.up(x)))
        return y


class Attention(nn.Module):
    """Mix each position with those before it, in heads that do not see each other.

    The number of heads follows from the size of ``query``: with 1/N of the rows of query, key and
    value, and of the columns of ``out``, the same code computes 1/N of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, head width)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def _split(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, heads, T, head width)
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class Block(nn.Module):
    """Add attention, then the MLP, to the stream; each sees it normalised (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y
