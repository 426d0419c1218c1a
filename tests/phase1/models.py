"""Models, batches and data sets that bodies, judges and references have in common."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES, CLASSES = 6, 3
GLOBAL_BATCH, NUM_SAMPLES, NUM_TEST = 8, 27, 11
STEPS = NUM_SAMPLES // GLOBAL_BATCH  # in an epoch


class Odd(nn.Module):
    """Has what breaks careless code: buffers, frozen, tied, unused and channels_last parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4).double()
        self.norm.running_mean.fill_(float(seed))  # type: ignore[union-attr]
        self.norm.num_batches_tracked.fill_(seed)  # type: ignore[union-attr]
        self.first = nn.Linear(3, 3, bias=False).double()
        self.tied = nn.Linear(3, 3).double()
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(2).double(), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(5).double())
        self.register_buffer("hidden", torch.full((2,), float(seed)), persistent=False)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; those that are shared come once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def state_of(module: nn.Module) -> dict[str, list[float]]:
    tensors = tensors_of(module).items()
    return {name: tensor.detach().double().flatten().tolist() for name, tensor in tensors}


def sizes_of_odd() -> list[int]:
    """Bytes of each parameter and buffer."""
    return [tensor.nbytes for tensor in tensors_of(Odd(0)).values()]


def gradients_of(rank: int) -> dict[str, Tensor | None]:
    """What a rank has after backward: odd ranks have not used ``sometimes``."""
    module, gradients = Odd(0), {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        generator = torch.Generator().manual_seed(100 * rank + number)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        has_one = parameter.requires_grad and not (name == "sometimes" and rank % 2)
        gradients[name] = drawn if has_one else None
    return gradients


def classifier(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return nn.Sequential(*layers).double()


def batch_of(sizes: Sequence[int], rank: int, step: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """The rank's inputs and targets; ``length`` targets each for sequences."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (sizes[rank], length) if length else (sizes[rank],)
    inputs = torch.randn(*shape, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, shape, generator=generator)


class Watched(Dataset[tuple[Tensor, Tensor]]):
    """Notes which samples are fetched, and when; each takes 1 ms, virtual where simulated."""

    def __init__(self, size: int, seed: int = 0, length: int = 0) -> None:
        self.inputs, self.targets = batch_of([size], 0, seed, length)
        self.fetched: list[int] = []
        self.fetched_s: list[float] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched.append(int(index))
        self.fetched_s.append(time.perf_counter())
        time.sleep(0.001)
        return self.inputs[index], self.targets[index]


def network(seed: int, *, normalised: bool) -> nn.Module:
    model = classifier(seed)
    if normalised:
        norm = nn.BatchNorm1d(8).double()
        return nn.Sequential(model[0], norm, *list(model)[1:])  # type: ignore[index,arg-type]
    return model
