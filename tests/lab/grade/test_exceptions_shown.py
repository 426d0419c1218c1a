"""How verdicts show exceptions: the call on one line, the case, and the learner's lines."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab import course
from distlab.grade import WrongResult
from distlab.grade.called import Lesson
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.running import Grade
from distlab.grade.submission import Submission
from distlab.launch import RankFailed
from distlab.util.tracebacks import headline
from judging.calls import case_told, cause_told
from judging.groups import inside_group
from phase2_advanced.given import Action

ROOT = Path(__file__).parents[3]
LOSS = "import torch\n\n\ndef broadcast(x, src=0):\n    return torch.ones(1)\n"
RAISES = "def broadcast(x, src=0):\n    raise KeyError(src)\n"


def raise_it(*args: object) -> None:
    raise ZeroDivisionError("no")


def shown(*args: object) -> str:
    """Return the headline of the exception that a lesson's function raises with these arguments."""
    module = ModuleType("lesson")
    vars(module)["raise_it"] = raise_it
    with pytest.raises(ZeroDivisionError) as caught:
        Lesson(module).raise_it(*args)
    return headline(caught.value)


def test_a_call_is_one_line_with_short_arguments() -> None:
    schedule = [[Action("F", 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0)]]
    block = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    batch = (torch.ones(8, 2), None, None)
    assert shown(schedule, [block], [batch, None], raise_it) == (
        "ZeroDivisionError: no, in raise_it([[F0, F0.1, B0.1, B0]], [Sequential], "
        "[(<(8, 2) float32>, None, None), None], raise_it)"
    )
    assert shown(torch.bfloat16, 1) == "ZeroDivisionError: no, in raise_it(torch.bfloat16, 1)"
    assert shown({"mask": torch.ones(1)}, "two\nlines", Path()).count("\n") == 0
    assert len(shown([list(range(10_000))] * 1_000)) < 1_000


def test_an_exception_says_in_which_case_it_was_raised() -> None:
    with pytest.raises(ValueError, match="no") as caught, case_told("of two stages", "Runner"):
        raise ValueError("no")
    assert headline(caught.value) == "ValueError: no, in Runner of two stages"
    with pytest.raises(NotImplementedError) as todo, case_told("of two stages"):
        raise NotImplementedError("Task 2.8")
    assert headline(todo.value) == "NotImplementedError: Task 2.8"


def test_a_riddle_of_torch_is_followed_by_its_cause() -> None:
    causes = {"riddle": "Send it.", "other": "Keep it."}
    with pytest.raises(RuntimeError) as riddle, cause_told(causes):
        raise RuntimeError("a riddle.\nIn two lines.")
    assert headline(riddle.value) == "RuntimeError: a riddle. Send it.\nIn two lines."
    with pytest.raises(RuntimeError) as called, case_told("of two", "Runner"), cause_told(causes):
        raise RuntimeError("a riddle.")
    assert headline(called.value) == "RuntimeError: a riddle, in Runner of two. Send it."
    with pytest.raises(RuntimeError) as clear, cause_told(causes):
        raise RuntimeError("clear.")
    assert headline(clear.value) == "RuntimeError: clear."
    with pytest.raises(ValueError, match="no") as refused, cause_told({"": "Wait."}, ValueError):
        raise ValueError("no")
    assert headline(refused.value) == "ValueError: no. Wait."


def verdict(
    folder: Path, text: str, world: str, body: Callable[..., object], size: int, *args: object
) -> Verdict:
    lessons = folder / "phase1_data_parallel"
    lessons.mkdir()
    (lessons / "collectives.py").write_text(text)
    task = course.load(ROOT).task("1.4")
    with pytest.raises(RankFailed) as caught:
        Grade(Submission(folder), task, world, 10.0).run(body, size, *args)
    return verdict_on(caught.value)


def go_backward(lesson: Any, group: Any = None) -> None:
    lesson.broadcast(torch.ones(1)).sum().backward()


def a_list_of_tensors(lesson: Any, group: Any = None) -> None:
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        raise WrongResult(f"broadcast should return None; it returned {torch.ones(2, 2)}")


def test_a_result_of_the_wrong_kind_is_reported_once(tmp_path: Path) -> None:
    text = "broadcast should return None; it returned tensor([[1., 1.], [1., 1.]])"
    found = verdict(tmp_path, LOSS, "sim", a_list_of_tensors, 3)
    assert found == Verdict(Outcome.FAILED, f"on rank 2 of 3, {text}", found.details, kind="wrong")
    assert "broadcast should" not in found.details
    assert "Raised outside" not in found.details
    shutil.rmtree(tmp_path / "phase1_data_parallel")
    alone = verdict(tmp_path, LOSS, "sim", a_list_of_tensors, 1)
    assert alone == Verdict(Outcome.FAILED, text, kind="wrong")


def files_in(found: Verdict) -> list[str]:
    lines = [line for line in found.details.splitlines() if line.startswith("  File ")]
    return [Path(line.split('"')[1]).name for line in lines]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_where_no_line_is_the_learners_none_is_shown(tmp_path: Path, world: str) -> None:
    found = verdict(tmp_path, LOSS, world, go_backward, 1)
    assert "does not require grad" in found.message
    assert files_in(found) == []
    assert found.details.splitlines()[-1] == "Raised outside of your file."
    assert "RuntimeError: element 0" in found.message
    assert "RuntimeError" not in found.details
    assert "Traceback" not in found.details
    assert ".backward()" not in found.details


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_learners_lines_are_shown_alone(tmp_path: Path, world: str) -> None:
    found = verdict(tmp_path, RAISES, world, inside_group, 5, go_backward)
    assert files_in(found) == ["collectives.py"]
    assert "raise KeyError(src)" in found.details
    assert "Traceback (most recent call last):" in found.details
