"""Bodies for task 3.14: a model trained by servers and workers, and in one process."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from phase3_multi_node.given import pack_by_server, unpack_by_server

NUM_STEPS, SERVERS = 4, (0, 1)
ASSIGNED = {"0.weight": 0, "0.bias": 1, "2.weight": 1, "2.bias": 0}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def _batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + worker)
    x, y = (torch.randn(6, k, generator=generator, dtype=torch.float64) for k in (3, 2))
    return x, y


def _gradients(model: nn.Module, step: int, worker: int) -> dict[str, Tensor]:
    model.zero_grad()
    x, y = _batch(step, worker)
    mse_loss(model(x), y).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(lesson: Any, settings: dict[str, Any]) -> list[list[float]] | None:
    """Ranks 0 and 1 serve, the others work; return the worker's parameters after every step."""
    rank, workers = dist.get_rank(), range(len(SERVERS), dist.get_world_size())
    model = _model()
    parameters = dict(model.named_parameters())
    shards = pack_by_server(parameters, ASSIGNED)
    if rank in SERVERS:
        optimizer = torch.optim.SGD([shards[rank]], lr=0.1, **settings)
        lesson.serve_synchronously(shards[rank], optimizer, [*workers], NUM_STEPS)
        return None
    states = []
    for step in range(NUM_STEPS):
        gradients = _gradients(model, step, workers.index(rank))
        lesson.push_pull(pack_by_server(gradients, ASSIGNED), shards)
        unpack_by_server(shards, parameters, ASSIGNED)
        states.append(_flat(model))
    return states


def train_alone(
    _: Any, all_settings: Sequence[dict[str, Any]], num_workers: int
) -> list[list[list[float]]]:
    """Train with each of the settings in one process.

    The process is a child, as those of the servers: torch's first optimizer loads a module that
    children find loaded.
    """
    return [_trained_alone(settings, num_workers) for settings in all_settings]


def _trained_alone(settings: dict[str, Any], num_workers: int) -> list[list[float]]:
    """Step with the mean of the workers' gradients."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    states = []
    for step in range(NUM_STEPS):
        parts = [_gradients(model, step, worker) for worker in range(num_workers)]
        for name, parameter in model.named_parameters():
            parameter.grad = torch.stack([part[name] for part in parts]).mean(0)
        optimizer.step()
        states.append(_flat(model))
    return states


def _flat(model: nn.Module) -> list[float]:
    numbers: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return numbers
