"""Models, batches and data sets shared by bodies, judges and references."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from judging.models import CLASSES, DOUBLE, FEATURES, batch

GLOBAL_BATCH, NUM_SAMPLES, NUM_TEST = 8, 27, 11
STEPS = NUM_SAMPLES // GLOBAL_BATCH  # steps per epoch
LR, FIRST_SEED = 0.3, 3  # rank r draws its initial weights with the seed 3 + r


class Odd(nn.Module):
    """A module that breaks careless code: it has tied, frozen, unused and channels_last parameters.

    Its parameters are in float64, its buffers in many dtypes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 3, 2, **DOUBLE).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4, **DOUBLE)
        self.norm.running_mean.fill_(float(seed))  # type: ignore[union-attr]
        self.norm.num_batches_tracked.fill_(2**62 + seed)  # type: ignore[union-attr]
        self.first = nn.Linear(3, 3, bias=False, **DOUBLE)
        self.tied = nn.Linear(3, 3, **DOUBLE)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.randn((), **DOUBLE))
        self.across = nn.Parameter(torch.randn(5, 2, **DOUBLE).t())
        self.frozen = nn.Parameter(torch.randn(2, **DOUBLE), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(5, **DOUBLE))
        self.never = nn.Parameter(torch.randn(3, **DOUBLE))
        self.register_buffer("hidden", torch.full((2,), float(seed)), persistent=False)
        self.register_buffer("mask", torch.arange(7) % (seed + 2) == 0)
        self.register_buffer("brief", torch.randn(300).bfloat16())
        self.register_buffer("absent", None)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name; shared ones appear only once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def state_of(module: nn.Module) -> dict[str, list[float]]:
    tensors = tensors_of(module).items()
    return {name: tensor.detach().flatten().tolist() for name, tensor in tensors}


def sizes_of_odd() -> list[int]:
    """Return the size of each parameter and buffer of ``Odd``, in bytes."""
    return [tensor.nbytes for tensor in tensors_of(Odd(0)).values()]


def gradients_of(rank: int) -> dict[str, Tensor | None]:
    """Make a rank's gradients for the parameters of ``Odd``; some have no gradient.

    ``never`` has none on any rank, ``sometimes`` has none on odd ranks, and rank 3 has no gradients
    at all. ``frozen`` has a gradient, which counts as stale. On rank 2, the gradient of ``scale``
    is infinite; all others consist of whole numbers that are exact in every dtype.
    """
    gradients: dict[str, Tensor | None] = {}
    for number, (name, parameter) in enumerate(Odd(0).named_parameters()):
        generator = torch.Generator().manual_seed(100 * rank + number)
        drawn = torch.randint(-8, 8, parameter.shape, generator=generator).double()
        if name == "scale" and rank == 2:
            drawn = torch.full_like(drawn, torch.inf)
        has_one = rank != 3 and name != "never" and not (name == "sometimes" and rank % 2)
        gradients[name] = drawn if has_one else None
    return gradients


def classifier(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 8, **DOUBLE), nn.Tanh(), nn.Linear(8, CLASSES, **DOUBLE)
    )


def batch_of(sizes: Sequence[int], rank: int, step: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets in a step; they are sequences if ``length`` is not 0."""
    return batch((sizes[rank], length) if length else (sizes[rank],), 1000 * step + rank)


class Watched(Dataset[tuple[Tensor, Tensor]]):
    """A data set that records which samples are fetched, and when.

    A fetch takes ``sample_s`` seconds. Copying returns the same object, so that fetches from a copy
    are recorded too.
    """

    def __init__(self, size: int, seed: int = 0, length: int = 0, sample_s: float = 0.001) -> None:
        with torch.device("cpu"):
            self.inputs, self.targets = batch_of([size], 0, seed, length)
        self.sample_s = sample_s
        self.fetched: list[int] = []
        self.fetched_s: list[float] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched.append(int(index))
        self.fetched_s.append(time.perf_counter())
        time.sleep(self.sample_s)
        return self.inputs[index], self.targets[index]

    def __copy__(self) -> "Watched":
        return self

    def __deepcopy__(self, memo: object) -> "Watched":
        return self


def network(seed: int, *, normalised: bool) -> nn.Module:
    """Make a classifier; if ``normalised``, add a BatchNorm whose statistics depend on the seed."""
    model = classifier(seed)
    if normalised:
        norm = nn.BatchNorm1d(8, **DOUBLE)
        norm.running_mean.fill_(seed / 2)  # type: ignore[union-attr]
        return nn.Sequential(model[0], norm, Seen(), *list(model)[1:])  # type: ignore[index,arg-type]
    return model


class Seen(nn.Module):
    """Keeps two buffers: the number of positive training inputs, and the last batch's maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positive", torch.tensor(0))
        self.register_buffer("largest", torch.zeros((), **DOUBLE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.positive += (x > 0).sum()
            self.largest.fill_(x.detach().max())
        return x


class Saturated(nn.Module):
    """A classifier for x = ±1 with bfloat16 logits 0 and 64·x.

    A target of 0 has a loss of exactly 64 if x is 1, and of exactly 0 if x is -1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(64.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        first = x[..., :1] * self.scale
        return torch.cat([torch.zeros_like(first), first], dim=-1)


class Notes:
    """A record of a model's calls; copies of the model share it."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # number of rows in each forward pass
        self.modes: set[str] = set()  # modes of calls that evaluation must avoid
        self.devices: set[str] = set()

    def __deepcopy__(self, memo: object) -> "Notes":
        return self


class Moody(nn.Module):
    """A classifier with dropout that records how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.notes = classifier(7), nn.Dropout(0.5), Notes()

    def forward(self, x: Tensor) -> Tensor:
        training = any(module.training for module in self.modules())
        modes = {"in training mode": training, "with gradients": torch.is_grad_enabled()}
        self.notes.modes |= {name for name, is_on in modes.items() if is_on}
        self.notes.rows.append(len(x))
        self.notes.devices.add(str(x.device))
        return self.drop(self.body(x))  # type: ignore[no-any-return]
