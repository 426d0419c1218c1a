"""Checks of tensor parallelism: comparison with the full module, and collective counts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grade import Grade, Run, check, check_cost
from judging.checks import is_close, short_beside
from judging.expect import expect, expect_cost
from phase2.tensor_parallel import rank_part

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}

Calls = list[tuple[str, int]]  # name and bytes of each collective or message


def sizes_for(grade: Grade) -> tuple[int, ...]:
    """Return the numbers of ranks to test with."""
    return (3, 4, 1) if grade.is_simulated else (3,)


def check_same(
    here: str, what: str, expected: Tensor | None, got: Any, n: int, cause: str = ""
) -> None:
    """Check that the learner's values are right, up to rounding.

    Args:
        here: The rank and the case, to begin an error text with.
        what: A name for the values, as the subject of the error text.
        expected: The right values, or None if there should be none.
        got: The learner's values, in nested lists.
        n: The number of ranks.
        cause: The likely cause of wrong values.
    """
    if expected is not None and got is not None:
        shape = f"{here}: the shape of {what.removeprefix('the ')}"
        joined = "Are parts joined or split along the right dim? "
        expect(shape, _shape(got), [*expected.shape], joined + cause)
    if _agree(expected, got):
        return  # do not format the values, which is slower than comparing them
    wanted = None if expected is None else expected.tolist()
    check(
        False,
        f"{here}: {what} should be {short_beside(wanted, got)}, not "
        f"{short_beside(got, wanted)}. {_multiple(expected, got, n)}{cause}",
    )


def _agree(expected: Tensor | None, got: Any) -> bool:
    """Return whether values agree up to rounding; comparing tensors is far faster than lists."""
    if expected is None or got is None:
        return expected is got
    expected = expected.detach()
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    found = torch.tensor(got, dtype=expected.dtype)
    return torch.allclose(found, expected, rtol=0.0, atol=ROUNDING[expected.dtype] * scale)


def _shape(nested: Any) -> list[int]:
    if not isinstance(nested, list):
        return []
    return [len(nested), *(_shape(nested[0]) if nested else [])]


def _multiple(expected: Tensor | None, got: Any, n: int) -> str:
    if expected is None or got is None or n == 1:
        return ""
    if is_close((expected * n).tolist(), got, 1e-9):
        return f"That is {n} times as much, as if it were added up over the ranks. "
    return f"That is 1/{n} of it. " if is_close((expected / n).tolist(), got, 1e-9) else ""


def check_graph(here: str, has_graph: bool) -> None:
    """Check that the output requires a gradient."""
    check(
        has_graph,
        f"{here}: the output has the right values, but does not require grad, so no gradient goes "
        "back through it. torch records no graph of what is received: dist.all_gather and the "
        "other collectives are not differentiable. Call them in the forward of an autograd "
        "Function, and give it the backward that belongs to it.",
    )


def check_use(here: str, found: Mapping[str, Any]) -> None:
    """Check that a call changes neither its arguments nor the gradient from x's other users."""
    expect(
        f"{here}: what has changed of the tensors that the caller has given",
        found["changed"],
        [],
        "all_reduce writes into what it is given, and another operation may hold the same tensor: "
        "sum a copy, and write into memory of your own.",
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
    """Check that a rank holds its shard of each parameter, and of each gradient.

    Args:
        here: The rank and the case, to begin an error text with.
        state: The rank's result of ``tensor_parallel.state_of``.
        full: The full module after its backward passes.
        part_of: Given a parameter's name, returns the dim along which it is split.
        place: The rank and the number of ranks.
        causes: The likely cause of a wrong gradient, by name of the parameter.
    """
    parameters = dict(full.named_parameters())
    expect(f"{here}: the parameters", sorted(state), sorted(parameters))
    for name, parameter in parameters.items():
        dim, found = part_of(name), state[name]
        part = "all of it" if dim is None else f"this rank's part of dim {dim}"
        kind = [parameter.requires_grad, str(parameter.dtype)[6:]]
        judge = expect_cost if [found["is_trained"], found["dtype"]] == kind else expect
        judge(
            f"{here}: {name}, whether it requires a gradient, its dtype and the bytes it holds,",
            [found["is_trained"], found["dtype"], found["held_bytes"]],
            [*kind, found["num_bytes"]],
            "A part of a tensor is a view of all of it: copy the part, so that the rest can be "
            "freed.",
        )
        values = rank_part(parameter, *place, dim)
        check_same(here, name, values, found["values"], place[1], f"It should be {part}.")
        gradient = None if parameter.grad is None else rank_part(parameter.grad, *place, dim)
        cause = f"It should be that of the full module, {part}. {causes.get(name, '')}"
        check_same(here, f"the gradient of {name}", gradient, found["gradient"], place[1], cause)


def check_is_independent(here: str, found: Mapping[str, Any]) -> None:
    """Check that a split layer leaves the full one unchanged, and lets its memory be freed."""
    cause = "Copy all that you keep: neither the full weight nor a view of it."
    expect(f"{here}: whether the full layer stays as it is", found["is_kept"], True, cause)
    freed = "once the full layer is deleted, its memory should be free"
    check_cost(found["is_freed"], f"{here}: {freed}. {cause}")


def calls_of(run: Run) -> list[list[Calls]]:
    """Return each rank's collectives and sends, in stages separated by the body's barriers."""
    by_rank: list[list[Calls]] = [[[]] for _ in run.results]
    for event in run.trace.events if run.trace else []:
        if event.kind == "collective" and event.name == "barrier":
            by_rank[event.rank].append([])
        elif event.kind in ("collective", "send"):
            by_rank[event.rank][-1].append((event.name, event.num_bytes))
    return by_rank


def check_calls(
    by_rank: Sequence[Sequence[Calls]],
    what: str,
    expected: Mapping[str, Calls],
    cause: str = "",
    small_bytes: int = 0,
) -> None:
    """Check each rank's calls in each stage.

    The calls of a single rank are not checked, since they cost nothing.

    Args:
        by_rank: The result of ``calls_of``, or only some of its stages.
        what: The function and the case, to begin an error text with.
        expected: The expected calls, by name of the stage.
        cause: The likely cause of wrong calls.
        small_bytes: The number of additional bytes that a backward stage may all-reduce.
    """
    n = len(by_rank)
    for rank, by_stage in enumerate(by_rank) if n > 1 else ():
        here = f"{what}, rank {rank} of {n}"
        check_barriers(here, len(by_stage), len(expected))
        for (stage, wanted), calls in zip(expected.items(), by_stage, strict=True):
            rest = calls
            if small_bytes and stage.startswith("backward"):
                sums = sum(size for name, size in calls if name == "all_reduce")
                rest = [call for call in calls if call[0] != "all_reduce"]
                check_cost(
                    sums <= small_bytes,
                    f"{here}: {stage} may sum the gradients of what works on a rank's positions, "
                    f"{small_bytes:,} bytes; it all-reduced {sums:,} bytes. {cause}",
                )
            check_cost(
                sorted(rest) == sorted(wanted),
                f"{here}: {stage} needs {_in_words(wanted)}; it made {_in_words(calls)}. {cause}",
            )


def check_barriers(here: str, num_stages: int, expected: int) -> None:
    """Check that the body's barriers are the only ones."""
    check(num_stages == expected, f"{here}: it calls a barrier, which it does not need.")


def _in_words(calls: Calls) -> str:
    if not calls:
        return "no communication"
    texts = [f"{name} of {num_bytes:,} bytes" for name, num_bytes in calls]
    return ", ".join(dict.fromkeys(f"{texts.count(t)} × {t}" for t in texts))
