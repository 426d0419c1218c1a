"""The open task of Phase 3: only message-based sums are accepted, and all sizes count equally."""

from pathlib import Path

import pytest
from commands import COURSE, ROOT, distlab

from distlab.grade import submission
from distlab.grade.submission import Submission
from distlab.races import ChallengeError, anywhere
from distlab.sim import Cluster

pytestmark = pytest.mark.usefixtures("forked")

OPEN_TASK = COURSE.phases[2].challenge
assert OPEN_TASK
CHALLENGE = OPEN_TASK
TWO_HOSTS = Cluster(2, 2, numbering="cyclic")
SIZES, ON_TIME = (4012, 2**14), [(0, 0.0)] * 2
GATHER = """
import torch
import torch.distributed as dist

def naive(x):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        for src in range(1, ranks):
            arrived = torch.empty_like(x)
            dist.recv(arrived, src)
            x += arrived
        for dst in range(1, ranks):
            dist.send(x, dst)
    else:
        dist.send(x, 0)
        dist.recv(x, 0)

"""
READS_MEMORY = """
def through_memory(x):
    boards = torch.__dict__.setdefault("board", {})
    boards[dist.get_rank()] = x.clone()
    naive(torch.ones(1))
    total = sum(boards[rank] for rank in range(dist.get_world_size()))
    naive(torch.ones(1))
    x.copy_(total)

def prepare_all_reduce():
    return through_memory
"""


def returns(body: str) -> str:
    """Return a lesson whose ``prepare_all_reduce`` has this body."""
    return f"{GATHER}def prepare_all_reduce():{body}\n"


def hand_in(folder: Path, text: str) -> Submission:
    (folder / CHALLENGE.folder).mkdir()
    (folder / CHALLENGE.folder / "challenge.py").write_text(text)
    return submission.find(str(folder), ROOT)


def seconds(folder: Path, text: str, cluster: Cluster = TWO_HOSTS) -> tuple[float, ...]:
    return anywhere.checked_s(hand_in(folder, text), CHALLENGE, cluster, SIZES, ON_TIME)


def solution_s(cluster: Cluster) -> tuple[float, ...]:
    solution = submission.find("solution", ROOT)
    return anywhere.checked_s(solution, CHALLENGE, cluster, SIZES, ON_TIME)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (returns("\n    return lambda x: None"), "element 0 of rank 0 should be 15, but is 1"),
        (returns("\n    return dist.all_reduce"), "calls a built-in collective. Collectives are"),
        (
            returns("\n    return lambda x: (dist.barrier(), naive(x))"),
            "calls a built-in collective. Collectives are",
        ),
        (returns("\n    return lambda x: naive(x[:1003])"), "element 1003 of rank 0 should be"),
        (returns("\n    return lambda x: naive(x) or x.mul_(0.25)"), "element 0 of rank 0 should"),
        (
            returns("\n    return naive if dist.get_rank() else lambda x: None"),
            r"prepare_all_reduce on 4 ranks, 3\.92 KiB to 16\.0 KiB: ",
        ),
        (GATHER + READS_MEMORY, r"has sent 16 bytes in messages, but to sum 20,396 bytes it takes"),
        (returns("\n    pass"), "NoneType"),
    ],
)
def test_what_does_not_sum_by_messages_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ChallengeError, match=said):
        seconds(tmp_path, text)


def test_preparing_takes_no_time(tmp_path: Path) -> None:
    slow = "\n    import time\n    time.sleep(5 + dist.get_rank())\n    return naive"
    assert max(seconds(tmp_path, returns(slow))) < 0.1


@pytest.mark.parametrize("cluster", [Cluster(1, 1), Cluster(1, 3), Cluster(5, 1), TWO_HOSTS])
def test_the_solution_sums_on_any_cluster(cluster: Cluster) -> None:
    assert len(solution_s(cluster)) == len(SIZES)


def test_the_command_prints_a_table_for_each_cluster_and_the_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(anywhere, "SMALL_WORLDS", ((2, 1),))
    of_few_ranks = ["--seed", "20", "--clusters", "2"]  # this seed draws clusters of 2 and 4 ranks
    assert distlab("challenge", "--phase", "3", "--impl", "solution", *of_few_ranks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("yours") for line in lines) == 2
    assert sum("16.0 MiB" in line for line in lines) == 2
    assert lines[-1].startswith("On all: 0.")
