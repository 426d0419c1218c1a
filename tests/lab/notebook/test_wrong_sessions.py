"""Sessions in which something goes wrong: the ranks answer the next cell, and nothing is left."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from notebooks import Notebook

ANSWER = """%%ranks
import torch, torch.distributed as dist
y = torch.ones(1, device=device)
dist.all_reduce(y)
y.item() + kept"""
ANSWERS = [f"rank {rank}: {45 + rank}.0" for rank in range(4)]


class Session(NamedTuple):
    """A session with mistakes.

    Attributes:
        cells: Cells that run one after another.
        says: Text that the last of them shows.
        interrupt_s: Seconds after which the user interrupts each cell; 0 for never.
        options: Options of ``%cluster``.
        repair: Cell that a user would run next.
    """

    cells: list[str]
    says: str
    interrupt_s: float = 0.0
    options: str = ""
    repair: str = ""


def on_ranks(*cells: str, says: str, **options: object) -> Session:
    return Session([f"%%ranks\n{cell}" for cell in cells], says, **options)  # type: ignore[arg-type]


LOOP = "while rank == 2:\n    pass\ndist.barrier()"
ENDLESS_COLLECTIVES = "while True:\n    dist.all_reduce(torch.ones(8))"
JOIN = "dist.init_process_group()"
SESSIONS = {
    # Exceptions
    "exception on one rank": on_ranks("if rank == 2: 1 / 0\ndist.barrier()", says="ZeroDivision"),
    "exception on all ranks": on_ranks("1 / 0", says="rank 0 of 4 raised ZeroDivisionError"),
    "exception in a hook": on_ranks(
        "p = torch.ones(1, requires_grad=True)\n"
        "p.register_hook(lambda g: g.no_such_thing)\n(p * 2).backward()\ndist.barrier()",
        says="no_such_thing",
    ),
    "exception that is no Exception": on_ranks(
        "class Stop(BaseException): pass\nif rank: raise Stop('here')\ndist.barrier()", says="here"
    ),
    "exception in finally": on_ranks(
        "try:\n    dist.recv(torch.ones(1), (rank + 1) % 4)\nfinally:\n    1 / 0", says="deadlock"
    ),
    "error that is caught, and then a collective": on_ranks(
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    if rank != 1:\n        dist.barrier()",
        says="rank 1",
    ),
    "endless recursion": on_ranks("def f(): f()\nf()", says="RecursionError"),
    "failed assertion": on_ranks("assert rank != 3, 'not this one'", says="not this one"),
    "exception in a thread of a rank": on_ranks(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n"
        "if rank: dist.barrier()",
        says="barrier",
    ),
    "not Python": on_ranks("for x in", says="SyntaxError"),
    "no such name": on_ranks("nonsense", says="NameError"),
    "no such module": on_ranks("import no_such_module", says="no_such_module"),
    # Exits
    "exit of one rank": on_ranks(
        "import sys\nif rank == 1: sys.exit(3)\ndist.barrier()", says="rank 1"
    ),
    "quit": on_ranks("if rank == 0: quit()\ndist.barrier()", says="rank 0"),
    "hard exit of one rank": on_ranks(
        "import os\nif rank == 1: os._exit(3)\ndist.barrier()", says="rank 1"
    ),
    "kill of itself": on_ranks(
        "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        says="rank 1",
    ),
    "signal to itself": on_ranks(
        "import signal\nif rank == 1: signal.raise_signal(signal.SIGTERM)\ndist.barrier()",
        says="rank 1",
    ),
    # Deadlocks
    "cycle of recv": on_ranks("dist.recv(torch.ones(1), (rank + 1) % 4)", says="send/recv cycle"),
    "cycle of send": on_ranks("dist.send(torch.ones(1), (rank + 1) % 4)", says="send/recv cycle"),
    "recv that nobody answers": on_ranks(
        "if rank == 0: dist.recv(torch.ones(1), 1)", says="rank 1"
    ),
    "a rank that skips a collective": on_ranks("if rank: dist.barrier()", says="rank 0"),
    "a cell on some ranks": Session(
        ["%%ranks 0-1\ndist.barrier()"], "ranks 2 and 3 are not in this run"
    ),
    "collectives in another order": on_ranks(
        "if rank: dist.barrier()\ndist.all_reduce(torch.ones(1))\nif not rank: dist.barrier()",
        says="all_reduce",
    ),
    "sizes that differ": on_ranks("dist.all_reduce(torch.ones(1 + rank))", says="(4,)"),
    "roots that differ": on_ranks("dist.broadcast(torch.ones(1), src=rank)", says="rank"),
    "a group that one rank does not use": on_ranks(
        "g = dist.new_group([0, 1, 2])\nif rank in (0, 2): dist.barrier(g)", says="rank 1"
    ),
    "a group that some ranks make": on_ranks(
        "if rank < 2: dist.new_group([0, 1])\ndist.barrier(dist.new_group([*range(4)]))",
        says="new_group",
    ),
    "two groups, crossed": on_ranks(
        "a, b = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "if rank < 2:\n    for g in (a, b) if rank else (b, a): dist.barrier(g)",
        says="deadlock",
    ),
    "a batch of messages without partners": on_ranks(
        "ops = [dist.P2POp(dist.irecv, torch.ones(1), (rank + 1) % 4)]\n"
        "[w.wait() for w in dist.batch_isend_irecv(ops)]",
        says="deadlock",
    ),
    "isend that is never received": on_ranks(
        "if rank == 0: dist.isend(torch.ones(1), 1).wait()", says="rank 1"
    ),
    "an event that nobody sets": on_ranks(
        "import threading\nif rank == 1: threading.Event().wait()\ndist.barrier()", says="rank 1"
    ),
    "a lock that a rank takes twice": on_ranks(
        "import threading\nlock = threading.Lock()\nlock.acquire()\nif rank == 1: lock.acquire()\n"
        "dist.barrier()",
        says="rank 1",
    ),
    "a key of the store that nobody sets": on_ranks(
        "if rank == 3: dist.distributed_c10d._get_default_store().get('never')", says="rank 3"
    ),
    # Endless loops and interrupts
    "endless loop on one rank": on_ranks(LOOP, says="rank 2 was interrupted", interrupt_s=0.3),
    "endless loop on all ranks": on_ranks("while True: pass", says="interrupted", interrupt_s=0.3),
    "endless loop that catches everything": on_ranks(
        "while True:\n    try:\n        dist.barrier()\n    except Exception:\n        pass",
        says="interrupted",
        interrupt_s=0.3,
    ),
    "endless collectives": on_ranks(ENDLESS_COLLECTIVES, says="interrupted", interrupt_s=0.3),
    "endless sleep": on_ranks("import time\nwhile True: time.sleep(1)", says="only sleeps"),
    "endless printing": on_ranks("while True: print('x')", says="interrupted", interrupt_s=0.3),
    **{
        f"interrupt at random moment {number}": on_ranks(
            # On a busy machine, some come before the ranks begin: KeyboardInterrupt.
            ENDLESS_COLLECTIVES,
            says="nterrupt",
            interrupt_s=random.Random(number).random() / 4,
        )
        for number in range(4)
    },
    "two interrupted cells": on_ranks(LOOP, LOOP, says="rank 2", interrupt_s=0.2),
    # Processes, folders and event loops
    "a current folder that is removed": on_ranks(
        "import os, tempfile\nfolder = tempfile.mkdtemp()\nos.chdir(folder)\nos.rmdir(folder)",
        "print('still here')",
        says="still here",
    ),
    "a forked process that exits": on_ranks(
        "import os\nif rank == 1:\n    child = os.fork()\n    if not child: raise SystemExit(5)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        says="rank 1: 5",
    ),
    "a forked process that goes on to the end": on_ranks(
        "import os\nif (child := os.fork()): print(os.waitpid(child, 0)[1])", says="ranks 0-3: 0"
    ),
    "asyncio that sleeps for long": on_ranks(
        "import asyncio\nasyncio.run(asyncio.sleep(1e6))\nprint('awake')", says="awake"
    ),
    "asyncio that waits for nothing": on_ranks(
        "import asyncio\nasync def wait(): await asyncio.Event().wait()\nasyncio.run(wait())",
        says="ranks 0-3 wait for a task of asyncio",
    ),
    # Groups that are left, and names that are lost
    "a rank that leaves the group": on_ranks(
        "if rank == 1: dist.destroy_process_group()\nelse: dist.barrier()",
        says="rank 1",
        repair=f"%%ranks\nif rank != 1: dist.destroy_process_group()\n{JOIN}",
    ),
    "all ranks leave the group": on_ranks(
        "dist.destroy_process_group()",
        "dist.barrier()",
        says="not been initialized",
        repair=f"%%ranks\n{JOIN}",
    ),
    "a rank that joins twice": on_ranks("dist.init_process_group()", says="rank 0"),
    "names that are overwritten": on_ranks(
        "dist = torch = print = None", "dist.barrier()", says="NoneType"
    ),
    # Cells in another order
    "a receive before its send": Session(
        [
            "%%ranks 1\nx = torch.zeros(1)\ndist.recv(x, 0)",
            "%%ranks 0\ndist.send(torch.ones(1), 1)",
        ],
        "rank 1",
    ),
    "a send that runs twice": Session(
        [
            "%%ranks 0\nw = dist.isend(torch.ones(1), 1)",
            "%%ranks 0\nw = dist.isend(torch.ones(1), 1)",
            "%%ranks 1\nx = torch.zeros(1)\nfor _ in range(3): dist.recv(x, 0)",
        ],
        "rank 0",
    ),
    "values that cannot be copied": Session(
        ["import threading\nlock = threading.Lock()", "%push lock"], "lock"
    ),
    # GPUs
    "a race": Session(
        [
            "%%ranks\nx = torch.ones(1 << 20, device=device)\nw = dist.all_reduce(x, async_op=True)"
            "\ny = x + 1"
        ],
        "wait()",
        options="--semantics nccl",
    ),
    "no such GPU": Session(
        ["%%ranks\ntorch.ones(1, device='cuda:99')"], "99", options="--semantics nccl"
    ),
    "too little memory": Session(
        ["%%ranks\nx = torch.ones(1 << 22, device=device)"],
        "memory",
        options="--semantics nccl --memory-gib 0.01",
    ),
    "more memory than the machine has": Session(
        ["%%ranks\nx = torch.ones(1 << 50, device=device)"],
        "out of memory in ones: it needs 4096 TiB",
        options="--semantics nccl",
    ),
}


def threads() -> set[threading.Thread]:
    """Return all threads but one that IPython begins anew when a process forks."""
    return {x for x in threading.enumerate() if x.name != "IPythonHistorySavingThread"}


@pytest.fixture(scope="module")
def leftovers(shell: InteractiveShell) -> Iterator[None]:
    """Check that nothing of any session is left when all have run."""
    before, children = threads(), {*psutil.Process().children(recursive=True)}
    yield
    deadline_s = time.monotonic() + 5
    while threads() - before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert threads() - before == set()
    assert {*psutil.Process().children(recursive=True)} - children == set()


def interrupted(notebook: Notebook, cell: str, after_s: float) -> str:
    """Run a cell, and interrupt it as the button of a notebook does.

    IPython drops an interrupt that comes while it prepares the cell; a user then presses again.
    """
    has_ended = threading.Event()

    def press() -> None:
        is_waiting = not has_ended.wait(after_s)
        while is_waiting:
            os.kill(os.getpid(), signal.SIGINT)
            is_waiting = not has_ended.wait(5)

    user = threading.Thread(target=press)
    user.start()
    try:
        return notebook.run(cell)
    finally:
        has_ended.set()
        user.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("leftovers")
@pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)
def test_the_ranks_answer_the_next_cell(notebook: Notebook, session: Session) -> None:
    notebook.run(f"%cluster 4 {session.options}")
    notebook.run("%%ranks\nkept = 41 + rank")
    for cell in session.cells:
        if session.interrupt_s:
            shown = interrupted(notebook, cell, session.interrupt_s)
        else:
            shown = notebook.run(cell)
    assert session.says in shown, shown
    notebook.run(session.repair or "pass")
    assert notebook.run(ANSWER).splitlines()[:4] == ANSWERS, shown
