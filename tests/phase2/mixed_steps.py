"""Bodies for task 2.5, and the functions that they give to a lesson."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab.grade import WrongResult
from judging.calls import cause_told, refusal_of, returned
from judging.models import CLASSES, FEATURES, Worn, state_of, two_groups
from phase2.mixed_models import LR, MOMENTUM, Noted, TorchScaler, batch_of, weighted
from phase2.step_arguments import OTHERS_HAVE_TARGETS, NotedAllReduce
from phase2_advanced.given import cross_entropy_sum

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def _result(found: Any) -> tuple[float, bool, float]:
    """Loss, decision and norm of what the learner's step has returned.

    Raises:
        WrongResult: it returned something else.
    """
    result = returned("mixed_precision_step", found)
    kinds = {"loss": float, "is_skipped": bool, "norm": float}
    if not all(hasattr(result, name) for name in kinds):
        kind = type(result).__name__
        raise WrongResult(f"mixed_precision_step should return a StepResult; it returned a {kind}")
    for name, kind in kinds.items():
        value = getattr(result, name)
        if not isinstance(value, kind):
            raise WrongResult(
                f"mixed_precision_step should return a StepResult whose {name} is a "
                f"{kind.__name__}; it is a {type(value).__name__}, {value!r:.50}"
            )
    return result.loss, result.is_skipped, result.norm


def train_steps(
    lesson: Any, sizes: list[int], num_steps: int, max_norm: float, group: Any = None
) -> dict[str, Any]:
    """Losses, norms, final weights and rows seen; the model is in float64, so all is exact."""
    rank, model, scaler = dist.get_rank(group), Worn(), TorchScaler(2.0**10, 2, group)
    optimizer = torch.optim.SGD(two_groups(model), lr=LR, momentum=MOMENTUM)
    given = {} if group is None else {"group": group}
    results, is_kept = [], True
    for step in range(num_steps):
        batch = batch_of(sizes, rank, step)
        with cause_told({} if len(batch[0]) else OTHERS_HAVE_TARGETS, ValueError):
            found = lesson.mixed_precision_step(
                *(model, optimizer, scaler, batch),
                reduce_dtype=torch.float64,
                max_norm=max_norm,
                **given,
            )
        results.append(_result(found))
        untouched = batch_of(sizes, rank, step)
        is_kept &= all(torch.equal(a, b) for a, b in zip(batch, untouched, strict=True))
    losses, skipped, norms = zip(*results, strict=True)
    return {
        "losses": list(losses),
        "skipped": list(skipped),
        "norms": list(norms),
        "state": state_of(model),
        "rows": model.rows,
        "is_kept": is_kept,
        "updates": [scaler.num_updates, scaler.value],
    }


def step_noted(lesson: Any, dtype: str) -> dict[str, Any]:
    """In which dtypes one step computes, and which its parameters and gradients have."""
    model, autocast, scaler = Noted(), list[tuple[bool, str]](), TorchScaler(8.0)
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1)
    kept = [(p, p.data_ptr()) for p in model.parameters()]

    def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inside = torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))
        autocast.append(inside)
        return cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    batch = torch.ones(3, FEATURES), torch.tensor([0, 1, 2])
    chosen = {} if dtype == "float16" else {"dtype": DTYPES[dtype]}  # that is the default
    result = lesson.mixed_precision_step(
        model, optimizer, scaler, batch, loss_sum=loss_sum, **chosen
    )
    now = [(p, p.data_ptr()) for p in model.parameters()]
    both = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return {
        "loss": _result(result)[0],
        "computed": sorted(model.dtypes),
        "autocast": autocast,
        "kept": sorted({str(tensor.dtype) for tensor in both}),
        "updates": scaler.num_updates,
        "is_same": all(a[0] is b[0] and a[1] == b[1] for a, b in zip(kept, now, strict=True)),
    }


def small_updates(lesson: Any, num_steps: int) -> float:
    """A weight of 1 after many steps of 2**-13 each, which float16 would round to nothing."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(two_groups(model), lr=2.0**-13)
    scaler, batch = TorchScaler(2.0**10), (torch.ones(1, 1),)
    for _ in range(num_steps):
        lesson.mixed_precision_step(
            model, optimizer, scaler, batch, loss_sum=weighted([1.0] * dist.get_world_size())
        )
    return model.weight.item()


def small_gradients(
    lesson: Any, factors: list[float], num_rows: list[int], scale: float, reduce_dtype: str
) -> dict[str, Any]:
    """How far a weight moves in a step, by lr 2**20; gradients are of the size of the factors."""
    rank, model = dist.get_rank(), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(two_groups(model), lr=2.0**20)
    scaler = TorchScaler(scale)
    result = lesson.mixed_precision_step(
        *(model, optimizer, scaler, (torch.ones(num_rows[rank], 1),)),
        reduce_dtype=DTYPES[reduce_dtype],
        loss_sum=weighted(factors),
    )
    return {"skipped": _result(result)[1], "moved": model.weight.item(), "scale": scaler.value}


def overflow(
    lesson: Any, by_step: list[list[float]], reduce_dtype: str, group: Any = None
) -> list[dict[str, Any]]:
    """Steps with gradients of the size of the rank's factor, and what they have changed."""
    torch.manual_seed(9)
    model = nn.Linear(FEATURES, 2)
    optimizer = torch.optim.Adam(two_groups(model), lr=0.01)
    scaler, found = TorchScaler(2.0**16, group=group), []
    for factors in by_step:
        sums = list[list[float]]()
        before = repr([state_of(model), optimizer.state_dict()])
        result = lesson.mixed_precision_step(
            *(model, optimizer, scaler, (torch.ones(1, FEATURES),)),
            reduce_dtype=DTYPES[reduce_dtype],
            max_norm=1.0,
            loss_sum=noting(sums, weighted(factors, group)),
            group=group,
        )
        has_changed = before != repr([state_of(model), optimizer.state_dict()])
        loss, is_skipped, norm = _result(result)
        is_finite = abs(norm) < torch.inf
        found.append(
            {
                "is_skipped": is_skipped,
                "has_changed": has_changed,
                "scale": scaler.value,
                "updates": scaler.num_updates,
                "has_finite_norm": is_finite,
                "state": state_of(model),
                "loss": loss,
                "sums": sums,
            }
        )
    return found


def noting(sums: list[list[float]], loss_sum: Any) -> Any:
    """Make a loss that notes what it has returned."""

    def noted(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, num_targets = loss_sum(model, batch)
        sums.append([loss.item(), num_targets])
        return loss, num_targets

    return noted


def sums_of(lesson: Any, reduce_dtype: str, group: Any = None) -> list[Any]:
    """What the all-reduce that a step is given is called with: elements, dtype, group."""
    model, noted = Noted(), NotedAllReduce()
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    model.second.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1)
    batch = torch.ones(3, FEATURES), torch.tensor([0, 1, 2])
    chosen = {} if reduce_dtype == "float32" else {"reduce_dtype": DTYPES[reduce_dtype]}
    lesson.mixed_precision_step(
        *(model, optimizer, TorchScaler(8.0, group=group), batch),
        loss_sum=_in_16_bits,
        all_reduce=noted,
        group=group,
        **chosen,
    )
    calls = zip(noted.sizes, noted.dtypes, noted.groups, strict=True)
    return [[size, dtype, given is group] for size, dtype, given in calls]


def _in_16_bits(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    loss, count = cross_entropy_sum(model, batch)
    return loss.half(), count


NOTED_TRAINABLE = FEATURES * 8 + 8 + 8 * CLASSES + 5  # of sums_of


def step_without_targets(lesson: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """How the step is refused, and whether the parameters are as before."""
    model, rank = Worn(), dist.get_rank()
    before = state_of(model)
    optimizer = torch.optim.SGD(two_groups(model), lr=0.5, weight_decay=0.1)
    inputs, targets = batch_of(sizes, rank, 0)
    batch = inputs, torch.full_like(targets, -100)
    step = lesson.mixed_precision_step
    refusal = refusal_of(lambda: step(model, optimizer, TorchScaler(8.0), batch))
    return {**refusal, "changed": state_of(model) != before}
