"""Judges tasks 1.9 and 1.10: all ranks start from one model, and average their gradients."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import (
    BYTE_S,
    LATENCY_S,
    MEASURED,
    UNIFORM,
    check_collectives,
    check_peak,
)
from judging.expect import expect, results_in_group
from judging.groups import MEMBERS
from phase1 import gradients as b
from phase1 import models, reference

PARAMETERS = dict(models.Odd(0).named_parameters())
TRAINABLE = {name: p for name, p in PARAMETERS.items() if p.requires_grad}
ON_EVERY_RANK = "Every rank must call each broadcast, for the same tensors in the same order."

# 1.9 broadcast_parameters


@task("1.9", real=True)
@pytest.mark.parametrize(("n", "src"), [(1, 0), (3, None), (4, 2)])
def test_all_ranks_have_the_model_of_src(grade: Grade, n: int, src: int | None) -> None:
    _check_models(grade.run(b.broadcast_odd, n, src, if_stuck=ON_EVERY_RANK).results, src or 0)


def _check_models(by_rank: list[Any], src: int) -> None:
    expected = reference.odd_state(src + 1)
    for rank, model in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}"
        replaced = model["replaced"]
        held = "The optimizer still holds the old ones." if {*replaced} & {*PARAMETERS} else ""
        expect(f"{here}: the tensors that are replaced by others", replaced, [], held)
        moved = "as after t.data = …: views of the old memory keep the old values. Use copy_."
        expect(f"{here}: the tensors that are in other memory,", model["moved"], [], moved)
        wrong = [name for name, values in expected.items() if model["state"].get(name) != values]
        check(
            not wrong,
            f"{here}: after a broadcast from rank {src}, the values of {', '.join(wrong)} should "
            f"be equal to those on rank {src}. Broadcast all parameters, even frozen ones, and all "
            "buffers: all are part of the model.",
        )
        expect(f"{here}: what else was changed", model["changed"], [])


@task("1.9")
@pytest.mark.parametrize("n", [4, 8])
def test_each_tensor_travels_once(grade: Grade, n: int) -> None:
    run, sizes = grade.run(b.broadcast_odd, n, 0, cluster=UNIFORM), models.sizes_of_odd()
    rounds = n.bit_length() - 1
    found = [sum(run.messages), int(sum(run.bytes_sent)), run.seconds * 1e6]
    most_us = 1e6 * sum(rounds * (LATENCY_S + size * BYTE_S) for size in sizes)
    most = [(n - 1) * len(sizes), (n - 1) * sum(sizes), most_us]
    check(
        all(a <= b * (1 + 1e-6) for a, b in zip(found, most, strict=True)),
        f"{len(sizes)} broadcasts on {n} ranks, of {rounds} rounds each, should take {most[0]} "
        f"messages, {most[1]} bytes and {most[2]:.1f} µs; yours took {found[0]} messages, "
        f"{found[1]} bytes and {found[2]:.1f} µs. Send each parameter and buffer once, even a "
        "weight that two layers share, in one message, and not from one rank to all others, one by "
        "one.",
    )


@task("1.9")
def test_models_inside_a_group(grade: Grade) -> None:
    src = grade.random.randrange(1, len(MEMBERS))
    _check_models(results_in_group(grade, b.broadcast_odd, src), src)


# 1.10 average_gradients, average_gradients_flat

FUNCTIONS = ("average_gradients", "average_gradients_flat")
WITHOUT_ONE = "Does a rank that has no gradient for a parameter make the same calls as the others?"
ONE_CALL_EACH = (
    "Send only the gradients of trainable parameters, in their own dtype, and that of a shared "
    "parameter only once; the flat version sends one bucket."
)


@task("1.10", real=True)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_become_their_mean(grade: Grade, function: str) -> None:
    sizes = [parameter.nbytes for parameter in TRAINABLE.values()]
    sizes = sizes if function == "average_gradients" else [sum(sizes)]
    for n in (2, 5, 1) if grade.is_simulated else (3,):
        run = grade.run(b.average_odd, n, function, if_stuck=WITHOUT_ONE)
        _check_means(run.results, function)
        _check_calls(run.results, function, sizes)
        if grade.is_simulated:
            check_collectives(run, [len(sizes)] * n, function)
    if grade.is_simulated:
        run = grade.run(b.average_by_default, 3, function)
        _check_means(run.results, f"{function}, given only a module")
        check_collectives(run, [len(sizes)] * 3, f"{function}, given only a module")


@task("1.10")
def test_gradients_of_many_dtypes_become_their_mean(grade: Grade) -> None:
    results = grade.run(b.average_odd, 4, FUNCTIONS[0], True).results
    _check_means(results, f"{FUNCTIONS[0]}, parameters of several dtypes")
    sizes = {name: parameter.nbytes for name, parameter in TRAINABLE.items()}
    sizes |= {name: TRAINABLE[name].numel() * dtype.itemsize for name, dtype in b.MIXED.items()}
    _check_calls(results, FUNCTIONS[0], list(sizes.values()))


def _check_means(by_rank: list[Any], what: str) -> None:
    n = len(by_rank)
    gradients = [
        {name: None if g is None else g.flatten().tolist() for name, g in of_rank.items()}
        for of_rank in map(models.gradients_of, range(n))
    ]
    for rank, result in enumerate(by_rank):
        here = f"{what}, rank {rank} of {n}"
        for name, parameter in PARAMETERS.items():
            zeros = [0.0] * parameter.numel()
            columns = zip(*(gradient[name] or zeros for gradient in gradients), strict=True)
            mean = [sum(column) / n for column in columns]
            expect(
                f"{here}: the gradient of {name}",
                result["means"].get(name),
                gradients[rank][name] if name == "frozen" else mean,
                "The mean is the sum divided by N. A rank that has no gradient takes part with "
                "zeros, and gets the mean as its gradient. A frozen one stays as it is.",
                1e-9,
            )
        expect(
            f"{here}: the gradients that are other tensors or in other memory,",
            result["moved"],
            [],
            "Copy the means back into p.grad: code that holds the old tensor would keep the old "
            "values.",
        )


def _check_calls(by_rank: list[Any], function: str, sizes: list[int]) -> None:
    for rank, result in enumerate(by_rank):
        expect(
            f"{function}, rank {rank}: the bytes of the tensors that all_reduce is called with",
            sorted(result["num_bytes"]),
            sorted(sizes),
            ONE_CALL_EACH,
        )


@task("1.10")
def test_nothing_is_sent_where_nothing_is_trainable(grade: Grade) -> None:
    run = grade.run(b.average_nothing, 2)
    expect("the sizes of tensors that all_reduce gets by rank", run.results, [[], []])
    check_collectives(run, [0, 0], "a module without trainable parameters")


@task("1.10")
def test_flat_takes_memory_for_one_bucket(grade: Grade) -> None:
    size = grade.random.randint(50, 90)
    run = grade.run(b.average_large, 1, FUNCTIONS[1], size, options=MEASURED)
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
    expect(f"{function}: the sizes of the tensors that all_reduce gets", sizes, [size**2])


@task("1.10")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_inside_a_group(grade: Grade, function: str) -> None:
    _check_means(results_in_group(grade, b.average_odd, function, False), function)
