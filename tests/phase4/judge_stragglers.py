"""Judges task 4.16: slow ranks and their slow parts, found at next to no cost.

Stories drawn at random are compared with a model of the detector (``stragglers.expected``).
"""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import MEASURED, check_silent, is_close
from judging.expect import check_small, results_in_group
from phase4 import stragglers as b
from phase4.stragglers import Story, Verdict

STUCK = "All ranks call add after every step, and gather their medians in the same one."
CAUSES = (  # likely causes of wrong ranks, parts and ratios
    "The own work, data_s + compute_s, is added up step by step before its median is taken over "
    "the window, which begins empty; a rank is slow if that is above factor times the median of "
    "all ranks. Of two in the middle, the lower one counts: median_low. Stragglers are ordered by "
    "rank.",
    "The part to blame is the one in which the rank needs more seconds above the median of all "
    "ranks, which need not be its longest one, nor the one with the larger ratio.",
    "The ratio is that of the rank's own work to the median of all ranks, inf if that is 0.",
)


def _in_words(verdict: Verdict) -> str:
    stragglers = (f"rank {r} by its {part}, ratio {ratio:.12g}" for r, part, ratio in verdict)
    return ", ".join(stragglers) or "no straggler"


def _check(by_rank: Sequence[Sequence[Any]], stories: Sequence[Story]) -> None:
    for place, story in sorted(enumerate(stories), key=lambda pair: len(pair[1].steps)):
        options = ", ".join(f"{name}={value}" for name, value in story.options.items())
        for rank, verdicts in enumerate(by_rank):
            for step, (verdict, right) in enumerate(
                zip(verdicts[place], b.expected(story), strict=True)
            ):
                wrong = _wrong_column(verdict, right)
                where = f"rank {rank} of {len(by_rank)}"
                check(
                    wrong is None,
                    f"with {options or 'no options'}, data_s and compute_s of the ranks are, step "
                    f"by step, {_last_steps(story, step)}. After that, {where} should hear of "
                    f"{_in_words(right)}; it hears of {_in_words(verdict)}. {CAUSES[wrong or 0]}",
                )


def _last_steps(story: Story, step: int) -> str:
    window = int(story.options.get("window", 50))
    steps = [*story.steps[: step + 1]][-2 * window :][-6:]
    omitted = "…, " if step + 1 > len(steps) else ""
    return omitted + ", ".join(str([*works]) for works in steps)


def _wrong_column(verdict: Verdict, right: Verdict) -> int | None:
    """Return the first of rank, part and ratio that is wrong in a verdict."""
    if [rank for rank, *_ in verdict] != [rank for rank, *_ in right]:
        return 0
    pairs = [*zip(verdict, right, strict=True)]
    if not all(part in wanted.split(" or ") for (_, part, _), (_, wanted, _) in pairs):
        return 1
    return None if all(is_close(facts[2], wanted[2]) for facts, wanted in pairs) else 2


@task("4.16", real=True)
def test_who_is_slow_and_in_what(grade: Grade) -> None:
    _check_drawn(grade, 4)


@task("4.16")
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_who_is_slow_among_other_numbers_of_ranks(grade: Grade, num_ranks: int) -> None:
    _check_drawn(grade, num_ranks)


def _check_drawn(grade: Grade, num_ranks: int) -> None:
    stories = [b.draw(grade.random, num_ranks) for _ in range(60)]
    _check(grade.run(b.watch, num_ranks, stories, if_stuck=STUCK).results, stories)


@task("4.16")
def test_window_and_factor_by_default(grade: Grade) -> None:
    works = [[(0.0, 1.0), (0.0, slow_s)] for slow_s in (1.28125, 1.3125)]
    stories = [Story([steps] * 50, {}) for steps in works]
    _check(grade.run(b.watch, 2, stories, if_stuck=STUCK).results, stories)


@task("4.16")
def test_nothing_is_sent_between_windows(grade: Grade) -> None:
    window = 6
    works = [(0.25, 1.0)] * 4
    before = [Story([works] * (window - 1), {"window": window})]
    check_silent(grade.run(b.watch, 4, before, if_stuck=STUCK), "a step that fills no window")
    steps = [Story([works] * (3 * window + 1), {"window": window})]
    run = grade.run(b.watch, 4, steps, options=MEASURED, if_stuck=STUCK)
    check_small(run, 3, 3 * 24, "StragglerDetector.add, in three full windows,")


@task("4.16")
def test_stragglers_inside_a_group(grade: Grade) -> None:
    stories = [b.draw(grade.random, 3) for _ in range(10)]
    _check(results_in_group(grade, b.watch, stories), stories)
