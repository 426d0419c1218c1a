"""Bodies for tasks 1.12 and 1.13."""

import io
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase1.calls import error_of, returned
from phase1.gradients import Counted, averaging
from phase1.models import (
    GLOBAL_BATCH,
    NUM_SAMPLES,
    NUM_TEST,
    Watched,
    classifier,
    network,
    state_of,
)

# 1.12


class Moody(nn.Module):
    """A classifier with dropout, one part of it frozen in evaluation mode.

    It notes its modes, and how many samples came in each forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = classifier(7), nn.Dropout(0.5)
        self.drop.eval()
        self.noted: set[str] = set()
        self.batch_sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        modes = {"in training mode": self.training, "with gradients": torch.is_grad_enabled()}
        self.noted |= {name for name, is_on in modes.items() if is_on}
        self.batch_sizes.append(len(x))
        return self.drop(self.body(x))  # type: ignore[no-any-return]


def evaluate(
    lesson: Any, size: int, batch_size: int, length: int = 0, group: Any = None
) -> dict[str, Any]:
    model, data = Moody(), Watched(size, length=length)
    modes = [module.training for module in model.modules()]
    found = lesson.evaluate(model, data, batch_size=batch_size, group=group)
    returned("evaluate", found)
    return {
        "found": [float(found.loss), float(found.accuracy), int(found.num_targets)],
        "fetched": data.fetched,
        "restored": modes == [module.training for module in model.modules()],
        "noted": sorted(model.noted),
        "batch_sizes": model.batch_sizes,
    }


def evaluate_nothing(lesson: Any) -> str:
    return error_of(lambda: lesson.evaluate(classifier(7), Watched(0)))


# 1.13

_PRINTED: dict[int, list[str]] = {}


class _ByRank(io.TextIOBase):
    """Keeps what is printed, by rank: simulated ranks share one standard output."""

    def write(self, text: str) -> int:
        _PRINTED.setdefault(dist.get_rank(), []).append(text)
        return len(text)


def fit(lesson: Any, epochs: int, *, normalised: bool = False, group: Any = None) -> dict[str, Any]:
    """Train from weights that differ by rank, in evaluation mode at first."""
    model = network(dist.get_rank(group) + 3, normalised=normalised).eval()
    train, all_reduce = Watched(NUM_SAMPLES), Counted()
    history = _history(lesson, model, train, epochs, all_reduce=all_reduce, group=group)
    return {
        "history": [_entry(result) for result in history],
        "images_per_s": [float(result.images_per_s) for result in history],
        "state": state_of(model),
        "fetched": train.fetched,
        "fetched_s": train.fetched_s,
        "reduced_s": all_reduce.done_s,
        "printed": "".join(_PRINTED.get(dist.get_rank(), [])),
    }


def _history(
    lesson: Any, model: nn.Module, train: Watched, epochs: int, seed: int = 5, **given: Any
) -> list[Any]:
    sys.stdout = _ByRank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    test = Watched(NUM_TEST, seed=1)
    found = lesson.Trainer(model, optimizer, **given).fit(
        train, test, epochs=epochs, global_batch_size=GLOBAL_BATCH, seed=seed
    )
    return list(returned("fit", found))


def fit_normalised(lesson: Any, epochs: int) -> dict[str, Any]:
    return fit(lesson, epochs, normalised=True)


def fit_in_group(lesson: Any, epochs: int) -> dict[str, Any] | None:
    """Train on ranks 1 and 2 of the world; the others do nothing."""
    group = dist.new_group([1, 2])
    return fit(lesson, epochs, group=group) if dist.get_rank() in (1, 2) else None


def _entry(result: Any) -> dict[str, Any]:
    return {
        "epoch": int(result.epoch),
        "step_losses": [float(loss) for loss in result.step_losses],
        "test": [float(result.test_loss), float(result.test_accuracy)],
    }


def fit_with_arguments(lesson: Any, seed: int) -> dict[str, Any]:
    """Order of the samples in one epoch, and how often the average given was called, with what."""
    train, all_reduce, given = Watched(NUM_SAMPLES), Counted(), list[Any]()
    _history(
        *(lesson, classifier(7), train, 1, seed),
        all_reduce=all_reduce,
        average=averaging(given),
    )
    return {"fetched": train.fetched, "average": [one is all_reduce for one in given]}


def fit_what_cannot_be_shared(lesson: Any) -> str:
    model = classifier(7)
    trainer = lesson.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.3))
    data = Watched(NUM_SAMPLES)
    return error_of(lambda: trainer.fit(data, data, epochs=1, global_batch_size=7))
