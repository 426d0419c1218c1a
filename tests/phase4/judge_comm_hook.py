"""Judges task 4.13: compressed gradients, residuals and states, with both data-parallel classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.grade import Grade, check, task
from judging.checks import check_refused, short_beside, uneven
from judging.expect import expect, expect_cost, results_in_group
from phase4 import comm_hooks as b
from phase4.comm_hooks import COURSES, SHAPES, TORCHS, Plan
from phase4.compressors import UNDISTURBED

NAN = 1e9  # stand-in for a NaN in comparisons
STUCK = (
    "The hook itself sends nothing: only what it is given as reduce does, once for each bucket, on "
    "all ranks in the order of the buckets."
)
each_door = pytest.mark.parametrize("door", [TORCHS, COURSES], ids=["torchs", "courses"])
Tensors = dict[str, Tensor]  # parameter name -> tensor
Step = Mapping[str, Any]  # a rank's "got" and "gradients", by name


def _plan(grade: Grade, door: str, reduce: str = "coarse", **options: Any) -> Plan:
    return Plan(door, reduce, seed=grade.random.randrange(1000), **options)


def _train(grade: Grade, n: int, plan: Plan) -> None:
    run = grade.run(b.train, n, plan, options=uneven(grade.random, n), if_stuck=STUCK)
    _check(plan, run.results)
    if grade.is_simulated and plan.door == COURSES and plan.restart < 0:
        expect_cost(
            f"the number of all-reduces of 3 buckets in {plan.steps} steps, by rank,",
            *(run.collectives, [3 * plan.steps] * n),
            "They are those of reduce: the hook itself sends nothing, and calls reduce once for "
            "each bucket.",
        )


def _check(plan: Plan, by_rank: Sequence[Mapping[str, Sequence[Step]]], where: str = "") -> None:
    expected, n = _expected(plan, len(by_rank)), len(by_rank)
    for how, steps in by_rank[0].items():
        for place, step in enumerate(range(plan.steps - len(steps), plan.steps)):
            here = f"{where}{plan.door}, step {step}{f', {how}' if how != UNDISTURBED else ''}"
            here += ", where each gradient of rank 0 holds a NaN" if step == plan.spoiled else ""
            names = [f"{here}, rank {rank} of {n}" for rank in range(n)]
            facts = [runs[how][place] for runs in by_rank]
            for row in zip(facts, expected[step], names, strict=True):
                _check_got(plan, step, *row)
            for of_rank, right, name in zip(facts, expected[step], names, strict=True):
                _check_gradients(plan, of_rank, right, n, name)


def _expected(plan: Plan, n: int) -> list[list[Any]]:
    """Return the right arguments of reduce, and the right gradients, by step and rank."""
    residuals = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(n)]
    steps = []
    for step in range(plan.steps):
        drawn = [b.gradients_of(plan, rank, step) for rank in range(n)]
        got = [{m: drawn[r][m] + residuals[r][m] for m in SHAPES} for r in range(n)]
        sent = [
            {m: b.sent_of(plan.reduce, part, step) for m, part in of_rank.items()}
            for of_rank in got
        ]
        mean = {m: torch.stack([of_rank[m] for of_rank in sent]).mean(0) for m in SHAPES}
        for rank, of_rank in enumerate(residuals):
            of_rank |= _left(got[rank], sent[rank], mean)
        rows = zip(drawn, got, sent, strict=True)
        steps.append([{"own": o, "got": g, "sent": s, "mean": mean} for o, g, s in rows])
    return steps


def _left(got: Tensors, sent: Tensors, mean: Tensors) -> Tensors:
    """Return new residuals for parameters whose mean is finite; all others keep their old ones."""
    left = {m: got[m] - sent[m] for m in SHAPES if mean[m].isfinite().all()}
    return {m: torch.where(part.isfinite(), part, 0.0) for m, part in left.items()}


def _check_got(plan: Plan, step: int, facts: Step, expected: Any, here: str) -> None:
    expect(
        f"{here}: the dtype that reduce gets for gradients of {plan.dtype}",
        *(facts["dtypes"], ["torch.float64" if plan.dtype == "float64" else "torch.float32"]),
        "Residuals in 16 bits would lose what is much smaller than they are.",
    )
    got, wanted = facts["got"], {b.own_name(name): part for name, part in expected["got"].items()}
    expect(
        f"{here}: the names of the pieces that reduce gets",
        *(sorted(got), sorted(wanted), "Those of module.named_parameters()."),
    )
    for name, shape in SHAPES.items():
        part, right = torch.tensor(got[b.own_name(name)]), expected["got"][name]
        expect(f"{here}: the shape of the piece of {name}", [*part.shape], [*shape])
        check(
            torch.equal(part.nan_to_num(NAN), right.nan_to_num(NAN)),
            f"{here}: for {name}, of which the gradient is {_start_of(expected['own'][name])} and "
            f"the residual {_start_of(right - expected['own'][name])}, reduce should get "
            f"{_start_of(right, part)}; it got {_start_of(part, right)}. "
            f"{_why_not_got(part, expected, name, step, plan)}",
        )


def _start_of(tensor: Tensor, other: Tensor | None = None) -> str:
    """Return a tensor's first numbers as text, with enough digits to differ from another's."""
    first, others = (x.flatten()[:3].tolist() for x in (tensor, tensor if other is None else other))
    return short_beside(first, others)


def _why_not_got(part: Tensor, expected: Any, name: str, step: int, plan: Plan) -> str:
    if plan.spoiled >= 0 and step > plan.spoiled:
        return (
            f"In step {plan.spoiled}, a gradient held a NaN or ±∞. If the mean isn't finite, the "
            "step is skipped, so its residuals stay what they were; and a NaN that was left behind "
            "becomes 0, as do ∞ and -∞, or no later step would be finite."
        )
    if torch.equal(part, expected["own"][name]) and step:
        return "The residual is missing: is it kept, and in the state?"
    if torch.equal(part.flatten().sort()[0], expected["got"][name].flatten().sort()[0]):
        return (
            "These are the right numbers in another order: torch lays a gradient out in memory as "
            "its parameter is (parameter.stride()), and pieces lie row by row."
        )
    return (
        "The residual is what reduce got, less what this rank sent (not the mean), and belongs to "
        "a parameter: buckets change. A state is a copy, and loading makes one."
    )


def _check_gradients(plan: Plan, facts: Step, expected: Any, n: int, here: str) -> None:
    for name in SHAPES:
        gradient, right = facts["gradients"][name], expected["mean"][name]
        check(gradient is not None, f"{here}: {name} has no gradient (None) after the step.")
        got = torch.tensor(gradient)
        tolerance = 1e-5 if plan.dtype == "float32" else 0.02
        check(
            torch.allclose(got, right, tolerance, tolerance, equal_nan=True),
            f"{here}: the gradient of {name} should be the mean over the ranks of what they sent, "
            f"{_start_of(right, got)}; it is {_start_of(got, right)}. "
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


# Both data-parallel classes


@task("4.13", real=True)
@each_door
def test_what_is_left_behind_goes_with_the_next_gradient(grade: Grade, door: str) -> None:
    _train(grade, 2, _plan(grade, door))


WORLDS: dict[str, tuple[int, dict[str, Any]]] = {  # number of ranks, and changes to the plan
    **{f"{n} ranks": (n, {"steps": 3}) for n in (1, 5)},
    "a reduce without loss": (3, {"reduce": "exact", "steps": 3}),
    "bfloat16": (2, {"dtype": "bfloat16"}),
    "float64": (2, {"dtype": "float64"}),
    "a parameter that one rank does not use": (2, {"unused": ("first.bias", "second.weight")}),
    "a NaN in the third step": (2, {"steps": 5, "spoiled": 2}),
    "a NaN that reduce drops": (2, {"reduce": "blind", "steps": 5, "spoiled": 2}),
}


@task("4.13")
@each_door
@pytest.mark.parametrize("what", WORLDS)
def test_hook_in_other_worlds(grade: Grade, door: str, what: str) -> None:
    n, changes = WORLDS[what]
    _train(grade, n, _plan(grade, door, **changes))


@task("4.13")
@each_door
def test_hook_inside_a_group(grade: Grade, door: str) -> None:
    plan = _plan(grade, door, steps=3)
    _check(plan, results_in_group(grade, b.train, plan), "inside a group, ")


@task("4.13")
@each_door
@pytest.mark.parametrize("reduce", ["coarse", "alternating"])
def test_loaded_residuals_go_on(grade: Grade, door: str, reduce: str) -> None:
    _train(grade, 2, _plan(grade, door, reduce, restart=grade.random.choice([1, 3])))


@task("4.13")
def test_a_bucket_that_holds_something_else(grade: Grade) -> None:
    what = "all_reduce of a bucket of 9 elements, of which 8 are gradients of the module,"
    check_refused([grade.call(b.foreign_bucket)], what)
