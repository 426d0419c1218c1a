"""Bodies for task 3.12, and the training in one process that theirs must equal."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.models import SGD, AdamW, ByHand, Odd, gradients_of
from judging.pretend_device import PretendDevice, device_of
from phase3.ddp_models import (
    Branches,
    Layer,
    NotedStart,
    Slow,
    loss_of,
    names_in,
    names_outside,
    odd_batch,
)
from phase3_multi_node.given import in_background

PLAIN, IN_PARTS = "a backward pass", "backward passes inside, then one outside"
INSIDE_ONLY, KEPT = "a backward pass inside only", "gradients kept from the step before"
FORWARD_BEFORE = "the forward pass before no_sync, the backward pass inside"
AFTER_ERROR = "an error inside, then a backward pass"
ACCUMULATIONS = INSIDE_ONLY, IN_PARTS, FORWARD_BEFORE, AFTER_ERROR, KEPT
NOTED, BY_DEFAULT, IN_THREAD = "noted", "by default", "in a thread"


class Limits(NamedTuple):
    """Limits of the buckets."""

    bucket_bytes: int
    first_bucket_bytes: int


class Plan(NamedTuple):
    """A training of an ``Odd``.

    Attributes:
        optimizer: "SGD" or "AdamW".
        limits: Limits of the buckets.
        rows: Rows of the batches, by step and rank; a rank without rows computes nothing then.
        way: All-reduce that is given: one that notes its calls, none, or a blocking one made of
            messages, in a thread.
        how: ``PLAIN``, or one of ``ACCUMULATIONS``.
    """

    optimizer: str
    limits: Limits
    rows: tuple[tuple[int, ...], ...]
    way: str = NOTED
    how: str = PLAIN


def wrapped(lesson: Any, module: nn.Module, limits: Limits, **arguments: Any) -> Any:
    """Give a module to the lesson."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return lesson.DistributedDataParallel(module, **limits._asdict(), **given)


def _optimizer(plan: Plan, model: nn.Module) -> ByHand:
    if plan.optimizer == "SGD":
        return SGD(model, 0.02, momentum=0.9, weight_decay=0.1)
    return AdamW(model, 0.02, weight_decay=0.1)


def train_each(lesson: Any, plans: Sequence[Plan], group: Any = None) -> list[dict[str, Any]]:
    """Train by each plan, with a fresh model."""
    return [train(lesson, plan, group) for plan in plans]


def train(lesson: Any, plan: Plan, group: Any = None) -> dict[str, Any]:
    """Train an ``Odd``; return what each step leaves, and the order of the first gradients."""
    training = Training(lesson, plan, group)
    steps = [training.step(step) for step in range(len(plan.rows))]
    return {"steps": steps, "arrived": training.arrived}


class Training:
    """A rank's training by a plan.

    Attributes:
        arrived: Names of the parameters, as their gradients came outside of no_sync in step 0.
    """

    def __init__(self, lesson: Any, plan: Plan, group: Any) -> None:
        self.plan, self.rank = plan, dist.get_rank(group)
        self.model, self.noted = Odd(self.rank + 1), NotedStart(group)
        self.arrived: list[str] = []
        self.is_noting = True
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                note = lambda _, name=name: self._note(name)  # noqa: E731
                parameter.register_post_accumulate_grad_hook(note)
        all_reduce = {
            NOTED: self.noted,
            BY_DEFAULT: None,
            IN_THREAD: in_background(_by_messages),
        }[plan.way]
        self.ddp = wrapped(lesson, self.model, plan.limits, all_reduce=all_reduce, group=group)
        self.optimizer = _optimizer(plan, self.model)

    def _note(self, name: str) -> None:
        if self.is_noting and name not in self.arrived:
            self.arrived.append(name)

    def step(self, step: int) -> dict[str, Any]:
        """Take a step."""
        rows, inside = self.plan.rows[step], _Inside(self)
        if self.plan.how != KEPT:
            self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        if rows[self.rank]:
            x = odd_batch(rows[self.rank], self.rank, step)
            self._go_back(x, len(rows) / sum(rows), inside)
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
            "has_group": all(call.has_group for call in calls),
            "strays": names_outside(calls, self.model),
            "before finish": num_before,
            "inside": inside.num_calls,
            "intervals": inside.intervals,
        }

    def _go_back(self, x: Tensor, scale: float, inside: "_Inside") -> None:
        how, parts = self.plan.how, x.tensor_split(3)
        if how == IN_PARTS:
            with inside():
                for part in parts[:-1]:
                    self._loss(part, scale).backward()
            self._loss(parts[-1], scale).backward()
        elif how == FORWARD_BEFORE:
            *some, last = [self._loss(part, scale) for part in parts]
            with inside():
                for loss in some:
                    loss.backward()
            last.backward()
        elif how == INSIDE_ONLY:
            with inside():
                self._loss(x, scale).backward()
        else:
            if how == AFTER_ERROR:
                _raise_inside(self.ddp)
            self._loss(x, scale).backward()

    def _loss(self, x: Tensor, scale: float) -> Tensor:
        return scale * loss_of(self.ddp(x))


class _Inside:
    """Opens no_sync, and notes when, and what leaves while it is open."""

    def __init__(self, training: Training) -> None:
        self.training, self.num_calls = training, 0
        self.intervals: list[tuple[float, float]] = []

    @contextmanager
    def _opened(self) -> Iterator[None]:
        training, calls = self.training, self.training.noted.calls
        was_noting, training.is_noting = training.is_noting, False
        num_before, begin_s = len(calls), _apart_s()
        with training.ddp.no_sync():
            yield
        self.num_calls += len(calls) - num_before
        self.intervals.append((begin_s, _apart_s()))
        training.is_noting = was_noting

    def __call__(self) -> AbstractContextManager[None]:
        return self._opened()


def _apart_s() -> float:
    """Let the past end before an interval begins, and return the time."""
    time.sleep(1.0)
    now_s = time.perf_counter()
    time.sleep(1.0)
    return now_s


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


def _by_messages(x: Tensor, group: Any = None) -> None:
    """A blocking all-reduce without a collective: each rank sends to every other."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    others = [other for other in range(world_size) if other != rank]
    inboxes, outgoing = {other: torch.empty_like(x) for other in others}, x.clone()
    messages = [
        operation
        for other, inbox in inboxes.items()
        for operation in (
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=other),
            dist.P2POp(dist.irecv, inbox, group=group, group_peer=other),
        )
    ]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    x.copy_(sum((inboxes.get(r, outgoing) for r in range(world_size)), torch.zeros_like(x)))


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
    optimizer = _optimizer(plan, model)
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
    """Return what has become of the module of a rank, and of calls of it."""
    model = Odd(dist.get_rank() + 1)
    before = dict(model.named_parameters())
    trainable = {name: parameter.requires_grad for name, parameter in before.items()}
    ddp = lesson.DistributedDataParallel(model)
    after = dict(model.named_parameters())
    state, x = state_of(model), odd_batch(2, 0, 0)
    result = {
        "state": state,
        "is_module": ddp.module is model,
        "replaced": [name for name in before if after.get(name) is not before[name]],
        "trainable": trainable == {name: p.requires_grad for name, p in after.items()},
        "outputs": ddp(x, scale=3.0).tolist(),
        "expected": model(x, scale=3.0).tolist(),
        "keys": sorted(ddp.state_dict()),
        "own_keys": sorted(model.state_dict()),
    }
    ddp.load_state_dict(Odd(9).state_dict())
    return {**result, "loaded": model.head.bias.tolist(), "saved": Odd(9).head.bias.tolist()}


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
    lesson: Any,
    orders: Sequence[Sequence[int]],
    inside: Sequence[int] = (),
    dtype: str = "float32",
) -> list[Any]:
    """Return gradients and buckets of three steps; rank r uses the branches in orders[r].

    A branch that is not in an order is not used. With ``inside``, each step begins with a backward
    pass of these branches inside of no_sync.
    """
    rank = dist.get_rank()
    model = Branches(max(map(max, orders)) + 1, getattr(torch, dtype))
    noted, steps = NotedStart(), []
    ddp = wrapped(lesson, model, Limits(24, 24), all_reduce=noted)
    for step in range(3):
        _forget_gradients(model)
        x = torch.full((3,), float(rank + 1 + step))
        if inside:
            with ddp.no_sync():
                ddp(x, inside).backward()
        ddp(x, orders[rank]).backward()
        ddp.finish_gradient_synchronization()
        calls, gradients = noted.taken(), [weight.grad for weight in model.weights]
        steps.append(
            {
                "gradients": [None if g is None else g[0].item() for g in gradients],
                "calls": [names_in(call, model) for call in calls],
                "num_bytes": [call.num_bytes for call in calls],
            }
        )
    return steps


def timed(
    lesson: Any, layers: Sequence[Layer], order: Sequence[int], before_s: float, limits: Limits
) -> list[dict[str, Any]]:
    """Return when gradients came, buckets left, and the step ended, since backward began.

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
    """Return where the gradients of a model are after a step."""
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
    x = torch.ones(1, width)
    for _ in range(3):
        _forget_gradients(model)
        ddp(x).sum().backward()
        ddp.finish_gradient_synchronization()
