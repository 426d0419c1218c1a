"""Bodies (functions that ranks run) for task 3.11, and training in one process to compare with."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.models import FLAG, SGD, Odd, batch, gradients_of
from judging.pretend_device import PretendDevice, device_of
from judging.tensors import own_device


def odd_batch(rows: int, rank: int, step: int) -> Tensor:
    """Return a batch of inputs for an ``Odd``; on even ranks, it has flags after the first step."""
    inputs, _ = batch((rows,), 100 * step + rank)
    if rank % 2 == 0 and step:
        inputs[::2, :1] = FLAG
    return inputs


def loss_of(outputs: Tensor) -> Tensor:
    """Return the loss, summed over the rows."""
    return (outputs - 0.5).square().sum()


class _Slowly(torch.autograd.Function):
    """The identity, with a backward pass that takes ``seconds``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Layer(NamedTuple):
    """The size of a layer, and the seconds that its backward pass takes."""

    numel: int
    backward_s: float


class Slow(nn.Module):
    """Layers with known backward times, registered in one order and used in another.

    Before the first layer, an operation without parameters also takes time in the backward pass.
    """

    def __init__(self, layers: Sequence[Layer], order: Sequence[int], before_s: float) -> None:
        super().__init__()
        self.layers, self.order, self.before_s = layers, order, before_s
        self.weights = nn.ParameterList(torch.zeros(layer.numel) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        x = _Slowly.apply(x, self.before_s)  # type: ignore[no-untyped-call]
        for i in self.order:
            y = x + self.weights[i].sum()
            x = _Slowly.apply(y, self.layers[i].backward_s)  # type: ignore[no-untyped-call]
        return x


class Call(NamedTuple):
    """An all-reduce that was started."""

    num_bytes: int
    address: int
    start_s: float

    def holds(self, gradient: Tensor) -> bool:
        """Return whether a gradient lies in the tensor that was reduced."""
        return gradient.numel() > 0 and 0 <= gradient.data_ptr() - self.address < self.num_bytes


class NotedStart:
    """An asynchronous all-reduce that records its calls; its handle can do nothing but wait."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, x: Tensor, group: Any = None) -> "_Waitable":
        if not x.is_contiguous():
            raise ValueError("all_reduce was given a tensor that is not contiguous")
        self.calls.append(Call(x.nbytes, x.data_ptr(), time.perf_counter()))
        return _Waitable(dist.all_reduce(x, group=group, async_op=True))

    def taken(self) -> list[Call]:
        """Return the calls recorded since ``taken`` was last called."""
        calls, self.calls = self.calls, []
        return calls


class _Waitable:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


def names_in(call: Call, module: nn.Module) -> list[str]:
    """Return the names of the parameters in a reduced tensor, ordered by their addresses."""
    addresses = {
        name: parameter.grad.data_ptr()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and call.holds(parameter.grad)
    }
    return sorted(addresses, key=lambda name: addresses[name])


PLAIN, IN_PARTS = "a backward pass", "backward passes inside, then one outside"
INSIDE_ONLY, KEPT = "a backward pass inside only", "gradients kept from the step before"
FORWARD_BEFORE = "the forward pass before no_sync, the backward pass inside"
AFTER_ERROR = "an error inside, then a backward pass"
ACCUMULATIONS = INSIDE_ONLY, IN_PARTS, FORWARD_BEFORE, AFTER_ERROR, KEPT


class Limits(NamedTuple):
    """Size limits of the buckets."""

    bucket_bytes: int
    first_bucket_bytes: int


class Plan(NamedTuple):
    """A training run of an ``Odd``.

    Attributes:
        limits: The size limits of the buckets.
        rows: The number of rows by step and rank. A rank without rows skips both passes.
        how: ``PLAIN``, or one of ``ACCUMULATIONS``.
        is_noted: Whether to pass an all-reduce that records its calls, rather than none.
    """

    limits: Limits
    rows: tuple[tuple[int, ...], ...]
    how: str = PLAIN
    is_noted: bool = True


def wrapped(lesson: Any, module: nn.Module, limits: Limits, **arguments: Any) -> Any:
    """Wrap a module in the lesson's class, omitting arguments that are None."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return lesson.DistributedDataParallel(module, **limits._asdict(), **given)


def _optimizer(model: nn.Module) -> SGD:
    return SGD(model, 0.02, momentum=0.9, weight_decay=0.1)


def train(lesson: Any, plans: Sequence[Plan], group: Any = None) -> list[dict[str, Any]]:
    """Train a fresh ``Odd`` according to each plan.

    Returns:
        For each plan, the results of every step, and ``Training.arrived``.
    """
    trainings = [Training(lesson, plan, group) for plan in plans]
    return [
        {"steps": [*map(training.step, range(len(plan.rows)))], "arrived": training.arrived}
        for plan, training in zip(plans, trainings, strict=True)
    ]


class Training:
    """One rank's training run, according to a plan.

    Attributes:
        arrived: The names of the parameters whose gradients arrived in step 0 outside no_sync, in
            the order of arrival.
    """

    def __init__(self, lesson: Any, plan: Plan, group: Any) -> None:
        self.plan, self.rank, self.device = plan, dist.get_rank(group), own_device(group)
        self.model, self.noted = Odd(self.rank + 1).to(self.device), NotedStart()
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
        """Take a step; return the gradients, and a record of the all-reduces."""
        rows, self.num_inside = self.plan.rows[step], 0
        if self.plan.how != KEPT:
            self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        if rows[self.rank]:
            x = odd_batch(rows[self.rank], self.rank, step)
            self._go_back(x.to(self.device), len(rows) / sum(rows))
        num_before = len(self.noted.calls)
        self.ddp.finish_gradient_synchronization()
        self.is_noting = False
        calls = self.noted.taken()
        gradients = gradients_of(self.model)
        self.optimizer.step()
        return {
            "gradients": gradients,
            "num_bytes": [call.num_bytes for call in calls],
            "names": [names_in(call, self.model) for call in calls],
            "before finish": num_before,
            "inside": self.num_inside,
        }

    def _go_back(self, x: Tensor, scale: float) -> None:
        how = self.plan.how
        parts = x.tensor_split(3) if how in (IN_PARTS, FORWARD_BEFORE) else (x,)
        early = [self._loss(part, scale) for part in parts] if how == FORWARD_BEFORE else []
        num_inside = len(parts) - (how != INSIDE_ONLY)
        if how == AFTER_ERROR:
            _raise_inside(self.ddp)
        for place, part in enumerate(parts):
            with self._inside() if place < num_inside else nullcontext():
                loss = early[place] if early else self._loss(part, scale)
                loss.backward()

    def _loss(self, x: Tensor, scale: float) -> Tensor:
        # Parameters used first get their gradients last. On odd ranks, those are the head's.
        used = [0.0 * parameter.sum() for parameter in self.model.head.parameters()]
        loss = scale * loss_of(self.ddp(x))
        return loss + sum(used) if self.rank % 2 else loss

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Run the block inside no_sync, and count the all-reduces that it starts."""
        was_noting, self.is_noting = self.is_noting, False
        num_before = len(self.noted.calls)
        with self.ddp.no_sync():
            yield
        self.num_inside += len(self.noted.calls) - num_before
        self.is_noting = was_noting


def _raise_inside(ddp: Any) -> None:
    with suppress(ArithmeticError):
        with ddp.no_sync():
            raise ArithmeticError("raised inside of no_sync")
        raise WrongResult(
            "an error that is raised inside of no_sync should come out of it, but the program "
            "continues after the block as if nothing had happened. Put yield between try and "
            "finally, without an except or a return that ends the error."
        )


def state_of(module: nn.Module) -> dict[str, list[float]]:
    """Return the values of all parameters and buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().flatten().tolist() for name, tensor in named}


def train_alone(plan: Plan) -> list[dict[str, Any]]:
    """Train in one process with the batches of all ranks.

    Returns:
        For each step, the mean gradients and, under "own", the gradients of each rank.
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
        steps.append({"gradients": gradients, "own": listed})
    return steps


def _own_gradients(model: nn.Module, rows: Sequence[int], rank: int, step: int) -> dict[str, Any]:
    """Return the gradients that a rank computes in a step, before any communication."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not rows[rank]:
        return {name: torch.zeros_like(p) for name, p in named.items()}
    loss = loss_of(model(odd_batch(rows[rank], rank, step))) * len(rows) / sum(rows)
    gradients = torch.autograd.grad(loss, [*named.values()], materialize_grads=True)
    return dict(zip(named, gradients, strict=True))


def start(lesson: Any) -> dict[str, Any]:
    """Wrap a model; return its state afterwards, and pairs of expected and actual values."""
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


def evaluate_alone(lesson: Any) -> list[str]:
    """Run forward passes without a backward pass, one more on rank 0 than on other ranks.

    Returns:
        The names of the parameters that have a gradient afterwards.
    """
    model = Odd(1)
    ddp, rank = lesson.DistributedDataParallel(model), dist.get_rank()
    loss_of(ddp(odd_batch(2, rank, 0))).backward()
    ddp.finish_gradient_synchronization()
    if rank == 0:
        ddp(odd_batch(2, rank, 1))
    _forget_gradients(model)
    with torch.no_grad():
        ddp(odd_batch(2, rank, 1))
    return [name for name, p in model.named_parameters() if p.grad is not None]


def _forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def timed(
    lesson: Any, layers: Sequence[Layer], order: Sequence[int], before_s: float, limits: Limits
) -> list[dict[str, Any]]:
    """Measure when gradients arrive, buckets leave and steps end, from the start of backward.

    Args:
        order: The order in which the layers are used.
        before_s: The seconds that the operation before the first layer takes in the backward pass.
    """
    model, noted, steps = Slow(layers, order, before_s), NotedStart(), []
    came_s: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        note = lambda _, name=name: came_s.update({name: time.perf_counter()})  # noqa: E731
        parameter.register_post_accumulate_grad_hook(note)
    ddp = wrapped(lesson, model, limits, all_reduce=noted)
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
    """Run a barrier, then time ``call``; return its start time and duration."""
    dist.barrier()
    begin_s = time.perf_counter()
    call()
    return begin_s, time.perf_counter() - begin_s


def _alone_s(num_bytes: int) -> float:
    """Return the seconds that an all-reduce takes on its own."""
    x = torch.zeros(num_bytes // 4)
    return _seconds_of(lambda: dist.all_reduce(x))[1]


def on_another_device(lesson: Any) -> dict[str, str]:
    """Return the devices of a model's gradients after a step."""
    with PretendDevice() as device:
        model = nn.Linear(2, 2).to(device)
        ddp = lesson.DistributedDataParallel(model)
        # Create all gradients here, because PretendDevice does not see those created in hooks.
        ddp.finish_gradient_synchronization()
        ddp(torch.ones(1, 2, device=device)).sum().backward()
        ddp.finish_gradient_synchronization()
        named = model.named_parameters()
        return {name: str(device_of(p.grad)) for name, p in named if p.grad is not None}


def in_little_memory(lesson: Any, num_layers: int, width: int, limits: Limits) -> None:
    """Take three steps of a deep model on a single row."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
    model = nn.Sequential(*layers)
    ddp = wrapped(lesson, model, limits)
    for _ in range(3):
        _forget_gradients(model)
        ddp(torch.ones(1, width)).sum().backward()
        ddp.finish_gradient_synchronization()
