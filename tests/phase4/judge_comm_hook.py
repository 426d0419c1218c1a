"""Judges task 4.13: what is compressed, what gradients become, residuals, states and both doors."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.grade import Grade, Run, check, task
from judging.checks import of_members, short, short_beside, uneven
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import comm_hooks as b
from phase4.comm_hooks import COURSES, GRAIN, SHAPES, TORCHS, Plan

NAN = 1e9  # stands for a NaN where numbers are compared
STUCK = (
    "The hook itself sends nothing: only what it is given as reduce does, once for each bucket, on "
    "all ranks in the order of the buckets."
)
each_door = pytest.mark.parametrize("door", [TORCHS, COURSES], ids=["torchs", "courses"])
Tensors = dict[str, Tensor]  # by the names of the parameters
Step = Mapping[str, Any]  # of a rank: "got" and "gradients", by name


def _plan(grade: Grade, door: str, reduce: str = "coarse", **options: Any) -> Plan:
    return Plan(door, reduce, seed=grade.random.randrange(1000), **options)


def _train(grade: Grade, n: int, plan: Plan) -> Run:
    run = grade.run(b.train, n, plan, options=uneven(grade.random, n), if_stuck=STUCK)
    _check(plan, run.results)
    return run


def _check(plan: Plan, by_rank: Sequence[Sequence[Step]], where: str = "") -> None:
    expected = _expected(plan, len(by_rank))
    for step in range(plan.steps):
        for rank, found in enumerate(by_rank):
            here = f"{where}{plan.door}, step {step}, rank {rank} of {len(by_rank)}"
            if step == plan.spoiled:
                here += ", where each gradient of rank 0 holds a NaN"
            _check_got(plan, step, found[step], expected[step][rank], here)
            _check_gradients(plan, found[step], expected[step][rank], len(by_rank), here)


def _expected(plan: Plan, n: int) -> list[list[Any]]:
    """What reduce should get and gradients should become, by step and rank."""
    residuals = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(n)]
    found = []
    for step in range(plan.steps):
        own = [b.gradients_of(plan, rank, step) for rank in range(n)]
        got = [{m: own[r][m] + residuals[r][m] for m in SHAPES} for r in range(n)]
        sent = [{m: _sent(plan, step, part) for m, part in of_rank.items()} for of_rank in got]
        mean = {m: torch.stack([of_rank[m] for of_rank in sent]).mean(0) for m in SHAPES}
        for rank, of_rank in enumerate(residuals):
            of_rank |= _left(got[rank], sent[rank], mean)
        rows = zip(own, got, sent, strict=True)
        found.append([{"own": o, "got": g, "sent": s, "mean": mean} for o, g, s in rows])
    return found


def _left(got: Tensors, sent: Tensors, mean: Tensors) -> Tensors:
    """What is left behind of those whose mean is finite; the others keep what they had."""
    left = {m: got[m] - sent[m] for m in SHAPES if mean[m].isfinite().all()}
    return {m: torch.where(part.isfinite(), part, 0.0) for m, part in left.items()}


def _sent(plan: Plan, step: int, part: Tensor) -> Tensor:
    if plan.reduce == "exact":
        return part
    if plan.reduce == "blind":
        part = part.nan_to_num(0.0)
    is_sent = plan.reduce != "alternating" or step % 2 == 0
    return (part / GRAIN).round() * GRAIN * is_sent


def _check_got(plan: Plan, step: int, found: Step, expected: Any, here: str) -> None:
    dtype = "float64" if plan.dtype == "float64" else "float32"
    check(
        found["dtypes"] == [f"torch.{dtype}"],
        f"{here}: reduce should get {dtype} for gradients of {plan.dtype}; it got "
        f"{found['dtypes']}. Residuals in 16 bits would lose what is much smaller than they are.",
    )
    got, wanted = found["got"], {b.own_name(name): part for name, part in expected["got"].items()}
    check(
        sorted(got) == sorted(wanted),
        f"{here}: reduce should get a piece for each parameter, under its name in "
        f"module.named_parameters(): {sorted(wanted)}; the pieces were {sorted(got)}.",
    )
    for name, shape in SHAPES.items():
        part, right = torch.tensor(got[b.own_name(name)]), expected["got"][name]
        check(
            part.shape == right.shape,
            f"{here}: the piece of {name} should have its shape, {shape}; it has {(*part.shape,)}.",
        )
        check(
            torch.equal(part.nan_to_num(NAN), right.nan_to_num(NAN)),
            f"{here}: for {name}, of which the gradient is {_told(expected['own'][name])} and the "
            f"residual {_told(right - expected['own'][name])}, reduce should get "
            f"{_told(right, part)}; it got {_told(part, right)}. "
            f"{_why_not_got(part, expected, name, step, plan)}",
        )


def _told(tensor: Tensor, other: Tensor | None = None) -> str:
    first = [*tensor.flatten()[:3].tolist()]
    return (
        short_beside(first, [*other.flatten()[:3].tolist()]) if other is not None else short(first)
    )


def _why_not_got(part: Tensor, expected: Any, name: str, step: int, plan: Plan) -> str:
    if plan.spoiled >= 0 and step > plan.spoiled:
        return (
            f"In step {plan.spoiled}, a gradient held a NaN. If the mean isn't finite, the step is "
            "skipped, so its residuals stay what they were; and a NaN that was left behind becomes "
            "0, or no later step would be finite."
        )
    if torch.equal(part, expected["own"][name]) and step:
        cause = "The residual is missing"
        return f"{cause}: is it in the state?" if step == plan.restart else f"{cause}."
    if torch.equal(part.flatten().sort()[0], expected["got"][name].flatten().sort()[0]):
        return (
            "These are the right numbers in another order: torch lays a gradient out in memory as "
            "its parameter is (parameter.stride()), and pieces lie row by row."
        )
    return (
        "The residual is what reduce got, less what this rank sent (not the mean), and belongs to "
        "a parameter: buckets change."
    )


def _check_gradients(plan: Plan, found: Step, expected: Any, n: int, here: str) -> None:
    for name in SHAPES:
        gradient, right = found["gradients"][name], expected["mean"][name]
        check(gradient is not None, f"{here}: {name} has no gradient (None) after the step.")
        got = torch.tensor(gradient)
        tolerance = 1e-5 if plan.dtype == "float32" else 0.02
        check(
            torch.allclose(got, right, tolerance, tolerance, equal_nan=True),
            f"{here}: the gradient of {name} should be the mean over the ranks of what they sent, "
            f"{_told(right, got)}; it is {_told(got, right)}. "
            f"{_why_not_mean(got, right, expected, name, n, plan.door)}",
        )


def _why_not_mean(got: Tensor, right: Tensor, expected: Any, name: str, n: int, door: str) -> str:
    if n > 1 and torch.allclose(got, n * right):
        return "That is the sum: torch divides nothing where there is a hook. Return the mean."
    if n > 1 and torch.allclose(n * got, right):
        return (
            f"That is the mean divided by {n} once more: {door} divides what all_reduce returns "
            "by the number of ranks, so give it the sum."
        )
    if torch.allclose(got, expected["own"][name]):
        return "That is the gradient of this rank: write the mean into the bucket."
    if torch.allclose(got, expected["sent"][name]):
        return "That is what this rank sent."
    return "Does every part of the mean go back to where its gradient was, in its layout?"


# What goes through the doors


@task("4.13", real=True)
@each_door
def test_what_is_left_behind_goes_with_the_next_gradient(grade: Grade, door: str) -> None:
    _train(grade, 2, _plan(grade, door))


@task("4.13")
@each_door
@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_hook_on_any_number_of_ranks(grade: Grade, door: str, n: int) -> None:
    _train(grade, n, _plan(grade, door, steps=3))


@task("4.13")
@each_door
def test_without_loss_it_is_the_mean(grade: Grade, door: str) -> None:
    _train(grade, 3, _plan(grade, door, "exact", steps=3))


@task("4.13")
@each_door
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_gradients_of_other_widths(grade: Grade, door: str, dtype: str) -> None:
    _train(grade, 2, _plan(grade, door, dtype=dtype))


@task("4.13")
@each_door
def test_a_parameter_that_one_rank_does_not_use(grade: Grade, door: str) -> None:
    _train(grade, 2, _plan(grade, door, unused=("first.bias", "second.weight")))


@task("4.13")
@each_door
@pytest.mark.parametrize("reduce", ["coarse", "blind"])
def test_a_nan_is_over_with_its_step(grade: Grade, door: str, reduce: str) -> None:
    _train(grade, 2, _plan(grade, door, reduce, steps=5, spoiled=grade.random.choice([0, 2])))


@task("4.13")
@each_door
def test_hook_inside_a_group(grade: Grade, door: str) -> None:
    plan = _plan(grade, door, steps=3)
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.train, plan, if_stuck=STUCK_IN_GROUP)
    _check(plan, of_members(run), "inside a group, ")


@task("4.13")
def test_only_reduce_sends(grade: Grade) -> None:
    plan = _plan(grade, COURSES, steps=3)
    run = _train(grade, 2, plan)
    for rank, calls in enumerate(run.collectives):
        expected = 3 * plan.steps
        check(
            calls == expected,
            f"rank {rank} of 2: 3 buckets in each of {plan.steps} steps should be {expected} "
            f"all-reduces, those of reduce; there were {calls} collectives. The hook itself sends "
            "nothing, and calls reduce once for each bucket.",
        )


@task("4.13")
@each_door
def test_training_comes_to_where_whole_numbers_alone_do_not(grade: Grade, door: str) -> None:
    target = grade.random.uniform(0.25, 0.45)
    for rank, x in enumerate(grade.run(b.descend, 2, door, target, 300).results):
        check(
            abs(x - target) < 0.1,
            f"{door}, rank {rank} of 2: ½ (x - {target:.3f})² with a reduce that sends whole "
            f"numbers. The gradients are below ½, so that nothing is sent, unless what was left "
            f"behind adds up; x should come near {target:.3f} and is {x:.3f}.",
        )


@task("4.13")
def test_a_bucket_that_holds_something_else(grade: Grade) -> None:
    found = grade.call(b.foreign_bucket)
    check(
        found.startswith("ValueError"),
        "all_reduce got a bucket of 9 elements, of which 8 are gradients of the module: it should "
        "raise a ValueError, because what reduce doesn't get stays as it is. It raised none.",
    )


# The state


@task("4.13", real=True)
@each_door
@pytest.mark.parametrize("reduce", ["coarse", "alternating"])
def test_loaded_residuals_go_on(grade: Grade, door: str, reduce: str) -> None:
    _train(grade, 2, _plan(grade, door, reduce, restart=grade.random.choice([1, 3])))


@task("4.13")
@each_door
def test_saved_residuals_stay_as_they_are(grade: Grade, door: str) -> None:
    plan = _plan(grade, door, steps=4)
    for rank, (expected, *others) in enumerate(grade.run(b.keep_a_state, 2, plan).results):
        for time, found in zip(("first", "second"), others, strict=True):
            check(
                found == expected,
                f"{door}, rank {rank} of 2: a state of step 0 is loaded twice, after the hook that "
                f"it is of has gone on. The {time} time, steps 1 to {plan.steps - 1} should be the "
                "same as without a stop, and differ. A state is a copy, and loading makes one.",
            )
