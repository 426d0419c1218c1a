"""What ``distlab hang`` says about the evidence of a hang, and how torch's records become it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.distributed_c10d as c10d

from distlab.cli import app
from distlab.production.evidence import KEPT, of_interest
from distlab.production.hang_report import report

PROGRAM = "/home/me/course/my_trainer.py"
ORDER = "Every rank of a group must make the same collective calls in the same order."
BOTH = (0, 1)


class Folder:
    """A run_dir with hand-made evidence."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "hang" / "2026-11-27T18.40.12"
        self.folder.mkdir(parents=True)
        self.said = ""

    def rank(self, rank: int, line: int, *calls: dict[str, Any], waits_in: str = "") -> None:
        """Write the evidence of a rank that is at a line of ``step``."""
        inner = f'  File "{c10d.__file__}", line 9 in {waits_in}\n' if waits_in else ""
        stack = f'{inner}  File "{PROGRAM}", line {line} in step\n'
        dump = f"main 0x7f01\nThread 0x00007f01 (most recent call first):\n{stack}"
        (self.folder / f"rank{rank}.txt").write_text(dump)
        self.write(f"rank{rank}.json", ranks=2, step=7, calls=[*calls], said=self.said)

    def write(self, name: str, **content: Any) -> None:
        (self.folder / name).write_text(json.dumps(content))

    def lines(self) -> list[str]:
        return report(self.run_dir).splitlines()


def call(number: int, *, done: bool = False, line: int = 20, **changes: Any) -> dict[str, Any]:
    known = {"group": "0", "ranks": BOTH, "number": number, "name": "all_reduce"}
    known |= {"form": "(4,) float32", "is_done": done, "site": (PROGRAM, line, "step")}
    return {**known, **changes}


@pytest.fixture
def evidence(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_rank_in_an_endless_loop_is_missing(evidence: Folder) -> None:
    evidence.rank(0, 21, call(2, done=True), call(3), waits_in="all_reduce")
    evidence.rank(1, 33, call(2, done=True))
    reason = "silent for more than 3 s: rank 1 (step 7)"
    evidence.write("reason.json", reason=reason, ranks=2, states={0: "", 1: ""})
    assert evidence.lines() == [
        "hang (missing rank): rank 0 waits in all_reduce (call 3 of ranks 0 and 1) for rank 1, but "
        "rank 1 is running at my_trainer.py:33 in step",
        "  rank 0  all_reduce (call 3 of ranks 0 and 1), (4,) float32  my_trainer.py:20 in step",
        "  rank 1  running                                             my_trainer.py:33 in step",
        f"rank1.txt in {evidence.folder} shows how it came to that line. {ORDER}",
        f"The run was ended because of this: {reason}",
    ]


@pytest.mark.parametrize(
    ("state", "fate", "shown", "advice"),
    [
        (
            "stopped",
            "rank 1 is stopped",
            "stopped",
            "Look for what has stopped rank 1: SIGSTOP, ctrl-Z, a debugger or a paused container.",
        ),
        (
            "vanished",
            "rank 1 has vanished",
            "vanished",
            "Look for what has killed rank 1: dmesg names the victims of the out-of-memory killer.",
        ),
        (
            "",
            "rank 1 has left no evidence",
            "no evidence",
            "Rank 1 may be stopped, cut off, or stuck outside Python: see its machine, and its "
            "log.",
        ),
        ("not in this cell", "rank 1 is not in this cell", "not in this cell", ORDER),
    ],
)
def test_a_rank_that_wrote_nothing(
    evidence: Folder, state: str, fate: str, shown: str, advice: str
) -> None:
    evidence.rank(0, 21, call(3))
    evidence.write("reason.json", reason="silent", ranks=2, states={0: "", 1: state})
    assert evidence.lines() == [
        "hang (missing rank): rank 0 waits in all_reduce (call 3 of ranks 0 and 1) for rank 1, "
        f"but {fate}",
        "  rank 0  all_reduce (call 3 of ranks 0 and 1), (4,) float32  my_trainer.py:20 in step",
        f"  rank 1  {shown}",
        advice,
        "The run was ended because of this: silent",
    ]


def test_another_order_of_collectives(evidence: Folder) -> None:
    evidence.rank(0, 20, call(3), call(4, name="broadcast", line=21))
    evidence.rank(1, 30, call(3, name="broadcast", line=30), call(4, line=31))
    assert evidence.lines() == [
        "hang (operation mismatch): all_reduce on rank 0, but broadcast on rank 1, in call 3 of "
        "ranks 0 and 1",
        "  rank 0  all_reduce (call 3 of ranks 0 and 1), (4,) float32  my_trainer.py:20 in step",
        "  rank 1  broadcast (call 3 of ranks 0 and 1), (4,) float32   my_trainer.py:30 in step",
        ORDER,
    ]


def test_another_order_of_groups(evidence: Folder) -> None:
    evidence.rank(0, 20, call(3), call(2, group="1", done=True))
    evidence.rank(1, 30, call(2, done=True), call(3, group="1", name="barrier", form="", line=30))
    headline, _, barrier, advice = evidence.lines()
    assert "  rank 1  barrier (call 3 of ranks 0 and 1)  " in barrier
    assert headline == (
        "hang (order mismatch): rank 0 waits in all_reduce (call 3 of ranks 0 and 1) for rank 1, "
        "and rank 1 waits in barrier (call 3 of ranks 0 and 1) for rank 0"
    )
    assert advice == "Ranks that share several groups have to use them in the same order."


def test_another_shape(evidence: Folder) -> None:
    evidence.rank(0, 20, call(3))
    evidence.rank(1, 20, call(3, form="(8,) float32"))
    assert evidence.lines()[0] == (
        "hang (shape or dtype mismatch): all_reduce with (4,) float32 on rank 0, but with (8,) "
        "float32 on rank 1, in call 3 of ranks 0 and 1"
    )


def test_shapes_may_differ_where_ranks_contribute_different_parts(evidence: Folder) -> None:
    evidence.rank(0, 20, call(3, name="all_gather"))
    evidence.rank(1, 20, call(3, name="all_gather", form="(8,) float32"))
    headline, row_0, row_1, advice = evidence.lines()
    assert headline == (
        "hang (no rank is missing): ranks 0 and 1 wait in all_gather (call 3 of ranks 0 and 1)"
    )
    assert "(4,)" in row_0
    assert "(8,)" in row_1
    assert "look at the network and the GPUs" in advice


def test_calls_that_are_done_may_differ(evidence: Folder) -> None:
    evidence.rank(0, 20, call(2, done=True), call(3))
    evidence.rank(1, 33, call(2, done=True, form="(8,) float32"))
    assert evidence.lines()[0].startswith("hang (missing rank): rank 0 waits in all_reduce (call 3")


def test_victims_are_not_blamed(evidence: Folder) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which loops."""
    evidence.rank(0, 20, call(3))
    evidence.rank(1, 30, call(2, group="1", ranks=(1, 2), line=30))
    evidence.rank(2, 40, call(1, group="1", ranks=(1, 2), done=True))
    assert evidence.lines()[0] == (
        "hang (missing rank): rank 1 waits in all_reduce (call 2 of ranks 1 and 2) for rank 2, but "
        "rank 2 is running at my_trainer.py:40 in step"
    )


def test_without_a_flight_recorder_the_stacks_tell(evidence: Folder) -> None:
    evidence.rank(0, 20, waits_in="recv")
    evidence.rank(1, 33)
    assert evidence.lines()[:3] == [
        "hang (missing rank): rank 0 waits in recv, but rank 1 is running at my_trainer.py:33 in "
        "step",
        "  rank 0  recv     my_trainer.py:20 in step",
        "  rank 1  running  my_trainer.py:33 in step",
    ]


def test_ranks_that_all_wait_for_messages(evidence: Folder) -> None:
    for rank in BOTH:
        evidence.rank(rank, 20, waits_in="recv")
    lines = evidence.lines()
    assert lines[:2] == [
        "hang (send/recv cycle): ranks 0 and 1 wait in recv",
        "  ranks 0 and 1  recv  my_trainer.py:20 in step",
    ]
    assert "start the send with isend" in lines[2]
    assert "collective" not in lines[2]


def test_no_evidence_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["hang", str(tmp_path)]) == 1
    told = f"distlab hang: {tmp_path}: this is not the run_dir of a training\n"
    assert capsys.readouterr().err == told
    (tmp_path / "config.yaml").touch()
    assert app.run(["hang", str(tmp_path)]) == 1
    told = f"distlab hang: {tmp_path}: no rank of this run has hung\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("text", ["", "[]", '{"ranks": 2, "calls": [{}]}', '{"ranks": "many"}'])
def test_damaged_evidence_is_one_line(evidence: Folder, text: str) -> None:
    evidence.rank(0, 21, call(3))
    (evidence.folder / "rank1.json").write_text(text)
    lines = evidence.lines()
    assert "but rank 1 has left no evidence" in lines[0]
    assert lines[-1].startswith(f"{evidence.folder}/rank1.json is damaged: ")


def test_the_newest_hang_counts(evidence: Folder) -> None:
    evidence.rank(0, 21, call(3))
    later = Folder(evidence.run_dir.parent / "other")
    later.rank(0, 55)
    later.folder.rename(evidence.folder.with_name("2026-11-28T00.00.00"))
    assert "my_trainer.py:55" in evidence.lines()[0]


# --- from torch's records ------------------------------------------------------------------------


def entry(number: int, **changes: Any) -> dict[str, Any]:
    frames = [
        {"name": "all_reduce", "filename": c10d.__file__, "line": 3245},
        {"name": "step", "filename": PROGRAM, "line": 20},
        {"name": "<module>", "filename": PROGRAM, "line": 90},
    ]
    known: dict[str, Any] = {
        "frames": frames,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "is_p2p": False,
    }
    return {**known, **changes}


@pytest.mark.parametrize(
    ("changes", "is_done"),
    [
        ({"retired": True}, True),
        ({"retired": False}, False),
        ({"profiling_name": "nccl:all_reduce", "retired": False, "state": "completed"}, True),
        ({"profiling_name": "nccl:all_reduce", "retired": True, "state": "started"}, False),
    ],
)
def test_a_call_is_done_when_its_backend_says_so(changes: dict[str, Any], is_done: bool) -> None:
    [found] = of_interest([entry(3, **changes)], {"0": BOTH})
    assert {**found, "ranks": BOTH} == call(3, done=is_done)


def test_open_calls_and_the_newest_of_each_group_are_kept() -> None:
    rare = entry(1, process_group=("1", "undefined"))
    many = [entry(number) for number in range(3, 3 * KEPT)]
    groups = {"0": BOTH, "1": BOTH}
    found = of_interest(
        [rare, entry(1), entry(2, retired=False), *many, entry(0, is_p2p=True)], groups
    )
    assert [c["number"] for c in found if c["group"] == "1"] == [1]
    assert [c["number"] for c in found if c["group"] == "0"] == [2, *range(2 * KEPT, 3 * KEPT)]


def test_the_last_lines_of_the_logs_are_shown(evidence: Folder) -> None:
    evidence.said = "step 10 of 60  loss 1.4"
    evidence.rank(0, 21, call(3))
    evidence.said = "step 20 of 60  loss 1.2"
    evidence.rank(1, 33)
    assert evidence.lines()[-2:] == [
        "Last line of rank 0: step 10 of 60  loss 1.4",
        "Last line of rank 1: step 20 of 60  loss 1.2",
    ]
