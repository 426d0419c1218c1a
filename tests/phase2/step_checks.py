"""How judges compare the steps of tasks 2.2, 2.3 and 2.5 with those of one process."""

from collections.abc import Mapping, Sequence
from math import hypot, inf
from typing import Any, NamedTuple

from distlab.grade import Grade, check
from distlab.util.text import counted, joined, sentence
from judging.checks import check_refused, is_close, same_loss, short, short_beside
from judging.models import Worn, state_of
from phase2 import steps as b
from phase2 import steps_alone as reference
from phase2.steps import LENGTH, LR, WEIGHT_DECAY, Share

TOLERANCE = 1e-12
CLIPPED = 1e-5  # clip_grad_norm_ adds 1e-6 to the norm

Shares = tuple[Share, ...]  # one for each rank


class Contract(NamedTuple):
    """A function that steps, and the likely causes of what is wrong.

    Attributes:
        with_zeros: Whether a parameter that nothing uses has a gradient of zero, or none.
        of_length: The cause of a gradient in the right direction, but of another length.
        of_end: The cause of losses or weights that differ only after the first step.
        of_unused: The cause of another weight of what nothing uses.
    """

    function: str
    with_zeros: bool
    of_length: str
    of_end: str
    of_unused: str


def described(shares: Shares) -> str:
    """The beginning of a message: how many rows and micro-batches each rank has."""
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
    alone = reference.steps_alone(
        shares, num_steps, with_zeros=contract.with_zeros, max_norm=max_norm
    )
    clips = f", max_norm {max_norm:.4g}" if max_norm < inf else ""
    for rank, result in enumerate(by_rank):
        here = f"{described(shares)}{clips}" + f", rank {rank}" * (len(shares) > 1)
        check_first_loss(here, result["losses"][0], shares, rank)
        _check_direction(here, result, shares, rank, max_norm, contract.of_length)
        _check_end(here, alone, result, CLIPPED if clips else TOLERANCE, contract)
        _check_use(here, contract.function, result, shares[rank], num_steps)


def _sums(shares: Shares) -> tuple[float, int]:
    """The sum of all losses of the first step, and the number of targets."""
    parts = [part for of_rank in reference.parts_of_step(shares) for part in of_rank]
    return sum(part.loss for part in parts), sum(part.targets for part in parts)


def norm_of_first(shares: Shares) -> float:
    """The norm of the gradient of the first step."""
    return hypot(*_directions(shares, 0)[""]) / _sums(shares)[1]


def check_first_loss(here: str, got: float, shares: Shares, rank: int) -> None:
    by_rank, (total, targets) = reference.parts_of_step(shares), _sums(shares)
    means = [[part.loss / part.targets for part in parts if part.targets] for parts in by_rank]
    of_ranks = [_mean_loss(parts) for parts in by_rank if _mean_loss(parts)]
    every = [mean for of_rank in means for mean in of_rank]
    causes = {
        "the sum of the losses: divide it by the number of targets": total,
        "the mean of the ranks' means, in which small batches weigh too much": (
            sum(of_ranks) / len(of_ranks)
        ),
        "the mean of this rank's own batch": _mean_loss(by_rank[rank]),
        "the loss of the last micro-batch alone": means[rank][-1] if means[rank] else inf,
        "1,024 times that, the scale of this test: return a loss that is not scaled": (
            1024 * total / targets
        ),
        "the mean of the micro-batches' means, in which those with few targets count too much": (
            sum(every) / len(every)
        ),
        "the mean over all targets, also those that do not count": (
            total / (sum(share.rows for share in shares) * LENGTH)
        ),
    }
    known = [f" That is {cause}." for cause, loss in causes.items() if same_loss(loss, got)]
    whole = "the batch" if len(shares) == 1 else "all batches"
    check(
        same_loss(total / targets, got),
        f"{here}: the mean loss per target of {whole}, before the step, is {total / targets:.6f}; "
        f"the function returned {got:.6f}.{''.join(known[:1])}",
    )


def _mean_loss(parts: Sequence[reference.Part]) -> float:
    return sum(part.loss for part in parts) / max(1, sum(part.targets for part in parts))


def _directions(shares: Shares, rank: int) -> dict[str, list[float]]:
    """The gradients that right and wrong steps have, up to a factor, by what they are."""
    by_rank = reference.parts_of_step(shares)
    every = [part for parts in by_rank for part in parts]
    sums = [(_added([(part.gradient, 1.0) for part in parts]), parts) for parts in by_rank if parts]
    last = "that of the ranks' last micro-batches alone"
    known = {
        "": _added([(part.gradient, 1.0) for part in every]),
        f"{last if len(shares) > 1 else 'the gradient of the last micro-batch alone'}. Gradients "
        "add up as long as nobody clears them: clear them once, before the first micro-batch, and "
        "communicate after the last": _added([(p[-1].gradient, 1.0) for p in by_rank if p]),
        "the gradient of the first micro-batch alone": every[0].gradient,
        "the mean of the ranks' means, in which targets of a rank with few of them weigh too much. "
        "Sum up over micro-batches and ranks, and divide once, by the number of targets of all "
        "ranks": _added([(total, 1 / _targets(parts)) for total, parts in sums if _targets(parts)]),
        "the mean of the micro-batches' means, in which the targets of a micro-batch with few of "
        "them weigh too much. Add up sums, and divide once, by all targets": _added(
            [(part.gradient, 1 / part.targets) for part in every if part.targets]
        ),
        "a sum of gradients of equal length: each rank has clipped its own, before the all-reduce. "
        "Scale by the norm of the mean gradient of all ranks": _added(
            [(total, 1 / hypot(*total)) for total, _ in sums]
        ),
    }
    alone = _added([(part.gradient, 1.0) for part in by_rank[rank]])
    return {**known, **({"that of this rank alone: all-reduce it": alone} if alone else {})}


def _targets(parts: Sequence[reference.Part]) -> int:
    return sum(part.targets for part in parts)


def _added(parts: Sequence[tuple[list[float], float]]) -> list[float]:
    """Return the sum of gradients, each times a number."""
    return [sum(row) for row in zip(*([x * f for x in part] for part, f in parts), strict=True)]


def _check_direction(
    here: str, result: Any, shares: Shares, rank: int, max_norm: float, cause: str
) -> None:
    """Check the gradient of the first step: its direction, then its length."""
    known = {name: _without_unused(x) for name, x in _directions(shares, rank).items()}
    got, right = _moved(result), known[""]
    expected = min(hypot(*right) / _sums(shares)[1], max_norm)
    if _is_along(got, right):
        check(
            is_close(hypot(*got) / expected, 1.0, 1e-5),
            f"{here}: the direction of the first step is right, but its gradient is "
            f"{hypot(*got) / expected:.4g} times as long as it should be. {cause}",
        )
        return
    for name, gradient in known.items():
        check(
            not _is_along(got, gradient),
            sentence(f"{here}: the gradient of the first step is {name}"),
        )


def _moved(result: Mapping[str, Any]) -> list[float]:
    """The gradient by which the first step has moved the trainable parameters."""
    model = Worn()
    before, after = state_of(model), result["states"][0]
    return [
        (x - y) / LR - WEIGHT_DECAY * x
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name != "unused"
        for x, y in zip(before[name], after[name], strict=True)
    ]


def _without_unused(gradient: list[float]) -> list[float]:
    """Leave out the parameter that nothing uses: only weight decay moves it, or nothing does."""
    kept, start = list[float](), 0
    for name, parameter in Worn().named_parameters():
        if parameter.requires_grad:
            kept += gradient[start : start + parameter.numel()] if name != "unused" else []
            start += parameter.numel()
    return kept


def _is_along(a: Sequence[float], b: Sequence[float]) -> bool:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = hypot(*a) * hypot(*b)
    return lengths > 0 and dot / lengths > 1 - 1e-9


def _check_end(here: str, alone: Any, result: Any, tolerance: float, contract: Contract) -> None:
    """Check losses and weights after the last step."""
    losses, state = result["losses"], result["states"][-1]
    check(
        same_loss(alone["losses"], losses),
        f"{here}: the losses of {len(losses)} steps should be those of one process on whole "
        f"batches, {short_beside(alone['losses'], losses)}; they are "
        f"{short_beside(losses, alone['losses'])}. {contract.of_end}",
    )
    wrong = [name for name in state if not is_close(alone["state"][name], state[name], tolerance)]
    check(
        not wrong,
        f"{here}: after {len(losses)} steps the losses are right, but {joined(wrong)} should have "
        "other weights, those of one process. "
        f"{contract.of_unused if wrong == ['unused'] else contract.of_end}",
    )


def _check_use(here: str, function: str, result: Any, share: Share, num_steps: int) -> None:
    """Check what a function did with its batches, and what it returned."""
    starts = share.starts()
    passes = [min(starts.step, share.rows - start) for start in starts] * num_steps
    check(
        [rows for rows in result["rows"] if rows] == passes,
        f"{here}: in {counted(num_steps, 'step')} the model should be called with {short(passes)} "
        f"rows, once for each micro-batch, {len(passes)} times in all; it was called "
        f"{len(result['rows'])} times, with {short(result['rows'])} rows.",
    )
    check(
        not result["changed"],
        f"{here}: {function} has changed the {' and '.join(result['changed'])} of its batch, "
        "which belong to the caller.",
    )
    check(
        not result["types"],
        f"{here}: {function} should return a float; it returned {' and '.join(result['types'])}.",
    )


def check_same_on_all(here: str, by_rank: Sequence[Any], *names: str) -> None:
    """Check that what a step returns is the same number on all ranks."""
    for rank, result in enumerate(by_rank):
        for name in names:
            check(
                result[name] == by_rank[0][name],
                f"{here}, rank {rank}: the {name} {result[name]} are not exactly those of rank 0, "
                f"{by_rank[0][name]}. Compute them from the result of the all-reduce.",
            )


def check_nothing_steps(results: Sequence[Any], what: str) -> None:
    """Check that a step without any target is refused, and changes no parameter."""
    check_refused(results, what)
    for rank, result in enumerate(results):
        check(
            not result["changed"],
            f"rank {rank} of {len(results)}: {what} is refused, but the parameters have changed. "
            "Raise the error before the optimizer's step.",
        )


def check_error_passed_on(grade: Grade, function: str) -> None:
    """Check that what the all-reduce raises, say because a peer has left, is raised by the step."""
    found = grade.call(b.step_without_peers, function)
    check(
        found == "ConnectionError",
        f"the all_reduce given raised a ConnectionError; {function} should pass it on, and "
        + (f"raised a {found}." if found else "raised nothing."),
    )
