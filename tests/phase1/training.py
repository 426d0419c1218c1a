"""Bodies (functions that ranks run) for tasks 1.9 to 1.13, and the callbacks they pass."""

import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from judging.calls import refusal_of, returned
from judging.comparing import noting_changes
from judging.models import Worn
from judging.models import gradients_of as gradients_of_module
from judging.pretend_device import PretendDevice, device_of, devices_sent
from judging.tensors import given_device, given_group, own_device
from phase1 import models

# Task 1.9: broadcast parameters


def broadcast_odd(lesson: Any, src: int | None, group: Any = None) -> dict[str, Any]:
    """Broadcast the parameters of ``Odd``; return its final state and any side effects."""
    module = models.Odd(dist.get_rank(group) + 1).train(src is None)  # the mode should not matter
    _set_gradients(module, models.gradients_of(dist.get_rank(group)))
    before, gradients = models.tensors_of(module), gradients_of_module(module)
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    trainable = [p.requires_grad for p in module.parameters()]
    arguments = [] if src is None else [src]
    lesson.broadcast_parameters(module, *arguments, **given_group(group))
    after = models.tensors_of(module)
    return {
        "state": models.state_of(module),
        "replaced": [name for name in before if after.get(name) is not before[name]],
        "moved": [name for name in before if before[name].data_ptr() != addresses[name]],
        "changed": ["requires_grad"] * (trainable != [p.requires_grad for p in module.parameters()])
        + ["gradients"] * (gradients != gradients_of_module(module)),
    }


def _set_gradients(module: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    """Set gradients with the memory layout of the parameters, as autograd does."""
    for name, parameter in module.named_parameters():
        drawn = gradients[name]
        if drawn is not None:
            parameter.grad = torch.empty_like(parameter).copy_(drawn)


# Task 1.10: averaged gradients


class Counted:
    """An all-reduce that records the sizes of its tensors, and when each call ends."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_bytes: list[int] = []
        self.done_s: list[float] = []

    def __call__(self, x: Tensor, group: Any = None) -> None:
        if not x.is_contiguous():
            raise ValueError("all_reduce was given a tensor that is not contiguous")
        self.sizes.append(x.numel())
        self.num_bytes.append(x.nbytes)
        dist.all_reduce(x, group=group)
        self.done_s.append(time.perf_counter())


MIXED = {"conv.weight": torch.float32, "first.weight": torch.bfloat16, "scale": torch.float16}


def average_odd(
    lesson: Any, function: str, mixed: bool = False, group: Any = None
) -> dict[str, Any]:
    """Average the gradients of ``Odd``, whose parameters have several dtypes if ``mixed``.

    Returns:
        The averaged gradients, the names of those that moved in memory or were replaced, and the
        bytes of each all-reduce.
    """
    module = models.Odd(0)
    for name, parameter in module.named_parameters() if mixed else ():
        parameter.data = parameter.data.to(MIXED.get(name, torch.float64))
    _set_gradients(module, models.gradients_of(dist.get_rank(group)))
    before = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    addresses = {name: gradient.data_ptr() for name, gradient in before.items()}
    all_reduce = Counted()
    getattr(lesson, function)(module, all_reduce, group)
    after = dict(module.named_parameters())
    return {
        "means": gradients_of_module(module),
        "moved": [
            name
            for name, gradient in before.items()
            if after[name].grad is not gradient or gradient.data_ptr() != addresses[name]
        ],
        "num_bytes": all_reduce.num_bytes,
    }


def average_by_default(lesson: Any, function: str) -> dict[str, Any]:
    """Average the gradients of ``Odd`` with the function's default arguments, and return them."""
    module = models.Odd(0)
    _set_gradients(module, models.gradients_of(dist.get_rank()))
    getattr(lesson, function)(module)
    return {"means": gradients_of_module(module), "moved": []}


def average_nothing(lesson: Any) -> list[int]:
    """Call both functions on a module with nothing to train; return their all-reduces' sizes."""
    all_reduce = Counted()
    for function in ("average_gradients", "average_gradients_flat"):
        module = models.Odd(0).requires_grad_(False)
        getattr(lesson, function)(module, all_reduce)
    return all_reduce.sizes


def average_large(lesson: Any, function: str, size: int) -> list[int]:
    """Average ``size**2`` gradients with an all-reduce that allocates no memory.

    Returns:
        The number of elements in each call of the all-reduce.
    """
    module, sizes = nn.Linear(size, size, bias=False), list[int]()
    module.weight.grad = torch.ones(size, size)
    getattr(lesson, function)(module, lambda x, group=None: sizes.append(x.numel()))
    return sizes


# Task 1.13: an ``average`` to pass to the trainer


def averaging(given: list[Any]) -> Callable[..., None]:
    """Make an ``average`` that only sums, and appends the all-reduce it gets to ``given``."""

    def average(module: nn.Module, all_reduce: Any, group: Any = None) -> None:
        given.append(all_reduce)
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=group)

    return average


# Task 1.11: steps


def train_steps(
    lesson: Any, sizes: list[int], num_steps: int, length: int = 0, group: Any = None
) -> dict[str, Any]:
    """Train from equal weights, starting with stale gradients.

    Returns:
        The losses, the final weights, the number of rows in each forward pass, and the names of
        inputs and buffers that the steps changed.
    """
    rank, device = dist.get_rank(group), own_device(group)
    model = Worn().to(device)
    # Leave an old gradient, as if the parameter had been frozen after a step.
    model.frozen.grad = torch.full_like(model.frozen, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, changed = [], set[str]()
    for step in range(num_steps):
        inputs, targets = (x.to(device) for x in models.batch_of(sizes, rank, step, length))
        model.register_buffer("kept", torch.full((2,), float(rank), device=device))
        with noting_changes(inputs=inputs, targets=targets, buffers=model.kept) as now_changed:
            loss = lesson.train_step(model, optimizer, (inputs, targets), **given_group(group))
        losses.append(returned("train_step", loss))
        changed |= {*now_changed}
        del model.kept
    return {
        "losses": [float(loss) for loss in losses],
        "types": sorted({type(loss).__name__ for loss in losses if not isinstance(loss, float)}),
        "state": models.state_of(model),
        "rows": model.rows,
        "changed": sorted(changed),
    }


def step_with_arguments(lesson: Any, gradient: float, group: Any = None) -> dict[str, Any]:
    """Take a step with a given ``average`` and ``all_reduce``.

    This ``average`` sets every gradient to ``gradient``, which determines how the weights change.

    Returns:
        How both functions were called, and the change of each weight.
    """
    model, counted, given = Worn(), Counted(), list[list[bool]]()
    expected = model, counted, group

    def average(module: nn.Module, all_reduce: Any, group: Any = None) -> None:
        pairs = zip((module, all_reduce, group), expected, strict=True)
        given.append([a is b for a, b in pairs])
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)

    before = models.state_of(model)
    batch = models.batch_of([3] * dist.get_world_size(group), dist.get_rank(group), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lesson.train_step(model, optimizer, batch, all_reduce=counted, average=average, group=group)
    after = models.state_of(model)
    moved = {
        name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after
    }
    return {"average": given, "sizes": counted.sizes, "moved": moved}


def step_without_data(lesson: Any) -> dict[str, Any]:
    """Take a step without targets; return its error, and whether the parameters changed."""
    model = Worn()
    before = models.state_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    empty = models.batch_of([0] * dist.get_world_size(), dist.get_rank(), 0)
    refusal = refusal_of(lambda: lesson.train_step(model, optimizer, empty))
    return {**refusal, "changed": models.state_of(model) != before}


def step_in_bfloat16(lesson: Any, sizes: list[int], num_wrong: list[int]) -> float:
    """Return the loss of a step in bfloat16; each wrong target adds 64, and every other adds 0."""
    rank, model = dist.get_rank(), models.Saturated()
    inputs = _signs(sizes[rank], num_wrong[rank])
    targets = torch.zeros(sizes[rank], dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = lesson.train_step(model, optimizer, (inputs, targets))
    return float(returned("train_step", found))


def _signs(size: int, num_wrong: int) -> Tensor:
    """Make inputs; ``Saturated`` predicts class 1 for the first ``num_wrong``, 0 for all others."""
    inputs = torch.full((size, 1), -1.0, dtype=torch.bfloat16)
    inputs[:num_wrong] = 1
    return inputs


# Task 1.12: evaluation


def evaluate(
    lesson: Any,
    size: int,
    length: int = 0,
    given: Mapping[str, Any] | None = None,
    modes: Sequence[bool] = (),
    group: Any = None,
) -> dict[str, Any]:
    """Evaluate a model; return the result, and how the model and the data set were used.

    Args:
        given: More arguments for the lesson's ``evaluate``.
        modes: For each of the model's modules, whether to put it in training mode before the call.
            If empty, modes stay as they are.
    """
    device, model = given_device(group), models.Moody()
    for module, mode in zip(model.modules(), modes, strict=False):
        module.training = mode
    data = models.Watched(size, length=length)
    named = {**device, **(given or {}), **given_group(group)}
    return _evaluated(lesson, model.to(**device), data, named)


def evaluate_there(lesson: Any, size: int) -> dict[str, Any]:
    """Evaluate a model on a pretend device; also return the devices of the tensors sent."""
    with PretendDevice() as device, devices_sent() as sent:
        model, data = models.Moody().to(device), models.Watched(size)
        found = _evaluated(lesson, model, data, {"device": str(device)})
    return {**found, "sent": sent, "device": str(device)}


def _evaluated(
    lesson: Any, model: models.Moody, data: models.Watched, given: dict[str, Any]
) -> dict[str, Any]:
    modes, before = [module.training for module in model.modules()], models.state_of(model)
    found = returned("evaluate", lesson.evaluate(model, data, **given))
    values = [found.loss, found.accuracy, found.num_targets]
    return {
        "found": [float(value) for value in values],
        "types": [type(found).__name__, *(type(value).__name__ for value in values)],
        "fetched": data.fetched,
        "rows": model.notes.rows,
        "noted": sorted(model.notes.modes),
        "devices": sorted(model.notes.devices),
        "restored": modes == [module.training for module in model.modules()],
        "changed": models.state_of(model) != before,
    }


def evaluate_nothing(lesson: Any) -> dict[str, str]:
    return refusal_of(
        lambda: lesson.evaluate(models.classifier(7), models.Watched(0), **given_device())
    )


def evaluate_in_bfloat16(lesson: Any, size: int, num_wrong: int) -> list[float]:
    """Return the loss, accuracy and number of targets of an evaluation in bfloat16.

    A wrong target has a loss of 64, and any other target has a loss of 0.
    """
    data = TensorDataset(_signs(size, num_wrong), torch.zeros(size, dtype=torch.int64))
    found = returned(
        "evaluate", lesson.evaluate(models.Saturated(), data, batch_size=size, **given_device())
    )
    return [float(found.loss), float(found.accuracy), float(found.num_targets)]


# Task 1.13: whole training runs

_PRINTED: dict[int, list[tuple[float, str]]] = {}


class _ByRank(io.TextIOBase):
    """A stream that collects text by rank, because simulated ranks share one standard output."""

    def write(self, text: str) -> int:
        _PRINTED.setdefault(dist.get_rank(), []).append((time.perf_counter(), text))
        return len(text)


def _printed() -> dict[str, Any]:
    """Return the text that this rank has printed, and the time at which each line was complete."""
    pieces = _PRINTED.get(dist.get_rank(), [])
    ends = [when for when, text in pieces for _ in range(text.count("\n"))]
    return {"printed": "".join(text for _, text in pieces), "printed_s": ends}


def fit(
    lesson: Any,
    calls: Sequence[int],
    normalised: bool = False,
    seed: int | None = 5,
    sample_s: float = 0.001,
    group: Any = None,
    **given: Any,
) -> dict[str, Any]:
    """Train from weights that differ by rank, with the model's parts in evaluation mode at first.

    Args:
        calls: The number of epochs in each call of ``fit``. Between the calls, all ranks but rank 0
            change their weights.
        seed: The seed to pass to ``fit``, or None to pass none.
        given: More arguments for the lesson's ``Trainer``.
    """
    sys.stdout, given = _ByRank(), {**given_device(group), **given}
    model = models.network(dist.get_rank(group) + models.FIRST_SEED, normalised=normalised).eval()
    model.training = dist.get_rank(group) % 2 == 1  # sets the mode of the model, not of its parts
    model, modes = model.to(given.get("device", "cpu")), _noted_modes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LR, momentum=0.9)
    trainer = lesson.Trainer(model, optimizer, **_named(group=group), **given)
    train = models.Watched(models.NUM_SAMPLES, sample_s=sample_s)
    test = models.Watched(models.NUM_TEST, 1, sample_s=sample_s)
    more = {"global_batch_size": models.GLOBAL_BATCH, **_named(seed=seed)}
    histories = []
    for epochs in calls:
        _change(model, dist.get_rank(group) if histories else 0)
        found = trainer.fit(train, test, epochs=epochs, **more)
        histories.append(returned("fit", found))
    return {
        "histories": [list(map(_entry, history)) for history in histories],
        "types": _wrong_types(lesson, histories),
        "images_per_s": [float(result.images_per_s) for h in histories for result in h],
        "state": models.state_of(model),
        "devices": sorted({str(device_of(tensor)) for tensor in models.tensors_of(model).values()}),
        "modes": sorted(modes),
        "fetched": train.fetched,
        "num_tested": len(test.fetched),
        "fetched_s": train.fetched_s,
        **_printed(),
    }


def _named(**given: Any) -> dict[str, Any]:
    """Return the arguments that are not None, by name."""
    return {name: value for name, value in given.items() if value is not None}


def _change(model: nn.Module, by: int) -> None:
    with torch.no_grad():
        for tensor in models.tensors_of(model).values():
            tensor += by


def _noted_modes(model: nn.Module) -> set[str]:
    """Return a set that collects the types of modules called in evaluation mode during training."""
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
    """List the values whose types differ from those that the lesson declares."""
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
    """Train with an all-reduce that records when each call ends; also return these times."""
    all_reduce = Counted()
    found = fit(lesson, calls, sample_s=sample_s, all_reduce=all_reduce)
    return {**found, "reduced_s": all_reduce.done_s}


def fit_in_group(lesson: Any, calls: Sequence[int]) -> dict[str, Any] | None:
    """Train in a group of ranks 1 and 2, which share each batch evenly; other ranks do nothing."""
    group = dist.new_group([1, 2])
    return fit(lesson, calls, normalised=True, group=group) if dist.get_rank() in (1, 2) else None


def fit_there(lesson: Any, calls: Sequence[int]) -> dict[str, Any]:
    """Train on a pretend device; also return its name."""
    with PretendDevice() as device:
        return {**fit(lesson, calls, normalised=True, device=device), "device": str(device)}


def fit_summing(lesson: Any) -> dict[str, Any]:
    """Train with an ``average`` that sums gradients instead of averaging them.

    Returns:
        The results of ``fit``, whether each call of ``average`` got the trainer's all-reduce, and
        the sizes of the tensors that this all-reduce got.
    """
    all_reduce, given = Counted(), list[Any]()
    found = fit(lesson, [1], all_reduce=all_reduce, average=averaging(given))
    return {**found, "average": [one is all_reduce for one in given], "sizes": all_reduce.sizes}


def parts_of_fit(lesson: Any, epochs: int) -> None:
    """Broadcast once and evaluate after each epoch, as ``fit`` does, but without any steps."""
    model = models.network(models.FIRST_SEED, normalised=True)
    test = models.Watched(models.NUM_TEST, 1)
    lesson.broadcast_parameters(model)
    for _ in range(epochs):
        lesson.evaluate(model, test, **given_device())


def fit_what_cannot_be_shared(lesson: Any) -> dict[str, str]:
    model = models.network(models.FIRST_SEED, normalised=False)
    trainer = lesson.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=models.LR), **given_device()
    )
    data = models.Watched(models.NUM_SAMPLES)
    return refusal_of(lambda: trainer.fit(data, data, epochs=1, global_batch_size=7))
