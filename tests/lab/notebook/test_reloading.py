"""Edited files are picked up by the next cell, on ranks and in the notebook itself."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from notebooks import run

from distlab.notebook.reloading import ReloadError, Watch, reload
from distlab.notebook.simulated import SimulatedRanks
from distlab.sim import Cluster, Faults, Options

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """A function that writes a module into the working folder, as an editor does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str, name: str = "mine", *, age_s: int = 0) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        changed_ns = time.time_ns() - age_s * 10**9  # the file system's own clock is coarser
        os.utime(file, ns=(changed_ns, changed_ns))
        importlib.invalidate_caches()
        return file

    yield write
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


class Edited:
    """Modules of this process, and the variables of cells that use them."""

    def __init__(self, *modules: str) -> None:
        self.modules = {name: importlib.import_module(name) for name in modules}
        self.names: dict[str, Any] = {}
        self._watch = Watch()
        self.reload()

    def reload(self) -> None:
        with self._watch.edited(self.modules.values()) as codes:
            reload(self.modules, codes, self.names)


CLASS = "class A:\n    def go(self): return {}\n"
BASE = "import torch\nclass Base:\n    def go(self): return 0\n"
NO_GRAD = "import torch\n@torch.no_grad()\n"
SUPER = f"{BASE}class A(Base):\n    {{}}\n    def two(self): return super().go() + 2"
OWN_DECORATOR = """import functools
ONE = 1
def plus(number):
    def decorate(f): return functools.wraps(f)(lambda: f() + number * ONE)
    return decorate
@plus(1)
def f(): return 1
"""
SLOTS = "class A:\n    __slots__ = {}\n    def __init__(self): self.x = {}"
FUNCTION = """import torch
class A(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g * {}
"""
DATACLASS = "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass A:\n    x: int = {}"
ENUM = "import enum\nclass A(enum.Enum):\n    X = {}"
ALIAS = "def one(): return 1\ndef two(): return 2\nused = {}"
GRADIENT = "int(torch.autograd.grad(A.apply(x), x)[0])"
EDITS = {  # the module before, a cell, the module after, an expression that is 2 then
    "function": ("def f(): return 1", "", "def f(): return 2", "f()"),
    "other name": ("def f(): return 1", "g = f", "def f(x=2): return x", "g()"),
    "lambda": ("f = lambda: 1", "", "f = lambda: 2", "f()"),
    "decorated": (f"{NO_GRAD}def f(): return 1", "", f"{NO_GRAD}def f(): return 2", "f()"),
    "now decorated": ("def f(): return 1", "g = f", f"{NO_GRAD}def f(): return 2", "g()"),
    "other decorator": (f"{NO_GRAD}def f(): return 1", "g = f", OWN_DECORATOR, "g()"),
    "cached": (
        "def f(): return 1",
        "g = f",
        "import functools\n@functools.cache\ndef f(): return 2",
        "g()",
    ),
    "in a list": ("def f(): return 1", "fs = [f]", "def f(): return 2", "fs[0]()"),
    "method": (CLASS.format(1), "a = A()", CLASS.format(2), "a.go()"),
    "bound method": (CLASS.format(1), "go = A().go", CLASS.format(2), "go()"),
    "new object": (CLASS.format(1), "", CLASS.format(2), "A().go()"),
    "super": (f"{BASE}class A(Base): pass", "a = A()", SUPER.format(""), "a.two()"),
    "super in a property": (f"{BASE}class A(Base): pass", "", SUPER.format("@property"), "A().two"),
    "super decorated": (
        f"{BASE}class A(Base): pass",
        "",
        SUPER.format("@torch.no_grad()"),
        "A().two()",
    ),
    "super in a class method": (
        "class Base:\n    @classmethod\n    def two(cls): return 2\nclass A(Base): pass",
        "",
        "class Base:\n    @classmethod\n    def two(cls): return 2\nclass A(Base):\n"
        "    @classmethod\n    def two(cls): return super().two()",
        "A.two()",
    ),
    "bases": (f"{BASE}class A: pass", "", SUPER.format(""), "A().two()"),
    "member gone": (
        f"{BASE}class A(Base):\n    go = 1",
        "a = A()",
        f"{BASE}class A(Base): pass",
        "a.go() + 2",
    ),
    "dataclass": (DATACLASS.format(1), "", DATACLASS.format(2), "A().x"),
    "enum": (ENUM.format(1), "", ENUM.format(2), "A.X.value"),
    "slots": (SLOTS.format("'x'", 1), "", SLOTS.format("'x', 'y'", 2), "A().x"),
    "autograd": (
        FUNCTION.format(1),
        "import torch\nx = torch.ones((), requires_grad=True)",
        FUNCTION.format(2),
        GRADIENT,
    ),
    "new function": ("def f(): return 1", "", "def f(): return g()\ndef g(): return 2", "f()"),
    "function gone": ("def f(): return 2", "", "", "mine.f()"),
    "alias": (ALIAS.format("two"), "", ALIAS.format("one"), "two() if mine.used() == 1 else 0"),
}


@pytest.mark.parametrize(("before", "cell", "after", "expression"), EDITS.values(), ids=[*EDITS])
def test_what_a_cell_has_becomes_new(
    write: Write, before: str, cell: str, after: str, expression: str
) -> None:
    write(before)
    edited = Edited("mine")
    exec(f"import mine\nfrom mine import *\n{cell}", edited.names)
    write(after)
    edited.reload()
    assert eval(expression, edited.names) == 2


def test_a_second_edit_is_seen_too(write: Write) -> None:
    write(CLASS.format(0) + "def f(): return 0")
    edited = Edited("mine")
    exec("from mine import f, A\na = A()", edited.names)
    for number in (1, 2):
        write(CLASS.format(number) + f"def f(): return {number}")
        edited.reload()
        assert eval("a.go(), A().go(), f()", edited.names) == (number,) * 3


@pytest.mark.parametrize("names", [("mine", "user"), ("user", "mine")])
def test_a_new_function_is_there_before_who_imports_it(
    write: Write, names: tuple[str, ...]
) -> None:
    write("def old(): return 1")
    write("from mine import old as used", "user")
    edited = Edited(*names)
    write("def old(): return 1\ndef new(): return 2")
    write("from mine import new\nused = new", "user")
    edited.reload()
    assert edited.modules["user"].used() == 2


def test_modules_that_import_each_other_are_loaded(write: Write) -> None:
    write("import user\ndef f(): return 1")
    write("import mine\ndef g(): return mine.f()", "user")
    edited = Edited("mine", "user")
    write("import user\ndef f(): return 2")
    write("import mine\ndef g(): return mine.f() + 1", "user")
    edited.reload()
    assert edited.modules["user"].g() == 3


def test_an_edit_back_to_an_older_file_is_seen(write: Write) -> None:
    write("def f(): return 1")
    edited = Edited("mine")
    write("def f(): return 2", age_s=5000)
    edited.reload()
    assert edited.modules["mine"].f() == 2


def test_unedited_modules_are_not_executed_again(write: Write) -> None:
    write("things = []")
    edited = Edited("mine")
    things = edited.modules["mine"].things
    edited.reload()
    assert edited.modules["mine"].things is things


def test_an_edit_in_the_cell_that_imported_the_module_is_seen(write: Write) -> None:
    watch = Watch()
    write("def f(): return 1")
    module = importlib.import_module("mine")
    write("def f(): return 2")
    with watch.edited([module]) as codes:
        assert codes


def test_a_module_that_fails_stays_as_it_was(write: Write) -> None:
    write("x = 1\ndef f(): return 1")
    edited = Edited("mine")
    write("x = 2\ndef f(): return 2\n\nnot_there")
    with pytest.raises(ReloadError, match=r"^mine.py, line 4: NameError: .*not_there.* not def"):
        edited.reload()
    module = edited.modules["mine"]
    assert (module.x, module.f()) == (1, 1)
    write("x = 3")
    edited.reload()
    assert module.x == 3


def test_a_module_that_fails_is_named_when_the_working_folder_is_gone(
    write: Write, tmp_path: Path
) -> None:
    file = write("x = 1")
    edited = Edited("mine")
    write("x = 1 / 0", age_s=-5)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)  # the fixture moves back
    gone.rmdir()
    with pytest.raises(ReloadError, match=f"{file}, line 1: ZeroDivisionError"):
        edited.reload()


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        ("SystemExit('usage: mine.py FILE')", ReloadError, "line 2: SystemExit: usage"),
        ("KeyboardInterrupt('stop')", KeyboardInterrupt, "^stop$"),
    ],
)
def test_a_module_that_ends_stays_as_it_was(
    write: Write, error: str, raised: type[BaseException], text: str
) -> None:
    write("def f(): return 1")
    edited = Edited("mine")
    write(f"def f(): return 2\nraise {error}")
    with pytest.raises(raised, match=text):
        edited.reload()
    assert edited.modules["mine"].f() == 1


@pytest.fixture
def ranks() -> Iterator[SimulatedRanks]:
    ranks = SimulatedRanks(3, Cluster.preset("laptop"), Options())
    yield ranks
    ranks.close()


def values(ranks: SimulatedRanks, source: str, *which: int) -> list[str]:
    """Return the value of a cell's last expression on each rank."""
    return [output.value["text/plain"] for output in run(ranks, source, *which)[1].values()]


def test_ranks_pick_up_an_edit_in_their_own_copies(write: Write, ranks: SimulatedRanks) -> None:
    write("seen = []\ndef f(): return 1")
    run(ranks, "import mine\nfrom mine import f\nmine.seen.append(rank)")
    write("def f(): return len(seen), seen[0] * 10")
    assert values(ranks, "f()") == ["(1, 0)", "(1, 10)", "(1, 20)"]
    assert "mine" not in sys.modules


def test_ranks_outside_the_cell_pick_it_up_later(write: Write, ranks: SimulatedRanks) -> None:
    write("def f(): return 1")
    run(ranks, "from mine import f", 0, 1)
    write("def f(): return 2")
    assert values(ranks, "f()", 0) == ["2"]
    assert values(ranks, "from mine import f\nf()") == ["2", "2", "2"]


def test_a_cell_does_not_run_after_an_edit_that_is_no_python(
    write: Write, ranks: SimulatedRanks
) -> None:
    write("def f(): return 1")
    run(ranks, "from mine import f\nx = 1")
    write("def f():\n    return (2")
    for _ in range(2):
        error = run(ranks, "x += 1")[0].error
        assert error.startswith("mine.py, line 2: '(' was never closed\nThe cell did not run")
    write("def f():\n    return (2)")
    assert values(ranks, "x, f()") == ["(1, 2)"] * 3


def test_an_edit_that_fails_on_a_rank_is_told(write: Write, ranks: SimulatedRanks) -> None:
    write("def f(): return 1")
    run(ranks, "from mine import f\nx = 1")
    write("import os\nif os.environ['RANK'] == '1':\n    1 / 0")
    first, second = run(ranks, "x += 1")[0].error.splitlines()
    assert first == "mine.py, line 3: ZeroDivisionError: division by zero (rank 1)"
    assert second.startswith("The cell did not run")
    write("def f(): return 2")
    assert values(ranks, "x, f()") == ["(1, 2)"] * 3


def test_the_living_pick_up_an_edit_after_a_rank_has_died(write: Write) -> None:
    faults = Faults(kill_ranks={2: 1.0})
    ranks = SimulatedRanks(3, Cluster.preset("laptop"), Options(faults=faults))
    write("def f(): return 1")
    run(ranks, "import time\nfrom mine import f\ntime.sleep(2)")
    write("def f(): return 2")
    assert values(ranks, "f()", 0, 1) == ["2", "2"]
    ranks.close()


def test_a_deleted_file_leaves_what_was_loaded(write: Write, ranks: SimulatedRanks) -> None:
    file = write("def f(): return 1")
    run(ranks, "from mine import f")
    file.unlink()
    assert values(ranks, "f()") == ["1"] * 3


def test_the_notebook_itself_picks_up_edits(write: Write, shell: InteractiveShell) -> None:
    write("def f(): return 1")
    shell.run_cell("import mine\nfrom mine import f")
    write("def f(): return 2")
    assert shell.run_cell("f(), mine.f()").result == (2, 2)
    write("def f(: return 3")
    with capture_output() as shown:
        assert shell.run_cell("f()").result == 2
    assert shown.stderr.startswith("mine.py, line 1: invalid syntax; the notebook goes on")


def test_modules_elsewhere_are_left_to_the_user(
    write: Write, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("def f(): return 1")
    shell.run_cell("import mine")
    monkeypatch.chdir("/")
    write("def f(): return 2")
    assert shell.run_cell("mine.f()").result == 1


def test_ranks_import_from_the_working_folder_and_the_course(
    write: Write, ranks: SimulatedRanks
) -> None:
    write("name = __name__")
    cell = (
        "import mine\nimport phase1_data_parallel.template_collectives as t\nmine.name, t.__name__"
    )
    assert values(ranks, cell) == ["('mine', 'phase1_data_parallel.template_collectives')"] * 3
