"""Bodies for tasks 1.1 to 1.3."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from phase1.groups import error_of

# 1.1


def shards(lesson: Any, cases: list[tuple[int, int, dict[str, Any]]]) -> list[list[list[int]]]:
    """For every (samples, ranks, options), the shards by rank; other draws come in between."""
    found = []
    for num_samples, num_ranks, options in cases:
        by_rank = []
        for rank in range(num_ranks):
            torch.rand(rank + 1), np.random.rand(rank + 1), random.random()
            shard = lesson.shard_indices(num_samples, rank, num_ranks, **options)
            by_rank.append([int(index) for index in shard])
        found.append(by_rank)
    return found


def shards_refused(lesson: Any, cases: list[tuple[int, int, int]]) -> list[str]:
    return [error_of(lambda case=case: lesson.shard_indices(*case)) for case in cases]  # type: ignore[misc]


def generators_moved(lesson: Any) -> list[str]:
    """Name the global generators that a call has moved or seeded."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
    lesson.shard_indices(10, 0, 2, epoch=3, seed=5)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
    names = ("random", "numpy", "torch")
    return [name for name, a, b in zip(names, before, after, strict=True) if a != b]


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
    data = Numbered(num_samples)
    loader = lesson.build_loader(data, global_batch_size, group=group, **options)
    return [_epoch(loader, epoch) for epoch in epochs]


def _epoch(loader: Any, epoch: int) -> dict[str, Any]:
    if epoch >= 0:
        loader.set_epoch(epoch)
    steps, noise = [], []
    for images, labels in loader:
        steps.append([int(label) for label in labels])
        noise += [float(number) for number in images[:, 1]]
    return {"steps": steps, "noise": noise, "len": len(loader)}


def loader_settings(lesson: Any) -> int:
    return int(lesson.build_loader(Numbered(8), 4, num_loader_workers=2).num_workers)


def loads_refused(lesson: Any, cases: list[tuple[int, int]]) -> list[str]:
    return [
        error_of(lambda n=n, batch=batch: lesson.build_loader(Numbered(n), batch))  # type: ignore[misc]
        for n, batch in cases
    ]


# 1.3


def scatter(
    lesson: Any, rows: int, src: int, label_dtype: str = "int64", group: Any = None
) -> dict[str, Any]:
    """The rank's rows of a batch whose row k holds k and 10 k."""
    has_it = dist.get_rank(group) == src
    batch = _batch(rows, label_dtype) if has_it else None
    images, labels = lesson.scatter_batch(batch, src, group=group)
    return {
        "shape": list(images.shape),
        "dtypes": [str(images.dtype), str(labels.dtype)],
        "images": images.double().flatten(1).mean(dim=1).tolist(),
        "labels": labels.tolist(),
    }


def _batch(rows: int, label_dtype: str) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(rows)
    images = numbers[:, None, None].expand(rows, 2, 250).to(torch.float32)
    transposed = images.transpose(1, 2).contiguous().transpose(1, 2)  # rows not contiguous
    return transposed, (10 * numbers).to(getattr(torch, label_dtype))


def scatter_what_is_wrong(lesson: Any, what: str) -> str:
    """Return the ValueError of this rank, when the source has no batch, or one that is wrong."""
    wrong = {
        "nothing": None,
        "6 images and 5 labels": (torch.zeros(6, 2), torch.zeros(5)),
    }[what]
    batch = wrong if dist.get_rank() == 1 else None
    return error_of(lambda: lesson.scatter_batch(batch, 1))
