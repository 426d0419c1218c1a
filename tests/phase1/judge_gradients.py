"""Judges task 1.10: averaged gradients."""

from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import MEASURED, check_peak, is_close, of_members, short
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import gradients as b
from phase1 import models

FUNCTIONS = ("average_gradients", "average_gradients_flat")
PARAMETERS = dict(models.Odd(0).named_parameters())
TRAINABLE = {name: p for name, p in PARAMETERS.items() if p.requires_grad}
WITHOUT_ONE = "Does a rank that has no gradient for a parameter make the same calls as the others?"


@task("1.10", real=True)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_become_their_mean(grade: Grade, function: str) -> None:
    for n in (2, 5, 1) if grade.is_simulated else (3,):
        results = grade.run(b.average_odd, n, function, if_stuck=WITHOUT_ONE).results
        _check_means(results, function)


@task("1.10")
def test_gradients_of_many_dtypes_become_their_mean(grade: Grade) -> None:
    function = "average_gradients"
    run = grade.run(b.average_odd, 4, function, True)
    _check_means(run.results, f"{function}, parameters of several dtypes")
    sizes = {name: parameter.nbytes for name, parameter in TRAINABLE.items()}
    sizes |= {name: TRAINABLE[name].numel() * dtype.itemsize for name, dtype in b.MIXED.items()}
    _check_calls(run, function, list(sizes.values()))


def _check_means(by_rank: list[Any], what: str) -> None:
    n = len(by_rank)
    gradients = [
        {name: None if g is None else g.flatten().tolist() for name, g in of_rank.items()}
        for of_rank in map(models.gradients_of, range(n))
    ]
    for rank, result in enumerate(by_rank):
        for name in sorted(PARAMETERS, key=_chance):
            own, got = gradients[rank][name], result["means"].get(name)
            mean = _mean([gradient[name] for gradient in gradients], name)
            expected = own if name == "frozen" else mean
            check(
                is_close(expected, got),
                f"{what}, rank {rank} of {n}: the gradient of {name} should be {short(expected)}, "
                f"but is {short(got)}. {_why_no_mean(name, n, mean, got, own)}",
            )
        check(
            not result["moved"],
            f"{what}, rank {rank}: the gradients of {', '.join(result['moved'])} should be "
            "overwritten in place, but are now other tensors or in other memory. Copy the means "
            "back into p.grad: code that holds the old tensor would keep the old values.",
        )


def _chance(name: str) -> tuple[bool, int]:
    """Order first the parameters whose mean is unlikely to be a rank's own gradient by chance."""
    return name in ("sometimes", "never"), -PARAMETERS[name].numel()


def _mean(by_rank: list[list[float] | None], name: str) -> list[float]:
    """A rank without a gradient counts as zero."""
    zeros = [0.0] * PARAMETERS[name].numel()
    columns = zip(*(gradient or zeros for gradient in by_rank), strict=True)
    return [sum(column) / len(by_rank) for column in columns]


def _why_no_mean(name: str, n: int, mean: list[float], got: Any, own: Any) -> str:
    if name == "frozen":
        return "It is frozen: leave it as it is."
    if got is None:
        return (
            "A rank that has no gradient takes part with zeros, and gets the mean as its gradient."
        )
    if n > 1 and own is not None and is_close(own, got):
        return "That is this rank's own gradient, as it was before."
    return "That is the sum: divide by N." if is_close([n * x for x in mean], got) else ""


@task("1.10")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_number_of_all_reduces(grade: Grade, function: str) -> None:
    sizes = [parameter.nbytes for parameter in TRAINABLE.values()]
    expected = sizes if function == "average_gradients" else [sum(sizes)]
    _check_calls(grade.run(b.average_odd, 3, function), function, expected)
    run = grade.run(b.average_by_default, 3, function)
    _check_means(run.results, f"{function}, given only a module")
    _check_nothing_besides(run, f"{function}, given only a module", len(expected))


def _check_calls(run: Run, function: str, expected: list[int]) -> None:
    for rank, result in enumerate(run.results):
        calls = sorted(result["num_bytes"])
        check(
            calls == sorted(expected),
            f"{function}, rank {rank}: the all-reduce that it was given should be called with "
            f"tensors of {sorted(expected)} bytes; it was called with {calls}. Send only the "
            "gradients of trainable parameters, in their own dtype, and that of a shared parameter "
            "only once; the flat version sends one bucket.",
        )
    _check_nothing_besides(run, function, len(expected))


def _check_nothing_besides(run: Run, what: str, num_calls: int) -> None:
    sends = sum(event.kind == "send" for event in run.trace.events) if run.trace else 0
    check(
        run.collectives == [num_calls] * len(run.results) and not sends,
        f"{what}: calling its argument all_reduce {counted(num_calls, 'time')} should be its only "
        f"communication; collective calls per rank: {run.collectives}; other messages sent: "
        f"{sends}.",
    )


@task("1.10")
def test_nothing_is_sent_where_nothing_is_trainable(grade: Grade) -> None:
    run = grade.run(b.average_nothing, 2)
    check(
        run.results == [[], []] and run.collectives == [0, 0],
        "a module without trainable parameters needs no all-reduce, but all_reduce was called with "
        f"tensors of these sizes, per rank: {run.results}.",
    )


@task("1.10")
def test_flat_takes_memory_for_one_bucket(grade: Grade) -> None:
    size = grade.random.randint(50, 90)
    run = grade.run(b.average_large, 1, "average_gradients_flat", size, options=MEASURED)
    check_peak(
        *(run, [3 * 4 * size**2 + 64]),
        "average_gradients_flat needs memory for the parameters, the gradients, and one bucket as "
        "large as the gradients. Divide the bucket in place, and copy the means from views of it.",
    )


@task("1.10")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_gradients_are_not_cut(grade: Grade, function: str) -> None:
    size = grade.random.randint(1100, 1200)
    (sizes,) = grade.run(b.average_large, 1, function, size).results
    check(
        sizes == [size**2],
        f"{function}: one parameter of {size**2:,} numbers should take one all-reduce, however "
        f"large it is; all_reduce was called with tensors of {short(sizes)} numbers.",
    )


@task("1.10")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_inside_a_group(grade: Grade, function: str) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.average_odd, function, False),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_means(of_members(run), function)
