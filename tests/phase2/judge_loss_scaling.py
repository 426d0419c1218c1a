"""Judges task 2.4: a loss scaler that decides on all ranks alike."""

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from judging.checks import is_close, of_members, short_beside
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import loss_scaling as b
from phase2 import steps_alone as reference

LARGE = 3e38  # finite in float32, but twice as much is not
WITHOUT_ONE = (
    "Every rank must call the all-reduce, also one that has no gradients, or has already found "
    "an inf among its own."
)


@task("2.4")
def test_a_loss_is_scaled_where_it_fits(grade: Grade) -> None:
    loss, scale = float(grade.random.randint(65, 100)), 1024.0
    for dtype, found in grade.call(b.scale_losses, loss, scale).items():
        here = f"a loss of {loss} in {dtype}, a scale of {scale}:"
        wide = "float64" if dtype == "float64" else "float32"
        check(
            found["value"] == loss * scale and found["dtype"] == wide,
            f"{here} scale should return {loss * scale} in {wide}; it returned {found['value']} in "
            f"{found['dtype']}. float16 ends at 65504, and bfloat16 has 8 significant bits: "
            "convert before you multiply.",
        )
        check(
            found["gradient"] == scale and found["is_kept"],
            f"{here} backward through the scaled loss should give the loss a gradient of {scale}, "
            f"and leave its value; the gradient is {found['gradient']}.",
        )


def _has_gradient(grade: Grade, n: int) -> list[list[bool]]:
    """By rank and parameter; rank 1 has none at all."""
    shares = [[grade.random.random() < 0.7 for _ in b.SHAPES] for _ in range(n)]
    shares[0] = [True] * len(b.SHAPES)
    return [[False] * len(b.SHAPES) if rank == 1 else row for rank, row in enumerate(shares)]


@task("2.4", real=True)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradients_are_divided_once_and_in_place(grade: Grade, n: int) -> None:
    has_gradient, scale = _has_gradient(grade, n), 2.0 ** grade.random.randint(3, 9)
    run = grade.run(b.unscale_twice, n, has_gradient, scale, if_stuck=WITHOUT_ONE)
    for rank, result in enumerate(run.results):
        _check_divided(f"rank {rank} of {n}", rank, result, has_gradient[rank], scale)
    if grade.is_simulated:
        _check_calls(run, n)


def _check_calls(run: Run, n: int) -> None:
    check(
        any(run.collectives),
        "unscale has called no all-reduce. Without one, each rank decides by its own gradients: a "
        "rank that finds an inf skips the step that the others take, and their parameters differ "
        "from then on. In a world of any size, all-reduce one number: what each rank has found.",
    )
    check(
        run.collectives == [2] * n and max(run.bytes_sent) <= 2 * 8 * n,
        "one all-reduce of one number is enough for each time that gradients are divided. Here "
        "they are divided in two steps, in the first of which unscale is called twice, before step "
        f"and update. By rank, the numbers of collectives are {run.collectives}, and the bytes "
        f"sent {[int(sent) for sent in run.bytes_sent]}.",
    )


def _check_divided(
    here: str, rank: int, result: Any, has_gradient: Sequence[bool], scale: float
) -> None:
    wanted = [b.gradient_of(rank, i).flatten().tolist() for i in range(len(b.SHAPES))]
    wanted[-1] = [scale * x for x in wanted[-1]]  # is not the optimizer's
    expected = [row if has else None for row, has in zip(wanted, has_gradient, strict=True)]
    times = ("after unscale", "after a second unscale", "after unscale in the step after update")
    for when, found in zip(times, result["after"], strict=True):
        for i, (want, got) in enumerate(zip(expected, found, strict=True)):
            check(
                is_close(want, got),
                f"{here}, {when}, scale {scale}: the gradient of parameter {i} should be "
                f"{short_beside(want, got)}, but is {short_beside(got, want)}. "
                f"{_why_not(want, got, scale, i)}",
            )
    check(
        not result["moved"],
        f"{here}: unscale should divide gradients in place, but those of parameters "
        f"{result['moved']} are other tensors now, or in other memory.",
    )
    check(
        all(answer is True for answer in result["answers"]),
        f"{here}: all gradients are finite, so unscale, again unscale, step, and unscale after "
        f"update should all return True; they returned {result['answers']}.",
    )
    _check_weights(here, result["weights"], expected)


def _why_not(want: Any, got: Any, scale: float, number: int) -> str:
    if number == len(b.SHAPES) - 1:
        return "That parameter is not the optimizer's."
    if want is None or got is None:
        return "A parameter that has no gradient stays without, and one that has keeps it."
    if is_close([x / scale for x in want], got):
        return "It has been divided twice."
    return "It has not been divided." if is_close([x * scale for x in want], got) else ""


def _check_weights(here: str, found: Any, gradients: Sequence[Any]) -> None:
    """The gradients were halved after unscale, so that a step which divides again is found out."""
    for i, lr in enumerate((0.5, 0.25, 0.25)):
        gradient = gradients[i] or [0.0] * len(found[i])
        wanted = [1 - lr * x / 2 for x in gradient]
        check(
            is_close(wanted, found[i]),
            f"{here}: after unscale the gradients were halved, as clipping might. Then step should "
            f"make parameter {i} {short_beside(wanted, found[i])}; it is "
            f"{short_beside(found[i], wanted)}. Has step unscaled again?",
        )


@task("2.4")
def test_the_answer_inside_a_group(grade: Grade) -> None:
    has_gradient, scale = _has_gradient(grade, len(MEMBERS)), 2.0 ** grade.random.randint(3, 9)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.unscale_twice, has_gradient, scale),
        if_stuck=STUCK_IN_GROUP,
    )
    for rank, result in enumerate(of_members(run)):
        here = f"rank {rank} of the group {list(MEMBERS)}"
        _check_divided(here, rank, result, has_gradient[rank], scale)
    _check_decisions(grade, len(MEMBERS), is_grouped=True)


@task("2.4", real=True)
def test_one_bad_number_stops_all_ranks(grade: Grade) -> None:
    for n in (1, 3, 5) if grade.is_simulated else (2,):
        _check_decisions(grade, n)


def _check_decisions(grade: Grade, n: int, *, is_grouped: bool = False) -> None:
    ranks = [n - 1, 0, *(grade.random.randrange(n) for _ in range(2))]
    places = [1, *(grade.random.randrange(len(b.SHAPES)) for _ in range(2)), 0]
    bad = list(zip((inf, nan, -inf, LARGE), ranks, places, strict=True))
    plan = [None, bad[0], None, *bad[1:], None]
    arguments = {"init_scale": 8.0, "growth_interval": 100}  # it never falls below 1
    if is_grouped:
        run = grade.run(
            *(inside_group, OUTER_WORLD_SIZE, b.follow, arguments, plan), if_stuck=STUCK_IN_GROUP
        )
    else:
        run = grade.run(b.follow, n, arguments, plan, if_stuck=WITHOUT_ONE)
    for rank, steps in enumerate(of_members(run) if is_grouped else run.results):
        _check_steps(f"rank {rank} of {n}", steps, plan)


def _check_steps(here: str, steps: Any, plan: Sequence[b.Bad]) -> None:
    for bad, step in zip(plan, steps, strict=True):
        is_bad = bad is not None and bad[0] != LARGE
        what = f"a gradient has {bad[0]} on rank {bad[1]}" if bad else "all gradients are finite"
        check(
            step["taken"] is (not is_bad),
            f"{here}: {what}, so step should return {not is_bad} on every rank; here it returned "
            f"{step['taken']}. {_why_wrong(bad)}",
        )
        check(
            step["has_changed"] is not is_bad,
            f"{here}: {what}, and step returned {step['taken']}, but the parameters or Adam's "
            f"state have {'' if is_bad else 'not '}changed. The optimizer's step is taken if and "
            "only if all gradients are finite.",
        )
        check(
            step["again"] == step["taken"] and not step["undivided"],
            f"{here}: {what}. unscale should return {not is_bad}, too, if it is called after step "
            "and before update, and all gradients should have been divided once by the scale, also "
            f"in a step that is skipped. It returned {step['again']}, and the gradients of "
            f"parameters {step['undivided']} are wrong.",
        )


def _why_wrong(bad: b.Bad) -> str:
    if bad and bad[0] == LARGE:
        return "That is finite in float32, but the sum of two of them is not: test each number."
    if bad:
        return (
            "A rank that has skipped while another has stepped has other parameters from then on: "
            "all-reduce what each rank has found, inf and nan alike."
        )
    return "Does update forget what was found in the step before?"


def _plan(grade: Grade, interval: int, n: int) -> list[b.Bad]:
    """Good steps but one, an overflow, good steps but one, and what comes by chance."""
    bad = [(inf, grade.random.randrange(n), grade.random.randrange(4)) for _ in range(12)]
    almost: list[b.Bad] = [None] * (interval - 1)
    drawn = [grade.random.choice((None, None, None, one)) for one in bad[1:]]
    return [*almost, bad[0], *almost, None, *drawn, *almost, None, *almost, None]


def _arguments(grade: Grade, interval: int) -> dict[str, Any]:
    growth, backoff = grade.random.choice([(2.0, 0.5), (4.0, 0.25), (2.0, 0.25), (4.0, 0.5)])
    return {
        "init_scale": 1.0,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }


@task("2.4")
def test_the_scale_falls_and_rises_as_torchs(grade: Grade) -> None:
    n, interval = 2, grade.random.randint(2, 4)
    arguments, plan = _arguments(grade, interval), _plan(grade, interval, n)
    expected = reference.scales(arguments, [bad is not None for bad in plan])
    for rank, steps in enumerate(grade.run(b.follow, n, arguments, plan).results):
        _check_values(f"rank {rank} of {n}", [s["value"] for s in steps], expected, plan, arguments)


def _check_values(
    here: str, found: list[float], expected: list[float], plan: Sequence[b.Bad], arguments: Any
) -> None:
    for k, (want, got) in enumerate(zip(expected, found, strict=True)):
        said = " ".join("bad" if bad else "good" for bad in plan[: k + 1])
        check(
            want == got,
            f"{here}: with {_text(arguments)}, after {said} the scale should be {want}, as torch's "
            f"GradScaler has it; it is {got}. The count of good steps begins again after an "
            "overflow, and when the scale has grown. A scale may be below 1.",
        )


def _text(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items())


@task("2.4")
def test_the_scale_doubles_after_2000_updates_by_default(grade: Grade) -> None:
    found = grade.call(b.count_with_defaults)
    expected = [65536.0, 65536.0, 131072.0, 65536.0, 65536.0]
    check(
        found == expected,
        "by default, the scale at first, after 1,999 and 2,000 good updates, after an overflow "
        f"and after one more good update should be {expected}; they are {found}. An update before "
        "which nothing was unscaled is a good one, too.",
    )


@task("2.4")
def test_a_loaded_scaler_goes_on_as_the_saved_one(grade: Grade) -> None:
    interval = grade.random.randint(3, 5)
    arguments, n = _arguments(grade, interval), 2
    before: list[b.Bad] = [None, (inf, 0, 0), *[None] * (interval - 1)]
    after: list[b.Bad] = [None, (nan, 1, 1), *[None] * (2 * interval)]
    expected = reference.scales(arguments, [bad is not None for bad in before + after])
    for rank, found in enumerate(grade.run(b.resume, n, arguments, before, after).results):
        here = f"rank {rank} of {n}"
        check(
            not found["odd"],
            f"{here}: state_dict should have plain numbers, which every checkpoint can hold; it "
            f"has {', '.join(found['odd'])}.",
        )
        check(
            not found["has_changed"],
            f"{here}: what state_dict returned has changed with later steps of the scaler that "
            "returned it, or of the one that has loaded it. Return a new dict, and keep none.",
        )
        wanted, got = expected[len(before) - 1 :], found["values"]
        check(
            got == wanted,
            f"{here}: saved after {interval - 1} good steps in a row, with {_text(arguments)}. "
            "Loaded, and after good, bad and good ones, the scales should be "
            f"{short_beside(wanted, got)}; they are {short_beside(got, wanted)}. "
            f"{_why_not_loaded(wanted, got)}",
        )


def _why_not_loaded(wanted: Sequence[float], got: Sequence[float]) -> str:
    """Name the cause, by the scale as it was loaded and after the good step that lets it grow."""
    loaded, after = got[:2]
    if loaded != wanted[0]:
        return "The first of them, right after loading, is that of the scaler that was saved."
    if after < loaded:
        return (
            "A good step has let it fall: the scaler had found an inf before it was loaded, which "
            "does not count any more. load_state_dict should forget it."
        )
    if after == loaded:
        return (
            "The first good step should let it grow. The scale alone is not enough: save and load "
            "the count of good steps, too."
        )
    return "Save and load the scale, and the count of good steps."


@task("2.4")
def test_an_overflow_in_one_of_two_optimizers(grade: Grade) -> None:
    for rank, found in enumerate(grade.run(b.two_optimizers, 2, grade.random.randrange(2)).results):
        expected = [
            {"taken": [True, False], "weights": [0.5, 1.0], "value": 4.0},
            {"taken": [False, True], "weights": [0.5, 0.0], "value": 2.0},
            {"taken": [True, True], "weights": [-1.5, -2.0], "value": 4.0},
        ]
        check(
            found == expected,
            f"rank {rank} of 2: two optimizers, of which the second has a nan in the first of "
            "three steps and the first in the second, scale 8, interval 1. By step, it should be "
            f"{expected}; it is {found}. Each "
            "optimizer steps by its own gradients, and the scale falls if any had to skip.",
        )


@task("2.4")
def test_a_scaler_uses_the_all_reduce_it_is_given(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.sums_of, if_stuck=STUCK_IN_GROUP)
    for rank, calls in enumerate(of_members(run)):
        check(
            calls == [[1, True]],
            f"rank {rank} of {len(MEMBERS)}: unscale and then step should call the all_reduce "
            "given once, with one number and the group given. Its calls, each with the number of "
            f"elements and whether it got the group: {calls}.",
        )
    expected = [int(rank in MEMBERS) for rank in range(OUTER_WORLD_SIZE)]
    check(
        run.collectives == expected,
        f"by rank, there should be {expected} collectives, but there are {run.collectives}: is "
        "there one besides the all_reduce given?",
    )
