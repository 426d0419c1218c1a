"""``%cluster``, ``%%ranks`` and their like, in a shell of IPython."""

import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from notebooks import Notebook
from processes import wait_until

from distlab.learner import folder, handout, source
from distlab.notebook import magics, output
from distlab.sim.engine import scheduler


def test_ranks_keep_their_variables(notebook: Notebook) -> None:
    notebook.run("%%ranks\nx = torch.full((2,), float(rank))")
    assert notebook.run("%%ranks\ndist.all_reduce(x)\nx").splitlines()[:2] == [
        "(2,) float32",
        "  ranks 0-3  6   6",
    ]


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("print(rank % 2)", ["ranks 0 and 2: 0", "ranks 1 and 3: 1"]),
        (
            "print('text')\n[rank // 2]",
            ["ranks 0-3: text", "ranks 0 and 1: [0]", "ranks 2 and 3: [1]"],
        ),
        (
            "torch.tensor([1, int(rank == 2)])",
            ["(2,) int64", "  ranks 0, 1 and 3  1   0", "  rank 2            1   1*"],
        ),
        ("print('10 %', end='\\r'); print('100 %')", ["ranks 0-3: 100 %"]),
        ("print('half:', '\\ud83d')", ["ranks 0-3: half: \\ud83d"]),
    ],
)
def test_equal_outputs_are_folded(notebook: Notebook, cell: str, lines: list[str]) -> None:
    assert notebook.run(f"%%ranks\n{cell}").splitlines() == lines


def test_waits_that_differ_by_rounding_are_equal(notebook: Notebook) -> None:
    notebook.run("%%ranks\nimport time")
    pauses = "(0.1, 0.2, 0.3) if rank % 2 else (0.3, 0.2, 0.1)"
    shown = notebook.run(
        f"%%ranks\nfor s in {pauses}:\n    time.sleep(s if rank < 3 else 2 * s)\ndist.barrier()"
    )
    assert "(ranks 0-2)" in shown


def test_some_ranks_run_a_cell(notebook: Notebook) -> None:
    assert notebook.run("%%ranks 0,2-3\nprint('here')") == "ranks 0, 2 and 3: here"
    assert notebook.run("%%ranks 0 2\nprint('here')") == "ranks 0 and 2: here"
    assert notebook.run("%rank 1 rank + 10") == "rank 1: 11"


def test_an_expression_is_the_rank_s_own(notebook: Notebook) -> None:
    """IPython would put the notebook's variables into a magic's braces."""
    notebook.run("rank = 99")
    assert notebook.run("%rank 1 f'{rank}'") == "rank 1: '1'"


def test_a_message_goes_from_cell_to_cell(notebook: Notebook) -> None:
    notebook.run("%%ranks 0\nwork = dist.isend(torch.ones(1), 1)")
    assert "send to rank 1" in notebook.run("%cluster")
    assert "rank 1: 1.0" in notebook.run("%%ranks 1\nx = torch.zeros(1)\ndist.recv(x, 0)\nx.item()")


def test_a_cluster_without_gpus_tells_its_state(notebook: Notebook) -> None:
    notebook.run("%cluster laptop --ranks 2")
    assert "virtual time: 0 s" in notebook.run("%cluster")


def test_each_shell_has_its_own_ranks(notebook: Notebook) -> None:
    other = Notebook(InteractiveShell())
    other.shell.display_pub = CapturingDisplayPublisher()
    for command in ("load_ext", "reload_ext"):
        other.shell.run_line_magic(command, "distlab")
        other.run("%cluster 2")
        assert "2 simulated ranks" in other.run("%cluster")
    other.shell.run_line_magic("unload_ext", "distlab")
    assert "there are no ranks" in other.run("%cluster")
    assert "4 simulated ranks" in notebook.run("%cluster")


def test_values_go_to_the_ranks_and_come_back(notebook: Notebook) -> None:
    notebook.run("import torch\nlist_of_driver, y = [1], torch.ones(2)")
    notebook.run("%push list_of_driver y")
    notebook.run("%%ranks\nlist_of_driver.append(rank)\ny.mul_(rank);")
    assert notebook.pulled("list_of_driver") == [[1, rank] for rank in range(4)]
    assert [y.tolist() for y in notebook.pulled("y")] == [[float(r)] * 2 for r in range(4)]


def test_an_exception_is_shown_once_and_the_ranks_live_on(notebook: Notebook) -> None:
    notebook.run("%%ranks\nx = rank")
    shown = notebook.run("%%ranks\nif rank == 2:\n    1 / 0\ndist.barrier()")
    assert notebook.has_failed
    assert shown.count("ZeroDivisionError: division by zero") >= 1
    assert "rank 2 of 4 raised ZeroDivisionError" in shown
    assert "line 3, in <module>\n    1 / 0" in shown
    assert "distlab" not in shown
    assert notebook.run("%%ranks\ndist.barrier()\nx * 2").splitlines()[0] == "rank 0: 0"


def test_functions_of_the_notebook_are_named_by_their_cells(notebook: Notebook) -> None:
    notebook.run("import torch.distributed as dist\ndef wait():\n    dist.barrier()")
    number = len(notebook.shell.user_ns["In"]) - 1
    notebook.run("%push wait")
    assert f"cell {number}:3 in wait" in notebook.run("%%ranks\nrank == 1 or wait()")
    assert f"cell {number}:3 in wait" in notebook.run("%cluster --why")
    notebook.run("def fail():\n    raise ValueError\n")
    notebook.run("%push fail")
    assert f'File "cell {number + 4}", line 2, in fail' in notebook.run("%%ranks\nfail()")


def test_what_has_no_text_is_shown(notebook: Notebook) -> None:
    notebook.run("%%ranks 1\nfrom IPython.display import display")
    notebook.run("%%ranks 1\ndisplay({'text/html': '<b>x</b>'}, raw=True)")
    assert "<b>x</b>" in notebook.html()


TABLE = """
class Table:
    def __repr__(self): return "as text"
    def _repr_html_(self): return f"<b>HTML of {rank}</b>"
"""


def test_what_has_text_and_html_is_shown_as_either(notebook: Notebook) -> None:
    notebook.run(f"%%ranks\nfrom IPython.display import HTML, display\n{TABLE}")
    for cell in ("display(Table())", "Table()"):
        assert notebook.run(f"%%ranks 0-1\n{cell}") == "rank 0: as text\nrank 1: as text"
        assert re.findall("HTML of .|as text", notebook.html()) == ["HTML of 0", "HTML of 1"]
    notebook.run("%%ranks\ndisplay(HTML('<i>once</i>'))")
    assert notebook.html().count("<i>once</i>") == 1


@pytest.mark.parametrize("png", ["b'\\x89PNG'", "'iVBORw=='"])
def test_pictures_are_shown_as_such(notebook: Notebook, png: str) -> None:
    notebook.run(f"%%ranks 1\nclass P:\n    def _repr_png_(self): return {png}\nP()")
    assert '<img src="data:image/png;base64,iVBORw==">' in notebook.html()


def test_a_log_is_shown_under_each_cell(notebook: Notebook) -> None:
    configure = "import logging\nlogging.basicConfig(format='%(message)s', force=True)"
    notebook.run(f"%%ranks\n{configure}\nlogging.warning('first')")
    shown = notebook.run("%%ranks\nlogging.warning('from %d', rank // 3)")
    assert shown.splitlines() == ["ranks 0-2: from 0", "rank 3: from 1"]
    assert notebook.run("import logging\nlogging.warning('mine')") == "mine"
    notebook.run("logging.basicConfig(force=True)")


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        ("torch.arange(40).view(2, 20).T", "(20, 2) int64 ranks 0-3 0 20 1 21 2 22"),
        ("torch.arange(40).view(2, 20)", "(2, 20) int64 ranks 0-3 0 1 2 3 4 5 6 7 8 9 10 11 …"),
        ("torch.arange(40).view(2, 1, 20)", "(2, 1, 20) int64 ranks 0-3 0 1 2 3 4 5 6 7 8 9 10"),
        ("torch.zeros(3, 0)", "(3, 0) float32"),
        ("torch.tensor(5)", "() int64 ranks 0-3 5"),
        ("torch.eye(2).to_sparse()", "ranks 0-3: tensor(indices="),
        ("torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)", "ranks 0-3: tensor([1."),
    ],
)
def test_tensors_of_all_shapes_are_shown(notebook: Notebook, tensor: str, shown: str) -> None:
    notebook.run("%%ranks\nimport warnings\nwarnings.simplefilter('ignore')")
    words = notebook.run(f"%%ranks\n{tensor}").split()
    assert " ".join(words).startswith(shown)


def test_a_display_is_updated_and_cleared_on_its_rank(notebook: Notebook) -> None:
    notebook.run("%%ranks\nfrom IPython.display import HTML, clear_output, display")
    update = (
        "handle = display(HTML('<i>old</i>'), display_id=True)\nhandle.update(HTML('<i>new</i>'))"
    )
    notebook.run(f"%%ranks\n{update}")
    assert "<i>new</i>" in notebook.html()
    assert "<i>old</i>" not in notebook.html()
    assert notebook.run("%%ranks\nprint('old')\nclear_output()\nprint('new')") == "ranks 0-3: new"


def test_a_flood_of_text_is_cut(notebook: Notebook) -> None:
    shown = notebook.run("%%ranks 0\nfor n in range(30_000): print('0123456789')\nprint('end')")
    assert len(shown) < 2 * output.MAX_CHARS
    assert "more characters …" in shown


def test_outputs_are_grouped_as_asked(notebook: Notebook) -> None:
    cell = "print('text')\nrank % 2"
    by_rank = notebook.run(f"%%ranks --targets 0-1 --group-outputs engine\n{cell}").splitlines()
    assert by_rank == ["rank 0:", "  text", "  0", "rank 1:", "  text", "  1"]
    by_type = notebook.run(f"%%ranks --group-outputs type\n{cell}").splitlines()
    assert by_type == ["ranks 0-3: text", "ranks 0 and 2: 0", "ranks 1 and 3: 1"]


def test_the_shell_knows_the_variables_of_ranks(notebook: Notebook) -> None:
    notebook.run("%%ranks 1\nonly_here = torch.ones(2)")
    assert notebook.completions("%rank 1 only_h") == ["%rank 1 only_here"]
    attribute = "only_here.requires_grad"
    assert f"%%ranks 1\nx = {attribute}" in notebook.completions(f"%%ranks 1\nx = {attribute[:-2]}")
    assert "%rank 2 only_here" not in notebook.completions("%rank 2 only_h")
    described = notebook.run("%rank 1 only_here?")
    assert described.splitlines()[:2] == ["Type:       Tensor", "Value:      tensor([1., 1.])"]
    assert notebook.run("%%ranks 1\nonly_here?") == described
    notebook.run("%%ranks\non_all = rank")
    assert "Value:      0" in notebook.shell.object_inspect_mime("on_all")["text/plain"]
    assert "name 'only_here' is not defined" in notebook.run("%rank 2 only_here?")
    notebook.run("%%ranks\nclass A:\n    @property\n    def x(self): return 1 / 0\na = A()")
    assert "UsageError: division by zero" in notebook.run("%rank 1 a.x?")
    notebook.run("%%ranks\nclass Odd:\n    def __repr__(self): return 1 / 0\nodd = Odd()")
    assert "UsageError: division by zero" in notebook.run("%rank 1 odd?")


@pytest.mark.parametrize("text", ["nowhere", "nowhere.", "1a"])
def test_a_tooltip_knows_nothing_of_other_texts(notebook: Notebook, text: str) -> None:
    with pytest.raises(KeyError):
        notebook.shell.object_inspect_mime(text)


def test_all_cells_run_on_ranks_if_asked(notebook: Notebook) -> None:
    notebook.run("%autoranks on")
    assert notebook.run("rank + 1 if rank < 1 else 7").splitlines() == ["rank 0: 1", "ranks 1-3: 7"]
    assert notebook.run("%rank 0 rank") == "rank 0: 0"
    assert "line 2, in <module>" in notebook.run("x = 1\n1 / 0")  # as the editor counts
    assert notebook.run("rank * 0  # why?") == "ranks 0-3: 0"
    assert notebook.shell.check_complete("x = 1") == ("complete", "")
    assert notebook.completions("world_si") == ["world_size"]
    notebook.run("%autoranks off")
    notebook.run("y = 1")
    assert notebook.shell.user_ns["y"] == 1


def test_two_progress_bars_stay_on_their_lines() -> None:
    """As tqdm writes them: the second bar is a line below the first."""
    screen = output.Screen()
    for text in ("\router 0%", "\n\rinner 0%\x1b[A", "\n\rinner 100%\x1b[A", "\router 100%", "\n"):
        screen.write(text)
    assert screen.text() == "outer 100%\ninner 100%"


def test_each_rank_has_its_own_progress_bars(notebook: Notebook) -> None:
    shown = notebook.run("%%ranks\nfrom tqdm import tqdm\nfor _ in tqdm(range(3), ncols=40): pass")
    assert shown.startswith("ranks 0-3: 100%|")
    assert "other threads" not in notebook.run("%%ranks\ndist.recv(torch.ones(1), (rank + 1) % 4)")


def test_what_ranks_print_is_no_html(notebook: Notebook) -> None:
    notebook.run("%%ranks\nprint('<script>alert(1)</script>')")
    assert "<script>" not in notebook.html()
    assert "&lt;script&gt;" in notebook.html()


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%cluster no-such-preset", "dgx-h100"),
        ("%cluster 0", "1 to 1024"),
        ("%cluster --ranks 0", "1 to 1024"),
        ("%cluster 8 --ranks 4", "give one number of ranks, not 8 and 4"),
        ("%cluster laptop --cluster p4d", "give one cluster, not laptop and p4d"),
        ("%cluster laptop 3 --world gloo", "real processes have no laptop: leave out --world gloo"),
        ("%cluster 4 --seed 3 --world gloo", "real processes have no --seed"),
        ("%cluster --world gloo", "say how many ranks"),
        ("%%ranks 7\n1", "there is no rank 7: the cluster has ranks 0-3"),
        ("%%ranks a\n1", "'a' names no ranks: write them as 0,2-3, or all"),
        ("%rank 1", "name ranks and an expression"),
        ("%cluster 8 --fault 'kill", "No closing quotation"),
        ("%cluster --seed 3", "say how many ranks"),
        ("%cluster --seed 0", "say how many ranks"),  # the default, but given
        ("%cluster 4 --seed 0 --world gloo", "real processes have no --seed"),
        ("%cluster --off --seed 0", "--off stands alone"),
        ("%cluster --why", "no cell has run yet"),
        ("%push nothing", "the notebook has no variable nothing"),
        ("%pull nothing", "ranks 0-3 have no nothing"),
        ("%cluster 4 --fault 'slow_rnak 3 2'", "unknown fault"),
        ("%cluster 2 --semantics nccl --no-devices", "does not go together with --no-devices"),
        ("%%ranks 3-1\n1", "'3-1' names no ranks"),
        ("%cluster 4 --off", "--off stands alone"),
        ("import threading\nx = threading.Lock()\n%push x", "x cannot be copied"),
        ("%pull torch", "torch cannot be copied"),
        (
            "%%ranks\nx = 1\n%time x",
            "line 3: ranks run Python alone; begin another cell with %time",
        ),
        ("%%ranks\n!ls", "line 2: ranks run Python alone; begin another cell with !ls"),
        ("%save", "name a task: %save 3.1"),
        ("%%check\n1", "name a task: %%check 3.1"),
    ],
)
def test_mistakes_are_one_line(notebook: Notebook, cell: str, says: str) -> None:
    [shown] = notebook.run(cell).splitlines()
    assert shown.startswith("UsageError: ")
    assert says in shown
    assert notebook.run("%rank 3 rank") == "rank 3: 3"  # the ranks are still there


def test_a_cluster_has_the_options_of_the_simulator(notebook: Notebook) -> None:
    notebook.run("%cluster 2 --cluster p4d --fault 'slow_rank 1 2' --algorithm tree")
    assert "2 simulated ranks of p4d" in notebook.run("%cluster")


def test_each_rank_draws_its_own_random_numbers_and_goes_on_in_the_next_cell(
    notebook: Notebook,
) -> None:
    rand = "%%ranks\nimport random\nx = torch.rand(1).item(), random.random()"

    def drawn(begin: str) -> list[object]:
        notebook.run(begin)
        notebook.run(rand)
        in_first_cell = notebook.pulled("x")
        notebook.run(rand)
        return [*in_first_cell, *notebook.pulled("x")]

    first = drawn("%cluster 2")
    assert len({*first}) == 4
    assert drawn("%cluster 2 --seed 0") == first
    assert {*drawn("%cluster 2 --seed 1")}.isdisjoint(first)


@pytest.mark.parametrize("words", ["laptop 3", "3 laptop", "--cluster laptop --ranks 3"])
def test_a_size_and_a_preset_come_in_any_order(notebook: Notebook, words: str) -> None:
    assert "3 simulated ranks of laptop" in notebook.run(f"%cluster {words}")


def test_a_variable_of_the_notebook_is_not_one_of_the_ranks(notebook: Notebook) -> None:
    notebook.run("only_here = 1")
    assert "%push only_here" in notebook.run("%%rank 1\nonly_here")


def test_there_are_no_ranks_without_a_cluster(notebook: Notebook) -> None:
    assert notebook.run("%cluster --off") == "The ranks have ended."
    assert "start some with %cluster 8" in notebook.run("%%ranks\n1")
    assert notebook.run("%cluster --off") == "There are no ranks."
    assert not notebook.has_failed


def test_the_options_of_a_command_are_listed(notebook: Notebook) -> None:
    lines = notebook.run("%cluster --help").splitlines()
    assert lines[0].startswith("%cluster [--help] [--off] [--why] [--lanes [FILE]]")
    assert lines[-1] == "%cluster? explains them."
    assert len(lines) < 10


@pytest.mark.parametrize(
    "command",
    [
        "run_line_magic('cluster', '--off')",
        "run_line_magic('cluster', '2')",
        "run_line_magic('rank', '0 1')",
        "run_cell_magic('ranks', '', 'print(1)')",
    ],
)
def test_ranks_call_no_commands(notebook: Notebook, command: str) -> None:
    shown = notebook.run(f"%%ranks\nfrom IPython import get_ipython\nget_ipython().{command}")
    assert "UsageError: ranks run Python alone: give this command in a cell of its own" in shown
    assert "replaced" not in shown
    assert notebook.run("%%ranks\n1") == "ranks 0-3: 1"


def test_an_interrupted_start_leaves_the_ranks_as_they_are(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(magics, "begun", interrupted)
    assert "UsageError: interrupted: no new ranks have begun" in notebook.run("%cluster 2")
    assert notebook.run("%%ranks\n1") == "ranks 0-3: 1"


def test_why_is_about_the_last_cell_that_ran(notebook: Notebook) -> None:
    notebook.run("%%ranks\n1 / 0")
    notebook.run("%%ranks\nif")
    assert "ZeroDivisionError" in notebook.run("%cluster --why")


def test_a_session_that_is_lost_says_so_in_one_line(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_INTERRUPTS", 10)
    of_rank, ours = socket.socketpair()

    def interrupt() -> None:
        ours.recv(1)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    release = threading.Timer(30, ours.send, [b"x"])  # not before other ranks have run
    with of_rank, ours:
        interrupter.start()
        release.start()
        number = of_rank.fileno()
        in_c = f"import os\nif rank == 1: os.write({number}, b'x'), os.read({number}, 1)"
        notebook.run(f"%%ranks\n{in_c}")
        interrupter.join()
        shown = notebook.run("%%ranks\n1")
        assert "the ranks cannot go on: rank 1 was interrupted at cell" in shown
        assert "Traceback" not in shown
        notebook.run("%cluster 2")
        assert notebook.run("%%ranks\n1") == "ranks 0 and 1: 1"
        assert release.is_alive()
        release.cancel()
        ours.send(b"x")
        wait_until(lambda: not scheduler.STUCK)


# %%check and %save


@pytest.fixture
def copy(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    here = folder.find(Path(__file__))
    target = tmp_path / "course"
    handout.write(here, target)
    monkeypatch.chdir(target)
    return folder.find(target)


def solution(task_id: str) -> str:
    here = folder.find(Path(__file__))
    task = here.task(task_id)
    functions = source.functions((here.root / task.solution).read_text())
    return "".join(functions[name] for name in task.functions)


def test_a_cell_is_judged_and_saved_as_the_template_would_be(notebook: Notebook, copy: Any) -> None:
    task = copy.task("3.1")
    before = (copy.root / task.template).read_text()
    code = solution("3.1")
    assert "✘ 3.1" in notebook.run(
        f"%%check 3.1\n{code.replace('return chunks', 'return 2 * chunks')}"
    )
    assert "✔ 3.1" in notebook.run(f"%%check 3.1\n{code}")
    assert (copy.root / task.template).read_text() == before
    assert "the old file is" in notebook.run("%save 3.1")
    after = (copy.root / task.template).read_text()
    assert code.strip() in after
    assert not source.is_to_write(copy, task)


def test_ranks_exchange_objects_of_classes_of_a_cell(notebook: Notebook) -> None:
    notebook.run("%%ranks\nclass Point:\n    def __init__(self): self.rank = rank")
    cell = "points = [None] * 4\ndist.all_gather_object(points, Point())\n[p.rank for p in points]"
    assert notebook.run(f"%%ranks\n{cell}").splitlines()[0] == "ranks 0-3: [0, 1, 2, 3]"
    notebook.run("import sys\nmain = sys.modules['__main__']")
    assert "Point" not in vars(notebook.shell.user_ns["main"])


def test_the_beginning_of_a_huge_line_is_shown(notebook: Notebook) -> None:
    lines = notebook.run("%%ranks\nprint('x' * 300_000)").splitlines()
    assert [line.strip()[-30:] for line in lines[1:]] == [
        "x" * 30,
        "… 100,001 more characters …",
    ]


def test_lanes_that_cannot_be_written_are_one_line(notebook: Notebook) -> None:
    notebook.run("%%ranks\ndist.barrier()")
    assert "UsageError: [Errno 2] No such file" in notebook.run("%cluster --lanes no/folder/a.png")


def test_the_unwinding_of_a_rank_is_not_shown(notebook: Notebook) -> None:
    notebook.run("%%ranks\nclass Leaver:\n    def __del__(self): dist.barrier()")
    shown = notebook.run("%%ranks\nif rank == 1: Leaver();")
    assert "rank 1 waits in barrier" in shown
    assert "Exception ignored" not in shown


def test_a_value_that_cannot_be_shown_is_of_its_rank(notebook: Notebook) -> None:
    notebook.run("%%ranks\nclass Odd:\n    def __repr__(self): return 1 / (rank - 2) and 'even'")
    shown = notebook.run("%%ranks\nOdd()")
    assert shown.splitlines()[0] == "ranks 0, 1 and 3: even"
    assert "rank 2:\n  Traceback (most recent call last):\n" in shown
    assert "ZeroDivisionError: division by zero" in shown
    assert "IPython" not in shown
    notebook.run("1 / 0")
    assert notebook.has_failed


def test_no_report_names_lines_of_the_shell(notebook: Notebook) -> None:
    notebook.run("%%ranks\nclass Synced:\n    def __repr__(self): return str(dist.barrier())")
    assert notebook.run("%%ranks\nSynced()").startswith("ranks 0-3: None")
    shown = notebook.run("%%ranks\nSynced() if rank == 0 else None")
    assert "rank 0 waits in barrier" in shown
    assert "pretty.py" not in shown
    assert "The except" not in shown
