"""Bodies (functions that ranks run) for task 2.3."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.calls import cause_told, returned, typed
from judging.tensors import given_group, own_device
from phase2.steps import NotedAllReduce

SHAPES = ((3, 2), (16, 16), (), (2, 2))
# A bad number, and the rank and parameter whose gradient holds it.
Bad = tuple[float, int, int] | None
NO_GRAPH = {
    "does not require grad": "No backward pass can go through what scale has returned: multiply "
    "the loss itself, neither a number taken from it nor a copy"
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def scale_losses(lesson: Any, loss: float, scale: float) -> dict[str, dict[str, Any]]:
    """Scale a loss of each dtype; return the scaled loss, its dtype, and the loss's gradient."""
    return {
        str(dtype).removeprefix("torch."): _scaled(lesson, loss, scale, dtype) for dtype in DTYPES
    }


def _scaled(lesson: Any, value: float, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    leaf = torch.tensor(value, dtype=dtype, requires_grad=True)
    loss = leaf * 1
    out = returned("scale", lesson.LossScaler(scale).scale(loss))
    with cause_told(NO_GRAPH):
        out.backward()
    return {
        "value": float(out.detach()),
        "dtype": str(out.dtype).removeprefix("torch."),
        "gradient": float(leaf.grad) if leaf.grad is not None else 0.0,
        "loss": loss.item(),
    }


# Gradients are set by hand to what a backward pass would leave.


def _parameters() -> list[nn.Parameter]:
    """Make parameters, one of them in float64, as in some models."""
    dtypes = (torch.float32, torch.float32, torch.float64, torch.float32)
    pairs = zip(SHAPES, dtypes, strict=True)
    device = own_device()
    return [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape, dtype in pairs]


def gradient_of(rank: int, number: int) -> Tensor:
    """Make the gradient that a parameter should have after unscaling.

    Its values are whole numbers plus 0.5. It is transposed in memory, and therefore not contiguous.
    """
    generator = torch.Generator().manual_seed(10 * rank + number)
    return (torch.randint(-8, 8, SHAPES[number][::-1], generator=generator) + 0.5).t()


def _set_gradients(
    parameters: Sequence[nn.Parameter], has_one: Sequence[bool], rank: int, scale: float
) -> None:
    for number, parameter in enumerate(parameters):
        gradient = (gradient_of(rank, number) * scale).to(parameter)
        parameter.grad = gradient if has_one[number] else None


def unscale_twice(
    lesson: Any, has_gradient: list[list[bool]], scale: float, group: Any = None
) -> dict[str, Any]:
    """Unscale twice, halve the gradients, take the step, and unscale in the next step.

    The last parameter does not belong to the optimizer.

    Returns:
        What the calls returned, the gradients after each unscale, the numbers of the parameters
        whose gradients moved or were replaced, and the weights after the step.
    """
    rank, parameters = dist.get_rank(group), _parameters()
    settings = [{"params": parameters[:1]}, {"params": parameters[1:3], "lr": 0.25}]
    optimizer = torch.optim.SGD(settings, lr=0.5)
    scaler = lesson.LossScaler(scale, **given_group(group))
    answers, after = [], {}

    def unscale(when: str) -> None:
        answers.append(typed("unscale", scaler.unscale(optimizer), bool))
        after[when] = [None if p.grad is None else p.grad.flatten().tolist() for p in parameters]

    _set_gradients(parameters, has_gradient[rank], rank, scale)
    before = _places(parameters)
    unscale("unscale")
    moved = [i for i, place in enumerate(_places(parameters)) if place != before[i]]
    unscale("a second unscale")
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    answers.append(typed("step", scaler.step(optimizer), bool))
    weights = [p.detach().flatten().tolist() for p in parameters]
    scaler.update()
    _set_gradients(parameters, has_gradient[rank], rank, scale)
    unscale("unscale in the step after update")
    return {"answers": answers, "after": after, "moved": moved, "weights": weights}


def _places(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int] | None]:
    """Return the object identity and the memory address of each gradient."""
    return [None if p.grad is None else (id(p.grad), p.grad.data_ptr()) for p in parameters]


# Many steps, some of them with a bad number in a gradient


def follow(lesson: Any, arguments: dict[str, Any], plan: Sequence[Bad]) -> list[dict[str, Any]]:
    """Take the steps of a plan; return each step's decision and changes, and the scale after it."""
    return _follow(lesson.LossScaler(**arguments), plan, dist.get_rank())


def _follow(scaler: Any, plan: Sequence[Bad], rank: int) -> list[dict[str, Any]]:
    parameters = _parameters()
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    return [_one_step(scaler, parameters, optimizer, bad, rank) for bad in plan]


def _one_step(
    scaler: Any, parameters: Sequence[nn.Parameter], optimizer: Any, bad: Bad, rank: int
) -> dict[str, Any]:
    _set_gradients(parameters, [True] * len(parameters), 0, 4.0)
    if bad and bad[1] == rank:
        gradient = parameters[bad[2]].grad
        assert gradient is not None
        # The sum of two large numbers overflows, and so does a uint8 that counts 256 infs.
        gradient.t().view(-1)[0 if bad[0] == torch.inf else -2 :] = bad[0]
    quotients = [p.grad / scaler.value for p in parameters if p.grad is not None]
    before = _everything(parameters, optimizer)
    taken = typed("step", scaler.step(optimizer), bool)
    has_changed = before != _everything(parameters, optimizer)
    again = typed("unscale", scaler.unscale(optimizer), bool)
    gradients = [p.grad for p in parameters]
    undivided = [
        number
        for number, (gradient, quotient) in enumerate(zip(gradients, quotients, strict=True))
        if gradient is None or not _agree(gradient, quotient)
    ]
    scaler.update()
    return {
        "taken": taken,
        "again": again,
        "has_changed": has_changed,
        "undivided": undivided,
        "value": float(scaler.value),
    }


def _agree(gradient: Tensor, quotient: Tensor) -> bool:
    """Return whether two tensors are equal, up to rounding, wherever the second is finite."""
    is_finite = quotient.isfinite()
    return torch.allclose(gradient[is_finite], quotient[is_finite])


def _everything(parameters: Sequence[nn.Parameter], optimizer: Any) -> str:
    """Return weights, optimizer state and settings as text, in which nan equals nan."""
    saved = optimizer.state_dict()
    moments = [
        torch.as_tensor(value).tolist()
        for of_one in saved["state"].values()
        for value in of_one.values()
    ]
    return repr([[p.tolist() for p in parameters], moments, saved["param_groups"]])


def resume(
    lesson: Any, arguments: dict[str, Any], before: list[Bad], after: list[Bad]
) -> dict[str, Any]:
    """Save a scaler's state, take more steps with it, and load the state into another scaler.

    The other scaler is in the middle of a bad step when it loads the state.
    """
    rank = dist.get_rank()
    saved, loaded = lesson.LossScaler(**arguments), lesson.LossScaler(**arguments)
    _follow(saved, before, rank)
    state = returned("state_dict", saved.state_dict())
    odd = [name for name, value in dict(state).items() if type(value) not in (int, float, bool)]
    first = repr(state)
    _follow(saved, [(torch.inf, 0, 0), None], rank)
    saved.state_dict()
    has_changed = repr(state) != first
    _follow(loaded, [None], rank)
    # This scaler has found an inf, and loads the state before it is updated.
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), torch.inf)
    loaded.unscale(torch.optim.SGD([parameter], lr=0.0))
    given = state if odd else json.loads(json.dumps(state))
    loaded.load_state_dict(given)
    values = [float(loaded.value), *(step["value"] for step in _follow(loaded, after, rank))]
    has_changed |= repr(given) != first
    return {"odd": odd, "has_changed": has_changed, "values": values}


def count_with_defaults(lesson: Any) -> list[float]:
    """Make 2,000 good updates, one after an overflow, and another good one, with default settings.

    One of the good updates is not preceded by a call of unscale.

    Returns:
        The scale at the start, and after each update from the 1,999th on.
    """
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = lesson.LossScaler(all_reduce=lambda x, group=None: None)
    values = [float(scaler.value)]
    for number in range(1, 2003):
        parameter.grad = torch.full((1,), torch.inf if number == 2001 else 1.0)
        if number != 1000:
            scaler.unscale(optimizer)
        scaler.update()
        if number >= 1999:
            values.append(float(scaler.value))
    return values


def two_optimizers(lesson: Any, bad_rank: int) -> list[list[Any]]:
    """Take three steps with one scaler and two optimizers.

    On ``bad_rank``, the second optimizer has a bad gradient in the first step, and the first
    optimizer has one in the second step.

    Returns:
        For each step, whether each optimizer stepped, the weights, and the scale.
    """
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.5) for parameter in parameters]
    scaler, found = lesson.LossScaler(8.0, growth_interval=1), []
    for bad_number in (1, 0, None):
        for number, parameter in enumerate(parameters):
            is_bad = number == bad_number and dist.get_rank() == bad_rank
            parameter.grad = torch.full((2,), torch.nan if is_bad else 8.0)
        taken = [typed("step", scaler.step(optimizer), bool) for optimizer in optimizers]
        scaler.update()
        found.append([taken, [weight[0].item() for weight in parameters], float(scaler.value)])
    return found


def sums_of(lesson: Any, group: Any = None) -> list[Any]:
    """Return the size of each all-reduce in unscale and step, and whether it got the group."""
    noted = NotedAllReduce()
    parameters = _parameters()
    _set_gradients(parameters, [True] * len(parameters), 0, 1.0)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = lesson.LossScaler(all_reduce=noted, group=group)
    scaler.unscale(optimizer)
    scaler.step(optimizer)
    return [[size, given is group] for size, given in zip(noted.sizes, noted.groups, strict=True)]
