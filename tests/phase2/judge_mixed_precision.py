"""Judges tasks 2.3 and 2.4: a loss scaler and a 16-bit step, whose decisions all ranks share."""

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from judging.checks import check_collectives, is_close, of_members
from judging.expect import expect, expect_cost, expect_on_all_ranks, results_in_group
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import loss_scaling as s
from phase2 import step_checks as c
from phase2 import steps as b
from phase2.steps import MIXED, Share, Small

LARGE = 3e38  # finite in float32, but doubling it overflows
WITHOUT_ONE = (
    "Every rank must call the all-reduce, also one that has no gradients, or has already found "
    "an inf among its own."
)


@task("2.3")
def test_a_loss_is_scaled_where_it_fits(grade: Grade) -> None:
    loss, scale = float(grade.random.randint(65, 100)), 1024.0
    for dtype, found in grade.call(s.scale_losses, loss, scale).items():
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
    """Draw which parameters have gradients on each rank: all on rank 0, and none on rank 1."""
    shares = [[grade.random.random() < 0.7 for _ in s.SHAPES] for _ in range(n)]
    shares[0] = [True] * len(s.SHAPES)
    return [[False] * len(s.SHAPES) if rank == 1 else row for rank, row in enumerate(shares)]


@task("2.3", real=True)
@pytest.mark.parametrize("n", [1, 4])
def test_gradients_are_divided_once_and_in_place(grade: Grade, n: int) -> None:
    has_gradient, scale = _has_gradient(grade, n), 2.0 ** grade.random.randint(3, 9)
    run = grade.run(s.unscale_twice, n, has_gradient, scale, if_stuck=WITHOUT_ONE)
    _check_divided(run.results, has_gradient, scale)
    if grade.is_simulated:
        _check_sums(run, n)


@task("2.3")
def test_the_answer_inside_a_group(grade: Grade) -> None:
    has_gradient, scale = _has_gradient(grade, len(MEMBERS)), 2.0 ** grade.random.randint(3, 9)
    results = results_in_group(grade, s.unscale_twice, has_gradient, scale)
    _check_divided(results, has_gradient, scale)


def _check_sums(run: Run, n: int) -> None:
    check(
        any(run.collectives),
        "unscale has called no all-reduce. Without one, each rank decides by its own gradients: a "
        "rank that finds an inf skips the step that the others take, and their parameters differ "
        "from then on. In a world of any size, all-reduce one number: what each rank has found.",
    )
    judge = check if min(run.collectives) < 2 else check_cost
    judge(
        run.collectives == [2] * n and max(run.bytes_sent) <= 2 * 8 * n,
        "one all-reduce of one number is enough for each time that gradients are divided. Here "
        "they are divided in two steps, in the first of which unscale is called twice, before step "
        f"and update. By rank, the numbers of collectives are {run.collectives}, and the bytes "
        f"sent {[int(sent) for sent in run.bytes_sent]}.",
    )


def _check_divided(by_rank: Sequence[Any], has_gradient: list[list[bool]], scale: float) -> None:
    for rank, result in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}, scale {scale}"
        wanted = [s.gradient_of(rank, i).flatten().tolist() for i in range(len(s.SHAPES))]
        wanted[-1] = [scale * x for x in wanted[-1]]  # not in the optimizer, so not divided
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
        # The gradients were halved after unscale, which exposes a step that divides again.
        for i, lr in enumerate((0.5, 0.25, 0.25)):
            gradient = expected[i] or [0.0] * len(result["weights"][i])
            expect(
                f"{here}: parameter {i}, stepped with gradients halved after unscale,",
                result["weights"][i],
                [1 - lr * x / 2 for x in gradient],
                "Has step unscaled again?",
                1e-9,
            )


@task("2.3", real=True)
def test_one_bad_number_stops_all_ranks(grade: Grade) -> None:
    for n in (1, 3, 5) if grade.is_simulated else (2,):
        ranks = [n - 1, 0, *(grade.random.randrange(n) for _ in range(2))]
        places = [1, *(grade.random.randrange(len(s.SHAPES)) for _ in range(2)), 0]
        bad = list(zip((inf, nan, -inf, LARGE), ranks, places, strict=True))
        plan = [None, bad[0], None, *bad[1:], None]
        arguments = {"init_scale": 8.0, "growth_interval": 100}  # the scale never falls below 1
        run = grade.run(s.follow, n, arguments, plan, if_stuck=WITHOUT_ONE)
        for rank, steps in enumerate(run.results):
            for one, step in zip(plan, steps, strict=True):
                _check_decision(f"rank {rank} of {n}", one, step)


def _check_decision(here: str, bad: s.Bad, step: Any) -> None:
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


def _plan(grade: Grade, interval: int, n: int) -> list[s.Bad]:
    """Make a plan: good steps just short of growth, an overflow, growth, random steps, growth."""
    bad = [(inf, grade.random.randrange(n), grade.random.randrange(4)) for _ in range(12)]
    almost: list[s.Bad] = [None] * (interval - 1)
    drawn = [grade.random.choice((None, None, None, one)) for one in bad[1:]]
    return [*almost, bad[0], *almost, None, *drawn, *almost, None, *almost, None]


def _arguments(grade: Grade, interval: int) -> dict[str, Any]:
    growth, backoff = grade.random.choice([(2.0, 0.5), (4.0, 0.25), (2.0, 0.25), (4.0, 0.5)])
    factors = {"growth_factor": growth, "backoff_factor": backoff}
    return {"init_scale": 1.0, **factors, "growth_interval": interval}


@task("2.3")
def test_the_scale_falls_and_rises_as_torchs(grade: Grade) -> None:
    n, interval = 2, grade.random.randint(2, 4)
    arguments, plan = _arguments(grade, interval), _plan(grade, interval, n)
    expected = c.scales(arguments, [bad is not None for bad in plan])
    for rank, steps in enumerate(grade.run(s.follow, n, arguments, plan).results):
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


@task("2.3")
def test_the_scale_doubles_after_2000_updates_by_default(grade: Grade) -> None:
    expect(
        "the default scale at first, after 1,999 and 2,000 good updates, after an overflow and "
        "after one more good update",
        grade.call(s.count_with_defaults),
        [65536.0, 65536.0, 131072.0, 65536.0, 65536.0],
        "An update before which nothing was unscaled is a good one, too.",
    )


@task("2.3")
def test_a_loaded_scaler_goes_on_as_the_saved_one(grade: Grade) -> None:
    interval = grade.random.randint(3, 5)
    arguments, n = _arguments(grade, interval), 2
    before: list[s.Bad] = [None, (inf, 0, 0), *[None] * (interval - 1)]
    after: list[s.Bad] = [None, (nan, 1, 1), *[None] * (2 * interval)]
    expected = c.scales(arguments, [bad is not None for bad in before + after])
    for rank, found in enumerate(grade.run(s.resume, n, arguments, before, after).results):
        here = f"rank {rank} of {n}"
        what = "the entries of state_dict that are not plain numbers"
        expect(f"{here}: {what}", found["odd"], [], "Not every checkpoint can hold other types.")
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


@task("2.3")
def test_an_overflow_in_one_of_two_optimizers(grade: Grade) -> None:
    expect_on_all_ranks(
        "steps taken, weights and scale",
        grade.run(s.two_optimizers, 2, grade.random.randrange(2)).results,
        [
            [[True, False], [0.5, 1.0], 4.0],
            [[False, True], [0.5, 0.0], 2.0],
            [[True, True], [-1.5, -2.0], 4.0],
        ],
        "Each optimizer steps by its own gradients, and the scale falls if any had to skip.",
        where=", two optimizers, of which the second has a nan in the first of three steps and the "
        "first in the second, scale 8, interval 1",
    )


@task("2.3")
def test_a_scaler_uses_the_all_reduce_it_is_given(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, s.sums_of, if_stuck=STUCK_IN_GROUP)
    for rank, calls in enumerate(of_members(run)):
        expect(
            f"rank {rank} of {len(MEMBERS)}: the calls of the all_reduce given in unscale and then "
            "step, each by its number of elements and whether it gets the group,",
            calls,
            [[1, True]],
        )
    expected = [int(rank in MEMBERS) for rank in range(OUTER_WORLD_SIZE)]
    expect_cost("the number of collectives by rank of the world", run.collectives, expected)


STEPS = 3
MAX_NORM = 0.25  # below the gradient norm in some steps
EVERY_CALL = (
    "Every rank must make the same calls, also one that has an empty batch or whose own gradients "
    "are not finite."
)
ORDER = (
    "Gradients are summed over the ranks, then unscaled, then clipped by the norm of all of them; "
    "those from before the step do not count."
)
CONTRACT = c.Contract(
    MIXED,
    with_zeros=True,
    of_length=f"Each target of all ranks weighs the same. {ORDER}",
    of_end=ORDER,
    of_unused="A parameter without a gradient counts as zero, so that weight decay changes it.",
)


def _uneven(grade: Grade, n: int) -> tuple[Share, ...]:
    """Draw each rank's number of rows: most on rank 0, and none on rank 1 if n is 3 or more."""
    rows = [grade.random.randint(5, 8), *(grade.random.randint(1, 4) for _ in range(n - 1))]
    return tuple(Share(0 if rank == 1 and n > 2 else size, 0) for rank, size in enumerate(rows))


@task("2.4", real=True)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_mixed_steps_are_those_of_one_process(grade: Grade, n: int) -> None:
    n = min(n, 3) if not grade.is_simulated else n
    shares = _uneven(grade, n)
    run = grade.run(b.mixed_steps, n, shares, STEPS, MAX_NORM, if_stuck=EVERY_CALL)
    _check_all(run.results, shares)
    if grade.is_simulated:
        what = f"{STEPS} steps, each with all-reduces of two numbers, of all gradients, and the "
        calls = 4 * STEPS if min(run.collectives) > 3 * STEPS else 3 * STEPS
        check_collectives(run, [calls] * n, what + "scaler's")


def _check_all(by_rank: list[Any], shares: tuple[Share, ...]) -> None:
    alone = c.steps_alone(shares, STEPS, with_zeros=True, max_norm=MAX_NORM)
    for rank, result in enumerate(by_rank):
        here = f"{c.described(shares)}, rank {rank}"
        c.check_first_loss(here, result["losses"][0], shares, rank)
        found, expected = result["norms"][0], alone["norms"][0]
        cause = (
            "Does each target of all ranks weigh the same, are old gradients gone, and does a "
            "parameter that only other ranks use have a gradient?"
        )
        if found > 50 * expected:
            cause = "The gradients were still scaled: unscale them before you clip."
        elif is_close(found, MAX_NORM, 1e-3):
            cause = "That is the norm after clipping."
        what = "the norm of the averaged and unscaled gradient of the first step, before clipping,"
        expect(f"{here}: {what}", found, expected, cause, 1e-6)
        expect(
            f"{here}: whether each step is skipped, the number of the scaler's updates, and its "
            f"scale, which starts at 1024 and has interval 2, after {STEPS} steps without an "
            "overflow,",
            [result["skipped"], *result["updates"]],
            [[False] * STEPS, STEPS, 2048.0],
        )
    c.check_steps(CONTRACT, by_rank, shares, STEPS, MAX_NORM)
    c.check_same_on_all(c.described(shares), by_rank, "losses", "norms")


@task("2.4")
def test_mixed_steps_inside_a_group(grade: Grade) -> None:
    shares = _uneven(grade, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.mixed_steps, shares, STEPS, MAX_NORM),
        if_stuck=STUCK_IN_GROUP,
    )
    results = of_members(run)
    _check_all(results, shares)
    expect_cost(
        f"the numbers of collectives in {STEPS} steps by rank of the group, through the all_reduce "
        "given and the scaler alone,",
        [run.collectives[member] for member in MEMBERS],
        [result["num_calls"] for result in results],
    )
    for rank, result in enumerate(results):
        here = f"{c.described(shares)}, rank {rank}: the calls of loss_sum in {STEPS} steps"
        expect_cost(
            here, result["num_losses"], STEPS, "It is called on every rank, with rows or not."
        )


@task("2.4")
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [("float16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_it_computes_in_16_bits_and_keeps_32(grade: Grade, dtype: str, reduce_dtype: str) -> None:
    for rank, found in enumerate(results_in_group(grade, b.step_noted, dtype, reduce_dtype)):
        here = f"rank {rank} of {len(MEMBERS)}, dtype {dtype}, reduce_dtype {reduce_dtype}"
        _check_dtypes(here, found, dtype)
        _check_calls(f"{here}: the calls of all_reduce", found, reduce_dtype)


def _check_dtypes(here: str, found: Any, dtype: str) -> None:
    expect(
        f"{here}: the calls of loss_sum, by whether autocast is on, and for which dtype,",
        found["autocast"],
        [(True, dtype)],
        "Call it once, under torch.autocast of the parameters' device type and that dtype.",
    )
    what = "the dtypes that both linear layers compute in"
    expect(f"{here}: {what}", found["computed"], [f"torch.{dtype}"])
    expect(
        f"{here}: the dtypes of parameters and gradients after the step, and whether parameters "
        "are the same tensors as before,",
        [found["kept"], found["is_same"]],
        [["torch.float32"], True],
        "autocast makes 16-bit copies of them by itself.",
    )
    expect(f"{here}: the number of the scaler's updates in a step", found["updates"], 1)


def _check_calls(here: str, found: Any, reduce_dtype: str) -> None:
    expect_cost(
        f"{here} with more than two numbers",
        [call for call in found["calls"] if call[0] > 2],
        [[found["trainable"], reduce_dtype]],
        "The gradients of all trainable parameters travel in one bucket. A parameter without a "
        "gradient counts as zero, a frozen one not at all.",
    )
    others = [call for call in found["calls"] if call[0] <= 2]
    dtypes = ["float32", "float64"]
    in_two = [[[1, count], [1, loss]] for count in ("int64", *dtypes) for loss in dtypes]
    right = [[[2, dtype]] for dtype in dtypes] + in_two + [pair[::-1] for pair in in_two]
    expect_cost(
        f"{here} with sum of losses and number of targets, in float32 or float64, in one call or "
        "two,",
        others,
        others if others in right else right[0],
    )
    check(found["is_group_given"], f"{here} should get the group that the step was given.")


@task("2.4")
def test_updates_that_16_bits_would_lose_add_up(grade: Grade) -> None:
    num_steps = grade.random.randint(8, 12)
    small = Small(1.0, 2.0**-13, [1.0, 1.0], [1, 1], num_steps=num_steps)
    results = grade.run(b.small_steps, 2, small).results
    expect_on_all_ranks(
        "one target with a gradient of 1.0 on each rank, scale 65536: whether a step is skipped",
        [found["skipped"] for found in results],
        False,
        "A scaled gradient of 65536 is inf in float16, but half of it is not: divide the loss by "
        "the 2 targets before the backward pass, instead of the gradients after it.",
    )
    expect_on_all_ranks(
        f"a weight of 1.0 after {num_steps} updates of -0.000122",
        [found["weight"] for found in results],
        1 - num_steps * 2.0**-13,
        "float16 has no number between 0.9995 and 1: the optimizer should update the parameters "
        "in float32.",
        1e-7,
    )


@task("2.4")
@pytest.mark.parametrize("reduce_dtype", ["float16", "float32"])
def test_small_gradients_survive(grade: Grade, reduce_dtype: str) -> None:
    """Gradients of 2**-26 are 0 in float16 unless both the backward pass and the sum scale them."""
    factors, rows, lr = [2.0**-26, 3 * 2.0**-26], [3, 1], 2.0**20
    expected = -lr * (3 * factors[0] + factors[1]) / 4
    small = Small(0.0, lr, factors, rows, reduce_dtype)
    for rank, found in enumerate(grade.run(b.small_steps, 2, small).results):
        here = f"rank {rank} of 2, reduce_dtype {reduce_dtype}, a gradient of {-expected / lr:.3g}"
        expect(f"{here}: whether a step is skipped", found["skipped"], False)
        expect(
            f"{here} and lr 2**20: the weight, at first 0,",
            found["weight"],
            expected,
            "float16 has nothing between 0 and 6e-8, so gradients must be scaled both in the "
            "backward pass and when they are summed.",
            abs(expected) / 100,
        )


def _check_overflow(by_rank: list[Any], is_bad: list[bool], what: str, scales: list[float]) -> None:
    for rank, steps in enumerate(by_rank):
        for number, (step, bad, scale) in enumerate(zip(steps, is_bad, scales, strict=True)):
            here = f"rank {rank} of {len(by_rank)}, step {number}, {what if bad else 'no overflow'}"
            expect(
                f"{here}: whether the step is skipped, whether parameters or Adam's state change, "
                "and whether the norm before clipping is finite",
                [step[name] for name in ("is_skipped", "has_changed", "has_finite_norm")],
                [bad, not bad, not bad],
                "All ranks skip a step, or none.",
            )
            found = [step["scale"], step["updates"]]
            expect(f"{here}: scale and number of updates so far", found, [scale, number + 1])
            of_rank_0 = by_rank[0][number]["state"]
            expect(f"{here}: the parameters, which are those of rank 0,", step["state"], of_rank_0)
            calls = [of_rank[number]["sums"] for of_rank in by_rank]
            what_calls = "the numbers of calls of loss_sum by rank, also in a step that is skipped,"
            expect(f"{here}: {what_calls}", [*map(len, calls)], [1] * len(calls))
            losses, counts = zip(*(sums for (sums,) in calls), strict=True)
            mean = sum(losses) / sum(counts)
            what_loss = "the loss, the mean over the targets of all ranks also in a skipped step,"
            expect(f"{here}: {what_loss}", step["loss"], mean, "", 1e-5 * abs(mean))


@task("2.4", real=True)
def test_an_overflow_on_one_rank_is_skipped_on_all(grade: Grade) -> None:
    for n in (2, 5) if grade.is_simulated else (3,):
        bad = [8.0 * n if rank == n - 1 else 2.0**-10 for rank in range(n)]
        good = [2.0**-10 * (1 + rank) for rank in range(n)]
        run = grade.run(b.overflow, n, [good, bad, good], "float32", if_stuck=EVERY_CALL)
        what = f"a gradient that overflows in float16 on rank {n - 1} only"
        _check_overflow(run.results, [False, True, False], what, [65536.0, 32768.0, 32768.0])


@task("2.4")
def test_an_overflow_in_the_sum_alone_is_skipped(grade: Grade) -> None:
    run = grade.run(b.overflow, 2, [[1.375] * 2, [2.0**-10] * 2], "float16")
    what = "reduce_dtype float16, a scaled gradient of 45056 on each of 2 ranks, 90112 in all"
    _check_overflow(run.results, [True, False], what, [32768.0, 32768.0])


@task("2.4")
def test_gradients_are_divided_before_the_sum(grade: Grade) -> None:
    for rank, (step,) in enumerate(grade.run(b.overflow, 2, [[0.75] * 2], "float16").results):
        expect(
            f"rank {rank} of 2, reduce_dtype float16, one target and a scaled gradient of 49152 on "
            "each rank: whether the step is skipped, and the scale",
            [step["is_skipped"], step["scale"]],
            [False, 65536.0],
            "Divided by the 2 targets, gradients sum up to 49152; divided after the sum, 98304 is "
            "inf in float16.",
        )


@task("2.4")
def test_an_error_of_the_all_reduce_ends_the_step(grade: Grade) -> None:
    c.check_error_passed_on(grade, MIXED)


@task("2.4")
def test_a_mixed_step_without_any_target_is_refused(grade: Grade) -> None:
    results = grade.run(b.step_on_nothing, 3, MIXED, [2, 0, 1], if_stuck=EVERY_CALL).results
    c.check_nothing_steps(results, "a step where no rank has a target")
