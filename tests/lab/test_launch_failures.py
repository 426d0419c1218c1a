"""Ways in which a rank can fail, the error that the user gets, and the time that it takes.

``pytest tests/lab/test_launch_failures.py -s`` prints a table of all failures.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
import psutil
import pytest
import torch
import torch.distributed as dist

from distlab import launch
from distlab.launch import Limits, fork_server_main, supervisor
from distlab.launch.rank import RankProcess

MiB = 2**20
# Limits for a rank that ends by itself, one that computes forever, and one that waits forever.
UNUSED = Limits(120, memory_bytes=600 * MiB)
COMPUTING = Limits(60, cpu_s=0.5)
IDLE = Limits(60, idle_s=0.5)
ERROR_CHARACTERS = 120  # maximum length of an error in the table
VERDICT_S = 60.0  # the table has the exact times; this only has to be far below "forever"
ANY = -1
# Unique to this run, since two runs of these tests may overlap; ranks inherit the variable.
ORPHAN = ["sleep", os.environ.setdefault("DISTLAB_TEST_ORPHAN_S", f"3607.{os.getpid()}")]


def raises() -> None:
    if dist.get_rank() == 1:
        print("about to fail")
        raise ValueError("3 chunks expected, got 2")
    dist.barrier()


def raises_while_others_compute() -> None:
    if dist.get_rank() == 2:
        raise KeyError("conv1.weight")
    while True:
        time.sleep(0.01)


def not_implemented() -> None:
    raise NotImplementedError("Task 1.4: broadcast")


def calls_sys_exit() -> None:
    if dist.get_rank() == 1:
        sys.exit(0)
    dist.barrier()


def calls_os_exit() -> None:
    if dist.get_rank() == 3:
        os._exit(0)
    dist.barrier()


def calls_os_exit_everywhere() -> None:
    os._exit(0)


def returns_early() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1))


def segfaults() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def is_killed() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def is_stopped() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def allocates_forever() -> None:
    hoard = []
    while dist.get_rank() == 1:
        hoard.append(bytearray(os.urandom(1) * (8 * MiB)))
        time.sleep(0.002)
    dist.barrier()


def asks_for_too_much() -> None:
    if dist.get_rank() == 1:
        torch.empty(2**48)
    dist.barrier()


def loops_forever() -> None:
    while dist.get_rank() == 1:
        pass
    dist.barrier()


def loops_holding_the_gil() -> None:
    if dist.get_rank() == 1:
        re.match(r"(a+)+$", "a" * 64 + "b")  # takes exponential time in C, holding the GIL
    dist.barrier()


def waits_for_a_message_that_never_comes() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        dist.recv(torch.zeros(1), src=0)


def reduces_different_shapes() -> None:
    dist.all_reduce(torch.ones(1000 if dist.get_rank() else 10))


def leaves_a_child_behind() -> None:
    subprocess.Popen(ORPHAN, start_new_session=True)
    if dist.get_rank() == 1:
        raise ValueError("and then failed")
    dist.barrier()


def floods_its_output() -> None:
    line = "x" * 100
    for _ in range(20_000):
        print(line)
    raise ValueError("after 2 MB")


def returns_what_cannot_be_sent() -> object:
    return (number for number in range(3))


def kills_the_fork_server() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    dist.barrier()


def wraps_what_the_peer_caused() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the first")
    try:
        dist.barrier()
    except RuntimeError as error:
        raise KeyError("step 7") from error


@dataclass(frozen=True)
class Case:
    fn: Callable[[], object]
    error: type[launch.LaunchError]
    rank: int | None  # the rank to blame; None: no single one; ANY: whichever was first
    says: tuple[str, ...]  # phrases that the message must have
    kind: str = ""  # kind of the error, if its class has several
    has_no_fates: bool = False
    limits: Limits = UNUSED


CASES = [
    Case(
        raises,
        launch.RankFailed,
        1,
        (
            "rank 1 of 4 raised ValueError: 3 chunks expected, got 2",
            "in raises\n",
            "about to fail",
            "The other ranks:",
        ),
    ),
    Case(
        raises_while_others_compute,
        launch.RankFailed,
        2,
        ("rank 2 of 4 raised KeyError: 'conv1.weight'", "stopped while running at"),
    ),
    Case(calls_sys_exit, launch.RankExited, 1, ("rank 1 of 4 left by sys.exit(0)",)),
    Case(calls_os_exit, launch.RankExited, 3, ("rank 3 of 4 ended by os._exit(0)",)),
    Case(
        returns_early,
        launch.RankExited,
        1,
        (
            "rank 1 of 4 has returned while rank",
            "still waited",
            "different sizes or dtypes",
            'backend="sim"',
            "in returns_early",
        ),
    ),
    Case(
        segfaults,
        launch.RankCrashed,
        1,
        ("rank 1 of 4 was killed by SIGSEGV at", "in segfaults", "ctypes.string_at(0)"),
    ),
    Case(is_killed, launch.RankCrashed, 2, ("rank 2 of 4 was killed by SIGKILL",)),
    Case(
        is_stopped,
        launch.RankHung,
        1,
        ("3 of 4 wait in barrier at", "rank 1 is suspended (by SIGSTOP"),
        kind="suspended",
        limits=IDLE,
    ),
    Case(
        allocates_forever,
        launch.RankOutOfMemory,
        1,
        ("rank 1 of 4 outgrew the memory limit", "in allocates_forever"),
    ),
    Case(asks_for_too_much, launch.RankOutOfMemory, 1, ("rank 1 of 4 ran out of memory",)),
    Case(
        loops_forever,
        launch.RankHung,
        1,
        (
            "time is up after 0.5 s of computing",
            *("3 of 4 wait in barrier at", "rank 1 is at", "in loops_forever"),
        ),
        kind="endless loop",
        limits=COMPUTING,
    ),
    Case(
        loops_holding_the_gil,
        launch.RankHung,
        1,
        ("3 of 4 wait in barrier at", "rank 1 is at", "re.match("),
        limits=COMPUTING,
    ),
    Case(
        waits_for_a_message_that_never_comes,
        launch.RankHung,
        None,
        (
            "time is up after 0.5 s in which no rank computed",
            *("3 of 4 wait in recv at", "rank 0 waits in recv at", "wait for each other"),
        ),
        kind="all wait",
        limits=IDLE,
    ),
    Case(
        reduces_different_shapes,
        launch.RankCrashed,
        ANY,
        ("was killed by SIGABRT in all_reduce at", "different shapes or dtypes"),
    ),
    Case(leaves_a_child_behind, launch.RankFailed, 1, ("and then failed",)),
    Case(floods_its_output, launch.RankFailed, ANY, ("raised ValueError: after 2 MB",)),
    Case(
        returns_what_cannot_be_sent,
        launch.RankFailed,
        ANY,
        ("TypeError: the result, a generator, cannot be sent", "return tensors"),
    ),
    Case(
        kills_the_fork_server,
        launch.SetupError,
        None,
        ("fork server", "was killed"),
        has_no_fates=True,
    ),
    Case(
        wraps_what_the_peer_caused,
        launch.RankFailed,
        1,
        ("rank 1 of 4 raised ValueError: the first", "failed because of it"),
    ),
]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    launch.run(dist.get_rank, 4)  # so that none of the times includes importing torch
    rows: list[str] = []
    yield rows
    print("\n\nway to fail                             seconds  error")
    print("\n".join(rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fn.__name__)
def test_failure_is_one_clear_error_in_time_and_nothing_survives(
    case: Case, table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    with pytest.raises(launch.LaunchError) as caught:
        launch.run(case.fn, 4, limits=case.limits)
    seconds = time.monotonic() - start
    capsys.readouterr()  # drops megabytes of output, which pytest -s would print after the test

    message = str(caught.value)
    error = message.splitlines()[0][:ERROR_CHARACTERS]
    table.append(f"{case.fn.__name__:<38} {seconds:>8.2f}  {error}")
    assert type(caught.value) is case.error, message
    assert case.kind in ("", caught.value.kind)
    assert [phrase for phrase in case.says if phrase not in message] == [], message
    if case.rank != ANY:
        assert caught.value.rank == case.rank, message
    assert [fate.rank for fate in caught.value.fates] == ([] if case.has_no_fates else [0, 1, 2, 3])
    assert seconds < VERDICT_S
    assert processes_of_ranks() == []


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_the_type_of_what_was_raised_is_known(backend: str) -> None:
    with pytest.raises(launch.RankFailed) as caught:
        launch.run(not_implemented, 2, backend=backend)
    assert caught.value.exception == "NotImplementedError"
    with pytest.raises(launch.RankExited) as exited:
        launch.run(calls_os_exit_everywhere, 2, backend=backend)
    assert exited.value.exception == ""
    assert "ended by os._exit(0)" in str(exited.value)


def waits_for_a_lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def waits_for_60_s() -> None:
    select.select([], [], [], 60)  # waits in real time, even on simulated ranks


@pytest.mark.parametrize(
    ("backend", "program"), [("gloo", waits_for_a_lock), ("sim", waits_for_60_s)]
)
def test_who_waits_for_what_is_not_communication_is_blocked(
    backend: str, program: Callable[[], None]
) -> None:
    with pytest.raises(launch.RankHung, match=program.__name__) as caught:
        launch.run(program, 1, backend=backend, limits=IDLE)
    assert caught.value.kind == "blocked"


def test_a_wait_in_given_code_is_no_line_that_blocks() -> None:
    here = str(Path(__file__).parent)
    with pytest.raises(launch.RankHung) as caught:
        launch.run(waits_for_a_lock, 2, limits=IDLE, given=(here,))
    assert caught.value.kind == "all wait"
    assert "<string>" not in str(caught.value)


def computes_for_1_s() -> bool:
    start = time.monotonic()
    while time.monotonic() - start < 1:
        pass
    return True


def uses_a_processor_for_1_s() -> bool:
    start = time.process_time()  # real processor time, even on simulated ranks
    while time.process_time() - start < 1:
        pass
    return True


def sleeps_for_1_s() -> bool:
    time.sleep(1)
    return True


def waits_for_a_child() -> bool:
    return subprocess.run(["sleep", "1.2"]).returncode == 0


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_who_waits_for_a_process_of_its_own_is_not_idle(backend: str) -> None:
    assert launch.run(waits_for_a_child, 2, backend=backend, limits=IDLE) == [True, True]


def says_again_that_it_has_started() -> None:
    control = int(next(iter(_sockets())))
    while True:
        os.write(control, b"S")
        time.sleep(0.1)


def _sockets() -> list[str]:
    """Return the descriptors of this rank's sockets, starting with the one to its supervisor."""
    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]}
    return sorted((fd for fd, target in links.items() if target.startswith("socket:")), key=int)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_rank_cannot_put_its_clock_back() -> None:
    with pytest.raises(launch.RankHung):
        launch.run(says_again_that_it_has_started, 1, backend="gloo", timeout_s=1.0)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_who_computes_is_not_idle_and_who_sleeps_does_not_compute(backend: str) -> None:
    limits = IDLE
    assert launch.run(computes_for_1_s, 2, backend=backend, limits=limits) == [True, True]
    assert launch.run(sleeps_for_1_s, 2, backend=backend, limits=Limits(60, cpu_s=0.5))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads wait for")
@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_who_gets_no_processor_and_is_seldom_looked_at_is_not_idle(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the process that looks at the ranks may get no processor either."""
    monkeypatch.setattr(supervisor, "TICK_S", 0.4)
    monkeypatch.setattr(RankProcess, "cpu_s", lambda rank: 0.0)
    assert launch.run(computes_for_1_s, 2, backend=backend, limits=IDLE) == [True, True]
    with pytest.raises(launch.RankHung, match="in which no rank computed"):
        launch.run(waits_for_60_s, 2, backend=backend, limits=IDLE)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads wait for")
@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_who_may_compute_for_longer_is_not_stopped_by_the_clock(backend: str) -> None:
    limits = Limits(0.7, cpu_s=30)
    assert launch.run(uses_a_processor_for_1_s, 2, backend=backend, limits=limits) == [True] * 2
    with pytest.raises(launch.RankHung, match=r"time is up after 0\.7 s: "):
        launch.run(uses_a_processor_for_1_s, 2, backend=backend, limits=Limits(0.7))
    with pytest.raises(launch.RankHung, match=r"time is up after 0\.7 s: "):
        launch.run(waits_for_60_s, 2, backend=backend, limits=limits)


def test_ranks_die_with_the_process_that_launched_them() -> None:
    script = (
        "import os, time\nfrom distlab import launch\n"
        "launch.run(lambda: (print('up', os.getpid(), flush=True), time.sleep(3600)), 2)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
        family = psutil.Process(parent.pid).children(recursive=True)
        assert {process.pid for process in family} >= set(pids)
        parent.kill()
    _, alive = psutil.wait_procs(family, timeout=VERDICT_S)
    assert alive == []


def test_ctrl_c_ends_the_ranks_and_reaches_the_caller() -> None:
    script = (
        "import os, time\nfrom distlab import launch\n"
        "try: launch.run(lambda: (print('up', flush=True), time.sleep(3600)), 2)\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(signal.SIGINT)
        assert parent.stdout.read() == "interrupted\n"
    _, alive = psutil.wait_procs(family, timeout=VERDICT_S)
    assert alive == []


def processes_of_ranks() -> list[psutil.Process]:
    """Return this process's descendants except fork servers, plus any orphans of ranks."""
    children = processes.children(recursive=False)
    servers = [child for child in children if fork_server_main.COMMAND in child.cmdline()]
    below = [process for server in servers for process in server.children(recursive=True)]
    orphans = [
        process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ORPHAN
    ]
    return below + [child for child in children if child not in servers] + orphans


def replaces_files_of_the_parent() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            stacks = Path(os.readlink(f"/proc/self/fd/{name}"))
            if stacks.suffix == ".stacks":
                stacks.unlink()
                os.mkfifo(stacks)
                (stacks.parent / "running").write_bytes(b"no words")
    while True:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="/proc names the files of a process")
def test_the_parent_waits_for_no_file_that_a_rank_has_replaced() -> None:
    with pytest.raises(launch.RankHung):
        launch.run(replaces_files_of_the_parent, 1, backend="sim", limits=COMPUTING)
