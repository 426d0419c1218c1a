"""How judges of tensor parallelism compare with the full module, and count collectives."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distlab.grade import Grade, Run, check
from judging.checks import is_close, short_beside
from phase2.sharding import rank_part

SIZES = (2, 3, 4, 5, 8, 1)  # numbers of ranks
REAL_SIZES = (3,)  # real processes
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}

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
    """Check values up to rounding.

    Args:
        here: Rank and case.
        what: The subject of the sentence.
        expected: The right values; None if there should be none.
        got: The same in nested lists.
        n: The number of ranks.
        cause: The likely one.
        known: Returns the values that known mistakes give, by the cause to name instead.
    """
    if expected is not None and got is not None:
        _check_shape(here, what, list(expected.shape), got, n, cause)
    if _agree(expected, got):
        return  # writing all values into a message takes longer than comparing them
    wanted = None if expected is None else expected.tolist()
    causes = (cause for cause, wrong in known().items() if is_close(wrong.tolist(), got))
    check(
        False,
        f"{here}: {what} should be {short_beside(wanted, got)}, not "
        f"{short_beside(got, wanted)}. {next(causes, '') or _multiple(expected, got, n) + cause}",
    )


def _agree(expected: Tensor | None, got: Any) -> bool:
    """Compare as tensors: lists of all the weights of a block would take most of the time."""
    if expected is None or got is None:
        return expected is got
    expected = expected.detach()
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    found = torch.tensor(got, dtype=expected.dtype)
    return torch.allclose(found, expected, rtol=0.0, atol=ROUNDING[expected.dtype] * scale)


def _check_shape(
    here: str, what: str, expected: list[int], got: Any, n: int, cause: str = ""
) -> None:
    shape = _shape(got)
    check(
        shape == expected,
        f"{here}: {what} should have the shape {expected}, not {shape}. "
        f"{_other_dim(expected, shape, n)}{cause}",
    )


def _shape(nested: Any) -> list[int]:
    if not isinstance(nested, list):
        return []
    return [len(nested), *(_shape(nested[0]) if nested else [])]


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


def _multiple(expected: Tensor | None, got: Any, n: int) -> str:
    if expected is None or got is None or n == 1:
        return ""
    if is_close((expected * n).tolist(), got, 1e-9):
        return f"That is {n} times as much, as if it were added up over the ranks. "
    return f"That is 1/{n} of it. " if is_close((expected / n).tolist(), got, 1e-9) else ""


def check_graph(here: str, has_graph: bool) -> None:
    """Check that the output requires a gradient, so that one can go back from it."""
    check(
        has_graph,
        f"{here}: the output has the right values, but does not require grad, so no gradient goes "
        "back through it. torch records no graph of what is received: dist.all_gather and the "
        "other collectives are not differentiable. Call them in the forward of an autograd "
        "Function, and give it the backward that belongs to it.",
    )


def check_use(here: str, found: Mapping[str, Any]) -> None:
    """Check that input and gradient stay as they are, also for other readers of the input."""
    check(
        not found["changed"],
        f"{here}: the {' and the '.join(found['changed'])} that the caller has given should stay "
        "as it is, and has changed. all_reduce writes into what it is given, and another operation "
        "may hold the same tensor: sum a copy, and write into memory of your own.",
    )
    check(
        found["is_alone"],
        f"{here}: x is read elsewhere too, as by a residual connection, and the gradient from "
        "there should reach x as it is; it has changed. A hook on x itself sees all gradients of "
        "x: sum only what comes back through this function.",
    )


def check_state(
    here: str,
    state: Mapping[str, Any],
    full: torch.nn.Module,
    part_of: Callable[[str], int | None],
    place: tuple[int, int],
    causes: Mapping[str, str],
) -> None:
    """Check that a rank holds its part of each parameter, and of each gradient.

    Args:
        here: Rank and case.
        state: The result of ``sharding.state_of``.
        full: The full module after its backward passes.
        part_of: Returns the split dim of a parameter by its name.
        place: Rank and number of ranks.
        causes: The likely causes of a wrong gradient, by name.
    """
    parameters = dict(full.named_parameters())
    check(
        sorted(state) == sorted(parameters),
        f"{here}: the parameters should be {', '.join(sorted(parameters))}; they are "
        f"{', '.join(sorted(state))}.",
    )
    for name, parameter in parameters.items():
        dim = part_of(name)
        what = "all of it" if dim is None else f"this rank's part of dim {dim}"
        _check_parameter(f"{here}: {name}", parameter, state[name])
        values = rank_part(parameter, *place, dim)
        check_same(here, name, values, state[name]["values"], place[1], f"It should be {what}.")
        gradient = None if parameter.grad is None else rank_part(parameter.grad, *place, dim)
        cause = f"It should be that of the full module, {what}. {causes.get(name, '')}"
        got = state[name]["gradient"]
        check_same(here, f"the gradient of {name}", gradient, got, place[1], cause)


def _check_parameter(here: str, full: Tensor, got: Mapping[str, Any]) -> None:
    check(
        got["is_trained"] == full.requires_grad,
        f"{here} should {'' if full.requires_grad else 'not '}require a gradient, as in the full "
        "module.",
    )
    dtype = str(full.dtype).removeprefix("torch.")
    check(
        got["dtype"] == dtype,
        f"{here} should keep the dtype of the full module, {dtype}, but has {got['dtype']}.",
    )
    check(
        got["held_bytes"] == got["num_bytes"],
        f"{here} has {got['num_bytes']} bytes, but keeps {got['held_bytes']} in memory. A part of "
        "a tensor is a view of all of it: copy the part, so that the rest can be freed.",
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
    run: Run,
    what: str,
    expected: Mapping[str, Calls],
    cause: str = "",
    small_bytes: int = 0,
) -> None:
    """Check what each rank has sent in each stage, and that it was nothing else.

    On one rank nothing need be sent, and what is, costs nothing.

    Args:
        run: A run whose body calls a barrier between stages.
        what: The function and the case.
        expected: The calls of each stage, by its name.
        cause: The likely one.
        small_bytes: Further bytes that may be all-reduced backward.
    """
    for rank, by_stage in enumerate(calls_of(run)) if len(run.results) > 1 else ():
        here = f"{what}, rank {rank} of {len(run.results)}"
        check(
            len(by_stage) == len(expected), f"{here}: it calls a barrier, which it does not need."
        )
        for (stage, wanted), calls in zip(expected.items(), by_stage, strict=True):
            rest = calls
            if small_bytes and stage.startswith("backward"):
                sums = sum(size for name, size in calls if name == "all_reduce")
                rest = [call for call in calls if call[0] != "all_reduce"]
                check(
                    sums <= small_bytes,
                    f"{here}: {stage} may sum the gradients of what works on a rank's positions, "
                    f"{small_bytes:,} bytes; it all-reduced {sums:,} bytes. {cause}",
                )
            check(
                sorted(rest) == sorted(wanted),
                f"{here}: {stage} needs {_in_words(wanted)}; it made {_in_words(calls)}. {cause}",
            )


def _in_words(calls: Calls) -> str:
    if not calls:
        return "no communication"
    texts = [f"{name} of {num_bytes:,} bytes" for name, num_bytes in calls]
    return ", ".join(dict.fromkeys(f"{texts.count(t)} × {t}" for t in texts))
