"""What students get holds no answer, and none of its pages leads to what they have not got."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import pytest
import test_docs

from distlab.course import load
from distlab.learner import handout
from distlab.learner.folder import CourseFolder
from distlab.learner.pages import NEEDS_SOLUTIONS, Page
from distlab.learner.source import defined

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)
NUM_LINES = 4  # in a row, that are no accident


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("handout") / "course"
    handout.write(CourseFolder(ROOT, COURSE), target)
    return target


# --- no answers ----------------------------------------------------------------------------------

Block = tuple[str, ...]


def code_lines(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def blocks(lines: Sequence[str]) -> Iterator[Block]:
    return (tuple(lines[k : k + NUM_LINES]) for k in range(len(lines) - NUM_LINES + 1))


def bodies(path: Path) -> dict[str, str]:
    """The bodies of all functions of a file, without docstrings."""
    text = path.read_text()
    found = {}
    for name, node in defined(ast.parse(text)):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        first = body[0].lineno - 1 if body else node.end_lineno
        found[name] = "\n".join(text.splitlines()[first : node.end_lineno])
    return found


def answers() -> dict[Block, str]:
    """All blocks of the solutions, and whose they are; not those that the templates give."""
    found = {}
    for template in sorted(ROOT.glob("phase*/template_*.py")):
        lesson = template.name.removeprefix("template_")
        solution, given = ROOT / "solutions" / template.parent.name / lesson, bodies(template)
        for name, body in bodies(solution).items():
            own = re.sub(r"solutions\.(phase\w+)\.", r"\1.template_", body)
            if given.get(name) != own:
                found |= dict.fromkeys(blocks(code_lines(body)), f"{solution.name}: {name}")
    return found


def given_away(folder: Path) -> list[str]:
    """Where in a folder something of a solution stands."""
    own = answers()
    return [
        f"{file.relative_to(folder)} has lines of {own[block]}"
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        for block in blocks(code_lines(file.read_text(errors="replace")))
        if block in own
    ]


def test_no_block_of_a_solution_is_in_any_file(students: Path) -> None:
    assert given_away(students) == []


def test_a_block_of_a_solution_is_found(tmp_path: Path) -> None:
    lines = bodies(ROOT / COURSE.task("1.5").solution)["broadcast"].splitlines()
    assert len(lines) > NUM_LINES
    (tmp_path / "note.md").write_text("\n".join(f"> {line}" for line in lines))
    assert given_away(tmp_path) == []
    (tmp_path / "note.md").write_text("\n\n".join(f"  {line.strip()}" for line in lines))
    assert given_away(tmp_path)[0] == "note.md has lines of collectives.py: broadcast"


def test_wrong_answers_would_give_solutions_away() -> None:
    assert given_away(ROOT / "tests/wrong_answers") != [], "and are left out for that"


# --- pages ---------------------------------------------------------------------------------------


def pages(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.md"))
    assert len(found) > 5
    return found


def test_no_link_is_broken(students: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_docs, "ROOT", students)
    broken = {page: test_docs.broken_links(page.read_text(), page) for page in pages(students)}
    assert {page: links for page, links in broken.items() if links} == {}


def test_no_page_names_a_file_that_was_left_out(students: Path) -> None:
    named = re.compile(rf"(^|\s)({'|'.join(map(re.escape, handout.LEFT_OUT))})\b")
    found = {}
    for page in pages(students):
        spans = re.findall(r"`([^`]+)`", test_docs.without_code(page.read_text()))
        if page.name != handout.NAMES_ALL:
            found[page] = list(filter(named.search, spans))
    assert {page: names for page, names in found.items() if names} == {}


def test_guidelines_lose_no_section_and_no_figure(students: Path) -> None:
    for phase in COURSE.phases:
        ours = (ROOT / phase.folder / "guidelines.md").read_text()
        theirs = (students / phase.folder / "guidelines.md").read_text()
        for pattern in (r"^#+ .+$", r"^!\[.+$", r"^<details>.+$"):
            found = re.findall(pattern, theirs, re.MULTILINE)
            assert found == re.findall(pattern, ours, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("One. Two with `scripts/a.py x`. Three.", "One."),
        ("Read `solutions/a.py`. Then go on.", ""),
        ("**Read.** `solutions/a.py` has all. Begin.", ""),
        ("*A pair, 3 µs. Drawn with\n`distlab sim scripts/a.py x`.*", "*A pair, 3 µs.*"),
        ("*Printed with `scripts/a.py`.*", ""),
        (
            "| a | b |\n|---|---|\n| `solutions/` | x |\n| `b/` | y |",
            "| a | b |\n|---|---|\n| `b/` | y |",
        ),
        ("- one\n- two, `solutions/`\n- three", "- one\n- three"),
        ("See [this](../solutions/a.py#b) now.", ""),
        ("One. Drawn with `python scripts/a.py\nx`.", "One."),
        ("See [this](a.md) and https://x.org/solutions/ now.", None),
        ("Some `solutions_of_yours/` and scripts.", None),
        ("```\npython scripts/a.py\n```", None),
        (
            "One.\n\n```\n`solutions/`\n```\n\nTwo `solutions/`.\n\nThree.\n",
            "One.\n\n```\n`solutions/`\n```\n\nThree.\n",
        ),
    ],
)
def test_what_goes_and_what_stays(text: str, left: str | None) -> None:
    page = Page(PurePosixPath("docs/page.md"), ["solutions", "scripts"])
    assert page.edited(text) == (text if left is None else left)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("$ distlab sim scripts/a.py x\nrank 0\n", "rank 0\n"),
        ("$ ls\n$ distlab sim \\\n    solutions/a.py\n$ distlab\n", "$ ls\n$ distlab\n"),
        ("$ python solutions/phase9/a.py x\n", "$ python phase9/template_a.py x\n"),
        ("$ distlab check 1.1\nscripts/a.py\n", None),
    ],
)
def test_no_command_needs_a_file_that_was_left_out(text: str, left: str | None) -> None:
    page = Page(PurePosixPath("docs/page.md"), ["solutions", "scripts"])
    shown = f"One.\n\n```console\n{text}```\n\nTwo.\n"
    assert page.edited(shown) == shown.replace(text, text if left is None else left)


@pytest.mark.parametrize("command", ["distlab diff 1.1", "distlab trace 1.5 --impl solution"])
def test_a_command_that_needs_the_solutions_is_marked(command: str) -> None:
    page = Page(PurePosixPath("docs/page.md"), ["solutions"])
    shown = f"One.\n\n```console\n$ {command}\nthe same\n```\n\nTwo.\n"
    assert page.edited(shown) == shown.replace("\n\nTwo", f"\n\n{NEEDS_SOLUTIONS}\n\nTwo")
    assert Page(PurePosixPath("page.md"), ["scripts"]).edited(shown) == shown


def test_commands_of_a_handout_need_nothing_that_it_has_not_got(students: Path) -> None:
    place = "|".join(map(re.escape, handout.LEFT_OUT))
    for page in pages(students):
        text = page.read_text()
        assert not re.findall(rf"^\$ .*\s(?:{place})/", text, re.MULTILINE), page
        for fence in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            assert fence.strip(), page
    first_hour = (students / "docs/first_hour.md").read_text()
    assert first_hour.count(NEEDS_SOLUTIONS) == 2


def test_a_page_that_may_name_files_has_no_link_to_them() -> None:
    page = Page(PurePosixPath("page.md"), ["solutions"], may_name=True)
    text = "Never read `solutions/`. See [it](solutions/a.py)."
    assert page.edited(text) == "Never read `solutions/`."
