"""Bodies for task 3.12."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.pretend_device import PretendDevice, device_of
from phase3.ddp_models import (
    Branches,
    ByHand,
    Call,
    Layer,
    NotedStart,
    Odd,
    Slow,
    loss_of,
    names_in,
    odd_batch,
)
from phase3_multi_node.given import in_background


class Limits(NamedTuple):
    """How large buckets may be."""

    bucket_bytes: int
    first_bucket_bytes: int


class Plan(NamedTuple):
    """A training of the odd model.

    rows: by step, and then by rank; a rank without rows computes nothing in that step.
    """

    optimizer: str
    limits: Limits
    rows: tuple[tuple[int, ...], ...]


def wrapped(lesson: Any, module: nn.Module, limits: Limits, **arguments: Any) -> Any:
    """Give a module to the lesson."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return lesson.DistributedDataParallel(module, **limits._asdict(), **given)


def train(
    lesson: Any, plan: Plan, in_thread: bool = False, group: Any = None
) -> list[dict[str, Any]]:
    """State and gradients after every step.

    Args:
        in_thread: reduce by messages, in another thread.
    """
    model = Odd(dist.get_rank(group) + 1)
    all_reduce = in_background(_by_messages) if in_thread else None
    ddp = wrapped(lesson, model, plan.limits, all_reduce=all_reduce, group=group)
    optimizer = ByHand(plan.optimizer, model)
    return [
        _step(ddp, model, optimizer, rows, step, dist.get_rank(group))
        for step, rows in enumerate(plan.rows)
    ]


def _step(
    ddp: Any,
    model: nn.Module,
    optimizer: ByHand,
    rows: Sequence[int],
    step: int,
    rank: int,
) -> dict[str, Any]:
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    if rows[rank]:
        loss = loss_of(ddp(odd_batch(rows[rank], rank, step)))
        (loss * len(rows) / sum(rows)).backward()
    ddp.finish_gradient_synchronization()
    gradients = gradients_of(model)
    optimizer.step()
    return {"gradients": gradients, "state": state_of(model)}


def _by_messages(x: Tensor, group: Any = None) -> None:
    """A blocking all-reduce without a collective: everybody sends to everybody."""
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


def gradients_of(module: nn.Module) -> dict[str, list[float] | None]:
    return {
        name: None if p.grad is None else p.grad.flatten().tolist()
        for name, p in module.named_parameters()
    }


def state_of(module: nn.Module) -> dict[str, list[float]]:
    """Parameters, and all buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().flatten().tolist() for name, tensor in named}


def start(lesson: Any) -> dict[str, Any]:
    """What has become of the module of a rank, and of calls of it."""
    model = Odd(dist.get_rank() + 1)
    before = dict(model.named_parameters())
    trainable = {name: parameter.requires_grad for name, parameter in before.items()}
    ddp = lesson.DistributedDataParallel(model)
    after = dict(model.named_parameters())
    state, x = state_of(model), odd_batch(2, 0, 0)
    found = {
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
    return {**found, "loaded": model.head.bias.tolist(), "saved": Odd(9).head.bias.tolist()}


def evaluate_alone(lesson: Any) -> dict[str, Any]:
    """After a step, rank 0 alone evaluates, with gradients and without."""
    model = Odd(1)
    ddp, rank = lesson.DistributedDataParallel(model), dist.get_rank()
    loss_of(ddp(odd_batch(2, rank, 0))).backward()
    ddp.finish_gradient_synchronization()
    if rank == 0:
        ddp(odd_batch(2, rank, 1))
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        ddp(odd_batch(2, rank, 1))
    return {"with_gradient": [n for n, p in model.named_parameters() if p.grad is not None]}


def buckets_of_steps(
    lesson: Any, limits: Limits, num_steps: int, by_default: bool = False, group: Any = None
) -> dict[str, Any]:
    """What was reduced in each step, and the order in which gradients came in the first."""
    model, rank = Odd(1), dist.get_rank(group)
    arrived = _arrivals(model)
    noted = NotedStart(group)
    ddp = wrapped(lesson, model, limits, all_reduce=None if by_default else noted, group=group)
    steps, strays = list[Any](), list[list[str]]()
    for step in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = None
        loss_of(ddp(odd_batch(2, rank, step))).backward()
        ddp.finish_gradient_synchronization()
        calls = noted.taken()
        steps.append([_described(call, model) for call in calls])
        strays.append(_outside(calls, model))
    return {"steps": steps, "strays": strays, "arrived": [*dict.fromkeys(arrived)]}


def _arrivals(model: nn.Module) -> list[str]:
    """A list that will hold the names of the parameters, as their gradients come."""
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            note = lambda _, name=name: arrived.append(name)  # noqa: E731
            parameter.register_post_accumulate_grad_hook(note)
    return arrived


def _described(call: Call, model: nn.Module) -> dict[str, Any]:
    return {
        "names": names_in(call, model),
        "num_bytes": call.num_bytes,
        "dtype": call.dtype,
        "has_group": call.has_group,
    }


def _outside(calls: Sequence[Call], model: nn.Module) -> list[str]:
    """The parameters whose gradient lies in nothing that was reduced."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not any(call.holds(parameter.grad) for call in calls)
    ]


def in_different_orders(
    lesson: Any, orders: Sequence[Sequence[int]], inside: Sequence[int] = ()
) -> list[Any]:
    """Gradients and buckets of three steps; rank r uses the branches in orders[r].

    A branch that is not in an order is not used. With ``inside``, each step begins with a backward
    pass of these branches inside of no_sync.
    """
    rank = dist.get_rank()
    model = Branches(max(map(max, orders)) + 1)
    limits, noted = Limits(24, 24), NotedStart()
    ddp = wrapped(lesson, model, limits, all_reduce=noted)
    steps = []
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        x = torch.full((3,), float(rank + 1 + step))
        if inside:
            with ddp.no_sync():
                ddp(x, inside).backward()
        ddp(x, orders[rank]).backward()
        ddp.finish_gradient_synchronization()
        gradients = [weight.grad for weight in model.weights]
        calls = [names_in(call, model) for call in noted.taken()]
        found = [None if g is None else g[0].item() for g in gradients]
        steps.append({"gradients": found, "calls": calls})
    return steps


def timed(
    lesson: Any, layers: Sequence[Layer], order: Sequence[int], before_s: float, limits: Limits
) -> list[dict[str, Any]]:
    """When gradients came, buckets left, and the step ended, after the backward pass began.

    Args:
        order: in which the layers are used.
        before_s: what the backward pass takes for what comes before them.
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
        for parameter in model.parameters():
            parameter.grad = None
        loss = ddp(torch.ones(2, requires_grad=True)).sum()
        dist.barrier()
        begin_s = time.perf_counter()
        loss.backward()
        computed_s = time.perf_counter() - begin_s
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


def _alone_s(num_bytes: int) -> float:
    """How long an all-reduce takes by itself."""
    x = torch.zeros(num_bytes // 4)
    dist.barrier()
    begin_s = time.perf_counter()
    dist.all_reduce(x)
    return time.perf_counter() - begin_s


INSIDE_ONLY, KEPT = "a backward pass inside only", "gradients kept from the step before"
ACCUMULATIONS = (
    INSIDE_ONLY,
    "backward passes inside, then one outside",
    "the forward pass before no_sync, the backward pass inside",
    "an error inside, then a backward pass",
    KEPT,
)


def accumulate(lesson: Any, limits: Limits, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Gradients of every kind of accumulation, and what was sent while no_sync was open.

    Each kind has two steps, of which the second has its buckets in another order.
    """
    return [_accumulated(lesson, limits, kind) for kind in kinds]


def _accumulated(lesson: Any, limits: Limits, kind: str) -> dict[str, Any]:
    model, rank, noted = Odd(1), dist.get_rank(), NotedStart()
    ddp = wrapped(lesson, model, limits, all_reduce=noted)
    found: dict[str, Any] = {"calls_inside": 0, "intervals": [], "gradients": []}

    @contextmanager
    def closed() -> Iterator[None]:
        before, begin_s = len(noted.calls), _apart_s()
        with ddp.no_sync():
            yield
        found["calls_inside"] += len(noted.calls) - before
        found["intervals"].append((begin_s, _apart_s()))

    for turn in range(2):
        if kind != KEPT:
            for parameter in model.parameters():
                parameter.grad = None
        for begin in _BACKWARDS[kind](ddp, closed, rank, turn):
            begin()
        before = len(noted.calls)
        ddp.finish_gradient_synchronization()
        found["gradients"].append(gradients_of(model))
        found["before_finish"] = before
        noted.taken()
    return found


def _apart_s() -> float:
    """Let the past end before an interval begins, and note the time."""
    time.sleep(1.0)
    now_s = time.perf_counter()
    time.sleep(1.0)
    return now_s


def micro_batch(rank: int, turn: int, place: int) -> Tensor:
    return odd_batch(2, rank, 2 * turn + place + 1)


def _two_inside(ddp: Any, closed: Any, rank: int, turn: int) -> Iterator[Any]:
    with closed():
        for place in range(2):
            yield loss_of(ddp(micro_batch(rank, turn, place))).backward
    yield loss_of(ddp(micro_batch(rank, turn, 2))).backward


def _all_inside(ddp: Any, closed: Any, rank: int, turn: int) -> Iterator[Any]:
    with closed():
        yield loss_of(sum_of(ddp, rank, turn)).backward


def _forward_before(ddp: Any, closed: Any, rank: int, turn: int) -> Iterator[Any]:
    losses = [loss_of(ddp(micro_batch(rank, turn, place))) for place in range(3)]
    with closed():
        for loss in losses[:2]:
            yield loss.backward
    yield losses[2].backward


class Boom(Exception):
    """What a learner's own code might raise."""


def _after_an_error(ddp: Any, closed: Any, rank: int, turn: int) -> Iterator[Any]:
    boom = Boom("raised inside of no_sync")
    with suppress(Boom):
        with ddp.no_sync():
            raise boom
        raise WrongResult(
            "an error that is raised inside of no_sync should come out of it, but the program goes "
            "on after the block as if nothing had happened. Put yield between "
            "try and finally, without an except or a return that ends the error."
        )
    yield loss_of(sum_of(ddp, rank, turn)).backward


def sum_of(ddp: Any, rank: int, turn: int) -> Tensor:
    outputs: Tensor = ddp(torch.cat([micro_batch(rank, turn, place) for place in range(3)]))
    return outputs


def _kept(ddp: Any, closed: Any, rank: int, turn: int) -> Iterator[Any]:
    yield loss_of(sum_of(ddp, rank, turn)).backward


_BACKWARDS = dict(
    zip(
        ACCUMULATIONS,
        (_all_inside, _two_inside, _forward_before, _after_an_error, _kept),
        strict=True,
    )
)


def on_another_device(lesson: Any) -> dict[str, str]:
    """Where the gradients of a model are after a step."""
    with PretendDevice() as device:
        model = nn.Linear(2, 2).to(device)
        ddp = lesson.DistributedDataParallel(model)
        ddp.finish_gradient_synchronization()  # makes all gradients: the mode does not see hooks
        ddp(torch.ones(1, 2, device=device)).sum().backward()
        ddp.finish_gradient_synchronization()
        named = model.named_parameters()
        return {name: str(device_of(p.grad)) for name, p in named if p.grad is not None}


def in_little_memory(lesson: Any, num_layers: int, width: int, limits: Limits) -> None:
    """Three steps of a deep model, on one row."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
    model = nn.Sequential(*layers)
    ddp = wrapped(lesson, model, limits)
    x = torch.ones(1, width)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        ddp(x).sum().backward()
        ddp.finish_gradient_synchronization()
