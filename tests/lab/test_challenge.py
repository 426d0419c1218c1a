"""The open task of Phase 1: only message-based all-reduces are accepted and timed."""

from pathlib import Path

import pytest
from commands import COURSE, PHASE, ROOT, distlab

from distlab import races
from distlab.grade import submission
from distlab.grade.submission import Submission
from distlab.races import ChallengeError, Standings, large
from distlab.sim import Cluster

pytestmark = pytest.mark.usefixtures("forked")

CHALLENGE = COURSE.phases[0].challenge
NUM_RANKS, NUM_ELEMENTS = 3, 1024  # 4 KiB
IMPORTS = "import torch\nimport torch.distributed as dist"
NAIVE = """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank == 0:
        for src in range(1, ranks):
            arrived = torch.empty_like(x)
            dist.recv(arrived, group=group, group_src=src)
            x += arrived
        for dst in range(1, ranks):
            dist.send(x, group=group, group_dst=dst)
    else:
        dist.send(x, group=group, group_dst=0)
        dist.recv(x, group=group, group_src=0)
"""


def hand_in(folder: Path, body: str) -> Submission:
    (folder / PHASE).mkdir()
    text = f"{IMPORTS}\n\ndef fast_all_reduce(x, group=None):{body}"
    (folder / PHASE / "challenge.py").write_text(text)
    return submission.find(str(folder), ROOT)


def seconds(handed_in: Submission) -> float:
    assert CHALLENGE
    return large.checked_s(handed_in, CHALLENGE, NUM_ELEMENTS, Cluster(1, NUM_RANKS))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("\n    dist.all_reduce(x, group=group)\n", "it calls a built-in collective"),
        ("\n    pass\n", r"element 0 of rank 0 should be 7, but is 1\. It must be the sum"),
        (NAIVE.replace("x += arrived", "x[:5] += arrived[:5]"), "of 3 ranks with 1,024 numbers"),
        (NAIVE.replace("group_dst=0", "group_dst=rank"), "on 3 ranks, 1,024 numbers: "),
        ("\n    while dist.get_world_size() > 1: dist.recv(x)\n", "deadlock"),
        ("\n    x.sum(\n", "SyntaxError|was never closed"),
    ],
)
def test_what_is_not_an_all_reduce_by_messages_is_refused(
    tmp_path: Path, body: str, says: str
) -> None:
    with pytest.raises(ChallengeError, match=says):
        seconds(hand_in(tmp_path, body))


def test_the_solution_sums_faster_than_by_way_of_one_rank(tmp_path: Path) -> None:
    assert seconds(submission.find("solution", ROOT)) < seconds(hand_in(tmp_path, NAIVE))


def test_the_command_shows_a_table_with_the_fastest_on_top(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(large, "SMALL_WORLDS", ((1, 5), (3, 8)))
    monkeypatch.setattr(large, "NODES", (1,))
    monkeypatch.setattr(large, "GPUS", (2,))
    options = ["--phase", "1", "--impl", "solution", "--seed", "7", "--clusters", "1"]
    assert distlab("challenge", *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on 1 cluster, ms; the same ones again: --seed 7")
    assert [line.split()[0] for line in lines if line.endswith("<")] == ["yours"]
    figures = [float(line.split("<")[0].split()[-1]) for line in lines[3:]]
    assert figures == sorted(figures, reverse=True)


def test_the_figure_is_the_geometric_mean_over_columns_and_tables() -> None:
    tables = tuple(
        Standings("", ("", ""), {"best": best, "yours": (1.0, 1.0)}, "best")
        for best in ((8.0, 2.0), (1.0, 1.0))
    )
    assert tables[0].speedup("yours") == pytest.approx(4.0)
    assert races.figure(tables) == pytest.approx(2.0)


@pytest.mark.parametrize(("phase", "task"), [(1, r"1\.7"), (3, r"3\.2")])
def test_an_unwritten_function_that_the_template_calls_is_named(phase: int, task: str) -> None:
    open_task = COURSE.phase(phase).challenge
    assert open_task
    template = submission.find("template", ROOT)
    with pytest.raises(
        ChallengeError, match=f"calls the function of task {task}, which is not written yet"
    ):
        races.race(template, open_task, seed=1, num_clusters=1)


def test_every_open_task_has_a_race() -> None:
    functions = {phase.challenge.function for phase in COURSE.phases if phase.challenge}
    assert functions == {*races.RACES}
