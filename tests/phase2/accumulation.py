"""Bodies for tasks 2.1 to 2.3."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from judging.calls import cause_told, refusal_of, returned
from judging.models import Deep, Worn, deep_batch, state_of, two_groups
from phase2.accumulation_models import (
    Dropping,
    Share,
    TwoHeaded,
    batch_of,
    batch_of_two,
    sgd,
    two_losses,
)
from phase2.step_arguments import OTHERS_HAVE_TARGETS, NotedAllReduce

# 2.1


def tensors_of(rows: int) -> tuple[Tensor, ...]:
    """Tensors of many kinds; the last is not contiguous."""
    images = torch.arange(rows * 6.0).view(rows, 3, 2)
    labels = torch.arange(rows) + 100
    masks = torch.arange(rows * 2).view(rows, 2) % 3 == 0
    return images, labels, masks, torch.arange(rows * 2.0).view(2, rows).t()


def split(lesson: Any, rows: int, size: int, count: int) -> dict[str, Any]:
    """Micro-batches of ``count`` tensors: values, dtypes, and whether they are views."""
    batch = tensors_of(rows)[:count]
    found = returned("split_micro_batches", lesson.split_micro_batches(batch, size))
    parts = [list(part) for part in found]
    return {
        "types": [type(found).__name__, *sorted({type(part).__name__ for part in found})],
        "values": [[tensor.tolist() for tensor in part] for part in parts],
        "dtypes": [[str(tensor.dtype) for tensor in part] for part in parts],
        "are_views": [[_shares(a, b) for a, b in zip(part, batch, strict=False)] for part in parts],
    }


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def split_badly(lesson: Any, rows: Sequence[int], size: int) -> dict[str, str]:
    batch = tuple(torch.zeros(count, 2) for count in rows)
    return refusal_of(lambda: lesson.split_micro_batches(batch, size))


# 2.2


def accumulate_steps(lesson: Any, share: Share, num_steps: int) -> dict[str, Any]:
    """Losses, weights, and how model and batches were used."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        return lesson.accumulate_step(model, optimizer, batch, share.size)

    return _steps(step, "accumulate_step", share, 0, num_steps)


def _steps(
    step: Callable[..., Any], function: str, share: Share, rank: int, num_steps: int
) -> dict[str, Any]:
    model = Worn()
    optimizer, losses, states, changed = sgd(model), list[Any](), list[Any](), set[str]()
    for number in range(num_steps):
        batch = batch_of(share, rank, number)
        losses.append(returned(function, step(model, optimizer, batch)))
        states.append(state_of(model))
        untouched = zip(("inputs", "targets"), batch, batch_of(share, rank, number), strict=True)
        changed |= {name for name, now, then in untouched if not torch.equal(now, then)}
    return {
        "losses": [float(loss) for loss in losses],
        "types": sorted({type(loss).__name__ for loss in losses if not isinstance(loss, float)}),
        "states": states,
        "rows": model.rows,
        "changed": sorted(changed),
    }


def accumulate_with_dropout(lesson: Any, seed: int, share: Share) -> dict[str, Any]:
    model, batch = Dropping(), batch_of(share, 0, 0)
    torch.manual_seed(seed)
    loss = lesson.accumulate_step(model, sgd(model), batch, share.size)
    return {"loss": float(returned("accumulate_step", loss)), "state": state_of(model)}


def accumulate_two_losses(lesson: Any, share: Share, factor: float) -> dict[str, Any]:
    """A step with a loss of two parts times a factor, and what it was called with."""
    model, calls = TwoHeaded(), list[tuple[bool, list[int]]]()

    def noted(given: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        calls.append((given is model, [len(tensor) for tensor in batch]))
        return two_losses(given, batch, factor)

    batch = batch_of_two(share.rows, share.size)
    loss = lesson.accumulate_step(model, sgd(model), batch, share.size, noted)
    found = float(returned("accumulate_step", loss))
    return {"loss": found, "state": state_of(model), "calls": calls}


def accumulate_nothing(lesson: Any, rows: int) -> dict[str, Any]:
    """A step on targets of which none counts, or on none at all."""
    model = Worn()
    before, batch = state_of(model), batch_of(Share(rows, 1), 0, 0)
    batch[1].fill_(-100)
    refusal = refusal_of(lambda: lesson.accumulate_step(model, sgd(model), batch, 2))
    return {**refusal, "changed": state_of(model) != before}


def accumulate_deep(lesson: Any, width: int, rows: int, counts: Sequence[int]) -> None:
    """Each rank by itself, in its own number of micro-batches: what memory do they take?"""
    model, batch = Deep(width), deep_batch(rows)
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1)
    lesson.accumulate_step(model, optimizer, batch, rows // counts[dist.get_rank()])


def plain_deep(lesson: Any, width: int, rows: int, counts: Sequence[int]) -> None:
    """One ordinary step on as many rows as a micro-batch of the rank has."""
    model, batch = Deep(width), deep_batch(rows // counts[dist.get_rank()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


# 2.3


def steps_over_ranks(
    lesson: Any,
    shares: Sequence[Share],
    num_steps: int,
    options: dict[str, Any],
    group: Any = None,
) -> dict[str, Any]:
    """As for one process; ``options`` are further arguments, all that may be left out is."""
    rank, named = dist.get_rank(group), {**options, **({} if group is None else {"group": group})}
    share = shares[rank]

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        with cause_told({} if share.rows else OTHERS_HAVE_TARGETS, ValueError):
            return lesson.accumulate_step_over_ranks(model, optimizer, batch, share.size, **named)

    return _steps(step, "accumulate_step_over_ranks", share, rank, num_steps)


def calls_over_ranks(
    lesson: Any, shares: Sequence[Share], num_steps: int, group: Any = None
) -> dict[str, Any]:
    """What the all_reduce given was called with."""
    all_reduce = NotedAllReduce()
    options = {"all_reduce": all_reduce}
    found = steps_over_ranks(lesson, shares, num_steps, options, group)
    is_right = [given is group for given in all_reduce.groups]
    return {**found, "sizes": all_reduce.sizes, "is_group_given": all(is_right)}


def two_losses_over_ranks(lesson: Any, shares: Sequence[Share], factor: float) -> dict[str, Any]:
    """Every rank has its rows of one batch."""
    rank, model = dist.get_rank(), TwoHeaded()
    first = sum(share.rows for share in shares[:rank])
    rows, size = shares[rank]
    whole = batch_of_two(sum(share.rows for share in shares), shares[0].size)
    batch = tuple(tensor[first : first + rows] for tensor in whole)
    loss_sum = partial(two_losses, factor=factor)
    loss = lesson.accumulate_step_over_ranks(model, sgd(model), batch, size, loss_sum=loss_sum)
    return {
        "loss": float(returned("accumulate_step_over_ranks", loss)),
        "state": state_of(model),
    }


def nothing_over_ranks(lesson: Any) -> dict[str, Any]:
    """How a step without any target is refused, and whether the parameters are as before.

    One parameter is trainable.
    """
    model, share = Worn().requires_grad_(False), Share(2 * dist.get_rank(), 1)
    model.first.weight.requires_grad_()
    before, batch = state_of(model), batch_of(share, dist.get_rank(), 0)
    batch[1].fill_(-100)
    refusal = refusal_of(
        lambda: lesson.accumulate_step_over_ranks(model, sgd(model), batch, share.size)
    )
    return {**refusal, "changed": state_of(model) != before}


def deep_over_ranks(lesson: Any, width: int, rows: int, counts: Sequence[int]) -> None:
    """Two steps: what the first leaves behind counts in the second."""
    model, batch = Deep(width), deep_batch(rows)
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1)
    size = rows // counts[dist.get_rank()]
    for _ in range(2):
        lesson.accumulate_step_over_ranks(model, optimizer, batch, size, max_norm=1e-3)
