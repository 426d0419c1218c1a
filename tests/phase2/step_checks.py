"""Checks for tasks 2.1, 2.2 and 2.4, which compare steps with those of one process.

Ranks must not import this module: a submission can inspect the code that calls it, and must not
find the expected results there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from math import hypot, inf
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.grade import Grade, check
from distlab.util.text import counted, joined, sentence
from judging.checks import check_refused, is_close, same_loss
from judging.expect import expect, expect_cost, expect_on_all_ranks
from judging.models import SGD, Worn, state_of
from phase2 import steps as b
from phase2_advanced.given import cross_entropy_sum

Shares = tuple[b.Share, ...]  # one for each rank


@cache
def steps_alone(
    shares: Shares, num_steps: int, *, with_zeros: bool = False, max_norm: float = inf
) -> dict[str, Any]:
    """Train in one process on the concatenated batches of all ranks.

    If ``with_zeros``, the unused parameter has a gradient of zero, rather than none.
    """
    model = Worn()
    optimizer, losses, norms = _sgd(model), [], []
    for step in range(num_steps):
        parts = [b.batch_of(share, rank, step) for rank, share in enumerate(shares)]
        optimizer.zero_grad()
        total, count = cross_entropy_sum(model, tuple(map(torch.cat, zip(*parts, strict=True))))
        (total / count).backward()
        if with_zeros:
            model.unused.grad = torch.zeros_like(model.unused)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(float(total.detach() / count))
    return {"losses": losses, "norms": norms, "state": state_of(model)}


@cache
def one_parameter_alone(shares: Shares) -> dict[str, Any]:
    """Take a step in one process with a model that has only one trainable parameter."""
    model, parts = b.with_one_parameter(), [b.batch_of(x, r, 0) for r, x in enumerate(shares)]
    optimizer = _sgd(model)
    optimizer.zero_grad()
    total, count = cross_entropy_sum(model, tuple(map(torch.cat, zip(*parts, strict=True))))
    (total / count).backward()
    optimizer.step()
    return state_of(model)


class Part(NamedTuple):
    """A micro-batch's contribution to the first step: its gradient, loss and target count."""

    gradient: list[float]
    loss: float
    targets: int


@cache
def parts_of_step(shares: Shares) -> list[list[Part]]:
    """Return a ``Part`` for each micro-batch of the first step, by rank."""
    return [
        [
            _part(
                *(tensor[start : start + share.starts().step] for tensor in b.batch_of(share, r, 0))
            )
            for start in share.starts()
        ]
        for r, share in enumerate(shares)
    ]


def _part(inputs: Tensor, targets: Tensor) -> Part:
    model = Worn()
    model.zero_grad()
    total, count = cross_entropy_sum(model, (inputs, targets))
    total.backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in _used(model).values()]
    return Part(torch.cat([x.flatten() for x in parts]).tolist(), float(total.detach()), count)


def _used(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, except the unused one."""
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name != "unused"}


@cache
def two_losses_alone(shares: Shares, loss: b.Loss) -> dict[str, Any]:
    """Take one step in a single process, on the whole batch that the ranks share."""
    whole = b.batch_of_two(b.Share(sum(share.rows for share in shares), shares[0].size))
    with torch.random.fork_rng(devices=[]):
        model = b.Dropping()
        sums = [loss.sum_of(model, part) for part in _split(whole, shares)]
    total, count = torch.stack(sums).sum(), loss.num_targets(whole)
    (total / count).backward()
    _sgd(model).step()
    return {"loss": float(total.detach()) / count, "state": state_of(model)}


def _split(whole: Sequence[Tensor], shares: Shares) -> Iterator[tuple[Tensor, ...]]:
    """Yield the micro-batches of all ranks in order, seeding dropout as each rank does."""
    of_ranks = zip(*(x.split([share.rows for share in shares]) for x in whole), strict=True)
    for share, tensors in zip(shares, of_ranks, strict=True):
        torch.manual_seed(share.rows)
        yield from zip(*(tensor.split(share.size) for tensor in tensors), strict=True)


def _sgd(model: nn.Module) -> SGD:
    return SGD(model, b.LR, b.MOMENTUM, b.WEIGHT_DECAY)


def scales(arguments: dict[str, Any], is_bad: Sequence[bool]) -> list[float]:
    """Return the scale after each update, computed by the torch function that GradScaler calls."""
    scale = torch.tensor(arguments["init_scale"], dtype=torch.float32)
    good_steps, values = torch.zeros((), dtype=torch.int32), []
    settings = [arguments[f"{name}_factor"] for name in ("growth", "backoff")]
    for bad in is_bad:
        num_bad = torch.tensor(float(bad))
        torch._amp_update_scale_(
            scale, good_steps, num_bad, *settings, arguments["growth_interval"]
        )
        values.append(scale.item())
    return values


TOLERANCE = 1e-12
CLIPPED = 1e-5  # larger, because clip_grad_norm_ adds 1e-6 to the norm


class Contract(NamedTuple):
    """A step function, and the likely causes of wrong results.

    Attributes:
        with_zeros: Whether the unused parameter has a gradient of zero, rather than none.
        of_length: Likely cause of a gradient with the right direction but the wrong length.
        of_end: Likely cause of losses or weights that differ only after the first step.
        of_unused: Likely cause of a wrong weight of the unused parameter.
    """

    function: str
    with_zeros: bool
    of_length: str
    of_end: str
    of_unused: str


def described(shares: Shares) -> str:
    """Describe each rank's rows and micro-batches in words, to begin a message with."""
    if not any(share.size for share in shares):
        return f"batches of {[share.rows for share in shares]} rows"
    if len(shares) == 1:
        return f"{counted(shares[0].rows, 'row')} in micro-batches of {shares[0].size}"
    return f"micro-batches by rank {[len(share.starts()) for share in shares]}"


def check_steps(
    contract: Contract,
    by_rank: Sequence[Any],
    shares: Shares,
    num_steps: int,
    max_norm: float = inf,
) -> None:
    """Check the steps of all ranks: the first loss and gradient, then losses and weights."""
    alone = steps_alone(shares, num_steps, with_zeros=contract.with_zeros, max_norm=max_norm)
    clips = f", max_norm {max_norm:.4g}" if max_norm < inf else ""
    for rank, result in enumerate(by_rank):
        here = f"{described(shares)}{clips}" + f", rank {rank}" * (len(shares) > 1)
        check_first_loss(here, result["losses"][0], shares, rank)
        _check_first_gradient(here, result, shares, rank, max_norm, contract.of_length)
        losses, state = result["losses"], result["states"][-1]
        what = f"the losses of {num_steps} steps, as of one process on whole batches,"
        expect(f"{here}: {what}", losses, alone["losses"], contract.of_end, 1e-6)
        tolerance = CLIPPED if clips else TOLERANCE
        wrong = [
            name for name in state if not is_close(alone["state"][name], state[name], tolerance)
        ]
        check(
            not wrong,
            f"{here}: after {len(losses)} steps the losses are right, but {joined(wrong)} should "
            "have other weights, those of one process. "
            f"{contract.of_unused if wrong == ['unused'] else contract.of_end}",
        )
        share, starts = shares[rank], shares[rank].starts()
        passes = [min(starts.step, share.rows - start) for start in starts] * num_steps
        rows = [rows for rows in result["rows"] if rows]
        expect_cost(
            f"{here}: the rows of all forward passes, one for each micro-batch,", rows, passes
        )
        what = "what has changed of the batch, which belongs to the caller,"
        expect(f"{here}: {what}", result["changed"], [])
        expect(f"{here}: the types of losses other than float", result["types"], [])


def _sums(parts: Iterable[Part]) -> tuple[float, int]:
    """Return the sum of the losses and the number of targets."""
    losses, targets = zip(*((part.loss, part.targets) for part in parts), strict=True)
    return sum(losses), sum(targets)


def norm_of_first(shares: Shares) -> float:
    """Return the gradient norm of the first step."""
    parts = [*chain.from_iterable(parts_of_step(shares))]
    return hypot(*_added((part.gradient, 1.0) for part in parts)) / _sums(parts)[1]


def check_first_loss(here: str, got: float, shares: Shares, rank: int) -> None:
    """Check the first loss; if a known mistake gives the learner's loss, name the mistake."""
    by_rank = parts_of_step(shares)
    total, targets = _sums(chain.from_iterable(by_rank))
    means = [[part.loss / part.targets for part in parts if part.targets] for parts in by_rank]
    of_ranks = [loss / count if count else 0.0 for loss, count in map(_sums, filter(None, by_rank))]
    own = _sums(by_rank[rank]) if by_rank[rank] else (inf, 1)
    every = [mean for of_rank in means for mean in of_rank]
    causes = {
        "the sum of the losses: divide it by the number of targets": total,
        "the mean of the ranks' means, in which small batches weigh too much": fmean(of_ranks),
        "the mean of this rank's own batch": own[0] / max(1, own[1]),
        "the loss of the last micro-batch alone": means[rank][-1] if means[rank] else inf,
        "1,024 times that, the scale of this test: return a loss that is not scaled": (
            1024 * total / targets
        ),
        "the mean of the micro-batches' means, in which those with few targets count too much": (
            fmean(every)
        ),
        "the mean of the micro-batches' means, in which those without targets count as zero": (
            sum(every) / sum(map(len, by_rank))
        ),
        "the sum of the ranks' means: divide each sum by the number of targets of all ranks, not "
        "by the rank's own": sum(of_ranks),
        "the sum of the micro-batches' means: divide each sum by the number of targets of the "
        "whole batch, not by the micro-batch's own": sum(every),
        "the mean divided by the number of targets once more": total / targets**2,
        "the mean over all targets, also those that do not count": (
            total / (sum(share.rows for share in shares) * b.LENGTH)
        ),
    }
    known = [f"That is {cause}." for cause, loss in causes.items() if same_loss(loss, got)]
    batches = "all ranks' batches" if len(shares) > 1 else "the batch"
    what = f"the mean loss per target of {batches}, before the step,"
    expect(f"{here}: {what}", got, total / targets, "".join(known[:1]), 1e-6)


def _directions(shares: Shares, rank: int) -> dict[str, list[float]]:
    """Return the gradient's direction under each known mistake, by description of the mistake."""
    by_rank = [parts for parts in parts_of_step(shares) if parts]
    every = [*chain.from_iterable(by_rank)]
    sums = [(_added((part.gradient, 1.0) for part in parts), _sums(parts)[1]) for parts in by_rank]
    last = "that of the ranks' last micro-batches alone"
    own = parts_of_step(shares)[rank]
    return {
        f"{last if len(shares) > 1 else 'the gradient of the last micro-batch alone'}. Gradients "
        "add up as long as nobody clears them: clear them once, before the first micro-batch, and "
        "communicate after the last": _added((p[-1].gradient, 1.0) for p in by_rank),
        "the gradient of the first micro-batch alone": every[0].gradient,
        "the mean of the ranks' means, in which targets of a rank with few of them weigh too much. "
        "Sum up over micro-batches and ranks, and divide once, by the number of targets of all "
        "ranks": _added((total, 1 / count) for total, count in sums if count),
        "the mean of the micro-batches' means, in which the targets of a micro-batch with few of "
        "them weigh too much. Add up sums, and divide once, by all targets": _added(
            (part.gradient, 1 / part.targets) for part in every if part.targets
        ),
        "a sum of gradients of equal length: each rank has clipped its own, before the all-reduce. "
        "Scale by the norm of the mean gradient of all ranks": _added(
            (total, 1 / hypot(*total)) for total, _ in sums
        ),
        "that of this rank alone: all-reduce it": _added((part.gradient, 1.0) for part in own),
    }


def _added(parts: Iterable[tuple[list[float], float]]) -> list[float]:
    """Return the weighted sum of gradients."""
    return [sum(row) for row in zip(*([x * f for x in part] for part, f in parts), strict=True)]


def _check_first_gradient(
    here: str, result: Any, shares: Shares, rank: int, max_norm: float, cause: str
) -> None:
    """Check the length of the first step's gradient; if its direction is wrong, find the mistake.

    Unknown mistakes are left to the check of losses and weights.
    """
    parts = [*chain.from_iterable(parts_of_step(shares))]
    got = _moved(result)
    right = _added((part.gradient, 1.0) for part in parts)
    expected = min(hypot(*right) / _sums(parts)[1], max_norm)
    if _is_along(got, right):
        what = "the direction of the first step is right: the length of its gradient, times"
        expect(f"{here}: {what} what it should be,", hypot(*got) / expected, 1.0, cause, 1e-5)
        return
    for name, gradient in _directions(shares, rank).items():
        check(
            not gradient or not _is_along(got, gradient),
            sentence(f"{here}: the gradient of the first step is {name}"),
        )


def _moved(result: Mapping[str, Any]) -> list[float]:
    """Return the gradient of the used parameters, worked out from how the first step moved them."""
    model = Worn()
    before, after = state_of(model), result["states"][0]
    return [
        (x - y) / b.LR - b.WEIGHT_DECAY * x
        for name in _used(model)
        for x, y in zip(before[name], after[name], strict=True)
    ]


def _is_along(a: Sequence[float], b: Sequence[float]) -> bool:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = hypot(*a) * hypot(*b)
    return lengths > 0 and dot / lengths > 1 - 1e-9


def check_same_on_all(here: str, by_rank: Sequence[Any], *names: str) -> None:
    """Check that a step returns the same numbers on all ranks."""
    for rank, result in enumerate(by_rank):
        for name in names:
            what = f"{here}, rank {rank}: the {name}, exactly as on rank 0,"
            cause = "Compute them from the result of the all-reduce."
            expect(what, result[name], by_rank[0][name], cause)


def check_nothing_steps(results: Sequence[Any], what: str) -> None:
    """Check that a step without any target is refused, and changes no parameter."""
    check_refused(results, what, text="alike")
    expect_on_all_ranks(
        "whether parameters change",
        [result["changed"] for result in results],
        False,
        "Raise the error before the optimizer's step.",
        where=f", {what}",
    )


def check_error_passed_on(grade: Grade, function: str) -> None:
    """Check that a step passes on an error of its all-reduce, such as one about a lost peer."""
    raised = grade.call(b.step_without_peers, function)
    expect(f"what {function} raises if the all_reduce given raises it", raised, "ConnectionError")
