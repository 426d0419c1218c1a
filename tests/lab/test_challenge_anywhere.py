"""The open task of phase 3: what does not sum by messages is refused, and sizes count alike."""

import random
from pathlib import Path

import pytest
import typer.testing

from distlab import course
from distlab.cli.app import app
from distlab.grade import submission
from distlab.grade.submission import Submission
from distlab.learner import race_anywhere, racing
from distlab.learner.racing import RIVALS, ChallengeError, Standings
from distlab.sim import Cluster

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
FOUND = course.load(ROOT).phases[2].challenge
assert FOUND
CHALLENGE = FOUND
TWO_HOSTS = Cluster(2, 2, numbering="cyclic")
SIZES, ON_TIME = (4012, 2**16), [(0, 0.0)] * 2
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
RING = """
def ring(x):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chunks = x.tensor_split(ranks)
    room = torch.empty_like(chunks[0])
    for step in range(2 * (ranks - 1)):
        outgoing, mine = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        work = dist.isend(outgoing, (rank + 1) % ranks)
        arrived = room[: len(mine)]
        dist.recv(arrived, (rank - 1) % ranks)
        work.wait()
        mine.copy_(mine + arrived if step < ranks - 1 else arrived)

"""


def returns(body: str) -> str:
    """Hand in a function that prepares in a way of its own."""
    return f"{GATHER}{RING}def prepare_all_reduce():{body}\n"


def hand_in(folder: Path, text: str) -> Submission:
    (folder / CHALLENGE.folder).mkdir()
    (folder / CHALLENGE.folder / "challenge.py").write_text(text)
    return submission.find(str(folder), ROOT)


def seconds(folder: Path, text: str, cluster: Cluster = TWO_HOSTS) -> tuple[float, ...]:
    return race_anywhere.checked_s(hand_in(folder, text), CHALLENGE, cluster, SIZES, ON_TIME)


def solution_s(cluster: Cluster) -> tuple[float, ...]:
    solution = submission.find("solution", ROOT)
    return race_anywhere.checked_s(solution, CHALLENGE, cluster, SIZES, ON_TIME)


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
            r"prepare_all_reduce on 4 ranks, 3\.92 KiB to 64\.0 KiB: ",
        ),
        (GATHER + READS_MEMORY, r"has sent 16 bytes in messages, but to sum 69,548 bytes it takes"),
        (returns("\n    pass"), "NoneType"),
    ],
)
def test_what_does_not_sum_by_messages_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ChallengeError, match=said):
        seconds(tmp_path, text)


def test_collectives_may_prepare(tmp_path: Path) -> None:
    asks = "\n    dist.all_gather_object([None] * dist.get_world_size(), 1)\n    dist.barrier()"
    assert seconds(tmp_path, returns(f"{asks}\n    return naive")) > (0, 0)


def test_preparing_takes_no_time(tmp_path: Path) -> None:
    slow = "\n    import time\n    time.sleep(5 + dist.get_rank())\n    return naive"
    assert max(seconds(tmp_path, returns(slow))) < 0.1


@pytest.mark.parametrize("cluster", [Cluster(1, 1), Cluster(1, 3), Cluster(5, 1), TWO_HOSTS])
def test_the_solution_sums_on_any_cluster(cluster: Cluster) -> None:
    assert len(solution_s(cluster)) == len(SIZES)


def test_a_late_rank_is_not_waited_for_in_the_figure() -> None:
    solution = submission.find("solution", ROOT)
    late = [(3, 1e-3), (2, 1e-3)]
    found = race_anywhere.checked_s(solution, CHALLENGE, TWO_HOSTS, SIZES, late)
    for with_late, on_time in zip(found, solution_s(TWO_HOSTS), strict=True):
        assert 0 < with_late <= on_time * 1.001


def test_an_entry_for_one_size_loses_on_the_others(tmp_path: Path) -> None:
    """A ring is right for 16 MiB and slow for 1 KiB; the figure says so."""
    cluster = Cluster(8, 1, net_latency_s=20e-6, nic_bytes_per_s=10e9)
    sizes = race_anywhere.SIZES_BYTES
    entry, late = hand_in(tmp_path, returns("\n    return ring")), [(0, 0.0)] * len(sizes)
    ring = race_anywhere.checked_s(entry, CHALLENGE, cluster, sizes, late)
    rivals = {name: race_anywhere.rival_s(name, cluster, late) for name in RIVALS}
    best = tuple(map(min, zip(*rivals.values(), strict=True)))
    assert best[-1] / ring[-1] > 0.9
    assert best[0] / ring[0] < 0.5
    table = Standings("", ("",) * 4, {"best": best, "yours": ring}, "best")
    assert table.speedup("yours") < 0.8


@pytest.mark.parametrize("seed", range(20))
def test_drawn_clusters_have_2_to_16_ranks_and_a_slower_network_than_nodes(seed: int) -> None:
    cluster = race_anywhere.drawn(random.Random(seed))
    assert 2 <= cluster.num_gpus <= race_anywhere.MAX_RANKS
    assert cluster.nic_bytes_per_s < cluster.nvlink_bytes_per_s
    assert cluster.net_latency_s > cluster.latency_s


def test_drawn_clusters_differ_in_all_that_an_entry_must_not_assume() -> None:
    clusters = [race_anywhere.drawn(random.Random(seed)) for seed in range(40)]
    assert {cluster.numbering for cluster in clusters} == {"block", "cyclic"}
    assert {bool(cluster.faults) for cluster in clusters} == {False, True}
    assert {cluster.nics_per_node == 1 for cluster in clusters} == {False, True}


def test_the_figure_is_the_geometric_mean_over_all_tables() -> None:
    tables = tuple(
        Standings("", ("", ""), {"best": best, "yours": (1.0, 1.0)}, "best")
        for best in ((8.0, 2.0), (1.0, 1.0))
    )
    assert racing.figure(tables) == pytest.approx(2.0)


def test_the_command_prints_a_table_for_each_cluster_and_the_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    of_few_ranks = ["--seed", "20", "--clusters", "2"]  # 2 and 4
    arguments = ["challenge", "--phase", "3", "--impl", "solution", *of_few_ranks]
    printed = []
    for _ in range(2):
        done = typer.testing.CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        printed.append(done.stdout)
    assert printed[0] == printed[1], "virtual time is the same in every run"
    lines = printed[0].splitlines()
    assert sum(line.startswith("yours") for line in lines) == 2
    assert sum("16.0 MiB" in line for line in lines) == 2
    assert lines[-1].startswith("On all: 0.")
