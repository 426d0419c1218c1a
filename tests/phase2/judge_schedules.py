"""Judges tasks 2.10, 2.11 and 2.13: which actions, in which order, and what that costs."""

from collections import Counter
from collections.abc import Sequence

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import clauses, counted, joined
from judging.checks import check_refused
from phase2 import drawings as d
from phase2 import pipelines as b
from phase2_advanced.given import Action, Schedule

GPIPE = {(3, 4): d.GPIPE_3_4, (4, 2): d.GPIPE_4_2}  # (stages, micro-batches): drawing
ONE_F_ONE_B = {
    (3, 4): d.ONE_F_ONE_B_3_4,
    (4, 8): d.ONE_F_ONE_B_4_8,
    (4, 2): d.ONE_F_ONE_B_4_2,
}
SIZES = [
    (4, 8),
    (3, 5),
    (2, 3),
    (3, 2),
    (5, 3),
    (8, 8),
    (1, 4),
    (1, 1),
    (6, 30),
]  # stages, micro-batches


def _schedules(grade: Grade, function: str) -> list[tuple[int, int, Schedule, str]]:
    """Stages, micro-batches, what the learner's function returns, and the words for its size."""
    sizes = [*SIZES, (grade.random.randint(2, 6), grade.random.randint(2, 12))]
    schedules = _called(grade, function, sizes)
    names = [d.size_text(p, m) for p, m in sizes]
    for (p, m), schedule, here in zip(sizes, schedules, names, strict=True):
        _check_actions(here, schedule, p, m)
    return [(*size, *rest) for size, *rest in zip(sizes, schedules, names, strict=True)]


def _called(grade: Grade, function: str, sizes: Sequence[tuple[int, ...]]) -> list[Schedule]:
    found = grade.call(b.rows_of_each, function, [list(size) for size in sizes])
    return [[[Action(*action) for action in row] for row in rows] for rows in found]


def _check_actions(here: str, schedule: Schedule, p: int, m: int, v: int = 1) -> None:
    """Check that every stage does every action once, and that the schedule can be run."""
    check(
        len(schedule) == p,
        f"{here}: {counted(p, 'list')}, one for each stage, should come; {len(schedule)} came.",
    )
    passes = [(i, chunk) for i in range(m) for chunk in range(v)]
    wanted = Counter(Action(kind, *one) for kind in "FB" for one in passes)
    for stage, actions in enumerate(schedule):
        missing, extra = wanted - Counter(actions), Counter(actions) - wanted
        check(
            not missing and not extra,
            f"{here}: stage {stage} should do each of its {len(wanted)} actions once. "
            f"{_difference(missing, extra)}.{d.picture(schedule)}",
        )
    is_run = len(d.timeline(schedule)) == 4 * p * m * v
    check(
        is_run,
        f"{here}: this schedule comes to a stop. {d.why_stopped(schedule)}{d.picture(schedule)}",
    )


def _difference(missing: Counter[Action], extra: Counter[Action]) -> str:
    lacks = [f"lacks {_some(missing)}"] if missing else []
    has = [f"has {_some(extra)} too often"] if extra else []
    return f"It {clauses([*lacks, *has])}"


def _some(actions: Counter[Action]) -> str:
    first, others = [str(action) for action in list(actions)[:4]], len(actions) - 4
    return joined(first) if others <= 0 else f"{', '.join(first)} and {others} more"


def _check_length(here: str, schedule: Schedule, expected: int, cause: str) -> None:
    """Check how long a schedule takes: the unit is a forward and a backward pass."""
    for backward_time in (1, 2):
        unit = 1 + backward_time
        found = d.length(schedule, backward_time) / unit
        takes = "twice as long" if backward_time == 2 else "as long"
        check(
            found <= expected,
            f"{here}: if a backward pass takes {takes} as a forward pass, "
            f"the step should take as long as {expected} forward and {expected} backward passes; "
            f"it takes as long as {found:g}. {cause}{d.picture(schedule)}",
        )


def _check_in_flight(here: str, schedule: Schedule, most: list[int], cause: str) -> None:
    for stage, actions in enumerate(schedule):
        found = d.in_flight(actions)
        check(
            found <= most[stage],
            f"{here}: at most {most[stage]} may be in flight in stage {stage}, but {found} are, "
            f"and each of them holds its activations. {cause}{d.picture(schedule)}",
        )


def _check_drawing(here: str, schedule: Schedule, text: str, cause: str) -> None:
    check(
        schedule == d.drawn(text),
        f"{here}: expected was\n    "
        + d.redrawn(text).replace("\n", "\n    ")
        + f"\nbut it is{d.picture(schedule)}\n{cause}",
    )


# 2.10 GPipe


@task("2.10")
@pytest.mark.parametrize(("p", "m"), [*GPIPE])
def test_gpipe_is_that_of_the_paper(grade: Grade, p: int, m: int) -> None:
    (schedule,) = _called(grade, "gpipe_schedule", [(p, m)])
    here = d.size_text(p, m)
    _check_actions(here, schedule, p, m)
    _check_drawing(
        *(here, schedule, GPIPE[p, m]),
        "All forward passes come first, from micro-batch 0 on; the backward passes begin with the "
        "last micro-batch.",
    )


@task("2.10")
def test_gpipe_of_any_size(grade: Grade) -> None:
    for p, m, schedule, here in _schedules(grade, "gpipe_schedule"):
        _check_length(
            *(here, schedule, m + p - 1),
            "Are several micro-batches on their way at the same time?",
        )
        _check_order(here, schedule, [*range(m)], [*reversed(range(m))])
        for stage, actions in enumerate(schedule):
            check(
                [action.kind for action in actions] == ["F"] * m + ["B"] * m,
                f"{here}: stage {stage} should do all {m} forward passes first, and then the "
                f"backward passes.{d.picture(schedule)}",
            )


def _check_order(here: str, schedule: Schedule, forward: list[int], backward: list[int]) -> None:
    """Check in which order micro-batches go forward, and in which backward."""
    for stage, actions in enumerate(schedule):
        for kind, name, wanted in (("F", "forward", forward), ("B", "backward", backward)):
            found = [action.micro_batch for action in actions if action.kind == kind]
            check(
                found == wanted,
                f"{here}: in stage {stage}, micro-batches should go {name} in the order {wanted}; "
                f"they do in the order {found}.{d.picture(schedule)}",
            )


# 2.11 1F1B


@task("2.11")
def test_1f1b_holds_few_micro_batches(grade: Grade) -> None:
    for p, _, schedule, here in _schedules(grade, "one_f_one_b_schedule"):
        _check_in_flight(
            *(here, schedule, [p - stage for stage in range(p)]),
            "The last stage can go backward right after each forward pass, and every stage before "
            "it needs one more forward pass ahead.",
        )


@task("2.11")
def test_1f1b_takes_no_longer_than_gpipe(grade: Grade) -> None:
    for p, m, schedule, here in _schedules(grade, "one_f_one_b_schedule"):
        _check_order(here, schedule, [*range(m)], [*range(m)])
        _check_length(
            *(here, schedule, m + p - 1),
            "Does each stage have enough forward passes ahead when it begins to take turns?",
        )


@task("2.11")
@pytest.mark.parametrize(("p", "m"), [*ONE_F_ONE_B])
def test_1f1b_is_that_of_the_paper(grade: Grade, p: int, m: int) -> None:
    """It is the only order with that memory and that length."""
    here = d.size_text(p, m)
    (schedule,) = _called(grade, "one_f_one_b_schedule", [(p, m)])
    _check_actions(here, schedule, p, m)
    _check_drawing(
        here,
        schedule,
        ONE_F_ONE_B[p, m],
        "Where do they differ first, and which stage waits there?",
    )


# 2.13 Interleaved 1F1B

INTERLEAVED = [
    (4, 8, 2),
    (2, 4, 2),
    (3, 6, 3),
    (4, 4, 3),
    (2, 2, 2),
    (2, 6, 1),
    (1, 3, 2),
    (2, 30, 2),
]


def _interleaved(grade: Grade) -> list[tuple[int, int, int, Schedule, str]]:
    """Stages, micro-batches, chunks, the learner's schedule, and the words for its size."""
    p = grade.random.randint(2, 5)
    drawn = p, p * grade.random.randint(1, 3), grade.random.randint(2, 4)
    found = []
    sizes = [*INTERLEAVED, drawn]
    for size, schedule in zip(sizes, _called(grade, "interleaved_schedule", sizes), strict=True):
        here = d.size_text(*size[:2]) + f", {counted(size[2], 'chunk')} on each stage"
        _check_actions(here, schedule, *size)
        found.append((*size, schedule, here))
    return found


@task("2.13")
def test_interleaving_divides_the_bubble(grade: Grade) -> None:
    for p, m, v, schedule, here in _interleaved(grade):
        _check_length(
            *(here, schedule, v * m + p - 1),
            f"1F1B takes {v * (m + p - 1)} such passes through one chunk: its bubble is {v} times "
            "as long. Do p micro-batches go through a chunk before they begin the next, and has "
            "each stage enough forward passes ahead?",
        )


@task("2.13")
def test_interleaving_holds_no_more_than_it_needs(grade: Grade) -> None:
    for p, _, v, schedule, here in _interleaved(grade):
        most = [(v - 1) * p + 2 * (p - 1 - stage) + 1 for stage in range(p)]
        _check_in_flight(
            *(here, schedule, most),
            "How many forward passes has the last stage done when micro-batch 0 leaves the last "
            "block? Two more for every stage before it are enough.",
        )


@task("2.13")
def test_interleaving_refuses_a_remainder(grade: Grade) -> None:
    for p, m in ((2, 3), (4, 6), (grade.random.randint(3, 7), 1)):
        found = grade.call(b.refusal_of_schedule, "interleaved_schedule", p, m, 2)
        check_refused([found], f"m = {m}, which is not a multiple of p = {p},", str(m), str(p))
