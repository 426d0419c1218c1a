"""Sessions in which something goes wrong: the ranks answer the next cell, and nothing is left.

Other mistakes, which notebooks add nothing to, are in tests/lab/sim/test_session.py.
"""

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


def on_gpus(cell: str, says: str, more: str = "") -> Session:
    return on_ranks(cell, says=says, options=f"--semantics nccl {more}")


LOOP = "while rank == 2:\n    pass\ndist.barrier()"
JOIN = "dist.init_process_group()"
ON_ONE_RANK = {  # what a rank does while the others wait for it, and what is shown
    "raise GeneratorExit('here')": "rank 1 of 4 raised GeneratorExit: here",
    "quit()": "rank 1 of 4 raised SystemExit, cell",
    "import os; os.abort()": "rank 1 of 4 ended by SIGABRT, cell",
    "import os, signal; os.killpg(0, signal.SIGTERM)": "rank 1 of 4 ended by SIGTERM, cell",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (
        "rank 1 of 4 ended by SIGKILL, cell"
    ),
    "import signal; signal.raise_signal(signal.SIGTERM)": "rank 1 of 4 ended by SIGTERM, cell",
    "import threading; threading.Event().wait()": (
        "deadlock (thread wait): rank 1 waits for an event of its own, and no thread of it can"
    ),
    "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()": (
        "deadlock (thread wait): rank 1 waits for a lock of its own, which it holds itself, and"
    ),
    "dist.distributed_c10d._get_default_store().get('never')": (
        "deadlock (key never set): rank 1 waits for the key 'never', which no rank has set, and"
    ),
}
MISMATCHES = {
    "dist.recv(torch.ones(1), (rank + 1) % 4)": "deadlock (send/recv cycle)",
    "dist.send(torch.ones(1), (rank + 1) % 4)": "deadlock (send/recv cycle)",
    "if rank == 0: dist.isend(torch.ones(1), 1).wait()": (
        "deadlock (peer ended): rank 0 waits for rank 1 to receive, but rank 1 has returned"
    ),
    "dist.all_reduce(torch.ones(1 + rank))": (
        "shape or dtype mismatch: all_reduce with size 1 on rank 0, with size 2 on rank 1,"
    ),
    "dist.broadcast(torch.ones(1), src=rank)": (
        "operation mismatch: broadcast with root 0 on rank 0, with root 1 on rank 1,"
    ),
}
SESSIONS = {
    **{
        code: on_ranks(f"if rank == 1: {code}\ndist.barrier()", says=says)
        for code, says in ON_ONE_RANK.items()
    },
    **{code: on_ranks(code, says=says) for code, says in MISMATCHES.items()},
    "exception in a hook": on_ranks(
        "p = torch.ones(1, requires_grad=True)\n"
        "p.register_hook(lambda g: g.no_such_thing)\n(p * 2).backward()\ndist.barrier()",
        says="rank 0 of 4 raised AttributeError: 'Tensor' object has no attribute 'no_such_thing'",
    ),
    "exception in finally": on_ranks(
        "try:\n    dist.recv(torch.ones(1), (rank + 1) % 4)\nfinally:\n    1 / 0",
        says="deadlock (send/recv cycle)",
    ),
    "endless recursion": on_ranks("def f(): f()\nf()", says="rank 0 of 4 raised RecursionError"),
    "endless recursion through C code": on_ranks(
        "class Model:\n    def __getattr__(self, name): return getattr(self.inner, name)\n"
        "def f(x): return sorted([x], key=f)\nif rank: Model().weight\nf(1)",
        says="raised RecursionError",
    ),
    "exception in a thread of a rank": on_ranks(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n"
        "if rank: dist.barrier()",
        says="On ranks 0-3, thread 'Thread-1 (<lambda>)' ended with ZeroDivisionError",
    ),
    "not Python": on_ranks("x = 1\nif x\n    pass", says='", line 3\n'),
    "a cell on some ranks": Session(
        ["%%ranks 0-1\ndist.barrier()"], "ranks 2 and 3 are not in this run"
    ),
    "a group that one rank does not use": on_ranks(
        "g = dist.new_group([0, 1, 2])\nif rank in (0, 2): dist.barrier(g)",
        says="wait in barrier (call 1 of ranks 0-2) for rank 1, but rank 1 has returned",
    ),
    "a group that some ranks make": on_ranks(
        "if rank < 2: dist.new_group([0, 1, 2])\ndist.barrier()",
        says="ranks 0 and 1 wait in new_group of ranks 0-2 for rank 2, and ranks 2 and 3 wait in",
    ),
    "two groups, crossed": on_ranks(
        "a, b = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "if rank < 2:\n    for g in (a, b) if rank else (b, a): dist.barrier(g)",
        says="These are two different groups of the same ranks: check group=.",
    ),
    "a batch of messages without partners": on_ranks(
        "ops = [dist.P2POp(dist.irecv, torch.ones(1), (rank + 1) % 4)]\n"
        "[w.wait() for w in dist.batch_isend_irecv(ops)]",
        says="deadlock (send/recv cycle)",
    ),
    # Errors in processes and callbacks
    "exception in a process of a DataLoader": on_ranks(
        "from torch.utils.data import DataLoader\nclass Images:\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i / (i != 2 or rank)\n"
        "for x in DataLoader(Images(), num_workers=1): dist.all_reduce(x)",
        says="in __getitem__\n    def __getitem__(self, i): return i / (i != 2 or rank)",
    ),
    "exception in a pool of processes": on_ranks(
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool: pool.map(int, ['x'])",
        says="ValueError: invalid literal for int()",
    ),
    "exception in a callback": on_ranks(
        "work = dist.all_reduce(torch.ones(1), async_op=True)\nwork.wait()\n"
        "work.get_future().then(lambda future: 1 / 0).wait()",
        says="ZeroDivisionError: division by zero\n\nAt:\n  cell",
    ),
    # Endless loops and interrupts
    "wait for a pool of processes": on_ranks(
        "import multiprocessing, time\n"
        "multiprocessing.get_context('fork').Pool(1).map(time.sleep, [1e6])",
        says="rank 0 was interrupted at cell",
        interrupt_s=0.5,
    ),
    "errors that are passed over in an endless loop": on_ranks(
        "while True:\n    try: dist.all_reduce(torch.ones(8))\n    except Exception: pass",
        says="was interrupted at cell",
        interrupt_s=0.3,
    ),
    "%pull that never ends": Session(
        [
            "%%ranks\nclass Slow:\n    def __deepcopy__(self, memo):\n        while True: pass\n"
            "slow = Slow()",
            "%pull slow",
        ],
        "CellFailed: rank 0 was interrupted at cell",
        interrupt_s=0.3,
    ),
    "two endless loops": on_ranks(LOOP, LOOP, says="rank 2 was interrupted at", interrupt_s=0.2),
    "endless sleep": on_ranks("import time\nwhile True: time.sleep(1)", says="only sleeps"),
    "endless printing": on_ranks(
        "while True: print('x')", says="was interrupted at cell", interrupt_s=0.3
    ),
    **{
        f"interrupt at random moment {number}": on_ranks(
            "while True:\n    dist.all_reduce(torch.ones(8))",
            says="nterrupt",  # on a busy machine, some come before the ranks begin
            interrupt_s=random.Random(number).random() / 4,
        )
        for number in range(4)
    },
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
        says="  destroyed its process group without communicating  cell",
        repair=f"%%ranks\nif rank != 1: dist.destroy_process_group()\n{JOIN}",
    ),
    "all ranks leave the group": on_ranks(
        "dist.destroy_process_group()",
        "dist.barrier()",
        says="rank 0 has destroyed its process group at cell",
        repair=f"%%ranks\n{JOIN}",
    ),
    "a rank that leaves the group and joins again": on_ranks(
        "if rank == 1:\n    dist.destroy_process_group()\n    dist.init_process_group()",
        "dist.barrier()",
        says="called init_process_group again, but not all equally often: let all ranks do both.",
        repair=f"%%ranks\ndist.destroy_process_group()\n{JOIN}",
    ),
    "ranks that leave the group, one cell later": on_ranks(
        "if rank == 1: dist.destroy_process_group()",
        "dist.barrier()",
        says="rank 1 has destroyed its process group at cell",
        repair=f"%%ranks\nif rank != 1: dist.destroy_process_group()\n{JOIN}",
    ),
    "a rank that joins twice": on_ranks(
        "dist.init_process_group()",
        says="trying to initialize the default process group twice! The rank is in it already",
    ),
    "names that are overwritten": on_ranks(
        "dist = torch = print = None",
        "dist.barrier()",
        says="'NoneType' object has no attribute 'barrier'",
    ),
    # Cells in another order
    "a receive before its send": Session(
        [
            "%%ranks 1\nx = torch.zeros(1)\ndist.recv(x, 0)",
            "%%ranks 0\ndist.send(torch.ones(1), 1)",
        ],
        "rank 0 waits for rank 1 to receive, but rank 1 is not in this run",
    ),
    "a send that runs twice": Session(
        [
            "%%ranks 0\nw = dist.isend(torch.ones(1), 1)",
            "%%ranks 0\nw = dist.isend(torch.ones(1), 1)",
            "%%ranks 1\nx = torch.zeros(1)\nfor _ in range(3): dist.recv(x, 0)",
        ],
        "rank 1 waits for rank 0 to send, but rank 0 is not in this run",
    ),
    # GPUs
    "a race": on_gpus(
        "x = torch.ones(1 << 20, device=device)\nw = dist.all_reduce(x, async_op=True)\ny = x + 1",
        says="what all_reduce (call 1 of ranks 0-3) writes, and nothing orders the two",
    ),
    "no such GPU": on_gpus(
        "torch.ones(1, device='cuda:99')", says="rank 0 asks for cuda:99, and it sees 8 GPUs"
    ),
    "too little memory": on_gpus(
        "x = torch.ones(1 << 22, device=device)",
        says="out of memory in ones: it needs 16.0 MiB more, 0 B of 10.2 MiB are in use",
        more="--memory-gib 0.01",
    ),
    "more memory than the machine has": on_gpus(
        "x = torch.ones(1 << 50, device=device)", says="out of memory in ones: it needs 4096 TiB"
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
