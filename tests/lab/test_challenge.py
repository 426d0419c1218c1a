"""The open task: what is not an all-reduce by messages is refused, and the rest is timed fairly."""

import random
from pathlib import Path

import pytest
import typer.testing

from distlab import course
from distlab.cli.app import app
from distlab.cli.challenge import _rows
from distlab.course import Challenge
from distlab.learner import challenge, race_16mib
from distlab.learner.folder import CourseFolder
from distlab.learner.racing import RIVALS, ChallengeError, Standings

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
HERE = CourseFolder(ROOT, course.load(ROOT))
PHASE = "phase1_data_parallel"
MANY_RANKS, FEW_RANKS = 1, 15  # seeds: 16 ranks and 12, with 16 MiB each; or 4 and 4
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


def only_when_small(otherwise: str) -> str:
    """All reduce as it should be done, but not in the runs that are timed."""
    return f"\n    if x.numel() > 4096: {otherwise}" + NAIVE


def the_challenge() -> Challenge:
    found = HERE.course.phases[0].challenge
    assert found
    return found


def hand_in(folder: Path, body: str) -> str:
    (folder / PHASE).mkdir()
    text = f"{IMPORTS}\n\ndef fast_all_reduce(x, group=None):{body}"
    (folder / PHASE / "challenge.py").write_text(text)
    return str(folder)


def run(impl: str, num_clusters: int = 1, seed: int = FEW_RANKS) -> Standings:
    (standings,) = challenge.run(HERE, the_challenge(), impl, seed, num_clusters)
    return standings


def test_the_solution_is_faster_than_where_one_begins() -> None:
    standings = run("solution", 2, MANY_RANKS)
    assert set(standings.seconds) == {*RIVALS, "yours"}
    assert {len(seconds) for seconds in standings.seconds.values()} == {2}
    assert standings.speedup("yours") > 1.5
    assert standings.speedup(race_16mib.BASELINE) == 1.0


def test_a_slow_one_is_timed_too(tmp_path: Path) -> None:
    assert run(hand_in(tmp_path, NAIVE)).speedup("yours") < 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("\n    dist.all_reduce(x, group=group)\n", "it calls a built-in collective"),
        ("\n    pass\n", r"element 0 of rank 0 should be 3, but is 1\. It must be the sum"),
        (NAIVE.replace("x += arrived", "x[:5] += arrived[:5]"), "of 3 ranks with 8 numbers each"),
        (only_when_small("dist.all_reduce(x, group=group)"), "it calls a built-in collective"),
        (only_when_small("x = x[:1000]"), "numbers each, element 1000 of rank 0 should be"),
        (only_when_small("return"), "with 4,194,304 numbers each, element 0 of rank 0 should be"),
        (NAIVE.replace("group_dst=0", "group_dst=rank"), "on 2 ranks, 1 number: "),
        ("\n    while dist.get_world_size() > 1: dist.recv(x)\n", "deadlock"),
        ("\n    x.sum(\n", "SyntaxError|was never closed"),
    ],
)
def test_what_is_not_an_all_reduce_by_messages_is_refused(
    tmp_path: Path, body: str, said: str
) -> None:
    with pytest.raises(ChallengeError, match=said):
        run(hand_in(tmp_path, body))


def test_a_seed_draws_the_same_clusters_and_another_one_others() -> None:
    shapes = [
        [(c.num_gpus, c.nic_bytes_per_s) for c in race_16mib.draw(random.Random(seed), 6)]
        for seed in (1, 1, 2)
    ]
    assert shapes[0] == shapes[1] != shapes[2]


@pytest.mark.parametrize("seed", range(20))
def test_drawn_clusters_have_few_ranks_and_a_slower_network_than_nodes(seed: int) -> None:
    for cluster in race_16mib.draw(random.Random(seed), 5):
        assert 2 <= cluster.num_gpus <= race_16mib.MAX_RANKS
        assert cluster.nic_bytes_per_s < cluster.nvlink_bytes_per_s


def test_the_figure_is_the_geometric_mean() -> None:
    seconds = {race_16mib.BASELINE: (8.0, 2.0), "yours": (1.0, 1.0)}
    assert Standings("", ("", ""), seconds, race_16mib.BASELINE).speedup("yours") == pytest.approx(
        4.0
    )


def test_the_command_shows_who_stands_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["challenge", "--impl", "solution", "--seed", f"{FEW_RANKS}", "--clusters", "1"]
    done = typer.testing.CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].endswith("on 1 cluster, ms; the same ones again: --seed 15")
    assert [line.split()[0] for line in lines if line.endswith("<")] == ["yours"]
    figures = [float(line.split("<")[0].split()[-1]) for line in lines[3:]]
    assert figures == sorted(figures, reverse=True)


def test_many_clusters_are_shown_a_few_at_a_time() -> None:
    columns = tuple(f"2x{number + 1} GPUs" for number in range(12))
    seconds = {race_16mib.BASELINE: (2e-3,) * 12, "yours": (1e-3,) * 12}
    lines = [*_rows(Standings("", columns, seconds, race_16mib.BASELINE))]
    heads = [line for line in lines if "GPUs" in line]
    assert [line.count("GPUs") for line in heads] == [5, 5, 2]
    assert [line.split()[-1] for line in lines if line.startswith("yours")] == ["1.00", "1.00", "<"]
    assert max(map(len, lines)) <= 90


@pytest.mark.parametrize(("phase", "task"), [(1, r"1\.7"), (3, r"3\.3")])
def test_what_the_template_begins_with_is_named_if_it_is_not_written(phase: int, task: str) -> None:
    open_task = HERE.course.phase(phase).challenge
    assert open_task
    with pytest.raises(
        ChallengeError, match=f"calls the function of task {task}, which is not written yet"
    ):
        challenge.run(HERE, open_task, "template", seed=1, num_clusters=1)


def test_every_open_task_has_a_race_of_its_own() -> None:
    functions = {phase.challenge.function for phase in HERE.course.phases if phase.challenge}
    assert functions == {*challenge.RACES}
