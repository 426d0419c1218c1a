"""With ``--semantics nccl``, bodies run on simulated GPUs, and what is wrong on them is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab import course
from distlab.grade import gpus
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.running import Grade
from distlab.grade.submission import Submission
from distlab.sim import Cluster, Options

ROOT = Path(__file__).parents[3]
LESSON = """
import torch.distributed as dist

TABLE = __import__("torch").zeros(1)  # made at import: on the CPU, as on real GPUs

def exchange(x):
    work = dist.all_reduce(x, async_op=True)
    {wait}
    return x.item() + sum(x.tolist())
"""


@pytest.fixture
def grade_of(tmp_path: Path) -> Any:
    def make(wait: str, semantics: str = "nccl") -> Grade:
        phase = tmp_path / "phase1_data_parallel"
        phase.mkdir()
        (phase / "collectives.py").write_text(LESSON.format(wait=wait))
        task = course.load(ROOT).task("1.3")
        return Grade(Submission(tmp_path), task, "sim", TIMEOUT_S, semantics=semantics)

    return make


def sum_up(lesson: Any, given: torch.Tensor) -> dict[str, Any]:
    value = lesson.exchange(given + dist.get_rank())
    devices = [str(x.device) for x in (given, torch.ones(2), lesson.TABLE)]
    return {"value": value, "devices": devices}


def test_what_a_body_makes_and_gets_is_on_its_rank_s_gpu(grade_of: Any) -> None:
    run = grade_of("work.wait()").run(sum_up, 3, torch.zeros(1))
    assert [result["value"] for result in run.results] == [6.0] * 3
    devices = [[f"cuda:{rank}", f"cuda:{rank}", "cpu"] for rank in range(3)]
    assert [result["devices"] for result in run.results] == devices
    assert (run.host_syncs, run.hazards) == ([2] * 3, [])


def test_wrong_uses_and_the_places_of_waits_are_noted(grade_of: Any) -> None:
    grade = grade_of("pass")
    assert "all_reduce" in grade.run(sum_up, 2, torch.zeros(1)).hazards[0]
    assert grade.gpus.hazards
    heading, *rows = gpus.sync_rows({"1.3": grade.gpus.syncs})
    assert heading.split() == ["task", "place", "waits", "in", "most", "times"]
    place = ["1.3", "collectives.py:9", "in", "exchange"]
    assert [row.split() for row in rows] == [[*place, ".item()", "1"], [*place, ".tolist()", "1"]]


@pytest.mark.parametrize(
    "settings", [{"cluster": Cluster(1, 2)}, {"options": Options(has_devices=False)}]
)
def test_worlds_that_a_test_has_set_stay_without_gpus(grade_of: Any, settings: Any) -> None:
    run = grade_of("work.wait()").run(sum_up, 2, torch.zeros(1), **settings)
    assert run.results[0]["devices"] == ["cpu"] * 3
    assert run.host_syncs == []


def test_one_test_may_ask_for_gpus(grade_of: Any) -> None:
    grade = grade_of("work.wait()", "gloo")
    assert grade.run(sum_up, 2, torch.zeros(1)).host_syncs == []
    on_gpus = grade.run(sum_up, 2, torch.zeros(1), options=Options(semantics="nccl"))
    assert on_gpus.host_syncs == [2, 2]
