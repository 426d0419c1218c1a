"""With ``Options(given=…)``, reports name the program's lines and never those of given code."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distlab.sim import Deadlock, Options, RankError, SimulationError, simulate

LESSON = """
import contextlib
import torch
import torch.distributed as dist

def waits_for_nobody():
    dist.recv(torch.zeros(4), 1 - dist.get_rank())

def sends(send):
    send(torch.ones(4), 1 - dist.get_rank())

def forgets():
    dist.isend(torch.ones(4), 1 - dist.get_rank())
    dist.recv(torch.zeros(4), 1 - dist.get_rank())

def raises():
    with contextlib.suppress(KeyError):
        torch.ones(2) @ torch.ones(3)

def raises_inside(action):
    try:
        action()
    except ValueError:
        raise RuntimeError("lesson") from None

def chained():
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        raise ValueError("second") from error

def makes_a_group():
    dist.new_group([dist.get_rank()])

def everybody_waits_inside(stack):
    with stack() as callback:
        callback()
"""

BODY = """
import contextlib
import torch
import torch.distributed as dist

def call(function, *args):
    return function(*args)

def recorded_send(tensor, dst):
    dist.send(tensor, dst)

def sends_through_a_recorder(lesson):
    lesson.sends(recorded_send)

def meets_after_the_lesson(lesson):
    if dist.get_rank() == 0:
        dist.barrier()

def fails():
    raise ValueError("body")

def raises_inside(lesson):
    lesson.raises_inside(fails)

@contextlib.contextmanager
def callbacks():
    yield dist.barrier

def waits_in_a_context(lesson):
    if dist.get_rank() == 0:
        lesson.everybody_waits_inside(callbacks)
"""


def load(folder: Path, name: str, source: str) -> ModuleType:
    file = folder / f"{name}.py"
    folder.mkdir()
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lesson(tmp_path: Path) -> Any:
    return load(tmp_path / "lessons", "lesson", LESSON)


@pytest.fixture
def body(tmp_path: Path) -> Any:
    return load(tmp_path / "tests", "body", BODY)


def options(tmp_path: Path) -> Options:
    return Options(given=(str(tmp_path / "tests"), __file__))


def report(tmp_path: Path, program: Callable[..., object], *args: object) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        simulate(program, 2, *args, options=options(tmp_path))
    assert "body.py" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda body, lesson: body.call(lesson.waits_for_nobody), "lesson.py:7 in waits_for_nob"),
        (lambda body, lesson: body.sends_through_a_recorder(lesson), "lesson.py:10 in sends"),
        # Frames of the standard library are skipped too.
        (
            lambda body, lesson: body.waits_in_a_context(lesson),
            "lesson.py:37 in everybody_waits_inside",
        ),
        (
            lambda body, lesson: body.meets_after_the_lesson(lesson),
            "in given code (meets_after_the_lesson)",
        ),
    ],
)
def test_a_deadlock_names_the_lesson_if_a_line_of_it_is_on_the_stack(
    tmp_path: Path, lesson: Any, body: Any, call: Callable[[Any, Any], object], place: str
) -> None:
    error = report(tmp_path, lambda: call(body, lesson))
    assert isinstance(error, Deadlock)
    assert all(call.where.startswith(place) for call in error.calls)
    assert place in str(error)


def test_unwaited_handles_and_groups_name_the_lesson(
    tmp_path: Path, lesson: Any, body: Any
) -> None:
    trace = simulate(body.call, 2, lesson.forgets, options=options(tmp_path)).trace
    assert [line.split("  ")[-1] for line in trace.unwaited] == ["lesson.py:13 in forgets"] * 2
    assert "lesson.py:33 in makes_a_group" in str(report(tmp_path, body.call, lesson.makes_a_group))


def frames(text: str) -> list[str]:
    return [line.split(", in ")[1] for line in text.splitlines() if line.startswith("  File ")]


def test_a_traceback_has_the_frames_of_the_lesson_only(
    tmp_path: Path, lesson: Any, body: Any
) -> None:
    error = report(tmp_path, body.call, lesson.raises)
    assert isinstance(error, RankError)
    assert frames(str(error)) == ["raises"]
    assert "torch.ones(2) @ torch.ones(3)" in str(error)
    assert frames(str(report(tmp_path, body.raises_inside, lesson))) == ["raises_inside"]
    chained = str(report(tmp_path, body.call, lesson.chained))
    assert frames(chained) == ["chained", "chained"]
    assert "The above exception was the direct cause" in chained
