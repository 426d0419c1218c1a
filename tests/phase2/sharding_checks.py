"""How judges of tensor parallelism compare with the full module, and count collectives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grade import Grade, Run, check
from judging.checks import is_close, short_beside
from phase2.sharding import own, part_of

SIZES = (2, 3, 4, 5, 8, 1)  # numbers of ranks
REAL_SIZES = (3,)  # in processes
EXACT = 1e-12

Calls = list[tuple[str, int]]  # name and bytes of each collective and message


def sizes_for(grade: Grade) -> tuple[int, ...]:
    """The numbers of ranks that a test goes through."""
    return SIZES if grade.is_simulated else REAL_SIZES


def check_same(
    here: str,
    what: str,
    expected: Tensor | None,
    got: Any,
    n: int,
    cause: str = "",
    known: Callable[[], Mapping[str, Tensor]] = dict,
) -> None:
    """Check values up to rounding in float64.

    Args:
        here: rank and case.
        what: is compared, as the subject of a sentence.
        cause: the likely one.
        known: returns the values that known mistakes give, by the cause that is told instead.
    """
    if expected is not None and got is not None:
        check_shape(here, what, list(expected.shape), got, n, cause)
    greatest = float(expected.detach().abs().max()) if expected is not None else 0.0
    if _agree(expected, got, EXACT * max(1.0, greatest)):
        return  # to write all values into a message takes longer than to compare them
    wanted = None if expected is None else expected.tolist()
    check(
        False,
        f"{here}: {what} should be {short_beside(wanted, got)}, not "
        f"{short_beside(got, wanted)}. "
        f"{_known_cause(known(), got) or _multiple(expected, got, n) + cause}",
    )


def _known_cause(known: Mapping[str, Tensor], got: Any) -> str:
    return next((cause for cause, wrong in known.items() if is_close(wrong.tolist(), got)), "")


def check_shape(
    here: str, what: str, expected: list[int], got: Any, n: int, cause: str = ""
) -> None:
    """Check the shape of nested lists; the arguments are those of ``check_same``."""
    shape = _shape(got)
    check(
        shape == expected,
        f"{here}: {what} should have the shape {expected}, not {shape}. "
        f"{_other_dim(expected, shape, n)}{cause}",
    )


def _other_dim(expected: list[int], shape: list[int], n: int) -> str:
    """Name the dims if one is n times as long as it should be, and another 1/n."""
    if len(shape) != len(expected):
        return ""
    longer = [dim for dim, size in enumerate(expected) if shape[dim] == n * size]
    shorter = [dim for dim, size in enumerate(expected) if n * shape[dim] == size]
    num_others = sum(a != b for a, b in zip(expected, shape, strict=True))
    if n == 1 or (len(longer), len(shorter), num_others) != (1, 1, 2):
        return ""
    return (
        f"Dim {longer[0]} is {n} times as long, and dim {shorter[0]} 1/{n} as long: the parts are "
        "joined or split along the wrong dim. "
    )


def check_graph(here: str, has_graph: bool) -> None:
    """Check that a gradient can go back from the output.

    Args:
        here: rank and case.
        has_graph: whether the output requires grad.
    """
    check(
        has_graph,
        f"{here}: the output has the right values, but does not require grad, so no gradient goes "
        "back through it. torch records no graph of what is received: dist.all_gather and the "
        "other collectives are not differentiable. Call them in the forward of an autograd "
        "Function, and give it the backward that belongs to it.",
    )


def _agree(expected: Tensor | None, got: Any, tolerance: float) -> bool:
    """Compare as tensors: lists of all the weights of a block would take most of the time."""
    if expected is None or got is None:
        return expected is got
    found = torch.tensor(got, dtype=expected.dtype)
    return torch.allclose(found, expected.detach(), rtol=0.0, atol=tolerance)


def check_others(here: str, is_alone_summed: bool) -> None:
    """Check that a gradient which reaches x from another reader of it is not summed.

    Args:
        here: rank and case.
        is_alone_summed: what ``sharding.is_alone_summed`` has found.
    """
    check(
        is_alone_summed,
        f"{here}: x is read elsewhere too, as by a residual connection, and the gradient from "
        "there should reach x as it is; it has changed. A hook on x itself sees all gradients of "
        "x: sum only what comes back through this function.",
    )


def check_dtype(here: str, found: Mapping[str, Any]) -> None:
    """Check that the output of a region has the dtype of x."""
    expected, got = found["dtypes"]
    check(got == expected, f"{here}: the output should have the dtype of x, {expected}, not {got}.")


def _shape(nested: Any) -> list[int]:
    return [len(nested), *(_shape(nested[0]) if nested else [])] if _is_list(nested) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _multiple(expected: Tensor | None, got: Any, n: int) -> str:
    if expected is None or got is None or n == 1:
        return ""
    if is_close((expected * n).tolist(), got, 1e-9):
        return f"That is {n} times as much, as if it were added up over the ranks. "
    return f"That is 1/{n} of it. " if is_close((expected / n).tolist(), got, 1e-9) else ""


def check_parameters(
    here: str,
    state: Mapping[str, Any],
    full: Mapping[str, Any],
    place: tuple[int, int],
    parts: Mapping[str, int | None] | None = None,
    causes: Mapping[str, str] | None = None,
) -> None:
    """Check that a rank holds its part of each parameter, and of each gradient.

    Args:
        here: rank and case.
        state: of ``sharding.state_of``.
        full: of ``sharding.passed``, with the full module.
        place: rank and number of ranks.
        parts: the dim that is split, by name; by default as in a transformer's block.
        causes: the likely ones of a wrong gradient, by name.
    """
    names = sorted(full["values"])
    check(
        sorted(state) == names,
        f"{here}: the parameters should be {', '.join(names)}; they are "
        f"{', '.join(sorted(state))}.",
    )
    for name in names:
        dim = parts[name] if parts else part_of(name)
        what = "all of it" if dim is None else f"this rank's part of dim {dim}"
        _check_parameter(here, name, what, state[name], full, (*place, dim))
        gradient = full["gradients"][name]
        expected = None if gradient is None else own(gradient, *place, dim)
        cause = f"It should be that of the full module, {what}. {(causes or {}).get(name, '')}"
        got = state[name]["gradient"]
        check_same(here, f"the gradient of {name}", expected, got, place[1], cause)


def _check_parameter(
    here: str,
    name: str,
    what: str,
    got: Mapping[str, Any],
    full: Mapping[str, Any],
    part: tuple[int, int, int | None],
) -> None:
    expected = own(full["values"][name], *part)
    check_same(here, name, expected, got["values"], part[1], f"It should be {what}.")
    is_trained = full["gradients"][name] is not None
    check(
        got["is_trained"] == is_trained,
        f"{here}: {name} should {'' if is_trained else 'not '}require a gradient, as in the full "
        "module.",
    )
    check(
        got["held_bytes"] == got["num_bytes"],
        f"{here}: {name} has {got['num_bytes']} bytes, but keeps {got['held_bytes']} in memory. A "
        "part of a tensor is a view of all of it: copy the part, so that the rest can be freed.",
    )


def check_is_independent(here: str, got: Mapping[str, Any]) -> None:
    """Check that a layer has left the full one as it was, and needs it no more."""
    check(got["is_kept"], f"{here}: the full layer that it is made from should not change.")
    check(
        got["is_own"],
        f"{here}: when the full layer's parameters change, so do this layer's. They should share "
        "no memory: copy all that you keep.",
    )
    check(
        got["is_freed"],
        f"{here}: the full weight is still in memory after the full layer was deleted. Keep "
        "neither it nor a view of it.",
    )


def calls_of(run: Run) -> list[list[Calls]]:
    """By rank, the collectives and sends in each stage; the body's barriers separate stages."""
    by_rank: list[list[Calls]] = [[[]] for _ in run.results]
    for event in run.trace.events if run.trace else []:
        if event.kind == "collective" and event.name == "barrier":
            by_rank[event.rank].append([])
        elif event.kind in ("collective", "send"):
            by_rank[event.rank][-1].append((event.name, event.num_bytes))
    return by_rank


def check_calls(
    run: Run, what: str, stages: Sequence[str], expected: Sequence[Calls], cause: str = ""
) -> None:
    """Check what each rank has sent in each stage, and that it was nothing else.

    On one rank nothing need be sent, and what is, costs nothing.
    """
    for rank, by_stage in enumerate(calls_of(run)) if len(run.results) > 1 else ():
        check(
            len(by_stage) == len(stages),
            f"{what}, rank {rank}: it calls a barrier, which it does not need.",
        )
        for stage, calls, wanted in zip(stages, by_stage, expected, strict=True):
            check(
                sorted(calls) == sorted(wanted),
                f"{what}, rank {rank} of {len(run.results)}: {stage} needs {_told(wanted)}; it "
                f"made {_told(calls)}. {cause}",
            )


def _told(calls: Calls) -> str:
    if not calls:
        return "no communication"
    texts = [f"{name} of {num_bytes:,} bytes" for name, num_bytes in calls]
    return ", ".join(dict.fromkeys(f"{texts.count(t)} × {t}" for t in texts))
