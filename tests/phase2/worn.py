"""A model in use, which tasks 2.1 to 2.5 train, and what they compare of it."""

from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 5, 4
FLAG = 9.0  # in the first feature of a batch: it uses the parameter ``rare``
DOUBLE: dict[str, Any] = {"dtype": torch.float64}  # autocast leaves it alone, so results are exact


class Worn(nn.Module):
    """A classifier in use: what is trainable has a gradient from before, the rest must not move.

    ``tied`` and ``first`` share a weight, ``frozen`` is not trainable, ``unused`` has no part in
    the logits, and ``rare`` has one only where the inputs have a flag. It notes the rows of each
    forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(FEATURES, FEATURES, **DOUBLE)
        self.tied = nn.Linear(FEATURES, FEATURES, **DOUBLE)
        self.tied.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES, **DOUBLE)
        self.frozen = nn.Parameter(torch.randn(FEATURES, **DOUBLE), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4, **DOUBLE))
        self.rare = nn.Parameter(torch.randn(FEATURES, **DOUBLE))
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 3.0)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        hidden = torch.tanh(self.first(x)) + self.frozen
        flagged = x[..., :1] == FLAG
        if flagged.any():
            hidden = hidden + self.rare * flagged
        return self.head(torch.tanh(self.tied(hidden)))  # type: ignore[no-any-return]


def state_of(module: nn.Module) -> dict[str, list[float]]:
    """The numbers of parameters, by name."""
    return {name: p.detach().flatten().tolist() for name, p in module.named_parameters()}
