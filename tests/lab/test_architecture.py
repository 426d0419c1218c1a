"""Who may import whom: folders in one direction, no cycles, solutions in plain torch."""

import ast
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Folders and files of distlab, from the lowest: what each may import besides itself and TOOLS.
MAY_IMPORT = {
    "process_group": set(),
    "sim": {"process_group"},  # nothing of the course: no grade, learner, cli, course
    "mpi": {"process_group"},
    "launch": {"mpi", "sim"},
    "explore": {"launch", "sim"},
    "data": set(),
    "models": {"data"},
    "plot": set(),
    "course": set(),
    "grade": {"course", "launch", "sim"},
    "learner": {"course", "grade", "launch", "sim"},
    "trainers": {"course", "grade", "learner"},
    "parallel": {"models"},
    "training": {"data", "grade", "launch", "models", "parallel", "process_group", "trainers"},
    "demo": {"plot", "trainers", "training"},
    "doctor": {"data", "launch", "training"},
    "shared_memory": set(),
    "bench": {"grade", "launch", "plot", "production", "shared_memory", "sim", "trainers"},
    "planning": {"sim", "trainers"},
    "chaos": {"grade", "trainers"},
    "production": {"data", "grade", "models", "sim", "trainers"},
    "cli": {
        *(
            "bench",
            "chaos",
            "course",
            "demo",
            "doctor",
            "launch",
            "learner",
            "planning",
            "production",
            "sim",
            "training",
        )
    },
    "__main__": {"cli"},
}
# The production trainer is no lesson: it puts the lessons together, with libraries.
TRAINER = ROOT / "solutions/phase4_production/imagenet_trainer.py"
LESSONS = [path for path in ROOT.glob("solutions/**/*.py") if path != TRAINER]
TOOLS = {"garbage", "interrupts", "torchvision_repair", "util"}

# Folders and files of the simulator, floor by floor from the lowest: each imports from lower floors
# and from itself.
FLOORS_OF_SIM = (
    {"reporting", "hardware", "device"},
    {"engine", "collectives"},
    {"network", "results"},
    {"messages"},
    {"isolation", "postmortem"},
    {"simulation"},
    {"script"},
    {""},  # distlab.sim itself
)
PUBLIC = {
    "sim": (
        *("BlockedCall", "Cluster", "Deadlock", "Event", "Faults", "GPU", "Mismatch", "Options"),
        *("PRESETS", "RankError", "Simulated", "SimulationError", "Trace", "choose_cluster"),
        *("simulate", "unwaited"),
    ),
    "launch": (
        *("Context", "LaunchError", "Limits", "RankCrashed", "RankExited", "RankFailed"),
        *("RankFate", "RankHung", "RankOutOfMemory", "SetupError", "context", "run", "simulate"),
    ),
    "grade": ("Grade", "Outcome", "Run", "Wrong", "WrongResult", "check", "task"),
}


class Arrow(NamedTuple):
    """One import of one module of distlab by another."""

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
    """Yield what a file imports, also inside its functions: ``a.b.c`` of ``from a.b import c``."""
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


def arrows_of(importer: str, text: str) -> Iterator[Arrow]:
    tree = ast.parse(text)
    types_only = for_types_only(tree)
    for node, name in imported_names(tree):
        home = name if name in modules() else name.rpartition(".")[0]
        if home in modules() and home != importer:
            yield Arrow(importer, home, node in types_only)


@cache
def arrows() -> frozenset[Arrow]:
    files = (ROOT / "distlab").rglob("*.py")
    return frozenset(arrow for f in files for arrow in arrows_of(module_name(f), f.read_text()))


def folder(module: str) -> str:
    """Return ``sim`` for ``distlab.sim.engine.trace``; ``distlab`` itself holds nothing."""
    return module.split(".")[1] if "." in module else ""


def folder_of_sim(module: str) -> str:
    """Return ``engine`` for ``distlab.sim.engine.trace``; "" for ``distlab.sim``."""
    return "".join(module.split(".")[2:3])


def floor_of_sim(module: str) -> int:
    return next(i for i, floor in enumerate(FLOORS_OF_SIM) if folder_of_sim(module) in floor)


def climbs(arrow: Arrow) -> bool:
    """Whether it leads to a higher floor of the simulator, or to another room of the same floor."""
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
    return {module for module, _ in edges if module in reached_from(module, edges)}


def foreign(text: str) -> set[str]:
    """Return the packages that a file of the lessons must not import."""
    packages = {name.partition(".")[0] for _, name in imported_names(ast.parse(text))}
    ours = {"torch", "numpy", "solutions", *(p.parent.name for p in ROOT.glob("phase*/given.py"))}
    return packages - ours - sys.stdlib_module_names


# The rules


def test_folders_import_only_what_lies_below() -> None:
    assert sorted(map(tuple, filter(refused, arrows()))) == []


def test_every_folder_has_a_place() -> None:
    assert {folder(module) for module in modules()} == {"", *MAY_IMPORT, *TOOLS}


def test_the_table_of_folders_has_no_cycle() -> None:
    assert in_cycles({(a, b) for a, others in MAY_IMPORT.items() for b in others}) == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert in_cycles({(a.importer, a.imported) for a in arrows() if not a.is_for_types}) == set()


def test_no_import_inside_sim_climbs_a_floor() -> None:
    inside = [a for a in arrows() if folder(a.importer) == folder(a.imported) == "sim"]
    assert sorted(map(tuple, filter(climbs, inside))) == []


def test_not_even_types_import_each_other_inside_sim() -> None:
    edges = {(a.importer, a.imported) for a in arrows() if folder(a.importer) == "sim"}
    assert in_cycles(edges) == set()


@pytest.mark.parametrize(
    "path",
    [*LESSONS, *ROOT.glob("phase*/[!t]*.py")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_lessons_need_torch_numpy_and_the_standard_library_only(path: Path) -> None:
    assert foreign(path.read_text()) == set()


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names(package: str) -> None:
    module = importlib.import_module(f"distlab.{package}")
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


# What breaks them is found


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("distlab.sim.engine.trace", "from distlab.grade import outcomes"),
        ("distlab.sim.engine.trace", "def later():\n    import distlab.course"),
        ("distlab.process_group.base", "from distlab.sim.engine.trace import Trace"),
        ("distlab.launch.api", "from distlab.grade.outcomes import Outcome"),
        ("distlab.util.text", "from distlab.sim import Cluster"),
        ("distlab.new_folder.file", "from distlab.sim import Cluster"),
    ],
)
def test_an_import_from_above_is_refused(importer: str, text: str) -> None:
    (arrow,) = arrows_of(importer, text)
    assert refused(arrow)


def test_an_import_for_types_is_told_from_others() -> None:
    text = (
        "if TYPE_CHECKING:\n    from distlab.sim.engine import trace\n"
        "from distlab.sim.isolation.host import prepared"
    )
    found = {(arrow.imported, arrow.is_for_types) for arrow in arrows_of("distlab.sim.new", text)}
    assert found == {("distlab.sim.engine.trace", True), ("distlab.sim.isolation.host", False)}


@pytest.mark.parametrize(
    ("importer", "text", "expected"),
    [
        ("distlab.sim.engine.trace", "from distlab.sim.messages.pending import Pending", True),
        ("distlab.sim.engine.trace", "from distlab.sim.collectives.phases import Phase", True),
        ("distlab.sim.engine.trace", "from distlab.sim.simulation import Simulation", True),
        ("distlab.sim.engine.trace", "from distlab.sim.engine.faults import Faults", False),
        ("distlab.sim.engine.trace", "from distlab.sim.reporting.sites import Site", False),
        ("distlab.sim.messages.group", "from distlab.sim.network.traffic import Traffic", False),
    ],
)
def test_an_import_that_climbs_is_found(importer: str, text: str, expected: bool) -> None:
    (arrow,) = arrows_of(importer, text)
    assert climbs(arrow) is expected


def test_a_cycle_is_found() -> None:
    assert in_cycles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == {"b", "c"}


def test_a_foreign_import_of_a_lesson_is_found() -> None:
    text = "import torch.nn\nfrom distlab.sim import Cluster\ndef f():\n    import pydantic"
    assert foreign(text) == {"distlab", "pydantic"}
