"""No correct answer loses points on a slow machine, and only the learner's lines are blamed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab import course
from distlab.grade.limits import (
    MEMORY_LIMIT_BYTES,
    TIMES_THE_REFERENCE,
    USUAL_S,
    limits_of,
    raised_to,
    scaled_by,
)
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.running import Grade
from distlab.grade.submission import Submission, reference
from distlab.launch import Limits, RankHung
from distlab.launch.limits import Used

ROOT = Path(__file__).parents[3]
HEAD = """import torch.distributed as dist


def exchange(outgoing, dst, incoming, src, group=None):
"""
RIGHT = f"""{HEAD}
    both = [dist.isend(outgoing, dst), dist.irecv(incoming, src)]
    for work in both:
        work.wait()
"""
LIMIT_S = 1.0  # of wall-clock time; computing is limited to 0.2 s


def exchange_slowly(lesson: Any) -> float:
    """Exceed the limit on computing before the exchange, as on a slow machine."""
    _compute_s(0.25)
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = torch.zeros(1)
    lesson.exchange(torch.ones(1) * rank, (rank + 1) % size, arrived, (rank - 1) % size)
    return float(arrived)


def _compute_s(seconds: float) -> None:
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass


def a_grade(folder: Path, text: str, world: str, *, has_reference: bool = True) -> Grade:
    phase = folder / "phase1_data_parallel"
    phase.mkdir()
    (phase / "collectives.py").write_text(text)
    task = course.load(ROOT).task("1.3")
    right = reference(ROOT) if has_reference else None
    return Grade(Submission(folder), task, world, LIMIT_S, reference=right)


def never_end(lesson: Any) -> None:
    """Hang in given code, which no learner can fix."""
    while True:
        pass


def verdict(grade: Grade, body: Callable[[Any], object] = exchange_slowly) -> Verdict:
    with pytest.raises(RankHung) as raised:
        grade.run(body, 2)
    return verdict_on(raised.value)


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_takes_as_long_as_the_reference_passes(tmp_path: Path, world: str) -> None:
    assert a_grade(tmp_path, RIGHT, world).run(exchange_slowly, 2).results == [1.0, 0.0]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_an_endless_loop_hangs_beyond_what_the_reference_needs(tmp_path: Path, world: str) -> None:
    found = verdict(a_grade(tmp_path, f"{HEAD}    while True: pass\n", world))
    assert (found.outcome, found.kind) == (Outcome.HANG, "endless loop")
    assert "collectives.py:5 in exchange" in found.message


def test_without_a_reference_limits_follow_the_speed_of_the_machine() -> None:
    usual = limits_of(10.0)
    assert scaled_by(usual, Used(cpu_s=USUAL_S / 2, wall_s=USUAL_S)) is None
    scaled = scaled_by(usual, Used(cpu_s=USUAL_S * 2, wall_s=USUAL_S * 4))
    assert scaled == Limits(40.0, 4.0, 8.0, MEMORY_LIMIT_BYTES)


def test_without_a_reference_given_code_is_not_blamed(tmp_path: Path) -> None:
    found = verdict(a_grade(tmp_path, RIGHT, "sim", has_reference=False), never_end)
    assert found.kind == "time is up"
    assert "in given code" in found.message
    assert "test_slow_machines.py" not in found.message + found.details


def test_limits_are_raised_to_what_the_reference_needs_and_never_lowered() -> None:
    usual = limits_of(10.0)
    assert raised_to(usual, Used(cpu_s=0.01, wall_s=0.1)) is None
    raised = raised_to(usual, Used(cpu_s=1.0, wall_s=8.0))
    clock_s, computing_s = TIMES_THE_REFERENCE * 8.0, TIMES_THE_REFERENCE * 1.0
    assert raised == Limits(clock_s, computing_s, 16.0, MEMORY_LIMIT_BYTES)
    assert raised_to(limits_of(500.0), Used(cpu_s=1.0, wall_s=8.0)) is None
