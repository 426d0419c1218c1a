"""Models, batches and a scaler that bodies, judges and references of tasks 2.5 share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.models import CLASSES, DOUBLE, FEATURES, FLAG

LENGTH = 4
LR, MOMENTUM = 0.5, 0.9


def batch_of(sizes: Sequence[int], rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Sequences, in which some targets do not count: the more, the higher the rank.

    Batches of even ranks have a flag in the last row.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (sizes[rank], LENGTH)
    inputs = torch.randn(*shape, FEATURES, generator=generator, **DOUBLE)
    targets = torch.randint(CLASSES, shape, generator=generator)
    targets[:, : rank % LENGTH] = -100
    if rank % 2 == 0:
        inputs[-1:, -1:, :1] = FLAG
    return inputs, targets


class TorchScaler:
    """torch's GradScaler under the names of the lesson, and with one decision for all ranks.

    So a step is judged also where the learner's own scaler is not written yet.
    """

    def __init__(self, init_scale: float, growth_interval: int = 2000, group: Any = None) -> None:
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=init_scale, growth_interval=growth_interval
        )
        self._found: dict[Any, bool] = {}
        self.group, self.num_updates = group, 0
        self._scaler.scale(torch.zeros(()))  # it makes its state when it is first used

    @property
    def value(self) -> float:
        return float(self._scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss.float() if loss.dtype.itemsize < 4 else loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._found:
            self._scaler.unscale_(optimizer)
            by_device = self._scaler._found_inf_per_device(optimizer)
            num_bad = sum((by_device.values()), torch.zeros(1))
            dist.all_reduce(num_bad, group=self.group)
            for found in by_device.values():
                found.copy_(num_bad[0])
            self._found[optimizer] = num_bad.item() == 0
        return self._found[optimizer]

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.unscale(optimizer):
            optimizer.step()
            return True
        return False

    def update(self) -> None:
        self._scaler.update()
        self._found.clear()
        self.num_updates += 1


class Noted(nn.Module):
    """Two layers in float32 that note in which dtypes they compute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.dtypes: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        logits: Tensor = self.second(torch.tanh(hidden))
        self.dtypes |= {str(tensor.dtype) for tensor in (hidden, logits)}
        return logits


def weighted(by_rank: Sequence[float], group: Any = None) -> Callable[..., tuple[Tensor, int]]:
    """Make a loss whose gradient is the rank's factor for each output and target."""

    def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        factor = by_rank[dist.get_rank(group)]
        return model(batch[0]).float().sum() * factor, len(batch[0])

    return loss_sum
