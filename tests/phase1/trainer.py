"""Bodies for task 1.13."""

import io
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from judging.calls import refusal_of, returned
from judging.pretend_device import PretendDevice, device_of
from phase1.gradients import Counted, averaging
from phase1.models import (
    FIRST_SEED,
    GLOBAL_BATCH,
    LR,
    NUM_SAMPLES,
    NUM_TEST,
    Watched,
    network,
    state_of,
    tensors_of,
)

_PRINTED: dict[int, list[tuple[float, str]]] = {}


class _ByRank(io.TextIOBase):
    """Keeps what is printed, by rank: simulated ranks share one standard output."""

    def write(self, text: str) -> int:
        _PRINTED.setdefault(dist.get_rank(), []).append((time.perf_counter(), text))
        return len(text)


def _printed() -> dict[str, Any]:
    """What this rank has printed, and when each line was complete."""
    pieces = _PRINTED.get(dist.get_rank(), [])
    ends = [when for when, text in pieces for _ in range(text.count("\n"))]
    return {"printed": "".join(text for _, text in pieces), "printed_s": ends}


def fit(
    lesson: Any,
    calls: Sequence[int],
    *,
    normalised: bool = False,
    seed: int | None = 5,
    sample_s: float = 0.001,
    group: Any = None,
    **given: Any,
) -> dict[str, Any]:
    """Train from weights that differ by rank, in evaluation mode at first.

    Args:
        calls: of ``fit``, by their numbers of epochs. Between them, ranks change their weights.
        seed: None leaves it out.
        given: to the trainer, besides model, optimizer and group.
    """
    sys.stdout = _ByRank()
    model = network(dist.get_rank(group) + FIRST_SEED, normalised=normalised).eval()
    model.training = dist.get_rank(group) % 2 == 1  # and no part of it
    model, modes = model.to(given.get("device", "cpu")), _noted_modes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    trainer = lesson.Trainer(model, optimizer, **_named(group=group), **given)
    train, test = Watched(NUM_SAMPLES, sample_s=sample_s), Watched(NUM_TEST, 1, sample_s=sample_s)
    histories = []
    for epochs in calls:
        _change(model, dist.get_rank(group) if histories else 0)
        found = trainer.fit(
            *(train, test), epochs=epochs, global_batch_size=GLOBAL_BATCH, **_named(seed=seed)
        )
        histories.append(returned("fit", found))
    return {
        "histories": [list(map(_entry, history)) for history in histories],
        "types": _wrong_types(lesson, histories),
        "images_per_s": [float(result.images_per_s) for h in histories for result in h],
        "state": state_of(model),
        "devices": sorted({str(device_of(tensor)) for tensor in tensors_of(model).values()}),
        "modes": sorted(modes),
        "fetched": train.fetched,
        "num_tested": len(test.fetched),
        "fetched_s": train.fetched_s,
        **_printed(),
    }


def _named(**given: Any) -> dict[str, Any]:
    """Leave out what is None."""
    return {name: value for name, value in given.items() if value is not None}


def _change(model: nn.Module, by: int) -> None:
    with torch.no_grad():
        for tensor in tensors_of(model).values():
            tensor += by


def _noted_modes(model: nn.Module) -> set[str]:
    """Note which modules are called for training while they are in evaluation mode."""
    found = set[str]()

    def before_forward(module: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled() and not module.training:
            found.add(type(module).__name__)

    for module in model.modules():
        module.register_forward_pre_hook(before_forward)
    return found


def _entry(result: Any) -> dict[str, Any]:
    return {
        "epoch": int(result.epoch),
        "step_losses": [float(loss) for loss in result.step_losses],
        "test": [float(result.test_loss), float(result.test_accuracy)],
    }


def _wrong_types(lesson: Any, histories: list[Any]) -> list[str]:
    """Which values are not of the type that the lesson declares."""
    found = {
        f"a {type(h).__name__} instead of a list" for h in histories if not isinstance(h, list)
    }
    for result in (result for history in histories for result in history):
        values = {"EpochResult": result, **vars(result)}
        kinds = {"EpochResult": lesson.EpochResult, "epoch": int, "step_losses": tuple}
        found |= {
            f"{name} is a {type(value).__name__}"
            for name, value in values.items()
            if not isinstance(value, kinds.get(name, float))
        }
        found |= {f"a {type(x).__name__} in step_losses" for x in result.step_losses} - {
            "a float in step_losses"
        }
    return sorted(found)


def fit_counted(lesson: Any, calls: Sequence[int], sample_s: float) -> dict[str, Any]:
    """With an all-reduce that notes when it was done."""
    all_reduce = Counted()
    found = fit(lesson, calls, sample_s=sample_s, all_reduce=all_reduce)
    return {**found, "reduced_s": all_reduce.done_s}


def fit_normalised(lesson: Any, calls: Sequence[int]) -> dict[str, Any]:
    return fit(lesson, calls, normalised=True)


def fit_in_group(lesson: Any, calls: Sequence[int]) -> dict[str, Any] | None:
    """Train on ranks 1 and 2 of the world; the others do nothing."""
    group = dist.new_group([1, 2])
    return fit(lesson, calls, normalised=True, group=group) if dist.get_rank() in (1, 2) else None


def fit_there(lesson: Any, calls: Sequence[int]) -> dict[str, Any]:
    """On a device that is not there."""
    with PretendDevice() as device:
        return {**fit(lesson, calls, normalised=True, device=device), "device": str(device)}


def fit_seeded(lesson: Any, seed: int | None, epochs: int = 1) -> list[int]:
    """The samples that are fetched in all; None leaves the seed out."""
    return list(fit(lesson, [epochs], seed=seed)["fetched"])


def fit_summing(lesson: Any) -> dict[str, Any]:
    """With an average that sums instead; what it was called with, and the all-reduce's sizes."""
    all_reduce, given = Counted(), list[Any]()
    found = fit(lesson, [1], all_reduce=all_reduce, average=averaging(given))
    return {**found, "average": [one is all_reduce for one in given], "sizes": all_reduce.sizes}


def parts_of_fit(lesson: Any, epochs: int) -> None:
    """What the lesson's own functions send for a training, without steps and buffers."""
    model, test = network(FIRST_SEED, normalised=True), Watched(NUM_TEST, 1)
    lesson.broadcast_parameters(model)
    for _ in range(epochs):
        lesson.evaluate(model, test)


def fit_what_cannot_be_shared(lesson: Any) -> dict[str, str]:
    model = network(FIRST_SEED, normalised=False)
    trainer = lesson.Trainer(model, torch.optim.SGD(model.parameters(), lr=LR))
    data = Watched(NUM_SAMPLES)
    return refusal_of(lambda: trainer.fit(data, data, epochs=1, global_batch_size=7))
