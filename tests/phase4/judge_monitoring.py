"""Judges tasks 4.14 to 4.16: the parts of a step, rates, FLOPs and memory, and slow ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted, joined, verb
from judging.checks import MEASURED, ON_CPU, check_refused, check_silent, is_close
from judging.expect import check_small, expect, expect_cost, expect_on_all_ranks, results_in_group
from phase4 import monitoring as b
from phase4.monitoring import Event, Story, Times, Verdict

# Task 4.14: random step programs are compared with a model, ``times_of``

NAMES = ("step_s", "data_s", "compute_s", "communication_s")
STUCK = "All ranks put their numbers together, by collectives that all of them call."
CAUSES_OF_TIMES = {  # likely causes of wrong times, by event in a program; the first match counts
    "fail": "An error ends the parts that it leaves: put what comes after yield into finally.",
    "launch": "Starting kernels takes no time, and the device works on them until synchronize has "
    "returned. Call synchronize first and read the clock then: when the timer is made, when a part "
    "begins or ends, and when a step ends.",
    "part": "Time in an inner part counts for this one alone; when it ends, the outer one goes on. "
    "A part that is entered twice in a step gets the sum; a new step begins with nothing.",
    "": "The first step begins when the timer is made, and each of the others when the one before "
    "has ended.",
}


COUNTED_TWICE = (
    "The parts add up to more than the step: the time of an inner part counts for it alone, and "
    "not for the part around it, too."
)


def _times_in_words(times: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in zip(NAMES, times, strict=True))


def _check_times(
    times: Sequence[Any],
    right: Sequence[Times],
    what: str,
    cause: str,
    tolerance: float = 1e-6,
) -> None:
    for step, (actual, wanted) in enumerate(zip(times, right, strict=True)):
        step_s, *parts_s = actual
        is_counted_twice = sum(parts_s) > step_s + tolerance
        # Parts that were not set back to 0 add up to more than the step, too.
        so_far_s = [sum(column) for column in zip(*right[: step + 1], strict=True)][1:]
        if is_counted_twice and not is_close(parts_s, so_far_s, tolerance):
            cause = COUNTED_TWICE
        check(
            is_close([*actual], [*wanted], tolerance),
            f"{what}: step {step} should have {_times_in_words(wanted)}; it has "
            f"{_times_in_words(actual)}. {cause}",
        )


@task("4.14")
def test_times_of_steps(grade: Grade) -> None:
    programs = [b.draw_program(grade.random, 2, most) for most in (1, 2, 3) for _ in range(30)]
    # The first failure is reported, and the shortest program is the clearest.
    programs.sort(key=lambda program: len(_program_in_words(program)))
    for program, (times, lost_s) in zip(programs, grade.call(b.split, programs), strict=True):
        text = _program_in_words(program)
        cause = next(cause for word, cause in CAUSES_OF_TIMES.items() if word in text)
        _check_times(times, b.times_of(program), f"steps of {text}", cause)
        check(
            lost_s < b.READING_S,
            f"steps of {text}: {lost_s / b.READING_S:.0f} readings of the clock are in no step. "
            "One reading ends a step and begins the next: with a second one, what is between them, "
            "a wait for the device too, is lost.",
        )


def _program_in_words(program: Sequence[Event]) -> str:
    return ", ".join(map(_event_in_words, program))


def _event_in_words(event: Event) -> str:
    kind, *values = event
    if kind in ("part", "fail"):
        names = values[0] if kind == "part" else "/".join(values[0])
        return f"{kind} {names}({_program_in_words(values[1])})"
    return f"{kind} {values[0]:g} s" if values else "end"


@task("4.14")
@pytest.mark.parametrize("name", ["dta", ""])
def test_a_part_that_is_mistyped(grade: Grade, name: str) -> None:
    facts = grade.call(b.mistype, name)
    check_refused([facts], f"part({name!r})", repr(name), "data", "compute", "communication")
    check(
        not facts["ran"],
        f"part({name!r}) should be refused on entry; what is inside of it has run. An error that "
        "comes when it is left takes the place of the one that left it.",
    )
    _check_times(
        *(facts["times"], [(5.0, 0.0, 5.0, 0.0)], f"part({name!r}) inside of compute"),
        "What is refused changes nothing: compute goes on. Look at the name before you open it.",
    )


@task("4.14")
@pytest.mark.parametrize(("num_batches", "leave"), [(0, ""), (4, ""), (3, "break"), (3, "error")])
def test_waiting_for_batches_is_data(grade: Grade, num_batches: int, leave: str) -> None:
    start_s, end_s, *waits_s = (grade.random.randrange(8, 99) / 8 for _ in range(num_batches + 2))
    facts = grade.call(b.loop, start_s, waits_s, end_s, leave)
    where = f"a loader of {counted(num_batches, 'batch', 'batches')}"
    where += f", left by {leave} at the second one" if leave else ""
    last = 1 if leave else num_batches
    expect(f"{where}: what batches yields", facts["batches"], [*range(last)])
    expect(
        f"{where}: the number of batches that the loader was asked for, as each of them comes,",
        *(facts["asked"], [*range(1, last + 1)]),
        "Ask for the next batch when the loop wants it.",
    )
    first, *others = [*waits_s, end_s]
    waits = [first + start_s, *others][: last + 1]
    right = [(wait + 3, wait, 2.0, 0.0) for wait in waits[:-1]]
    right += [(waits[-1] + 8, waits[-1], 0.0, 0.0)]
    times = joined([f"{wait_s:g} s" for wait_s in (start_s, *waits_s, end_s)])
    _check_times(
        *(facts["times"], right, f"{where}, which takes {times} to start, for each and to end"),
        "Starting counts as data, and so do the last seconds, after which there is no batch: they "
        "belong to the step that follows. What the loop does with a batch is not data, and no part "
        "is open when it has ended.",
    )


@task("4.14")
def test_waiting_for_the_slowest_rank_is_communication(grade: Grade) -> None:
    seconds = [grade.random.randrange(1, 40) / 8 for _ in range(4)]
    slowest = max(seconds)
    run = grade.run(b.train, len(seconds), seconds, 3, options=ON_CPU, if_stuck=STUCK)
    for rank, times in enumerate(run.results):
        right = (slowest, 0.0, seconds[rank], slowest - seconds[rank])
        _check_times(
            *(times, [right] * 3, f"ranks compute for {seconds} s, then all-reduce; rank {rank}"),
            "The default clock is time.perf_counter, and waiting for the network is communication.",
            1e-3,
        )
    expect_cost(
        "the number of collectives in 3 steps with an all-reduce each, by rank,",
        *(run.collectives, [3] * len(seconds), "A timer needs no communication."),
    )


def _times(grade: Grade) -> list[Times]:
    return [tuple(grade.random.random() for _ in NAMES) for _ in range(3)]


def _check_gathered(by_rank: Sequence[Any], right: Sequence[Times]) -> None:
    as_tuples = [[*map(tuple, times)] for times in by_rank]
    cause = "Rank by rank, just as they were given: float32 rounds, float64 does not."
    expect_on_all_ranks("what gather_times returns", as_tuples, [*right], cause)


@task("4.14", real=True)
def test_every_rank_knows_the_times_of_all(grade: Grade) -> None:
    right = _times(grade)
    run = grade.run(b.gather, 3, right, if_stuck=STUCK)
    _check_gathered(run.results, right)
    if grade.is_simulated:
        check_small(run, 1, 32, "gather_times")


@task("4.14")
def test_gathering_times_inside_a_group(grade: Grade) -> None:
    right = _times(grade)
    _check_gathered(results_in_group(grade, b.gather, right), right)


# Task 4.15: rates of the job, counted FLOPs, and peak memory

MIB = 2**20
Given = Sequence[tuple[float, ...]]  # arguments by rank


# Rates: throughput(num_samples, seconds) and mfu(flops, step_s, peak_flops_per_s)

CAUSES_OF_RATES = {
    "throughput": "All samples over the time of the slowest rank, or of the only one. A mean or a "
    "sum of the ranks' own rates is not the rate of the job, and float32 rounds.",
    "mfu": "All FLOPs, over the time of the slowest rank times the sum of all peaks; float32 "
    "rounds.",
}
BYTES = {"throughput": 16, "mfu": 24}  # limit on each rank's contribution


def _draw(grade: Grade, function: str) -> Given:
    draw = grade.random.uniform
    if function == "throughput":
        return [(grade.random.randrange(1, 4000), draw(0.5, 3)) for _ in range(3)]
    return [(draw(1e12, 4e12), draw(0.01, 0.02), draw(5e14, 1e15)) for _ in range(3)]


def _check_rate(by_rank: Sequence[float], function: str, given: Given) -> None:
    work, _, *peaks = (sum(column) for column in zip(*given, strict=True))
    right = work / (max(times_s for _, times_s, *_ in given) * (peaks[0] if peaks else 1))
    for rank, rate in enumerate(by_rank):
        where = f"ranks call {function} with {[*given]}: the result on rank {rank}"
        expect(where, rate, right, CAUSES_OF_RATES[function], 1e-12 * right)


@task("4.15", real=True)
@pytest.mark.parametrize("function", CAUSES_OF_RATES)
def test_the_rate_of_the_job(grade: Grade, function: str) -> None:
    given = _draw(grade, function)
    run = grade.run(b.rate, len(given), function, given, if_stuck=STUCK)
    _check_rate(run.results, function, given)
    if grade.is_simulated:
        check_small(run, 2, BYTES[function], function)


UNEVEN: Sequence[tuple[str, Given]] = (
    ("throughput", [(300, 1.5)]),
    ("throughput", [(300, 1.0), (0, 2.5), (100, 2.0)]),  # the slowest rank has no samples
    ("throughput", [(0, 1.0), (0, 0.5)]),
    ("throughput", [(2**24 + 1 + 2 * rank, 1.0) for rank in range(3)]),  # inexact in float32
    ("mfu", [(1e12, 0.01, 1e15), (0.0, 0.01, 5e14)]),  # an idle device counts too
)


@task("4.15")
@pytest.mark.parametrize(("function", "given"), UNEVEN)
def test_rates_of_uneven_ranks(grade: Grade, function: str, given: Given) -> None:
    run = grade.run(b.rate, len(given), function, given, if_stuck=STUCK)
    _check_rate(run.results, function, given)


@task("4.15")
@pytest.mark.parametrize("function", CAUSES_OF_RATES)
def test_rates_inside_a_group(grade: Grade, function: str) -> None:
    given = _draw(grade, function)
    _check_rate(results_in_group(grade, b.rate, function, given), function, given)


# FLOPs

COUNTS: dict[str, tuple[Callable[..., int], str]] = {  # kind -> FLOPs by sizes, and the reason
    "trained": (
        lambda m, k, h, n: 4 * m * k * h + 6 * m * h * n,
        "2·m·k·n for each layer's forward pass and for each of its gradients, but none for the "
        "gradient of the data",
    ),
    "forward only": (
        lambda m, k, h, n: 2 * m * k * h + 2 * m * h * n,
        "because there is no backward pass",
    ),
    "recomputed": (
        lambda m, k, h, n: 6 * m * k * h + 6 * m * h * n,
        "because the backward pass computes the forward pass again, up to the last tensor that it "
        "needs",
    ),
    "convolution": (
        lambda m, channels, filters, width: 4 * m * width**2 * filters * channels * 9,
        "once for the output of the convolution and once for the gradient of its weight",
    ),
}


@task("4.15")
@pytest.mark.parametrize("kind", COUNTS)
def test_operations_of_a_step_are_counted(grade: Grade, kind: str) -> None:
    sizes, (right, why) = grade.random.sample(range(4, 12), 4), COUNTS[kind]
    facts = grade.call(b.count, kind, sizes)
    expect("the number of times that count_flops calls step", facts["calls"], 1)
    expect(f"{kind}, with the sizes {sizes}: the FLOPs", facts["flops"], right(*sizes), why)
    check(
        not facts["other"],
        f"{kind}: a step that is counted should leave all as one that is not does; after it, "
        f"{joined(facts['other'])} {verb(facts['other'], 'are', 'is')} other than after the step "
        "alone. Let the step do what it does: one whose random numbers are put back drops the same "
        "activations as the one before.",
    )
    check(
        not facts["printed"],
        f"count_flops should print nothing; it printed {facts['printed'][:60]!r}. "
        "FlopCounterMode prints a table unless display=False.",
    )


# Memory


@task("4.15")
def test_the_peak_of_the_process(grade: Grade) -> None:
    low, peak, high = grade.call(b.process_memory)
    check(
        0.97 * low <= peak <= 1.03 * high,
        f"the most that the process has held in memory is between {low / MIB:.0f} and "
        f"{high / MIB:.0f} MiB; peak_memory_bytes says {peak / MIB:.3g} MiB. ru_maxrss of the "
        "process itself is the peak, not what it holds now; Linux counts it in KiB, macOS in "
        "bytes.",
    )


@task("4.15")
def test_the_peak_of_a_gpu(grade: Grade) -> None:
    index, num_bytes = grade.random.randrange(1, 8), grade.random.randrange(10**9, 10**10)
    expect(
        f"the peak of GPU {index}, of which torch.cuda.max_memory_allocated says "
        f"{num_bytes + index},",
        *(grade.call(b.gpu_memory, index, num_bytes), num_bytes + index),
        "Pass the device on: without it, torch answers for the current one.",
    )


# Task 4.16: random stories are compared with a model of the detector, ``verdicts_of``

STUCK_MEDIANS = "All ranks call add after every step, and gather their medians in the same one."
RATIO = 2  # column of a verdict
CAUSES_OF_VERDICTS = (  # likely causes of wrong ranks, parts and ratios
    "The own work, data_s + compute_s, is added up step by step before its median is taken over "
    "the window, which begins empty; a rank is slow if that is above factor times the median of "
    "all ranks. Of two in the middle, the lower one counts: median_low. Stragglers are ordered by "
    "rank.",
    "The part to blame is the one in which the rank needs more seconds above the median of all "
    "ranks, which need not be its longest one, nor the one with the larger ratio.",
    "The ratio is that of the rank's own work to the median of all ranks, inf if that is 0.",
)
ADDS_MEDIANS = (
    "That is the median of data_s plus the median of compute_s. Add data_s and compute_s in each "
    "step, and then take the median over the window."
)
IN_FLOAT32 = (
    "The ratio is right up to the rounding of float32: gather the medians in torch.float64."
)


def _verdict_in_words(verdict: Verdict) -> str:
    stragglers = (f"rank {r} by its {part}, ratio {ratio:.12g}" for r, part, ratio in verdict)
    return ", ".join(stragglers) or "no straggler"


def _check_verdicts(by_rank: Sequence[Sequence[Any]], stories: Sequence[Story]) -> None:
    for place, story in sorted(enumerate(stories), key=lambda pair: len(pair[1].steps)):
        options = ", ".join(f"{name}={value}" for name, value in story.options.items())
        for rank, verdicts in enumerate(by_rank):
            models = b.verdicts_of(story), b.verdicts_of(story, adds_medians=True)
            for step, (verdict, right, with_medians) in enumerate(
                zip(verdicts[place], *models, strict=True)
            ):
                wrong = _wrong_column(verdict, right)
                cause = CAUSES_OF_VERDICTS[wrong or 0]
                if _wrong_column(verdict, with_medians) is None:
                    cause = ADDS_MEDIANS
                elif wrong == RATIO and _wrong_column(verdict, right, 1e-5) is None:
                    cause = IN_FLOAT32
                where = f"rank {rank} of {len(by_rank)}"
                check(
                    wrong is None,
                    f"with {options or 'no options'}, data_s and compute_s of the ranks are, step "
                    f"by step, {_last_steps(story, step)}. After that, {where} should hear of "
                    f"{_verdict_in_words(right)}; it hears of {_verdict_in_words(verdict)}. "
                    f"{cause}",
                )


def _last_steps(story: Story, step: int) -> str:
    window = int(story.options.get("window", 50))
    steps = [*story.steps[: step + 1]][-2 * window :][-6:]
    omitted = "…, " if step + 1 > len(steps) else ""
    return omitted + ", ".join(str([*works]) for works in steps)


def _wrong_column(verdict: Verdict, right: Verdict, tolerance: float = 1e-9) -> int | None:
    """Return the first wrong column of a verdict: 0 for rank, 1 for part, 2 for ratio, or None."""
    if [rank for rank, *_ in verdict] != [rank for rank, *_ in right]:
        return 0
    pairs = [*zip(verdict, right, strict=True)]
    if not all(part in wanted.split(" or ") for (_, part, _), (_, wanted, _) in pairs):
        return 1
    are_close = (is_close(facts[2], wanted[2], tolerance) for facts, wanted in pairs)
    return None if all(are_close) else RATIO


@task("4.16", real=True)
def test_who_is_slow_and_in_what(grade: Grade) -> None:
    _check_drawn(grade, 4)


@task("4.16")
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_who_is_slow_among_other_numbers_of_ranks(grade: Grade, num_ranks: int) -> None:
    _check_drawn(grade, num_ranks)


def _check_drawn(grade: Grade, num_ranks: int) -> None:
    stories = [b.draw_story(grade.random, num_ranks) for _ in range(60)]
    _check_verdicts(grade.run(b.watch, num_ranks, stories, if_stuck=STUCK_MEDIANS).results, stories)


@task("4.16")
def test_window_and_factor_by_default(grade: Grade) -> None:
    works = [[(0.0, 1.0), (0.0, slow_s)] for slow_s in (1.28125, 1.3125)]
    stories = [Story([steps] * 50, {}) for steps in works]
    _check_verdicts(grade.run(b.watch, 2, stories, if_stuck=STUCK_MEDIANS).results, stories)


@task("4.16")
def test_nothing_is_sent_between_windows(grade: Grade) -> None:
    window = 6
    works = [(0.25, 1.0)] * 4
    before = [Story([works] * (window - 1), {"window": window})]
    check_silent(
        grade.run(b.watch, 4, before, if_stuck=STUCK_MEDIANS), "a step that fills no window"
    )
    steps = [Story([works] * (3 * window + 1), {"window": window})]
    run = grade.run(b.watch, 4, steps, options=MEASURED, if_stuck=STUCK_MEDIANS)
    check_small(run, 3, 3 * 24, "StragglerDetector.add, in three full windows,")


@task("4.16")
def test_stragglers_inside_a_group(grade: Grade) -> None:
    stories = [b.draw_story(grade.random, 3) for _ in range(10)]
    _check_verdicts(results_in_group(grade, b.watch, stories), stories)
