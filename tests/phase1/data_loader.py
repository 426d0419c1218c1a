"""Bodies for tasks 1.1 to 1.3."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from phase1.calls import error_of, pair, returned

# 1.1


def shards(lesson: Any, cases: list[tuple[int, int, dict[str, Any]]]) -> list[list[list[int]]]:
    """For every (samples, ranks, options), the shards by rank; other draws come in between."""
    found = []
    for num_samples, num_ranks, options in cases:
        by_rank = []
        for rank in range(num_ranks):
            torch.rand(rank + 1), np.random.rand(rank + 1), random.random()
            shard = lesson.shard_indices(num_samples, rank, num_ranks, **options)
            by_rank.append([int(index) for index in returned("shard_indices", shard)])
        found.append(by_rank)
    return found


def shards_refused(lesson: Any, cases: list[tuple[int, int, int]]) -> list[str]:
    return [error_of(lambda case=case: lesson.shard_indices(*case)) for case in cases]  # type: ignore[misc]


class Generators:
    """The global generators, as they are when this is made."""

    def __init__(self) -> None:
        self.states = {
            "random": random.getstate(),
            "numpy": np.random.get_state()[1].tobytes(),  # type: ignore[index,union-attr]
            "torch": torch.get_rng_state().numpy().tobytes(),
        }

    def moved(self) -> set[str]:
        """Name those that have been moved, or seeded, since."""
        return {name for name, state in Generators().states.items() if state != self.states[name]}


def generators_moved(lesson: Any) -> list[str]:
    """Name the global generators that a call has moved or seeded."""
    before = Generators()
    lesson.shard_indices(10, 0, 2, epoch=3, seed=5)
    return sorted(before.moved())


# 1.2


class Numbered(Dataset[tuple[Tensor, int]]):
    """Sample k is the number k and a random number, as augmentation would draw it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        return torch.tensor([float(index), noise], dtype=torch.float64), index


def load_epochs(
    lesson: Any,
    num_samples: int,
    global_batch_size: int,
    epochs: list[int],
    options: dict[str, Any],
    group: Any = None,
) -> list[dict[str, Any]]:
    """What the rank loads in each epoch: indices by step, and what augmentation drew."""
    torch.manual_seed(dist.get_rank())
    data, before = Numbered(num_samples), Generators()
    loader = lesson.build_loader(data, global_batch_size, group=group, **options)
    returned("build_loader", loader)
    return [_epoch(loader, epoch, before) for epoch in epochs]


def _epoch(loader: Any, epoch: int, before: Generators) -> dict[str, Any]:
    if epoch >= 0:
        loader.set_epoch(epoch)
    moved = before.moved()
    steps, noise = [], []
    for images, labels in loader:
        moved |= before.moved()  # as the training would see them
        steps.append([int(label) for label in labels])
        noise += [float(number) for number in images[:, 1]]
    return {"steps": steps, "noise": noise, "len": len(loader), "moved": sorted(moved)}


def load_by_processes(lesson: Any, *args: Any) -> dict[str, Any]:
    """What two loader processes of each rank load, and how many the loader says there are."""
    loader = lesson.build_loader(Numbered(8), 4, num_loader_workers=2)
    workers = returned("build_loader", loader).num_workers
    return {"workers": workers, "epochs": load_epochs(lesson, *args, {"num_loader_workers": 2})}


def loads_refused(lesson: Any, cases: list[tuple[int, int]]) -> list[str]:
    return [
        error_of(lambda n=n, batch=batch: lesson.build_loader(Numbered(n), batch))  # type: ignore[misc]
        for n, batch in cases
    ]


# 1.3


def scatter(
    lesson: Any, rows: int, src: int, kinds: dict[str, Any], group: Any = None
) -> dict[str, Any]:
    """The rank's rows of a batch whose row k holds k, and 10 k in its labels."""
    has_it = dist.get_rank(group) == src
    batch = _batch(rows, **kinds) if has_it else None
    part = lesson.scatter_batch(batch, src, group=group)
    images, labels = pair("scatter_batch", part, "images and labels")
    return {
        "shapes": [list(images.shape), list(labels.shape)],
        "dtypes": [str(images.dtype), str(labels.dtype)],
        "images": images.double().flatten(1).mean(dim=1).tolist(),
        "labels": labels.double()[:, None].flatten(1).mean(dim=1).tolist(),
    }


def _batch(
    rows: int,
    image_dtype: str = "float32",
    label_dtype: str = "int64",
    label_shape: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(rows)
    images = numbers[:, None, None].expand(rows, 2, 250).to(getattr(torch, image_dtype))
    transposed = images.transpose(1, 2).contiguous().transpose(1, 2)  # rows not contiguous
    labels = (10 * numbers).view(-1, *(1 for _ in label_shape)).expand(rows, *label_shape)
    return transposed, labels.to(getattr(torch, label_dtype)).contiguous()


def scatter_what_is_wrong(lesson: Any, what: str) -> str:
    """Return the ValueError of this rank, when the source has no batch, or one that is wrong."""
    wrong = {
        "nothing": None,
        "6 images and 5 labels": (torch.zeros(6, 2), torch.zeros(5)),
    }[what]
    batch = wrong if dist.get_rank() == 1 else None
    return error_of(lambda: lesson.scatter_batch(batch, 1))
