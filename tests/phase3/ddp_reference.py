"""What task 3.12 is compared with: one process that has the batches of all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phase3.ddp import KEPT, Plan, gradients_of, micro_batch, state_of
from phase3.ddp_models import ByHand, Odd, loss_of, odd_batch


def train_alone(plan: Plan) -> list[dict[str, Any]]:
    """State and gradients after every step."""
    model = Odd(1)
    optimizer = ByHand(plan.optimizer, model)
    found = []
    for step, rows in enumerate(plan.rows):
        set_zero(model)
        for rank, count in enumerate(rows):
            if count:
                (loss_of(model(odd_batch(count, rank, step))) / sum(rows)).backward()
        gradients = gradients_of(model)
        optimizer.step()
        found.append({"gradients": gradients, "state": state_of(model)})
    return found


def gradients_by_rank(plan: Plan, step: int, states: Sequence[dict[str, Any]]) -> list[Any]:
    """The gradients that each rank computes in a step, before anything is sent."""
    model = Odd(1)
    _set_state(model, states[step - 1]["state"] if step else state_of(model))
    rows, by_rank = plan.rows[step], []
    for rank, count in enumerate(rows):
        set_zero(model)
        if count:
            loss = loss_of(model(odd_batch(count, rank, step)))
            (loss * len(rows) / sum(rows)).backward()
        by_rank.append(gradients_of(model))
    return by_rank


def _set_state(model: Odd, state: dict[str, list[float]]) -> None:
    for name, parameter in model.named_parameters():
        values = torch.tensor(state[name], dtype=parameter.dtype)
        parameter.data.copy_(values.view(parameter.shape))


def accumulated(kind: str, num_ranks: int) -> list[dict[str, Any]]:
    """The mean over ranks of what their backward passes add up to, by turn."""
    model, found = Odd(1), []
    set_zero(model)
    for turn in range(2):
        if kind != KEPT:
            set_zero(model)
        for rank in range(num_ranks):
            (loss_of(model(_rows_of(rank, turn))) / num_ranks).backward()
        found.append(gradients_of(model))
    return found


def _rows_of(rank: int, turn: int) -> Tensor:
    return torch.cat([micro_batch(rank, turn, place) for place in range(3)])


def set_zero(model: Odd) -> None:
    """Give every trainable parameter a gradient of zero."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
