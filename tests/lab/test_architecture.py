"""Rules for imports: one direction between folders, no cycles, and solutions in plain torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Folders and files of distlab, lowest first, and what each may import besides itself and TOOLS.
MAY_IMPORT = {
    "process_group": set(),
    "sim": {"process_group"},  # nothing from the course: no grade, learner, cli, course
    "mpi": {"process_group"},
    "launch": {"mpi", "sim"},
    "data": set(),
    "models": {"data"},
    "plot": set(),
    "course": set(),
    "lessons": {"course"},
    "grade": {"course", "launch", "lessons", "sim"},
    "learner": {"course", "grade", "launch", "lessons", "sim"},
    "explore": {"learner", "lessons", "sim"},
    "races": {"course", "grade", "launch", "sim"},
    "chosen": {"course", "grade", "learner", "lessons"},
    "demo": {"chosen", "launch", "lessons", "production"},
    "doctor": {"data", "launch"},
    "shared_memory": set(),
    "production": {
        *("chosen", "data", "grade", "launch", "lessons", "models", "process_group"),
        *("shared_memory", "sim"),
    },
    "notebook": {"course", "doctor", "launch", "learner", "lessons", "mpi", "production", "sim"},
    "bench": {
        *("chosen", "grade", "launch", "lessons", "plot", "production", "shared_memory", "sim")
    },
    "planning": {"chosen", "lessons", "sim"},
    "chaos": {"chosen", "grade", "launch"},
    "cli": {
        *(
            "bench",
            "chaos",
            "course",
            "demo",
            "doctor",
            "grade",
            "launch",
            "learner",
            "planning",
            "production",
            "races",
            "sim",
        )
    },
    "__main__": {"cli"},
    "": {"notebook"},  # distlab itself is the extension that IPython loads: nothing depends on it
}
TOOLS = {"torchvision_repair", "util"}
# Only FINDER imports phases and solutions. The modules in IMPORTS_BY_NAME import
# by a computed name: from a package with lazy names, from a hand-in, or to preload a fork server.
FINDER = "distlab.lessons"
IMPORTS_BY_NAME = {
    FINDER: "the course's own lessons",
    "distlab.grade": "its own names",
    "distlab.launch": "its own names",
    "distlab.grade.submission": "the files of a hand-in",
    "distlab.notebook.watched": "modules of ipyparallel",
    "distlab.launch.fork_server_main": "modules that ranks have imported",
}
NOT_IMPORTED = {"distlab.__main__"}  # importing it runs the command
LESSON = re.compile(r"(solutions|phase\d_\w+)(\.\w+)*")
TRAINER = ROOT / "solutions/phase4_production/imagenet_trainer.py"  # only runs distlab's trainer
LESSONS = [path for path in ROOT.glob("solutions/**/*.py") if path != TRAINER]

# Folders and files of the simulator by floor, lowest first: each imports only from lower floors and
# from itself.
FLOORS_OF_SIM = (
    {"reporting", "hardware"},
    {"device", "engine", "collectives"},
    {"network", "results"},
    {"messages"},
    {"gpu"},
    {"isolation", "postmortem"},
    {"sanitizer"},
    {"simulation"},
    {"configured", "session", "starting"},
    {"script"},
    {""},  # distlab.sim itself
)


class Arrow(NamedTuple):
    """An import of one distlab module by another."""

    importer: str
    imported: str
    is_for_types: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> frozenset[str]:
    return frozenset(map(module_name, (ROOT / "distlab").rglob("*.py")))


def imported_names(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Yield all imports, even inside functions, with names: ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def for_types_only(tree: ast.AST) -> set[ast.stmt]:
    """Return the statements under ``if TYPE_CHECKING:``."""
    return {
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
    }


def finds_lessons(tree: ast.AST) -> Iterator[str]:
    """Yield the imports of phases and solutions, and the strings that name their modules."""
    for _, name in imported_names(tree):
        if LESSON.fullmatch(name):
            yield name
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in docstrings and "." in node.value and LESSON.match(node.value):
            yield node.value


def imports_by_name(tree: ast.AST) -> bool:
    """Return True if a file imports a module by a computed name."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__", "run_module")
        and not isinstance(call.args[0], ast.Constant)
        for call in calls
    )


def arrows_of(importer: str, tree: ast.AST) -> Iterator[Arrow]:
    types_only = for_types_only(tree)
    for node, name in imported_names(tree):
        home = name if name in modules() else name.rpartition(".")[0]
        if home in modules() and home != importer:
            yield Arrow(importer, home, node in types_only)


@cache
def trees() -> dict[str, ast.Module]:
    files = (ROOT / "distlab").rglob("*.py")
    return {module_name(file): ast.parse(file.read_text()) for file in files}


@cache
def arrows() -> frozenset[Arrow]:
    return frozenset(arrow for name, tree in trees().items() for arrow in arrows_of(name, tree))


def folder(module: str) -> str:
    """Return ``sim`` for ``distlab.sim.engine.trace``; "" for ``distlab``."""
    return module.split(".")[1] if "." in module else ""


def folder_of_sim(module: str) -> str:
    """Return ``engine`` for ``distlab.sim.engine.trace``; "" for ``distlab.sim``."""
    return "".join(module.split(".")[2:3])


def floor_of_sim(module: str) -> int:
    (floor,) = (i for i, floor in enumerate(FLOORS_OF_SIM) if folder_of_sim(module) in floor)
    return floor


def climbs(arrow: Arrow) -> bool:
    """Return True if an import leads to a higher floor, or to another folder on the same floor."""
    if folder_of_sim(arrow.importer) == folder_of_sim(arrow.imported):
        return False
    return floor_of_sim(arrow.importer) <= floor_of_sim(arrow.imported)


def reached_from(start: str, edges: set[tuple[str, str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        following = {end for begin, end in edges if begin == module} - reached
        reached |= following
        waiting += following
    return reached


def refused(arrow: Arrow) -> bool:
    importer, imported = folder(arrow.importer), folder(arrow.imported)
    allowed = set() if importer in TOOLS else TOOLS | MAY_IMPORT.get(importer, set())
    return imported not in {"", importer, *allowed}


def in_cycles(edges: set[tuple[str, str]]) -> set[str]:
    """Return the modules that are part of an import cycle."""
    waiting = {
        module: {end for start, end in edges if start == module}
        for edge in edges
        for module in edge
    }
    while ready := {module for module, ends in waiting.items() if not ends & waiting.keys()}:
        waiting = {module: ends for module, ends in waiting.items() if module not in ready}
    return waiting.keys() & {module for module in waiting if module in reached_from(module, edges)}


def foreign(text: str) -> set[str]:
    """Return the packages that a lesson imports but must not."""
    packages = {name.partition(".")[0] for _, name in imported_names(ast.parse(text))}
    ours = {"torch", "numpy", "solutions", *(p.parent.name for p in ROOT.glob("phase*/given.py"))}
    return packages - ours - sys.stdlib_module_names


# The rules


def test_folders_import_only_what_lies_below() -> None:
    assert sorted(map(tuple, filter(refused, arrows()))) == []


def test_every_folder_has_a_place() -> None:
    assert {folder(module) for module in modules()} == {"", *MAY_IMPORT, *TOOLS}


def test_one_module_finds_lessons() -> None:
    names = {name: [*finds_lessons(tree)] for name, tree in trees().items()}
    assert {name: lessons for name, lessons in names.items() if lessons}.keys() == {FINDER}
    assert {name for name, tree in trees().items() if imports_by_name(tree)} == {*IMPORTS_BY_NAME}


def test_all_of_distlab_is_imported_without_the_course() -> None:
    """A wheel of distlab contains no phases and no solutions."""
    program = (
        "import importlib, re, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if re.fullmatch({LESSON.pattern!r}, name):\n"
        "            raise ModuleNotFoundError(f'no module {name}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
    )
    names = sorted(modules() - NOT_IMPORTED)
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = {
        (a.importer, a.imported) for a in arrows() if not a.is_for_types and folder(a.importer)
    }
    assert in_cycles(edges) == set()


def test_no_import_inside_sim_climbs_a_floor() -> None:
    inside = [a for a in arrows() if folder(a.importer) == folder(a.imported) == "sim"]
    assert sorted(map(tuple, filter(climbs, inside))) == []


def test_not_even_types_import_each_other_inside_sim() -> None:
    inside = (a for a in arrows() if not a.is_for_types and folder(a.importer))
    edges = {(a.importer, a.imported) for a in inside}
    assert in_cycles(edges) == set()


@pytest.mark.parametrize(
    "path",
    [*LESSONS, *ROOT.glob("phase*/[!t]*.py")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_lessons_need_torch_numpy_and_the_standard_library_only(path: Path) -> None:
    assert foreign(path.read_text()) == set()
