"""The evidence of a hang as a rank writes it: once, whole, and without endangering the watch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import wait_until
from torch._C._distributed_c10d import HashStore

from distlab.production import evidence as evidence_files
from distlab.production import hang
from distlab.production.hang import Evidence
from distlab.production.hang_report import report


@pytest.fixture
def evidence(tmp_path: Path) -> Iterator[Evidence]:
    """The evidence of rank 0, which believes that there is another rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = Evidence(tmp_path)
    made.processes *= 2
    wait_until(settled)
    yield made
    made.close()
    dist.destroy_process_group()


def settled() -> bool:
    """Return True if gloo's threads have noted the end of every call, which they do later."""
    return all(entry["retired"] for entry in evidence_files.recorded())


def content(evidence: Evidence, name: str) -> Any:
    return json.loads((evidence.folder / name).read_text())


def test_a_silent_rank_writes_its_stacks_and_its_calls(evidence: Evidence) -> None:
    dist.all_reduce(torch.ones(4))
    wait_until(settled)
    evidence.update(4.9, 10.0, step=7)
    assert not evidence.folder.exists()
    evidence.update(5.1, 10.0, step=7)
    assert "test_production_hang_evidence.py" in (evidence.folder / "rank0.txt").read_text()
    found = content(evidence, "rank0.json")
    assert (found["ranks"], found["step"]) == (2, 7)
    if hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        call = found["calls"][-1]
        assert (call["name"], call["form"], call["is_done"]) == ("all_reduce", "(4,) float32", True)
        assert call["site"][0] == __file__


def test_a_rank_that_goes_on_takes_its_evidence_back(evidence: Evidence) -> None:
    evidence.update(6.0, 10.0, step=7)
    evidence.update(0.5, 10.0, step=8)
    assert not evidence.folder.exists()
    evidence.update(6.0, 10.0, step=9)
    evidence.update(7.0, 10.0, step=10)
    assert content(evidence, "rank0.json")["step"] == 9, "it is written once"


def test_a_watch_that_is_held_up_prints_the_stacks(
    evidence: Evidence, capfd: pytest.CaptureFixture[str]
) -> None:
    evidence.update(0.0, 0.02, step=7)
    told: list[str] = []

    def has_told() -> bool:
        told.append(capfd.readouterr().err)
        return "test_production_hang_evidence.py" in "".join(told)

    wait_until(has_told, lambda: "".join(told))
    evidence.close()


def test_a_rank_alone_waits_for_nobody(evidence: Evidence) -> None:
    del evidence.processes[1:]
    evidence.update(6.0, 10.0, step=7)
    assert not evidence.folder.exists()


def test_the_first_rank_that_ends_the_run_says_why(evidence: Evidence) -> None:
    with mock.patch.object(hang, "_state", side_effect=["", "stopped"]):
        evidence.conclude("silent for more than 10 s: rank 1 (step 7)", 7)
    with mock.patch.object(hang, "_state", side_effect=["vanished", ""]):
        evidence.conclude("rank 0 does not answer", 7)
    reason = content(evidence, "reason.json")
    assert reason["reason"] == "silent for more than 10 s: rank 1 (step 7)"
    assert reason["states"] == {"0": "", "1": "stopped"}
    assert "rank 1 is stopped" in report(evidence.folder.parents[1])


def test_what_cannot_be_written_is_a_warning(
    evidence: Evidence, capfd: pytest.CaptureFixture[str]
) -> None:
    evidence.folder.parent.write_text("a file in the folder's place")
    evidence.conclude("silent", 7)
    first, *_ = capfd.readouterr().err.splitlines()
    assert first.startswith("warning: rank 0: the evidence of the hang is incomplete: ")


def test_a_recorder_that_fails_leaves_the_stacks(evidence: Evidence) -> None:
    with mock.patch.object(evidence_files, "recorded", side_effect=RuntimeError("no recorder")):
        evidence.update(6.0, 10.0, step=7)
    assert (evidence.folder / "rank0.txt").stat().st_size > 0
