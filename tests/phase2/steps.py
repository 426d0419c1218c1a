"""Bodies (functions that ranks run) for tasks 2.1, 2.2 and 2.4: split batches, and steps."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab.grade import WrongResult
from judging.calls import cause_told, refusal_of, refused, returned
from judging.comparing import noting_changes
from judging.models import (
    CLASSES,
    DOUBLE,
    FEATURES,
    FLAG,
    IGNORED,
    Deep,
    Worn,
    batch,
    deep_batch,
    state_of,
    trainable,
    two_groups,
)
from judging.tensors import own_device
from phase2_advanced.given import LossSum, cross_entropy_sum

ACCUMULATE, OVER_RANKS, MIXED = (
    "accumulate_step",
    "accumulate_step_over_ranks",
    "mixed_precision_step",
)
LENGTH = 3
LR, MOMENTUM, WEIGHT_DECAY = 0.5, 0.9, 0.01
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
OTHERS_HAVE_TARGETS = {
    "": "This rank's batch is empty, but other ranks have targets: decide after the all-reduce, "
    "when all ranks know the same."
}


class Share(NamedTuple):
    """One rank's share of a step."""

    rows: int
    size: int  # rows of a micro-batch; 0 for a batch that is not split

    def starts(self) -> range:
        """Return the first row of each micro-batch."""
        return range(0, self.rows, self.size or max(1, self.rows))


def batch_of(share: Share, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Make a rank's sequences, in which about a third of the targets do not count.

    In the first micro-batch, only one target counts. On even ranks, the last row has a flag.
    """
    inputs, targets = batch((share.rows, LENGTH), 1000 * step + rank)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED
    targets[: share.size] = IGNORED
    targets[:1, :1] = 1
    if rank % 2 == 0:
        inputs[-1:, :1, :1] = FLAG
        targets[-1:, :1] = 0
    return inputs, targets


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(two_groups(model), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


class NotedAllReduce:
    """An all-reduce that records sizes, dtypes and groups; ``group`` may be passed by position."""

    def __init__(self) -> None:
        self.sizes, self.dtypes, self.groups = list[int](), list[str](), list[Any]()

    def __call__(self, x: Tensor, group: Any = None) -> None:
        self.sizes.append(x.numel())
        self.dtypes.append(str(x.dtype).removeprefix("torch."))
        self.groups.append(group)
        dist.all_reduce(x, group=group)


# Task 2.1: split batches


def tensors_of(rows: int) -> tuple[Tensor, ...]:
    """Make tensors of several kinds; the last is not contiguous."""
    images = torch.arange(rows * 6.0).view(rows, 3, 2)
    labels = torch.arange(rows) + 100
    masks = torch.arange(rows * 2).view(rows, 2) % 3 == 0
    return images, labels, masks, torch.arange(rows * 2.0).view(2, rows).t()


def split(lesson: Any, rows: int, size: int, count: int) -> dict[str, Any]:
    """Split ``count`` tensors; return types, values, dtypes, and whether parts are views."""
    whole = tensors_of(rows)[:count]
    found = returned("split_micro_batches", lesson.split_micro_batches(whole, size))
    parts = [list(part) for part in found]
    return {
        "types": [type(found).__name__, *sorted({type(part).__name__ for part in found})],
        "values": [[tensor.tolist() for tensor in part] for part in parts],
        "dtypes": [[str(tensor.dtype) for tensor in part] for part in parts],
        "are_views": [[_shares(a, b) for a, b in zip(part, whole, strict=False)] for part in parts],
    }


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def split_badly(lesson: Any, rows: Sequence[int], size: int) -> dict[str, str]:
    """Return how the lesson refuses a batch whose tensors have the given numbers of rows."""
    return refused(lesson, "split_micro_batches", tuple(torch.zeros(n, 2) for n in rows), size)


# Steps of each function


def accumulate_steps(lesson: Any, share: Share, num_steps: int) -> dict[str, Any]:
    """Take steps with accumulate_step, in one process; return the results of ``_steps``."""

    def step(model: nn.Module, optimizer: Any, whole: Any) -> Any:
        return lesson.accumulate_step(model, optimizer, whole, share.size)

    return _steps(step, ACCUMULATE, share, 0, num_steps, is_transposed=True)


def steps_over_ranks(
    lesson: Any, shares: Sequence[Share], num_steps: int, max_norm: float = inf, group: Any = None
) -> dict[str, Any]:
    """Take steps with accumulate_step_over_ranks.

    Without a group, all optional arguments except ``max_norm`` are omitted.

    Returns:
        The results of ``_steps``, the size of each all-reduce, and whether all got the group.
    """
    rank, all_reduce = dist.get_rank(group), NotedAllReduce()
    more = {"max_norm": max_norm} if max_norm < inf else {}
    more |= {} if group is None else {"group": group, "all_reduce": all_reduce}

    def step(model: nn.Module, optimizer: Any, whole: Any) -> Any:
        size = shares[rank].size
        return lesson.accumulate_step_over_ranks(model, optimizer, whole, size, **more)

    is_transposed = group is not None  # an all-reduce of a transposed gradient fails
    found = _steps(step, OVER_RANKS, shares[rank], rank, num_steps, is_transposed)
    is_group_given = all(given is group for given in all_reduce.groups)
    return {**found, "sizes": all_reduce.sizes, "is_group_given": is_group_given}


def mixed_steps(
    lesson: Any, shares: Sequence[Share], num_steps: int, max_norm: float, group: Any = None
) -> dict[str, Any]:
    """Take steps with mixed_precision_step; results are exact because the model is in float64.

    If there is a group, a loss and an all-reduce that record their calls are passed, too.
    """
    rank, scaler, results = dist.get_rank(group), TorchScaler(2.0**10, 2, group), list[Any]()
    more, sums = {"reduce_dtype": torch.float64, "max_norm": max_norm}, list[list[float]]()
    reduced = NotedAllReduce()
    if group is not None:
        loss_sum = _noting(sums, cross_entropy_sum)
        more |= {"group": group, "loss_sum": loss_sum, "all_reduce": reduced}

    def step(model: nn.Module, optimizer: Any, whole: Any) -> Any:
        found = lesson.mixed_precision_step(model, optimizer, scaler, whole, **more)
        results.append(_result(found))
        return results[-1][0]

    found = _steps(step, MIXED, shares[rank], rank, num_steps, group is not None)
    _, skipped, norms = zip(*results, strict=True)
    updates = [scaler.num_updates, scaler.value]
    return {
        **found,
        "skipped": list(skipped),
        "norms": list(norms),
        "updates": updates,
        "num_losses": len(sums),
        "num_calls": len(reduced.sizes) + scaler.num_sums,
    }


def _steps(
    step: Callable[..., Any],
    function: str,
    share: Share,
    rank: int,
    num_steps: int,
    is_transposed: bool,
) -> dict[str, Any]:
    device = own_device()
    model = Worn(is_transposed=is_transposed).to(device)
    optimizer, losses, states, changed = sgd(model), list[Any](), list[Any](), set[str]()
    for number in range(num_steps):
        inputs, targets = (x.to(device) for x in batch_of(share, rank, number))
        with (
            noting_changes(inputs=inputs, targets=targets) as now_changed,
            cause_told({} if share.rows else OTHERS_HAVE_TARGETS, ValueError),
        ):
            losses.append(returned(function, step(model, optimizer, (inputs, targets))))
        states.append(state_of(model))
        changed |= {*now_changed}
    return {
        "losses": [float(loss) for loss in losses],
        "types": sorted({type(loss).__name__ for loss in losses if not isinstance(loss, float)}),
        "states": states,
        "rows": model.rows,
        "changed": sorted(changed),
    }


def with_one_parameter() -> Worn:
    """Make a model that has only one trainable parameter."""
    model = Worn().requires_grad_(False)
    model.first.weight.requires_grad_()
    return model


def step_of_one_parameter(lesson: Any, function: str, shares: Sequence[Share]) -> dict[str, Any]:
    """Take a step with a model that has only one trainable parameter; return the parameters."""
    rank, model = dist.get_rank(), with_one_parameter()
    _step(lesson, function, model, batch_of(shares[rank], rank, 0))
    return state_of(model)


def step_on_nothing(lesson: Any, function: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Take a step without targets; return its error, and whether parameters changed.

    Only one of the model's parameters is trainable.
    """
    model = with_one_parameter()
    before, (inputs, targets) = state_of(model), batch_of(Share(sizes[dist.get_rank()], 1), 0, 0)
    whole = inputs, torch.full_like(targets, IGNORED)
    refusal = refusal_of(lambda: _step(lesson, function, model, whole))
    return {**refusal, "changed": state_of(model) != before}


def _step(lesson: Any, function: str, model: nn.Module, whole: Any, **more: Any) -> None:
    """Take a step with one of the three step functions, whose name is ``function``."""
    mixed = function == MIXED
    arguments = (TorchScaler(8.0), whole) if mixed else (whole, 2)
    getattr(lesson, function)(model, sgd(model), *arguments, **more)


def step_without_peers(lesson: Any, function: str) -> str:
    """Return the type of the error that a step raises if its all-reduce fails; "" for none."""

    def failing(x: Tensor, group: Any = None) -> None:
        raise ConnectionError("rank 1 has left")

    try:
        _step(lesson, function, Worn(), batch_of(Share(3, 0), 0, 0), all_reduce=failing)
    except Exception as error:
        return type(error).__name__
    return ""


# Tasks 2.1 and 2.2: other models and losses


class Dropping(nn.Sequential):
    """A classifier of sequences with dropout."""

    def __init__(self) -> None:
        torch.manual_seed(8)
        ends = nn.Linear(FEATURES, 16, **DOUBLE), nn.Linear(16, CLASSES, **DOUBLE)
        super().__init__(ends[0], nn.Tanh(), nn.Dropout(0.5), ends[1])


def batch_of_two(share: Share) -> tuple[Tensor, ...]:
    """Make inputs, labels, values, and the number of targets that each row counts as.

    Rows of the first micro-batch count as no targets, but still have a loss.
    """
    generator = torch.Generator().manual_seed(share.rows)
    values = torch.randn(share.rows, generator=generator, dtype=torch.float64)
    counts = torch.randint(1, 4, (share.rows,), generator=generator)
    counts[: share.size] = 0
    return *batch((share.rows,), share.rows), values, counts


class Loss(NamedTuple):
    """A sum of cross-entropies and squared errors, times a factor."""

    factor: float = 1.0

    def sum_of(self, model: nn.Module, part: Sequence[Tensor]) -> Tensor:
        inputs, labels, values, _ = part
        logits = model(inputs)
        squares = (logits[:, 0] - values).square().sum()
        total = cross_entropy(logits, labels, reduction="sum") + 0.3 * squares
        return total * self.factor

    def num_targets(self, part: Sequence[Tensor]) -> int:
        *_, counts = part
        return int(counts.sum())


def two_losses(lesson: Any, function: str, shares: Sequence[Share], loss: Loss) -> dict[str, Any]:
    """Take a step on the rank's rows of a batch; return its result, and the calls of the loss."""
    rank, model, calls = dist.get_rank(), Dropping(), list[tuple[bool, list[int]]]()

    def noted(given: nn.Module, part: Sequence[Tensor]) -> Tensor:
        calls.append((given is model, [len(tensor) for tensor in part]))
        return loss.sum_of(given, part)

    whole = batch_of_two(Share(sum(share.rows for share in shares), shares[0].size))
    rows = [share.rows for share in shares]
    part = tuple(tensor.split(rows)[rank] for tensor in whole)
    step = getattr(lesson, function)
    torch.manual_seed(shares[rank].rows)
    loss_sum = LossSum(noted, loss.num_targets)
    mean = returned(function, step(model, sgd(model), part, shares[rank].size, loss_sum=loss_sum))
    return {"loss": float(mean), "state": state_of(model), "calls": calls}


def accumulate_deep(
    lesson: Any, function: str, num_steps: int, width: int, rows: int, counts: Sequence[int]
) -> None:
    """Take steps whose memory is measured; rank r uses ``counts[r]`` micro-batches."""
    model, whole = Deep(width), deep_batch(rows)
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1)
    step = getattr(lesson, function)
    more = {"max_norm": 1e-3} if function == OVER_RANKS else {}
    for _ in range(num_steps):
        step(model, optimizer, whole, rows // counts[dist.get_rank()], **more)


def plain_deep(lesson: Any, width: int, rows: int, counts: Sequence[int]) -> None:
    """Take one ordinary step on a batch as large as one of this rank's micro-batches."""
    model, whole = Deep(width), deep_batch(rows // counts[dist.get_rank()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cross_entropy(model(whole[0]), whole[1]).backward()
    optimizer.step()


# Task 2.4: mixed-precision steps


class TorchScaler:
    """torch's GradScaler with the lesson's method names, and one decision for all ranks.

    It allows judging a step before the learner has written a scaler.
    """

    def __init__(self, init_scale: float, growth_interval: int = 2000, group: Any = None) -> None:
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=init_scale, growth_interval=growth_interval
        )
        self._is_finite: dict[Any, bool] = {}
        self.group, self.num_updates, self.num_sums = group, 0, 0
        # Use the scaler once, because it creates its state only then.
        self._scaler.scale(torch.zeros((), device=own_device(group)))

    @property
    def value(self) -> float:
        return float(self._scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss.float() if loss.dtype.itemsize < 4 else loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._is_finite:
            self._scaler.unscale_(optimizer)
            by_device = self._scaler._found_inf_per_device(optimizer)
            num_bad = sum(by_device.values(), torch.zeros(1, device=own_device(self.group)))
            dist.all_reduce(num_bad, group=self.group)
            self.num_sums += 1
            for flag in by_device.values():
                flag.copy_(num_bad[0])
            self._is_finite[optimizer] = num_bad.item() == 0
        return self._is_finite[optimizer]

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.unscale(optimizer):
            optimizer.step()
            return True
        return False

    def update(self) -> None:
        self._scaler.update()
        self._is_finite.clear()
        self.num_updates += 1


def _result(found: Any) -> tuple[float, bool, float]:
    """Return a step's loss, whether it was skipped, and its norm, after checking their types.

    Raises:
        WrongResult: A field is missing or has the wrong type.
    """
    result = returned(MIXED, found)
    for name, kind in {"loss": float, "is_skipped": bool, "norm": float}.items():
        value = getattr(result, name, None)
        if not isinstance(value, kind):
            raise WrongResult(
                f"{MIXED} should return a StepResult whose {name} is a {kind.__name__}; it "
                f"returned {result!r:.70}, of type {type(result).__name__}"
            )
    return result.loss, result.is_skipped, result.norm


class Noted(nn.Module):
    """Two float32 layers that record the dtypes they compute in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.dtypes: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        logits: Tensor = self.second(torch.tanh(hidden))
        self.dtypes |= {str(tensor.dtype) for tensor in (hidden, logits)}
        return logits


def weighted(by_rank: Sequence[float]) -> LossSum:
    """Make a loss whose gradient with respect to each output is the rank's factor."""

    def sum_of(model: nn.Module, whole: Any) -> Tensor:
        factor = by_rank[dist.get_rank()]
        return model(whole[0]).float().sum() * factor

    return LossSum(sum_of, lambda whole: len(whole[0]))


def step_noted(lesson: Any, dtype: str, reduce_dtype: str, group: Any = None) -> dict[str, Any]:
    """Take one step; return the dtypes used in it, and the calls of the all-reduce passed to it."""
    model, autocast, reduced = Noted(), list[tuple[bool, str]](), NotedAllReduce()
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    model.second.bias.requires_grad_(False)
    kept = [(id(p), p.data_ptr()) for p in model.parameters()]
    scaler = TorchScaler(8.0, group=group)

    def noted(model: nn.Module, whole: Any) -> Tensor:
        device = own_device().type
        now = str(torch.get_autocast_dtype(device))[6:]
        autocast.append((torch.is_autocast_enabled(device), now))
        return cross_entropy_sum.sum_of(model, whole).half()

    whole = torch.ones(3, FEATURES), torch.tensor([0, 1, 2])
    chosen = {"dtype": dtype, "reduce_dtype": reduce_dtype}.items()
    defaults = {"dtype": "float16", "reduce_dtype": "float32"}.items()
    more = {name: DTYPES[value] for name, value in chosen - defaults}
    step = partial(lesson.mixed_precision_step, model, sgd(model), scaler, whole, **more)
    loss_sum = LossSum(noted, cross_entropy_sum.count)
    _result(step(loss_sum=loss_sum, all_reduce=reduced, group=group))
    both = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return {
        "computed": sorted(model.dtypes),
        "autocast": autocast,
        "kept": sorted({str(tensor.dtype) for tensor in both}),
        "updates": scaler.num_updates,
        "is_same": kept == [(id(p), p.data_ptr()) for p in model.parameters()],
        "calls": [list(call) for call in zip(reduced.sizes, reduced.dtypes, strict=True)],
        "is_group_given": all(given is group for given in reduced.groups),
        "trainable": sum(p.numel() for p in trainable(model)),
    }


class Small(NamedTuple):
    """Steps that update a single weight, described by its initial value, gradients and so on."""

    start: float
    lr: float
    factors: Sequence[float]  # gradients by rank
    rows: Sequence[int]  # number of rows by rank
    reduce_dtype: str = "float32"
    num_steps: int = 1


def small_steps(lesson: Any, small: Small) -> dict[str, Any]:
    """Update a single weight; return its final value, and whether any of the steps was skipped."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, small.start)
    optimizer = torch.optim.SGD(two_groups(model), lr=small.lr)
    scaler, whole = TorchScaler(2.0**16), (torch.ones(small.rows[dist.get_rank()], 1),)
    more = {"reduce_dtype": DTYPES[small.reduce_dtype], "loss_sum": weighted(small.factors)}
    step = partial(lesson.mixed_precision_step, model, optimizer, scaler, whole, **more)
    skipped = [_result(step())[1] for _ in range(small.num_steps)]
    return {"skipped": any(skipped), "weight": model.weight.item()}


def overflow(lesson: Any, by_step: list[list[float]], reduce_dtype: str) -> list[dict[str, Any]]:
    """Take steps in which every gradient is the rank's factor; return the effects of each step."""
    torch.manual_seed(9)
    model = nn.Linear(FEATURES, 2)
    optimizer = torch.optim.Adam(two_groups(model), lr=0.01)
    scaler, found = TorchScaler(2.0**16), list[Any]()
    for factors in by_step:
        sums = list[list[float]]()
        before = repr([state_of(model), optimizer.state_dict()])
        result = lesson.mixed_precision_step(
            *(model, optimizer, scaler, (torch.ones(1, FEATURES),)),
            reduce_dtype=DTYPES[reduce_dtype],
            max_norm=1.0,
            loss_sum=_noting(sums, weighted(factors)),
        )
        loss, is_skipped, norm = _result(result)
        found.append(
            {
                "is_skipped": is_skipped,
                "has_changed": before != repr([state_of(model), optimizer.state_dict()]),
                "scale": scaler.value,
                "updates": scaler.num_updates,
                "has_finite_norm": abs(norm) < inf,
                "state": state_of(model),
                "loss": loss,
                "sums": sums,
            }
        )
    return found


def _noting(sums: list[list[float]], loss_sum: LossSum) -> LossSum:
    """Wrap ``loss_sum`` so that each call appends its results to ``sums``."""

    def noted(model: nn.Module, whole: Any) -> Tensor:
        loss, num_targets = loss_sum(model, whole)
        sums.append([loss.item(), int(num_targets)])
        return loss

    return LossSum(noted, loss_sum.count)
