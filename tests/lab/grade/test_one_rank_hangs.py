"""One of 8 ranks hangs: the verdict names it and its line."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab import course
from distlab.grade.outcomes import Outcome, verdict_on
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.running import Grade
from distlab.grade.submission import Submission, reference
from distlab.launch import RankHung

ROOT = Path(__file__).parents[3]
LESSON = """
import torch.distributed as dist

def exchange(outgoing, dst, incoming, src, group=None):
    if dist.get_rank() == 5:
        {hang}
"""
HANGS = {"endless loop": "while True: pass", "deadlock": "dist.recv(incoming, src)"}


def exchange_once(lesson: Any) -> None:
    lesson.exchange(torch.ones(1), 0, torch.ones(1), 4)
    dist.barrier()


@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_of_rank_5_alone_names_it_and_its_line(
    tmp_path: Path, world: str, kind: str
) -> None:
    phase = tmp_path / "phase1_data_parallel"
    phase.mkdir()
    (phase / "collectives.py").write_text(LESSON.format(hang=HANGS[kind]))
    task, right = course.load(ROOT).task("1.3"), reference(ROOT)
    grade = Grade(Submission(tmp_path), task, world, TIMEOUT_S, reference=right)
    with pytest.raises(RankHung) as raised:
        grade.run(exchange_once, 8, if_stuck="Who waits?")
    verdict = verdict_on(raised.value)
    assert (verdict.outcome, verdict.kind) == (Outcome.HANG, kind)
    assert "rank 5" in verdict.message
    assert verdict.message.startswith("Who waits?") == (kind == "deadlock"), "a loop is no wait"
    assert ("\nIf that is not it: " in verdict.details) == (kind == "deadlock")
    assert "collectives.py:6 in exchange" in verdict.message + verdict.details
