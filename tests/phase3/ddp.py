"""Bodies for task 3.12, and the training in one process that theirs must equal."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.models import SGD, Odd, gradients_of
from judging.pretend_device import PretendDevice, device_of
from phase3.ddp_models import (
    Branches,
    Layer,
    NotedStart,
    Slow,
    loss_of,
    names_in,
    odd_batch,
)

PLAIN, IN_PARTS = "a backward pass", "backward passes inside, then one outside"
INSIDE_ONLY, KEPT = "a backward pass inside only", "gradients kept from the step before"
FORWARD_BEFORE = "the forward pass before no_sync, the backward pass inside"
AFTER_ERROR = "an error inside, then a backward pass"
ACCUMULATIONS = INSIDE_ONLY, IN_PARTS, FORWARD_BEFORE, AFTER_ERROR, KEPT


class Limits(NamedTuple):
    """Limits of the buckets."""

    bucket_bytes: int
    first_bucket_bytes: int


class Plan(NamedTuple):
    """A training of an ``Odd``.

    Attributes:
        limits: Limits of the buckets.
        rows: Rows of the batches, by step and rank; a rank without rows computes nothing then.
        is_noted: True if an all-reduce is given that notes its calls, False for the default.
        how: ``PLAIN``, or one of ``ACCUMULATIONS``.
    """

    limits: Limits
    rows: tuple[tuple[int, ...], ...]
    is_noted: bool = True
    how: str = PLAIN


def wrapped(lesson: Any, module: nn.Module, limits: Limits, **arguments: Any) -> Any:
    """Give a module to the lesson; arguments that are None are left out."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return lesson.DistributedDataParallel(module, **limits._asdict(), **given)


def _optimizer(model: nn.Module) -> SGD:
    return SGD(model, 0.02, momentum=0.9, weight_decay=0.1)


def train(lesson: Any, plans: Sequence[Plan], group: Any = None) -> list[dict[str, Any]]:
    """Train a fresh ``Odd`` by each plan.

    Returns:
        For each plan, the facts of every step, and the order of the first gradients.
    """
    trainings = [Training(lesson, plan, group) for plan in plans]
    return [
        {"steps": [*map(training.step, range(len(plan.rows)))], "arrived": training.arrived}
        for plan, training in zip(plans, trainings, strict=True)
    ]


class Training:
    """A rank's training by a plan.

    Attributes:
        arrived: Names of the parameters in the order in which their gradients arrived in step 0,
            outside of no_sync.
    """

    def __init__(self, lesson: Any, plan: Plan, group: Any) -> None:
        self.plan, self.rank = plan, dist.get_rank(group)
        self.model, self.noted = Odd(self.rank + 1), NotedStart()
        self.arrived: list[str] = []
        self.is_noting = True
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                note = lambda _, name=name: self._note(name)  # noqa: E731
                parameter.register_post_accumulate_grad_hook(note)
        all_reduce = self.noted if plan.is_noted else None
        self.ddp = wrapped(lesson, self.model, plan.limits, all_reduce=all_reduce, group=group)
        self.optimizer = _optimizer(self.model)

    def _note(self, name: str) -> None:
        if self.is_noting and name not in self.arrived:
            self.arrived.append(name)

    def step(self, step: int) -> dict[str, Any]:
        """Take a step."""
        rows, self.num_inside = self.plan.rows[step], 0
        if self.plan.how != KEPT:
            self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        if rows[self.rank]:
            x = odd_batch(rows[self.rank], self.rank, step)
            self._go_back(x, len(rows) / sum(rows))
        num_before = len(self.noted.calls)
        self.ddp.finish_gradient_synchronization()
        self.is_noting = False
        calls = self.noted.taken()
        gradients = gradients_of(self.model)
        self.optimizer.step()
        return {
            "gradients": gradients,
            "state": state_of(self.model),
            "num_bytes": [call.num_bytes for call in calls],
            "names": [names_in(call, self.model) for call in calls],
            "before finish": num_before,
            "inside": self.num_inside,
        }

    def _go_back(self, x: Tensor, scale: float) -> None:
        how, parts = self.plan.how, x.tensor_split(3)
        if how == IN_PARTS:
            with self._inside():
                for part in parts[:-1]:
                    self._loss(part, scale).backward()
            self._loss(parts[-1], scale).backward()
        elif how == FORWARD_BEFORE:
            *losses, last = [self._loss(part, scale) for part in parts]
            with self._inside():
                for loss in losses:
                    loss.backward()
            last.backward()
        elif how == INSIDE_ONLY:
            with self._inside():
                self._loss(x, scale).backward()
        else:
            if how == AFTER_ERROR:
                _raise_inside(self.ddp)
            self._loss(x, scale).backward()

    def _loss(self, x: Tensor, scale: float) -> Tensor:
        return scale * loss_of(self.ddp(x))

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Open no_sync, and count the all-reduces that start while it is open."""
        was_noting, self.is_noting = self.is_noting, False
        num_before = len(self.noted.calls)
        with self.ddp.no_sync():
            yield
        self.num_inside += len(self.noted.calls) - num_before
        self.is_noting = was_noting


class Boom(Exception):
    """An error such as a learner's own code might raise."""


def _raise_inside(ddp: Any) -> None:
    boom = Boom("raised inside of no_sync")
    with suppress(Boom):
        with ddp.no_sync():
            raise boom
        raise WrongResult(
            "an error that is raised inside of no_sync should come out of it, but the program goes "
            "on after the block as if nothing had happened. Put yield between "
            "try and finally, without an except or a return that ends the error."
        )


def state_of(module: nn.Module) -> dict[str, list[float]]:
    """Return the numbers of the parameters and of all buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().flatten().tolist() for name, tensor in named}


def train_alone(plan: Plan) -> list[dict[str, Any]]:
    """Train in one process that has the batches of all ranks.

    Returns:
        For each step, gradients and state; and under "own", each rank's gradients.
    """
    model, steps = Odd(1), []
    optimizer = _optimizer(model)
    for step, rows in enumerate(plan.rows):
        own = [_own_gradients(model, rows, rank, step) for rank in range(len(rows))]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                mean = torch.stack([gradients[name] for gradients in own]).sum(0) / len(rows)
                is_kept = plan.how == KEPT and parameter.grad is not None
                parameter.grad = parameter.grad + mean if is_kept else mean
        gradients = gradients_of(model)
        optimizer.step()
        listed = [{name: x.flatten().tolist() for name, x in of_rank.items()} for of_rank in own]
        steps.append({"gradients": gradients, "state": state_of(model), "own": listed})
    return steps


def _own_gradients(model: nn.Module, rows: Sequence[int], rank: int, step: int) -> dict[str, Any]:
    """Return the gradients that a rank computes in a step, before anything is sent."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not rows[rank]:
        return {name: torch.zeros_like(p) for name, p in named.items()}
    loss = loss_of(model(odd_batch(rows[rank], rank, step))) * len(rows) / sum(rows)
    gradients = torch.autograd.grad(loss, [*named.values()], materialize_grads=True)
    return dict(zip(named, gradients, strict=True))


def start(lesson: Any) -> dict[str, Any]:
    """Return a rank's state after the construction, and right and learner's values of its use."""
    model = Odd(dist.get_rank() + 1)
    before = dict(model.named_parameters())
    trainable = {name: parameter.requires_grad for name, parameter in before.items()}
    ddp = lesson.DistributedDataParallel(model)
    after, state, x = dict(model.named_parameters()), state_of(model), odd_batch(2, 0, 0)
    values = {
        "ddp.module is module": [True, ddp.module is model],
        "the list of its parameters that were replaced": [
            [],
            [name for name in before if after.get(name) is not before[name]],
        ],
        "requires_grad of its parameters": [
            trainable,
            {name: p.requires_grad for name, p in after.items()},
        ],
        "ddp(x, scale=3.0), as module(x, scale=3.0),": [
            model(x, scale=3.0).tolist(),
            ddp(x, scale=3.0).tolist(),
        ],
        "the names in state_dict": [sorted(model.state_dict()), sorted(ddp.state_dict())],
    }
    ddp.load_state_dict(Odd(9).state_dict())
    biases = [Odd(9).head.bias.tolist(), model.head.bias.tolist()]
    return {"state": state, "values": values | {"the head's bias after load_state_dict": biases}}


def evaluate_alone(lesson: Any) -> dict[str, Any]:
    """After a step, let rank 0 alone evaluate, with gradients and without."""
    model = Odd(1)
    ddp, rank = lesson.DistributedDataParallel(model), dist.get_rank()
    loss_of(ddp(odd_batch(2, rank, 0))).backward()
    ddp.finish_gradient_synchronization()
    if rank == 0:
        ddp(odd_batch(2, rank, 1))
    _forget_gradients(model)
    with torch.no_grad():
        ddp(odd_batch(2, rank, 1))
    return {"with_gradient": [n for n, p in model.named_parameters() if p.grad is not None]}


def _forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def in_different_orders(
    lesson: Any, orders: Sequence[Sequence[int]], num_branches: int, dtype: str
) -> list[Any]:
    """Return gradients and buckets of three steps; rank r uses the branches in orders[r]."""
    rank = dist.get_rank()
    model = Branches(num_branches, getattr(torch, dtype))
    noted, steps = NotedStart(), []
    ddp = wrapped(lesson, model, Limits(24, 24), all_reduce=noted)
    for step in range(3):
        _forget_gradients(model)
        ddp(torch.full((3,), float(rank + 1 + step)), orders[rank]).backward()
        ddp.finish_gradient_synchronization()
        calls, gradients = noted.taken(), [weight.grad for weight in model.weights]
        steps.append(
            {
                "gradients": [None if g is None else g[0].item() for g in gradients],
                "calls": [names_in(call, model) for call in calls],
            }
        )
    return steps


def timed(
    lesson: Any, layers: Sequence[Layer], order: Sequence[int], before_s: float, limits: Limits
) -> list[dict[str, Any]]:
    """Return when gradients arrived, buckets left, and the step ended, since backward began.

    Args:
        order: Order in which the layers are used.
        before_s: Seconds of the backward pass of what comes before them.
    """
    model = Slow(layers, order, before_s)
    came_s: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        note = lambda _, name=name: came_s.update({name: time.perf_counter()})  # noqa: E731
        parameter.register_post_accumulate_grad_hook(note)
    noted = NotedStart()
    ddp = wrapped(lesson, model, limits, all_reduce=noted)
    steps = []
    for _ in range(3):
        _forget_gradients(model)
        loss = ddp(torch.ones(2, requires_grad=True)).sum()
        begin_s, computed_s = _seconds_of(loss.backward)
        ddp.finish_gradient_synchronization()
        end_s, calls = time.perf_counter() - begin_s, noted.taken()
        steps.append(
            {
                "came_s": [came_s[name] - begin_s for name, _ in model.named_parameters()],
                "left_s": [call.start_s - begin_s for call in calls],
                "num_bytes": [call.num_bytes for call in calls],
                "computed_s": computed_s,
                "end_s": end_s,
                "alone_s": [_alone_s(call.num_bytes) for call in calls],
            }
        )
    return steps


def _seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """Call when all ranks are there; return when that was, and how long it took."""
    dist.barrier()
    begin_s = time.perf_counter()
    call()
    return begin_s, time.perf_counter() - begin_s


def _alone_s(num_bytes: int) -> float:
    """Return the seconds of an all-reduce by itself."""
    x = torch.zeros(num_bytes // 4)
    return _seconds_of(lambda: dist.all_reduce(x))[1]


def on_another_device(lesson: Any) -> dict[str, str]:
    """Return the devices of a model's gradients after a step."""
    with PretendDevice() as device:
        model = nn.Linear(2, 2).to(device)
        ddp = lesson.DistributedDataParallel(model)
        ddp.finish_gradient_synchronization()  # makes all gradients: the mode does not see hooks
        ddp(torch.ones(1, 2, device=device)).sum().backward()
        ddp.finish_gradient_synchronization()
        named = model.named_parameters()
        return {name: str(device_of(p.grad)) for name, p in named if p.grad is not None}


def in_little_memory(lesson: Any, num_layers: int, width: int, limits: Limits) -> None:
    """Take three steps of a deep model, on one row."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
    model = nn.Sequential(*layers)
    ddp = wrapped(lesson, model, limits)
    for _ in range(3):
        _forget_gradients(model)
        ddp(torch.ones(1, width)).sum().backward()
        ddp.finish_gradient_synchronization()
