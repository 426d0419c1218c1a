"""Cells on real ranks: processes that ipyparallel starts."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from mpirun import needs_mpi
from notebooks import Notebook, run
from processes import wait_until

from distlab.notebook import engine, under_way
from distlab.notebook.cells import compiled
from distlab.notebook.engines import Engines
from distlab.notebook.output import RankOutput
from distlab.notebook.under_way import UnderWay

SESSION = {
    "x": "x = torch.arange(3.0) + rank\ndist.all_reduce(x)",
    "part": "part = torch.empty(1)\n"
    "parts = [*torch.arange(3.0).split(1)] if rank == 0 else None\ndist.scatter(part, parts)",
    "left": "left = torch.empty(1)\nwork = dist.isend(part, (rank + 1) % 3)",
    "noise": "dist.recv(left, (rank - 1) % 3)\nwork.wait()\n"
    "noise = torch.rand(2, generator=torch.Generator().manual_seed(rank))",
}

ANSWER = "ranks 0-2: 3.0"


@pytest.fixture(scope="module")
def cluster(shell: InteractiveShell) -> Iterator[Notebook]:
    notebook = Notebook(shell)
    assert notebook.run("%cluster 3 --world gloo") == "3 processes with gloo"
    yield notebook
    notebook.run("%cluster --off")


@pytest.fixture
def notebook(cluster: Notebook) -> Iterator[Notebook]:
    """A notebook with three real ranks, which answer the next cell whatever a test has done."""
    cluster.run("%%ranks\nkept = rank * 10")
    yield cluster
    assert first_line(cluster, "z = torch.ones(1)\ndist.all_reduce(z)\nz.item()") == ANSWER


def first_line(notebook: Notebook, cell: str) -> str:
    """Run a cell on all ranks; return the first line that it shows."""
    return notebook.run(f"%%ranks\n{cell}").partition("\n")[0]


@contextlib.contextmanager
def other_ranks(notebook: Notebook, command: str) -> Iterator[None]:
    """Replace the ranks for a while."""
    kept, notebook.magics.world = notebook.magics.world, None
    notebook.run(command)
    yield
    notebook.run("%cluster --off")
    notebook.magics.world = kept


@contextlib.contextmanager
def when(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Act in another thread as soon as something is true."""

    def wait() -> None:
        wait_until(condition)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def interrupted(notebook: Notebook, tmp_path: Path, cell: str, first: str = "") -> str:
    """Run a cell, and interrupt it once all ranks have begun it and run its first lines."""
    begun = f"import pathlib; pathlib.Path(r'{tmp_path}', str(rank)).touch()"
    with when(lambda: len([*tmp_path.iterdir()]) == 3, lambda: os.kill(os.getpid(), signal.SIGINT)):
        return notebook.run(f"%%ranks\n{first}\n{begun}\n{cell}")


def test_values_are_those_of_simulated_ranks(notebook: Notebook) -> None:
    def values() -> dict[str, list[list[float]]]:
        for cell in SESSION.values():
            notebook.run(f"%%ranks\n{cell}")
        notebook.run(f"%pull {' '.join(SESSION)}")
        return {name: [x.tolist() for x in notebook.shell.user_ns[name]] for name in SESSION}

    on_real = values()
    with other_ranks(notebook, "%cluster 3"):
        assert values() == on_real


def test_programs_find_the_variables_of_torchrun(notebook: Notebook) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    notebook.run(f"%%ranks\nimport os\nknown = [os.environ[n] for n in {names}]")
    expected = [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert notebook.pulled("known") == expected


def test_values_of_any_kind_go_to_the_ranks_and_come_back(notebook: Notebook) -> None:
    notebook.run("import math\ndef area(r): return math.pi * r * r")
    notebook.run("%push area")
    notebook.run("%%ranks\nclass Net(torch.nn.Linear): pass\nnet, size = Net(2, rank + 1), area(1)")
    assert [net.out_features for net in notebook.pulled("net")] == [1, 2, 3]
    assert notebook.pulled("size") == [pytest.approx(3.14159, abs=1e-5)] * 3
    assert "ranks 0-2 have no nothing" in notebook.run("%pull nothing")


def test_names_of_ranks_are_completed_and_described(notebook: Notebook) -> None:
    assert notebook.completions("%rank 1 kep") == ["%rank 1 kept"]
    assert "Value:      10" in notebook.run("%rank 1 kept?")
    assert "  kept  int" in notebook.run("%cluster")


def test_prints_appear_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    go_on, outputs = tmp_path / "go on", {0: RankOutput()}
    cell = compiled(
        "import pathlib, time, tqdm\nprint('first')\nfor _ in tqdm.tqdm(range(3)): pass\n"
        f"while not pathlib.Path(r'{go_on}').exists(): time.sleep(0.01)\nprint('last')",
        "cell 1",
    )
    with when(lambda: "3/3" in outputs[0].screen.text(), go_on.touch):
        notebook.magics.world.run(cell, outputs)
    text = outputs[0].screen.text()
    assert text.startswith("first\n100%|")
    assert text.endswith("\nlast\n")
    assert text.count("3/3") == 1


def test_displays_go_to_the_output_of_their_rank(notebook: Notebook) -> None:
    source = """
from IPython.display import HTML, display
import matplotlib.pyplot as plt
handle = display(HTML("old"), display_id=True)
handle.update(HTML(f"<b>{rank}</b>"))
display(plt.subplots(figsize=(1, 1))[0]);"""
    for rank, output in run(notebook.magics.world, source)[1].items():
        html, picture = output.shown
        assert html["text/html"] == f"<b>{rank}</b>"
        assert picture["image/png"]


def test_an_exception_is_shown_once_with_what_the_others_did(notebook: Notebook) -> None:
    shown = notebook.run("%%ranks\nif rank == 2:\n    1 / 0\ndist.barrier()")
    assert notebook.has_failed
    assert "rank 2 of 3 raised ZeroDivisionError: division by zero" in shown
    assert shown.count("Traceback") == 1
    assert "line 3, in <module>\n    1 / 0" in shown
    assert "ranks 0 and 1  barrier (call " in shown
    assert ":4" in shown
    assert "distlab" not in shown
    assert first_line(notebook, "kept") == "rank 0: 0"


def test_ctrl_c_ends_a_deadlock_and_says_who_waits_where(
    notebook: Notebook, tmp_path: Path
) -> None:
    cell = "if rank == 1:\n    dist.recv(z, 0)\nelse:\n    dist.barrier()"
    notebook.run("%%ranks\nz = torch.zeros(1)")
    shown = interrupted(notebook, tmp_path, cell)
    assert "ranks 0 and 2 wait in barrier" in shown
    assert "for rank 1, but rank 1 is waiting in recv" in shown
    assert notebook.run("%cluster --why") in shown
    assert notebook.run("%rank 1 kept").startswith("rank 1: 10")


def test_ctrl_c_ends_an_endless_loop_and_names_its_line(notebook: Notebook, tmp_path: Path) -> None:
    shown = interrupted(notebook, tmp_path, "if rank == 1:\n    while True:\n        pass")
    assert "rank 1 was interrupted at cell" in shown


def test_a_deadlock_ends_by_itself(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "DEADLOCK_S", 1.0)
    shown = notebook.run("%%ranks\ndist.all_reduce(torch.zeros(2 + 2 * (rank == 2)))")
    assert "hang (shape or dtype mismatch): all_reduce" in shown
    assert "(4,) float32 on rank 2" in shown
    shown = notebook.run("%%ranks 0\ndist.barrier()")
    assert "but ranks 1 and 2 are not in this cell" in shown


def test_a_rank_that_works_is_not_taken_for_a_deadlock(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_way, "DEADLOCK_S", 0.5)
    notebook.run("%%ranks\nimport time\nif rank == 0: time.sleep(2)\ndist.barrier()")
    assert not notebook.has_failed


class Call(Future[engine.Ended]):
    """A call to a rank, as ipyparallel returns it."""

    def __init__(self, idle: tuple[float, float]) -> None:
        super().__init__()
        self.data = {engine.IDLE: idle}
        self.get = self.result


def test_ranks_that_waited_for_one_that_has_ended_are_not_deadlocked(tmp_path: Path) -> None:
    now_s = time.monotonic()
    calls = [Call((now_s, now_s)), Call((now_s - 60, now_s))]  # rank 1's last news of itself
    ended = engine.Ended(RankOutput(), None, False)
    calls[0].set_result(ended)
    timer = threading.Timer(5 * under_way.PERIOD_S, calls[1].set_result, [ended])
    timer.start()
    processes = Mock(**{"dead.return_value": set()})
    cell = UnderWay(dict(enumerate(calls)), {0: RankOutput(), 1: RankOutput()}, processes, tmp_path)
    cell.finish()
    timer.join()
    assert not cell.interrupted


def test_a_rank_that_is_killed_begins_anew(notebook: Notebook) -> None:
    shown = notebook.run("%%ranks\nimport os\nif rank == 1: os._exit(3)\ndist.barrier()")
    assert "rank 1 of 3 ended in the cell" in shown
    assert "rank 1 begins anew, without variables" in shown
    notebook.run("%%ranks\nhas = 'kept' in globals()\ndist.barrier()")
    assert notebook.pulled("has") == [True, False, True]


@pytest.mark.parametrize("send", ["raise_signal(15)", "raise_signal(9)", "os.killpg(0, 15)"])
def test_a_rank_that_a_signal_ends_does_so_in_its_cell(notebook: Notebook, send: str) -> None:
    shown = notebook.run(f"%%ranks\nimport os\nfrom signal import *\nif rank == 1: {send}")
    name = signal.Signals(9 if "9" in send else 15).name
    assert f"rank 1 of 3 ended by {name} in the cell" in shown
    assert "rank 1 begins anew, without variables" in shown
    assert first_line(notebook, "rank > 5") == "ranks 0-2: False"


def test_a_rank_that_ignores_interrupts_is_killed(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_way, "MAX_INTERRUPTS", 1)
    ignore = "import signal\nif rank == 1: signal.signal(signal.SIGINT, signal.SIG_IGN)"
    shown = interrupted(notebook, tmp_path, "while rank == 1:\n    pass\ndist.barrier()", ignore)
    assert "rank 1 of 3 did not react to interrupts: killed" in shown


def test_a_rank_that_ends_between_cells_begins_anew(notebook: Notebook) -> None:
    notebook.run("%%ranks\nimport os\npid = os.getpid()")
    process = psutil.Process(notebook.pulled("pid")[0])
    process.kill()
    process.wait()
    assert "rank 0 begins anew, without variables" in notebook.run("%%ranks\ndist.barrier()")
    assert not notebook.has_failed


def test_ranks_that_leave_the_group_join_again(notebook: Notebook) -> None:
    notebook.run("%%ranks 2\ndist.destroy_process_group()")
    assert not notebook.has_failed


def test_a_value_that_no_process_can_get_is_told_in_a_line(notebook: Notebook) -> None:
    shown = notebook.run("import threading\nlock = threading.Lock()\n%push lock")
    assert "lock cannot be sent to a process" in shown
    assert "Traceback" not in shown


def test_a_forked_process_ends_with_the_cell(notebook: Notebook) -> None:
    """Otherwise it would go on as a second engine."""
    notebook.run("%%ranks\nimport os\nchild = os.fork() if rank == 0 else 0")
    child = notebook.pulled("child")[0]
    reap = f"%%ranks 0\nprint(os.waitpid({child}, 0)[0] == {child})"
    assert notebook.run(reap).startswith("rank 0: True")
    assert first_line(notebook, "dist.barrier()\n6") == "ranks 0-2: 6"


def test_ranks_that_join_by_themselves_in_vain_join_again(notebook: Notebook) -> None:
    again = "if rank: dist.destroy_process_group()\ndist.init_process_group()"
    assert "default process group twice" in notebook.run(f"%%ranks\n{again}")
    assert first_line(notebook, "dist.barrier()\n5") == "ranks 0-2: 5"


def test_edited_modules_are_loaded_again(notebook: Notebook, tmp_path: Path) -> None:
    module = tmp_path / "edited_on_ranks.py"
    module.write_text("def version(): return 1")
    path = f"import os, sys\nos.chdir(r'{tmp_path}')\nsys.path.insert(0, os.getcwd())"
    notebook.run(f"%%ranks\n{path}\nfrom edited_on_ranks import version")
    module.write_text("def version(): return 2 + 0")
    assert first_line(notebook, "version()") == "ranks 0-2: 2"


def test_ranks_whose_folder_is_removed_go_on(notebook: Notebook) -> None:
    into = "import os, tempfile\nhome = os.getcwd()\nfolder = tempfile.mkdtemp()\nos.chdir(folder)"
    notebook.run(f"%%ranks\n{into}\nos.rmdir(folder)")
    assert first_line(notebook, "os.chdir(home)\nos.getcwd() == home") == "ranks 0-2: True"


def test_real_ranks_have_no_lanes(notebook: Notebook) -> None:
    assert "simulate the cell, by %cluster 3" in notebook.run("%cluster --lanes")


@needs_mpi
def test_ranks_of_mpi(cluster: Notebook, tmp_path: Path) -> None:
    with other_ranks(cluster, "%cluster 3 --world mpi"):
        assert first_line(cluster, "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()") == ANSWER
        shown = interrupted(cluster, tmp_path, "dist.recv(x, (rank + 1) % 3)")
        assert "ranks 0-2 wait in recv" in shown
        assert first_line(cluster, "dist.all_reduce(x)\nx.item()") == "ranks 0-2: 9.0"
        assert "ranks 0-2 begin anew" in cluster.run("%%ranks 1\nimport os\nos._exit(0)")
        cluster.run("%%ranks\ndist.barrier()")
        assert not cluster.has_failed


def test_what_is_missing_is_said_in_a_line(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"2 ranks with nccl need a GPU each.* has 1 GPU"):
        Engines(2, "nccl")
    monkeypatch.setattr("distlab.notebook.engines.find_mpirun", lambda: None)
    with pytest.raises(ValueError, match="need mpi4py and mpirun"):
        Engines(2, "mpi")
    for module in ("engines", "processes"):
        monkeypatch.delitem(sys.modules, f"distlab.notebook.{module}")
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    notebook = Notebook(shell)
    monkeypatch.setattr(notebook.magics, "world", None)
    assert "real ranks need ipyparallel" in notebook.run("%cluster 2 --world gloo")


DRIVER = """
from distlab.notebook.cells import compiled
from distlab.notebook.engines import Engines
from distlab.notebook.output import RankOutput

ranks = Engines(2, "gloo")
folder = ranks._processes.folder
print(folder, flush=True)
cell = f"open('{folder}/begun', 'w').close()\\ndist.recv(torch.zeros(1), 1 - rank)"
ranks.run(compiled(cell, "cell 1"), {0: RankOutput(), 1: RankOutput()})
"""


def test_a_killed_notebook_leaves_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        folder = Path(it.stdout.readline().strip())
        wait_until((folder / "begun").exists)
        started = psutil.Process(it.pid).children(recursive=True)
        it.kill()
    assert len(started) >= 3
    wait_until(lambda: not any(process.is_running() for process in started))
    wait_until(lambda: not folder.exists())
