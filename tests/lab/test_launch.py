"""launch.run when everything goes well, and when a request is impossible."""

import math
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distlab import launch
from distlab.launch import Limits, choices, fork_server


@dataclass(frozen=True)
class Answer:
    rank: int
    values: torch.Tensor


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def ring_sum(offset: float) -> Answer:
    x = torch.full((3,), dist.get_rank() + offset)
    dist.all_reduce(x)
    return Answer(dist.get_rank(), x)


def what_a_rank_sees() -> dict[str, object]:
    return {
        "context": launch.context(),
        "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
        "variable": os.environ.get("DISTLAB_TEST_VARIABLE"),
        "ranks": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
        "session": os.getsid(0) == os.getpid(),
    }


def nested() -> None:
    launch.run(rank_and_size, 1)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_every_rank_knows_who_it_is_and_results_come_by_rank(world_size: int) -> None:
    assert launch.run(rank_and_size, world_size) == [(r, world_size) for r in range(world_size)]


def test_arguments_and_results_are_real_objects() -> None:
    answers = launch.run(ring_sum, 3, 0.5)
    assert [answer.rank for answer in answers] == [0, 1, 2]
    assert all(isinstance(answer, Answer) for answer in answers)
    for answer in answers:
        torch.testing.assert_close(answer.values, torch.full((3,), 4.5))


def test_closures_and_lambdas_need_no_module() -> None:
    factor = 7
    assert launch.run(lambda: factor * dist.get_rank(), 3) == [0, 7, 14]


def test_a_rank_sees_the_callers_environment_and_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.run(rank_and_size, 1)  # starts the fork server before the changes below
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTLAB_TEST_VARIABLE", "seen")
    seen = launch.run(what_a_rank_sees, 2)
    assert [view["context"] for view in seen] == [
        launch.Context(rank, 2, torch.device("cpu")) for rank in (0, 1)
    ]
    assert [view["ranks"] for view in seen] == [["0", "0", "2"], ["1", "1", "2"]]
    for view in seen:
        assert view["threads"] == 1
        assert view["folder"] == str(tmp_path)
        assert view["variable"] == "seen"
        assert view["session"]


def test_a_changed_module_is_seen_by_the_next_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    # The answers differ in length; otherwise, Python might reuse a .pyc made in the same second.
    for answer in (1, 22):
        (tmp_path / "edited_by_learner.py").write_text(f"ANSWER = {answer}\n")
        assert launch.run(_answer_of_edited_module, 2) == [answer] * 2


def _answer_of_edited_module() -> int:
    import edited_by_learner  # type: ignore[import-not-found]

    return int(edited_by_learner.ANSWER)


def test_output_is_shown_in_whole_lines_and_kept_per_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch.run(_print_lines, 3, output_dir=tmp_path / "logs")
    shown = capfd.readouterr().out.splitlines()
    expected = {rank: [f"rank {rank} line {i}" for i in range(50)] for rank in range(3)}
    assert sorted(shown) == sorted(line for lines in expected.values() for line in lines)
    for rank, lines in expected.items():
        assert (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines() == lines


def _print_lines() -> None:
    for i in range(50):
        print("rank", dist.get_rank(), end=" ", flush=True)
        print("line", i)


def test_a_rank_that_returns_early_does_not_disturb_those_that_still_talk() -> None:
    assert launch.run(_two_of_three_talk_late, 3) == [0.0, 5.0, 5.0]


def _two_of_three_talk_late() -> float:
    x = torch.full((1,), 5.0 if dist.get_rank() == 1 else 0.0)
    if dist.get_rank() == 1:
        time.sleep(1.5)  # longer than a returned rank stays connected
        dist.send(x, 2)
    if dist.get_rank() == 2:
        dist.recv(x, 1)
    return float(x)


def test_worlds_can_run_side_by_side() -> None:
    def sums(offset: float) -> list[list[float]]:
        worlds = [launch.run(ring_sum, 3, offset) for _ in range(4)]
        return [[answer.values[0].item() for answer in world] for world in worlds]

    with ThreadPoolExecutor(2) as threads:
        of_threads = list(threads.map(sums, (0.0, 100.0)))
    assert of_threads == [[[3.0] * 3] * 4, [[303.0] * 3] * 4]


def _draws() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_ranks_that_do_not_seed_draw_different_numbers(backend: str) -> None:
    for drawn in zip(*launch.run(_draws, 4, backend=backend), strict=True):
        assert len(set(drawn)) == 4


def test_slow_imports_of_one_world_are_made_ahead_for_the_next() -> None:
    fork_server.close_idle()
    first = launch.run(_optimizer_was_ready, 2)
    second = launch.run(_optimizer_was_ready, 2)
    assert first == [False, False]
    assert second == [True, True]


def _optimizer_was_ready() -> bool:
    ready = "torch._dynamo" in sys.modules
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())  # imports torch._dynamo, which takes 1 s
    return ready


def test_context_outside_a_rank_says_where_to_call_it() -> None:
    with pytest.raises(RuntimeError, match="in the function given to launch"):
        launch.context()


def test_a_rank_cannot_start_a_world() -> None:
    with pytest.raises(launch.RankFailed, match="run was called inside a world"):
        launch.run(nested, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
        ({"world_size": 2.5}, "world_size must be a whole number"),
        ({"backend": "ncll"}, "backend must be one of auto, gloo, nccl, sim, mpi; got 'ncll'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda; got 'tpu'"),
        ({"timeout_s": 0}, "timeout_s must be positive or None, got 0"),
        ({"timeout_s": math.nan}, "timeout_s must be positive or None, got nan"),
        ({"timeout_s": "60"}, "timeout_s must be positive or None, got '60'"),
        (
            {"timeout_s": 5, "limits": Limits(timeout_s=60)},
            r"timeout_s=5 is given as well as limits=Limits\(timeout_s=60.*: put it into",
        ),
        ({"backend": "nccl"}, "needs a GPU per rank: 2 ranks, 0 GPUs"),
        ({"device": "cuda"}, "torch sees no GPU here"),
        ({"fn": "train"}, "run needs a function, got 'train'"),
    ],
)
def test_impossible_requests_get_one_line_that_says_what_is_possible(
    arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    request: dict[str, object] = {"fn": rank_and_size, "world_size": 2, **arguments}
    with pytest.raises(launch.SetupError, match=message):
        launch.run(request.pop("fn"), request.pop("world_size"), **request)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"timeout_s": -5}, "timeout_s must be positive or None, got -5"),
        ({"cpu_s": 0}, "cpu_s must be positive or None, got 0"),
        ({"idle_s": -1.0}, "idle_s must be positive or None, got -1.0"),
        ({"memory_bytes": 0}, "memory_bytes must be positive or None, got 0"),
        ({"memory_bytes": "4 GB"}, "memory_bytes must be positive or None, got '4 GB'"),
    ],
)
def test_a_limit_that_is_not_positive_is_refused_where_it_is_written(
    limit: dict[str, Any], message: str
) -> None:
    with pytest.raises(launch.SetupError, match=f"^{message}$"):
        Limits(**limit)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(launch.SetupError, match=r"argument 1, .*lock.* cannot be sent"):
        launch.run(print, 2, "fine", threading.Lock())


@pytest.mark.parametrize(
    ("backend", "device", "num_ranks", "num_gpus", "chosen"),
    [
        ("auto", "auto", 4, 0, ("gloo", ["cpu"] * 4)),
        ("auto", "auto", 4, 3, ("gloo", ["cpu"] * 4)),
        ("auto", "auto", 2, 2, ("nccl", ["cuda:0", "cuda:1"])),
        ("auto", "cpu", 2, 2, ("gloo", ["cpu"] * 2)),
        ("gloo", "cuda", 3, 2, ("gloo", ["cuda:0", "cuda:1", "cuda:0"])),
        ("nccl", "auto", 1, 8, ("nccl", ["cuda:0"])),
    ],
)
def test_the_backend_follows_the_gpus(
    backend: str,
    device: str,
    num_ranks: int,
    num_gpus: int,
    chosen: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    name, devices = choices.devices(backend, device, num_ranks)
    assert (name, list(devices)) == chosen


SCRIPT = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    from distlab import launch

    def total():
        x = torch.ones(1)
        dist.all_reduce(x)
        return dist.get_rank(), float(x)

    results = launch.run(total, 2, backend="gloo", device="cpu")
    results = launch.run(total, 2, backend="gloo", device="cpu")   # a second time, same world
    sys.stdout.write(f"results {results}\\n")    # in one piece: torchrun's ranks share a pipe
    """
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.usefixtures("forked")
def test_a_script_needs_no_main_guard(script: Path) -> None:
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert done.stdout == "results [(0, 2.0), (1, 2.0)]\n", done.stderr


@pytest.mark.usefixtures("forked")
def test_the_same_script_joins_the_world_that_torchrun_started(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=240)
    assert done.stdout.count("results [(0, 2.0), (1, 2.0)]") == 2, done.stderr


def test_torchrun_with_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(launch.SetupError, match="torchrun started 3 ranks and the script asks for"):
        launch.run(rank_and_size, 2)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "nosuch0"),
        (
            {"MASTER_ADDR": "no-such-host.invalid"},
            "Name or service not known|nodename nor servname",
        ),
    ],
)
@pytest.mark.usefixtures("forked")
def test_ranks_that_do_not_find_each_other_name_the_interface(
    variables: dict[str, str], reason: str
) -> None:
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = "from distlab import launch; launch.run(print, 1, backend='gloo')"
    usual = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        env={**usual, **one_rank, **variables},
    )
    assert done.returncode == 1
    error = done.stderr.partition("SetupError: ")[2]
    assert error.startswith("rank 0 of 1 could not join the process group at ")
    assert re.search(reason, error)
    assert f"GLOO_SOCKET_IFNAME={variables.get('GLOO_SOCKET_IFNAME', '(not set)')}" in error
    assert "NCCL_SOCKET_IFNAME=(not set)" in error
