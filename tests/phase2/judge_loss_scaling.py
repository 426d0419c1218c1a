"""Judges task 2.4: a loss scaler that decides on all ranks alike."""

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from judging.checks import of_members
from judging.expect import expect, results_in_group
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import loss_scaling as b
from phase2 import step_checks as reference

LARGE = 3e38  # finite in float32, but twice as much is not
WITHOUT_ONE = (
    "Every rank must call the all-reduce, also one that has no gradients, or has already found "
    "an inf among its own."
)


@task("2.4")
def test_a_loss_is_scaled_where_it_fits(grade: Grade) -> None:
    loss, scale = float(grade.random.randint(65, 100)), 1024.0
    for dtype, found in grade.call(b.scale_losses, loss, scale).items():
        wide = "float64" if dtype == "float64" else "float32"
        expect(
            f"a loss of {loss} in {dtype}, a scale of {scale}: the scaled loss, its dtype, the "
            "gradient that backward gives the loss, and the loss afterwards",
            [found[name] for name in ("value", "dtype", "gradient", "loss")],
            [loss * scale, wide, scale, loss],
            "float16 ends at 65504, and bfloat16 has 8 significant bits: convert before you "
            "multiply.",
        )


def _has_gradient(grade: Grade, n: int) -> list[list[bool]]:
    """Draw by rank and parameter whether it has a gradient; rank 1 has none at all."""
    shares = [[grade.random.random() < 0.7 for _ in b.SHAPES] for _ in range(n)]
    shares[0] = [True] * len(b.SHAPES)
    return [[False] * len(b.SHAPES) if rank == 1 else row for rank, row in enumerate(shares)]


@task("2.4", real=True)
@pytest.mark.parametrize("n", [1, 4])
def test_gradients_are_divided_once_and_in_place(grade: Grade, n: int) -> None:
    has_gradient, scale = _has_gradient(grade, n), 2.0 ** grade.random.randint(3, 9)
    run = grade.run(b.unscale_twice, n, has_gradient, scale, if_stuck=WITHOUT_ONE)
    _check_divided(run.results, has_gradient, scale)
    if grade.is_simulated:
        _check_calls(run, n)


@task("2.4")
def test_the_answer_inside_a_group(grade: Grade) -> None:
    has_gradient, scale = _has_gradient(grade, len(MEMBERS)), 2.0 ** grade.random.randint(3, 9)
    results = results_in_group(grade, b.unscale_twice, has_gradient, scale)
    _check_divided(results, has_gradient, scale)


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


def _check_divided(by_rank: Sequence[Any], has_gradient: list[list[bool]], scale: float) -> None:
    for rank, result in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}, scale {scale}"
        wanted = [b.gradient_of(rank, i).flatten().tolist() for i in range(len(b.SHAPES))]
        wanted[-1] = [scale * x for x in wanted[-1]]  # is not the optimizer's
        rows = zip(wanted, has_gradient[rank], strict=True)
        expected = [row if has_one else None for row, has_one in rows]
        for when, found in result["after"].items():
            for i, (want, got) in enumerate(zip(expected, found, strict=True)):
                expect(
                    f"{here}, after {when}: the gradient of parameter {i}",
                    got,
                    want,
                    "Divide each gradient of the optimizer's parameters once; one that has none "
                    "stays without. The last parameter is not the optimizer's.",
                    1e-9,
                )
        moved = f"{here}: the parameters whose gradients are other tensors now, or in other memory,"
        expect(moved, result["moved"], [], "Divide in place.")
        what = "what unscale, again unscale, step, and unscale after update return"
        expect(f"{here}: {what}", result["answers"], [True] * 4)
        # The gradients were halved after unscale, so that a step which divides again is found out.
        for i, lr in enumerate((0.5, 0.25, 0.25)):
            gradient = expected[i] or [0.0] * len(result["weights"][i])
            expect(
                f"{here}: parameter {i}, stepped with gradients halved after unscale,",
                result["weights"][i],
                [1 - lr * x / 2 for x in gradient],
                "Has step unscaled again?",
                1e-9,
            )


@task("2.4", real=True)
def test_one_bad_number_stops_all_ranks(grade: Grade) -> None:
    for n in (1, 3, 5) if grade.is_simulated else (2,):
        ranks = [n - 1, 0, *(grade.random.randrange(n) for _ in range(2))]
        places = [1, *(grade.random.randrange(len(b.SHAPES)) for _ in range(2)), 0]
        bad = list(zip((inf, nan, -inf, LARGE), ranks, places, strict=True))
        plan = [None, bad[0], None, *bad[1:], None]
        arguments = {"init_scale": 8.0, "growth_interval": 100}  # it never falls below 1
        run = grade.run(b.follow, n, arguments, plan, if_stuck=WITHOUT_ONE)
        for rank, steps in enumerate(run.results):
            for one, step in zip(plan, steps, strict=True):
                _check_decision(f"rank {rank} of {n}", one, step)


def _check_decision(here: str, bad: b.Bad, step: Any) -> None:
    is_good = bad is None or bad[0] == LARGE
    what = f"a gradient has {bad[0]} on rank {bad[1]}" if bad else "all gradients are finite"
    cause = "Does update forget what was found in the step before?"
    if bad:
        cause = (
            "A rank that has skipped while another has stepped has other parameters from then on: "
            "all-reduce what each rank has found, inf and nan alike."
        )
    if bad and is_good:
        cause = "That is finite in float32, but the sum of two of them is not: test each number."
    expect(
        f"{here}, {what}: whether step takes the optimizer's step, whether that changes anything, "
        "what unscale returns before update, and the parameters whose gradients are not divided "
        "once, also in a step that is skipped,",
        [step[name] for name in ("taken", "has_changed", "again", "undivided")],
        [is_good, is_good, is_good, []],
        cause,
    )


def _plan(grade: Grade, interval: int, n: int) -> list[b.Bad]:
    """Draw good steps but one, an overflow, good steps but one, and what comes by chance."""
    bad = [(inf, grade.random.randrange(n), grade.random.randrange(4)) for _ in range(12)]
    almost: list[b.Bad] = [None] * (interval - 1)
    drawn = [grade.random.choice((None, None, None, one)) for one in bad[1:]]
    return [*almost, bad[0], *almost, None, *drawn, *almost, None, *almost, None]


def _arguments(grade: Grade, interval: int) -> dict[str, Any]:
    growth, backoff = grade.random.choice([(2.0, 0.5), (4.0, 0.25), (2.0, 0.25), (4.0, 0.5)])
    factors = {"growth_factor": growth, "backoff_factor": backoff}
    return {"init_scale": 1.0, **factors, "growth_interval": interval}


@task("2.4")
def test_the_scale_falls_and_rises_as_torchs(grade: Grade) -> None:
    n, interval = 2, grade.random.randint(2, 4)
    arguments, plan = _arguments(grade, interval), _plan(grade, interval, n)
    expected = reference.scales(arguments, [bad is not None for bad in plan])
    for rank, steps in enumerate(grade.run(b.follow, n, arguments, plan).results):
        for k, (want, step) in enumerate(zip(expected, steps, strict=True)):
            steps_so_far = " ".join("bad" if bad else "good" for bad in plan[: k + 1])
            expect(
                f"rank {rank} of {n}, {arguments}: the scale, as of torch's GradScaler, after "
                f"{steps_so_far}",
                step["value"],
                want,
                "The count of good steps begins again after an overflow, and when the scale has "
                "grown. A scale may be below 1.",
            )


@task("2.4")
def test_the_scale_doubles_after_2000_updates_by_default(grade: Grade) -> None:
    expect(
        "the default scale at first, after 1,999 and 2,000 good updates, after an overflow and "
        "after one more good update",
        grade.call(b.count_with_defaults),
        [65536.0, 65536.0, 131072.0, 65536.0, 65536.0],
        "An update before which nothing was unscaled is a good one, too.",
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
        what = "what is no plain number in state_dict, which every checkpoint should hold,"
        expect(f"{here}: {what}", found["odd"], [])
        check(
            not found["has_changed"],
            f"{here}: what state_dict returned has changed with later steps of the scaler that "
            "returned it, or of the one that has loaded it. Return a new dict, and keep none.",
        )
        wanted, got = expected[len(before) - 1 :], found["values"]
        cause = (
            "The first good step should let it grow: save and load the count of good steps, too."
        )
        if got[0] != wanted[0]:
            cause = "The first, right after loading, is that of the scaler that was saved."
        elif got[1] < got[0]:
            cause = "load_state_dict should forget an inf that the scaler had found before."
        expect(
            f"{here}, saved after {interval - 1} good steps in a row, with {arguments}: the scales "
            "once loaded, and after good, bad and good steps,",
            got,
            wanted,
            cause,
        )


@task("2.4")
def test_an_overflow_in_one_of_two_optimizers(grade: Grade) -> None:
    for rank, found in enumerate(grade.run(b.two_optimizers, 2, grade.random.randrange(2)).results):
        expect(
            f"rank {rank} of 2, two optimizers, of which the second has a nan in the first of "
            "three steps and the first in the second, scale 8, interval 1: steps taken, weights "
            "and scale",
            found,
            [
                [[True, False], [0.5, 1.0], 4.0],
                [[False, True], [0.5, 0.0], 2.0],
                [[True, True], [-1.5, -2.0], 4.0],
            ],
            "Each optimizer steps by its own gradients, and the scale falls if any had to skip.",
        )


@task("2.4")
def test_a_scaler_uses_the_all_reduce_it_is_given(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.sums_of, if_stuck=STUCK_IN_GROUP)
    for rank, calls in enumerate(of_members(run)):
        expect(
            f"rank {rank} of {len(MEMBERS)}: the calls of the all_reduce given in unscale and then "
            "step, each by its number of elements and whether it gets the group,",
            calls,
            [[1, True]],
        )
    expected = [int(rank in MEMBERS) for rank in range(OUTER_WORLD_SIZE)]
    expect("the number of collectives by rank of the world", run.collectives, expected)
