"""The README's table of methods and docs/results.md are true, as far as it can be checked here.

Times of this machine can't be. Files, tasks, lines, virtual times, ratios and commands can.
"""

import ast
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import test_docs
from test_docs import COURSE, ROOT, unknown_commands, without_code

from distlab.course import anchor
from distlab.sim import Cluster, Options
from distlab.sim.script import run_script
from distlab.util.text import seconds_text

pytestmark = pytest.mark.usefixtures("forked")

README = test_docs.README.read_text(encoding="utf-8")
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
LAUNCHER = ROOT / "scripts/launch_training.sh"
IDS = [task.id for task in COURSE.tasks]


# --- the table of methods ------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the README's table."""

    name: str
    file: str
    lines: int
    measured: str

    @property
    def ids(self) -> list[str]:
        """Of its tasks: "1.1 to 1.3", "4.5, 4.7 and 4.8"."""
        named = re.findall(r"\d\.\d+", self.name)
        if " to " not in self.name:
            return named
        return IDS[IDS.index(named[0]) : IDS.index(named[1]) + 1]


ROW = re.compile(r"^\| (.+) \| \[`\w+\.py`\]\((solutions/\S+\.py)\) \| (\d+) \| (.+) \|$", re.M)
ROWS = [Row(name, file, int(lines), said) for name, file, lines, said in ROW.findall(README)]
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Count the lines of a program that are not docstrings, comments or blank."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [(t.start[0], t.end[0]) for t in tokens if t.type not in NOT_CODE]
    lines = {line for first, last in spans for line in range(first, last + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_code_is_neither_docstrings_nor_comments_nor_blank() -> None:
    documented = '"""What.\n\nMore.\n"""\n\n# why\ndef f(\n    x,\n):\n    """Do."""\n'
    assert code_lines(f'{documented}\n    return """a\n\nb"""\n') == 3 + 3


def test_each_task_is_in_one_row_with_its_solution() -> None:
    rows = {id: row.file for row in ROWS for id in row.ids}
    assert rows == {task.id: task.solution.as_posix() for task in COURSE.tasks}
    assert sum(len(row.ids) for row in ROWS) == len(IDS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: Path(row.file).stem)
def test_a_row_has_the_lines_of_its_file(row: Row) -> None:
    found = code_lines((ROOT / row.file).read_text(encoding="utf-8"))
    assert row.lines == found, f"README.md: write {found} lines for {row.file}"


def sections(text: str) -> dict[str, str]:
    """Return a page's sections by what links to them end in."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {anchor(name): said for name, said in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: Path(row.file).stem)
def test_figures_of_a_row_are_in_the_section_that_it_links_to(row: Row) -> None:
    for said, name in re.findall(r"\[([^\]]+)\]\(docs/results\.md#([\w-]+)\)", row.measured):
        section = sections(RESULTS)[name]
        for figure in re.findall(r"\d[\d.,e-]*", said.replace("1/8", "0.125")):
            assert figure in section, f"{figure} of {row.name} is not in {name}"


# --- the results ---------------------------------------------------------------------------------

TABLE = re.compile(r"((?:^[^|\n].*\n)+)\n((?:^\|.*\n)+)", re.MULTILINE)
COMMAND = re.compile(r"`((?:distlab|python|pytest|mpirun|make) [^`]+)`")


def tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each table's cells, and the paragraph above it."""
    for paragraph, rows in TABLE.findall(text):
        yield (
            paragraph,
            [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.split("\n")],
        )


def without_source(text: str) -> list[str]:
    """Return paragraphs above tables that give no date, or no command for all rows."""
    return [
        paragraph
        for paragraph, (head, *_) in tables(text)
        if not re.search(r"\b2026-\d\d-\d\d\b", paragraph)
        or not ("command" in head or COMMAND.search(paragraph))
    ]


def test_each_table_has_a_command_and_a_date() -> None:
    assert without_source(RESULTS) == []
    assert len(list(tables(RESULTS))) == RESULTS.count("\n|---")


@pytest.mark.parametrize(
    ("above", "is_missing"),
    [
        ("`distlab bench ddp`, 2026-11-24:", False),
        ("`distlab bench ddp`, yesterday:", True),
        ("`DistributedDataParallel`, 2026-11-24:", True),
    ],
)
def test_a_table_without_source_is_found(above: str, is_missing: bool) -> None:
    assert bool(without_source(f"# A\n\n{above}\n\n| a |\n|---|\n| 1 |\n")) is is_missing


def wrong_ratios(text: str) -> list[str]:
    """Return rows whose ratio is not that of our figure and the rival's."""
    found = []
    for _, (head, _, *rows) in tables(text):
        names = [{"a step": "ours", "rival's step": "rival"}.get(name, name) for name in head]
        for row in rows:
            cells = dict(zip(names, row, strict=False))
            if {"ours", "rival", "ratio"} <= cells.keys():
                ours, rival, ratio = (_number(cells[name]) for name in ("ours", "rival", "ratio"))
                found += [" | ".join(row)] * (abs(ours / rival - ratio) > 0.01 * ratio)
    return found


def _number(cell: str) -> float:
    return float(cell.split()[0])


def test_ratios_are_those_of_the_figures_beside_them() -> None:
    assert wrong_ratios(RESULTS) == []


def test_a_wrong_ratio_is_found() -> None:
    table = "Above.\n\n| what | ours | rival | ratio |\n|---|---|---|---|\n"
    assert wrong_ratios(f"{table}| a | 3 ms | 2 ms | 1.50 |\n") == []
    assert wrong_ratios(f"{table}| a | 3 ms | 2 ms | 1.40 |\n") == ["a | 3 ms | 2 ms | 1.40"]


# --- commands ------------------------------------------------------------------------------------


def missing(command: str) -> list[str]:
    """Return what a command names and is not there: files, subcommands, options."""
    words = shlex.split(command)
    files = [word for word in words if word.endswith((".py", ".sh", ".yaml")) or "tests/" in word]
    found = [file for file in files if not (ROOT / file).exists()]
    if words[0] == "python" and "-m" not in words and not found:
        text = (ROOT / words[1]).read_text(encoding="utf-8")
        found += [word for word in words[2:] if not re.search(rf"{re.escape(word)}\b", text)]
    return found + (unknown_commands(f"```console\n$ {command}\n```") if "distlab" in words else [])


COMMANDS = [*dict.fromkeys(COMMAND.findall(without_code(RESULTS)))]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_names_is_there(command: str) -> None:
    assert missing(command) == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("distlab bench zero --ranks 2", []),
        ("distlab bench zero --rnks 2", ["distlab bench zero --rnks 2"]),
        ("python benchmarks/simulated_tables.py zero", []),
        ("python benchmarks/simulated_tables.py zro", ["zro"]),
        ("python benchmarks/tables.py", ["benchmarks/tables.py"]),
        ("pytest tests/lab/test_lost.py -s", ["tests/lab/test_lost.py"]),
        ("mpirun -np 4 python -m distlab trian", ["mpirun -np 4 python -m distlab trian"]),
    ],
)
def test_what_is_missing_is_found(command: str, found: list[str]) -> None:
    assert missing(command) == found


@pytest.mark.skipif(not LAUNCHER.exists(), reason="the trainer is not there yet")
@pytest.mark.parametrize("page", [README, RESULTS], ids=["README", "results"])
def test_commands_of_the_trainer_are_there(page: str) -> None:
    lines = re.findall(r"^scripts/.*$", page, flags=re.MULTILINE)
    assert lines
    assert [missing(line.partition("#")[0]) for line in lines] == [[]] * len(lines)


SIMULATED = re.findall(
    r"^\| .* \| (\S+ \S+) \| `distlab sim --cluster (\S+) --ranks (\d+) (scripts/\S+) (\w+)` \|$",
    RESULTS,
    flags=re.MULTILINE,
)


@pytest.mark.parametrize("row", SIMULATED, ids=lambda row: row[-1])
def test_virtual_times_are_those_of_the_simulator(row: tuple[str, ...]) -> None:
    quoted, cluster, ranks, program, subject = row
    world = Cluster.preset(cluster)
    run = run_script(ROOT / program, [subject], int(ranks), world, Options())
    assert seconds_text(run.seconds) == quoted


def test_each_row_of_simulated_runs_was_read() -> None:
    assert len(SIMULATED) == RESULTS.count("`distlab sim --cluster ") > 10


# --- the picture ---------------------------------------------------------------------------------


def test_the_picture_has_the_phases_and_lessons_of_today() -> None:
    picture = (ROOT / "docs/images/course.svg").read_text(encoding="utf-8")
    texts = set(re.findall(r">([^<>]+)</text>", picture))
    for phase in COURSE.phases:
        assert f"{len(phase.tasks)} tasks, {phase.points} points" in texts
        wanted = {name for lesson in phase.lessons for name in (lesson.title, f"{lesson.name}.py")}
        assert wanted <= texts, "python scripts/course_map.py draws it again"
