"""Starting and ending worlds when the machine is slow or short of resources, and after ctrl-C."""

import contextlib
import gc
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import psutil
import pytest
import torch.distributed as dist

from distlab import launch
from distlab.launch import Limits, fork_server, fork_server_main, limits, output
from distlab.launch.rank import RankProcess

MiB = 2**20

StartRank = Callable[[fork_server.ForkServer, Any, int], int]


@pytest.fixture
def on_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], None]], None]:
    """Return a function that sets a callback, called with each started rank's number and pid."""

    def arrange(react: Callable[[int, int], None]) -> None:
        original: StartRank = fork_server.ForkServer.start_rank
        pids: list[int] = []

        def start_rank(home: fork_server.ForkServer, control: Any, output: int) -> int:
            pids.append(original(home, control, output))
            react(len(pids) - 1, pids[-1])
            return pids[-1]

        monkeypatch.setattr(fork_server.ForkServer, "start_rank", start_rank)

    launch.run(dist.get_rank, 1)  # starts the fork server
    return arrange


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start ranks in fresh interpreters, as on macOS."""
    fork_server.close_idle()
    monkeypatch.setattr(fork_server_main, "METHOD", "spawn")
    yield
    fork_server.close_idle()


def python(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **variables},
    )


# A rank that is late, or gone, before the function is called


def test_a_rank_that_starts_late_finds_the_others_still_there(
    on_start: Callable[[Callable[[int, int], None]], None],
) -> None:
    def hold_back(number: int, pid: int) -> None:
        if number == 2:  # hold it back for longer than a returned rank stays connected
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.5, os.kill, [pid, signal.SIGCONT]).start()

    on_start(hold_back)
    assert launch.run(dist.get_rank, 3, timeout_s=20) == [0, 1, 2]


def test_time_is_counted_from_when_all_ranks_are_up(
    on_start: Callable[[Callable[[int, int], None]], None],
) -> None:
    def hold_back(number: int, pid: int) -> None:
        if number == 0:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(3.0, os.kill, [pid, signal.SIGCONT]).start()

    on_start(hold_back)
    assert launch.run(dist.get_rank, 2, timeout_s=2.8) == [0, 1]


def test_a_rank_killed_while_others_are_started_is_the_one_to_blame(
    on_start: Callable[[Callable[[int, int], None]], None],
) -> None:
    def kill_first(number: int, pid: int) -> None:
        if number == 0:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)  # so that its exit is known before the next rank is requested

    on_start(kill_first)
    with pytest.raises(launch.RankCrashed, match="rank 0 of 2 was killed by SIGKILL") as caught:
        launch.run(dist.get_rank, 2, timeout_s=20)
    assert caught.value.fates[1].what.startswith("stopped while still starting")


def test_a_start_that_takes_too_long_says_how_long_it_may_take(
    on_start: Callable[[Callable[[int, int], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "START_TIMEOUT_S", 0.5)
    on_start(lambda number, pid: os.kill(pid, signal.SIGSTOP) if number == 1 else None)
    with pytest.raises(launch.RankHung, match=r"^time is up after 0\.5 s to start: ") as caught:
        launch.run(dist.get_rank, 2)
    assert "2 of 2 are still starting, and not in the process group yet" in str(caught.value)
    assert "within 0.5 s, and 2 s more for each rank beyond 4 of a core." in str(caught.value)
    assert caught.value.kind == "time is up"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_is_at_a_terminal_sees_how_far_the_start_is(
    on_start: Callable[[Callable[[int, int], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold_back(number: int, pid: int) -> None:
        if number == 1:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, [pid, signal.SIGCONT]).start()

    monkeypatch.setattr(output, "QUIET_S", 0.0)
    monkeypatch.setattr(output, "REDRAW_S", 0.0)
    on_start(hold_back)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert launch.run(dist.get_rank, 2) == [0, 1]
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "starting 2 ranks: 2 have a process, 0 have joined the group" in shown
    assert shown.endswith("\r\x1b[K"), "the line is erased"


# Fresh interpreters


def raises_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def sleeps_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.barrier()


@pytest.mark.usefixtures("spawning")
def test_spawned_ranks_fail_as_clearly_as_forked_ones() -> None:
    with pytest.raises(launch.RankFailed, match="rank 1 of 2 raised ValueError: boom"):
        launch.run(raises_on_one, 2, timeout_s=60)
    with pytest.raises(launch.RankHung, match=r"rank 0 waits in barrier at .*; rank 1 is at"):
        launch.run(sleeps_on_one, 2, limits=Limits(120, idle_s=1.0))


# Memory that does not count


def test_a_file_that_all_ranks_map_is_nobodys_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.ones(60 * MiB, dtype=np.uint8))
    path = str(tmp_path / "images.npy")
    limits = Limits(memory_bytes=150 * MiB)  # the four ranks read 240 MiB together
    assert launch.run(_sum_of_mapped_file, 4, path, limits=limits) == [60 * MiB] * 4


def _sum_of_mapped_file(path: str) -> int:
    total = int(np.load(path, mmap_mode="r").sum())
    time.sleep(0.3)  # gives the supervisor time to look
    return total


# Interruptions


# Ctrl-C between an open() and its assignment leaves the closing to Python, which then warns.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_world_after_ctrl_c_at_any_moment_is_healthy_and_nothing_leaks() -> None:
    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    launch.run(dist.get_rank, 3)
    gc.collect()  # clears other tests' garbage
    before = _descriptors()
    previous = signal.signal(signal.SIGALRM, strike)
    try:
        for after_s in (0.002, 0.02, 0.04, 0.1):
            _interrupted(after_s)
            assert launch.run(dist.get_rank, 3, timeout_s=20) == [0, 1, 2]
    finally:
        signal.signal(signal.SIGALRM, previous)
    gc.collect()
    assert _descriptors() == before
    _interrupted_worlds_leave_no_process()


def _interrupted(after_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        launch.run(time.sleep, 3, 3600, timeout_s=20)
    except KeyboardInterrupt:
        return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupted_worlds_leave_no_process() -> None:
    servers = [home.process.pid for home in fork_server._idle]
    children = processes.children()
    assert sorted(child.pid for child in children) == sorted(servers)


def test_worlds_leave_no_descriptor_and_no_folder() -> None:
    def failing() -> None:
        raise ValueError("boom")

    launch.run(dist.get_rank, 2)
    before = (_descriptors(), _folders())
    for _ in range(3):
        launch.run(dist.get_rank, 3)
        with pytest.raises(launch.RankFailed):
            launch.run(failing, 3)
    assert (_descriptors(), _folders()) == before


def _descriptors() -> int:
    return psutil.Process().num_fds()


def _folders() -> list[Path]:
    return [path for home in fork_server._idle for path in home._folder.iterdir()]


def test_the_folder_goes_when_the_launching_process_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, torch.distributed as dist\nfrom distlab import launch\n"
        "launch.run(dist.get_rank, 2)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert python(script, TMPDIR=str(tmp_path)).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while list(tmp_path.glob("distlab-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("distlab-*")) == []


def test_a_server_started_ahead_is_that_of_the_next_world() -> None:
    fork_server.close_idle()
    fork_server.start_ahead("json")
    (server,) = fork_server._idle
    assert launch.run(dist.get_rank, 2) == [0, 1]
    assert fork_server._idle == [server]


def test_a_server_that_still_loads_ends_without_having_loaded() -> None:
    fork_server.close_idle()
    fork_server.start_ahead()
    (server,) = fork_server._idle
    fork_server.close_idle()
    assert server.process.returncode == -signal.SIGKILL


def test_a_fork_server_that_its_world_stopped_holds_nothing_of_it() -> None:
    with pytest.raises((launch.RankHung, launch.SetupError)):  # whichever is noticed first
        launch.run(_stop_the_server, 2, timeout_s=0.5)
    _interrupted_worlds_leave_no_process()
    assert launch.run(dist.get_rank, 2) == [0, 1]


def _stop_the_server() -> None:
    dist.barrier()
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(3600)


@pytest.mark.usefixtures("spawning")
def test_a_server_does_not_finish_an_import_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_sleeps.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "KILL_TIMEOUT_S", 600.0)
    fork_server.load_ahead(["module_that_sleeps"])
    (server,) = fork_server._idle
    fork_server.close_idle()
    assert server.process.returncode == -signal.SIGKILL
    assert not server._folder.exists()


@pytest.mark.usefixtures("spawning")
def test_a_server_is_stopped_for_as_long_as_it_has_been_seen_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the parent was stopped too, and resumes before the server, that time must not count."""
    monkeypatch.setattr(fork_server, "LOOK_S", 0.0)
    monkeypatch.setattr(fork_server, "STOPPED_S", 0.0)
    with contextlib.closing(fork_server.ForkServer()) as server:
        server.await_answer()
        server.process.send_signal(signal.SIGSTOP)
        processes.wait_until(server.is_stopped)
        server.check()
        with pytest.raises(launch.SetupError, match="SIGSTOP"):
            server.check()


# Requests that the machine refuses


@pytest.mark.usefixtures("spawning")
def test_a_folder_that_was_there_before_the_server_is_not_used() -> None:
    """The folder's path is visible in a process's arguments, so another user may have made it."""
    with contextlib.closing(fork_server.ForkServer()) as server:
        server._folder.mkdir()
        with pytest.raises(launch.SetupError, match="File exists"):
            server.await_answer()


def test_too_few_descriptors_is_a_set_up_error() -> None:
    launch.run(dist.get_rank, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_descriptors() + 12, limits[1]))
    try:
        with pytest.raises(launch.SetupError, match=r"refuses what a world needs.*open files"):
            launch.run(dist.get_rank, 32, timeout_s=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert launch.run(dist.get_rank, 2) == [0, 1]


def test_logs_can_go_to_a_folder_named_by_a_string_but_not_into_a_file(tmp_path: Path) -> None:
    launch.run(print, 1, "hello", output_dir=str(tmp_path / "logs"))
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "hello\n"
    (tmp_path / "file").touch()
    with pytest.raises(launch.SetupError, match="File exists"):
        launch.run(print, 1, "hello", output_dir=tmp_path / "file")


# The script's definitions on the ranks


SCRIPT = """
import functools, sys
from dataclasses import dataclass
import torch.distributed as dist
from distlab import launch

@dataclass
class Note:
    rank: int

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@functools.lru_cache(maxsize=7, typed=True)
def next_one(n):
    "As documented."
    return n + 1

def exchange():
    notes = [None, None]
    dist.all_gather_object(notes, Note(dist.get_rank()))
    cached = next_one.cache_info().currsize
    return notes, sys.argv, [fibonacci(20), next_one(dist.get_rank()), cached, next_one.__doc__]

next_one(5)
(notes, argv, first), (_, _, second) = launch.run(exchange, 2)
print(notes, isinstance(notes[1], Note), argv)
print(first, second, launch.run(fibonacci, 2, 10, backend="sim"))
"""


@pytest.mark.usefixtures("forked")
def test_classes_and_cached_functions_of_a_script_reach_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, path, "--fast"], capture_output=True, text=True, timeout=240
    )
    notes, caches = done.stdout.splitlines()
    assert notes == f"[Note(rank=0), Note(rank=1)] True ['{path}', '--fast']", done.stderr
    assert caches == "[6765, 1, 0, 'As documented.'] [6765, 2, 0, 'As documented.'] [55, 55]"


# Output


def rank_with(tail: bytes) -> RankProcess:
    return RankProcess(0, 0, None, 0, tail=bytearray(tail))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"plain\n", "plain\n"),
        (b"from a terminal\r\nnext\r\n", "from a terminal\nnext\n"),
        (b"10 %\r50 %\r100 %\ndone", "100 %\ndone"),
        (b"", ""),
    ],
)
def test_text_is_what_a_terminal_would_show(printed: bytes, shown: str) -> None:
    assert rank_with(printed).text() == shown
