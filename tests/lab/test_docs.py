"""Links lead somewhere, commands exist, and those of two pages print what the pages show."""

import ast
import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from distlab.cli import main
from distlab.cli.app import app
from distlab.course import anchor, load
from distlab.production.config import Config
from distlab.production.parallelism import FLAT_SIZES

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)
README = ROOT / "README.md"
START = ROOT / "docs/start.md"
FIRST_HOUR = ROOT / "docs/first_hour.md"
FOLDERS = ("*.md", "docs/*.md", "phase*/guidelines.md", "examples/*/*.md")
PAGES = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    """Remove code blocks, whose lines are neither headings nor links."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


# --- links ---------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings; a second heading of the same name gets -1."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", without_code(text), flags=re.MULTILINE):
        name = anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        seen = found.count(name)
        found += [name, f"{name}-{seen}"] if seen else [name]
    return set(found)


def broken_links(text: str, page: Path) -> list[str]:
    """Return a page's relative links and pictures that lead nowhere."""
    outside_spans = re.sub(r"`[^`\n]*`", "``", without_code(text))
    targets = re.findall(r"\]\(([^()\s]+)\)", outside_spans)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)", outside_spans, flags=re.MULTILINE)
    return [target for target in targets if "://" not in target and not _leads(target, text, page)]


def _leads(target: str, text: str, page: Path) -> bool:
    path, _, name = target.partition("#")
    file = page.parent / path if path else page
    if not file.exists() or not file.resolve().is_relative_to(ROOT):
        return False
    if not name:
        return True
    there = file.read_text(encoding="utf-8") if path else text
    return file.suffix == ".md" and name in anchors(there)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(encoding="utf-8"), page) == []


# --- commands ------------------------------------------------------------------------------------


def shown_commands(text: str) -> Iterator[str]:
    """Yield the commands on a page, both after a prompt and in the middle of a sentence."""
    joined = text.replace("\\\n", " ")
    for block in re.findall(r"^```console\n(.*?)^```$", joined, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^\S*\$ (.*)$", block, flags=re.MULTILINE)
    for span in re.findall(r"`([^`\n]+)`", without_code(joined)):
        if span.startswith(("distlab ", "make ")):
            yield span


def unknown_commands(text: str) -> list[str]:
    """Return the distlab and make commands on a page that do not exist."""
    return [command for command in shown_commands(text) if not _is_known(command)]


def _is_known(command: str) -> bool:
    words = shlex.split(command.replace("…", ""), comments=True)
    for name, is_known in (("distlab", _is_in_cli), ("make", _is_target)):
        if name in words and not is_known(words[words.index(name) + 1 :]):
            return False
    return True


OF_THE_TRAINER = {
    *("--config", "--impl", "--dry-run", "--help"),
    *("--nodes", "--node-rank", "--rendezvous", "--max-restarts"),
    *(f"--{key}" for key in (*Config.model_fields, *FLAT_SIZES)),
}


def _is_in_cli(words: list[str]) -> bool:
    known = OF_THE_TRAINER if words[:1] == ["train"] else {"-h", "--help"}
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return False
        command, words = command.commands[words[0]], words[1:]
    known = known | {option for param in command.params for option in param.opts}
    before_script = [word for word in words if not word.endswith(".py")]
    if len(before_script) < len(words):  # words after the script belong to it
        words = words[: [word.endswith(".py") for word in words].index(True)]
    words = words[: words.index("|")] if "|" in words else words
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return used <= known


def _is_target(words: list[str]) -> bool:
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return all(word in targets for word in words if "=" not in word)


@each_page
def test_commands_exist(page: Path) -> None:
    assert unknown_commands(page.read_text(encoding="utf-8")) == []


# --- the pages -----------------------------------------------------------------------------------


def spoilers(text: str) -> list[str]:
    """Return the lines of code on a page that are also in a task's solution."""
    said = {line.strip() for line in text.splitlines()}
    return [line for line in _lines_of_answers() if line in said]


def _lines_of_answers() -> list[str]:
    found = []
    for task in COURSE.tasks:
        text = (ROOT / task.solution).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name in task.function.split("."):
                body = text.splitlines()[node.body[0].end_lineno or 0 : node.end_lineno]
                found += [line.strip() for line in body if len(line.strip()) > 20]
    return found


@pytest.mark.parametrize("page", [README, FIRST_HOUR], ids=lambda page: page.name)
def test_the_first_pages_give_no_answer_away(page: Path) -> None:
    assert spoilers(page.read_text(encoding="utf-8")) == []


def test_every_page_of_docs_is_reached_from_the_readme_and_on_the_site() -> None:
    linked = set(re.findall(r"\]\(([\w/]+\.md)", README.read_text(encoding="utf-8")))
    pages = {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")}
    assert pages <= linked
    assert pages <= set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))


# --- the first hour ------------------------------------------------------------------------------

LESSON = Path("phase1_data_parallel/template_data_loader.py")
SWAP = Path("examples/first_hour/swap.py")


def replayed(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the learner's action before each command, the command, and its output."""
    step = r"(?:^<!-- replay: ([^\n]*) -->\n)?^```console\n\$ ([^\n]*)\n(.*?)^```$"
    yield from re.findall(step, text, flags=re.MULTILINE | re.DOTALL)


def pattern(output: str) -> str:
    """Return a pattern for the output; … matches any text, or, alone on a line, any lines."""
    lines = output.rstrip("\n").split("\n")
    return "".join(r"(.*\n)*?" if line == "…" else _line(line) for line in lines)


def _line(line: str) -> str:
    return ".*".join(map(re.escape, line.split("…"))) + r"\n"


def write_shard_indices(body: str) -> None:
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    start = text.index("    # TODO 1.1")
    end = text.index(")\n", text.index("raise NotImplementedError(", start)) + 2
    LESSON.write_text(text[:start] + body + text[end:], encoding="utf-8")


def solution_of_shard_indices() -> str:
    text = (ROOT / COURSE.task("1.1").solution).read_text(encoding="utf-8")
    (function,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "shard_indices"
    )
    return "".join(
        text.splitlines(keepends=True)[function.body[0].end_lineno : function.end_lineno]
    )


def move_the_barrier() -> None:
    text = (ROOT / SWAP).read_text(encoding="utf-8")
    first, last = "        dist.barrier()  # wait until rank 0 is ready\n", "dist.send(mine, 0)\n"
    assert text.count(first) == text.count(last) == 1
    SWAP.write_text(text.replace(first, "").replace(last, f"{last}        dist.barrier()\n"))


ACTIONS = {
    "": lambda: None,
    "the barrier comes last": move_the_barrier,
    "shard_indices returns an empty list": lambda: write_shard_indices("    return []\n"),
    "shard_indices is written": lambda: write_shard_indices(solution_of_shard_indices()),
}


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a copy of the files that the first hour needs."""
    ignored = shutil.ignore_patterns("__pycache__")
    phases = tuple(phase.folder for phase in load(ROOT).phases)
    tests = ("tests/judging", *(f"tests/phase{number}" for number in range(1, len(phases) + 1)))
    for folder in (*phases, *tests, "solutions", "examples/first_hour"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    suites = tuple(f"tests/test_phase{number}.py" for number in range(1, len(phases) + 1))
    for file in ("course.toml", "pyproject.toml", "tests/conftest.py", "tests/tiers.py", *suites):
        shutil.copy(ROOT / file, tmp_path / file)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("fork")
def test_the_first_hour_is_what_the_commands_print(capfd: pytest.CaptureFixture[str]) -> None:
    steps = list(replayed(FIRST_HOUR.read_text(encoding="utf-8")))
    assert {action for action, _, _ in steps} == ACTIONS.keys()
    for action, command, output in steps:
        ACTIONS[action]()
        name, *words = shlex.split(command)
        assert name == "distlab"
        with pytest.raises(SystemExit):
            main(words)
        printed = "".join(capfd.readouterr()).rstrip("\n") + "\n"
        assert re.fullmatch(pattern(output), printed), f"{command} printed\n{printed}"


# --- the first program ---------------------------------------------------------------------------

TIMEOUT_S = 120  # only a hang takes this long


def shown_by_torchrun(words: list[str]) -> str:
    """Run a script as ``torchrun`` does, without GPUs; return what it printed, in order."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={"PYTHONPATH": str(ROOT), "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    # Two processes may print into one line, in which case both ends of lines come behind it.
    lines = re.findall(r"rank .*?(?=rank |\n|\Z)", done.stdout)
    return "".join(f"{line}\n" for line in sorted(lines))


def test_the_first_program_prints_what_the_page_shows(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    steps = list(replayed(START.read_text(encoding="utf-8")))
    assert [command.split()[0] for _, command, _ in steps] == ["torchrun", "distlab", "distlab"]
    for _, command, output in steps:
        name, *words = shlex.split(command)
        if name == "torchrun":
            assert shown_by_torchrun(words) == output
            continue
        with pytest.raises(SystemExit):
            main(words)
        printed = "".join(capfd.readouterr()).rstrip("\n") + "\n"
        assert re.fullmatch(pattern(output), printed), f"{command} printed\n{printed}"


def test_the_first_program_is_shown_as_it_is() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", START.read_text(encoding="utf-8"), re.DOTALL)
    assert f"\n{shown}\n" in (ROOT / "examples/first_steps/hello.py").read_text(encoding="utf-8")


def test_the_picture_of_the_collectives_is_that_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    figure = importlib.import_module("figures").COLLECTIVES
    wanted: list[str] = []
    for name, panel in figure.panels().items():
        wanted.append(name)
        for rank, (before, after) in enumerate(panel):
            wanted += [str(rank), *filter(None, [*before, *after])]
    drawn = re.findall(r">([^<>\n]+)</text>", figure.path.read_text(encoding="utf-8"))
    assert drawn == wanted, "python scripts/figures.py collectives draws it again"


def shown_in(svg: str) -> tuple[str, list[float]]:
    """Return the body of a picture with its numbers replaced, and these numbers, mostly points."""
    body = svg.partition("</metadata>")[2]  # which names the version of matplotlib
    number = r"(?<![\w#])-?\d+(?:\.\d+)?"
    return re.sub(number, "0", body), [float(found) for found in re.findall(number, body)]


def test_the_drawn_pictures_are_what_their_functions_draw_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for drawing in importlib.import_module("figures").DRAWINGS:
        body, numbers = shown_in(drawing.svg())
        there, found = shown_in(drawing.path.read_text(encoding="utf-8"))
        advice = f"python scripts/figures.py {drawing.name} draws it again"
        assert there == body, advice
        assert found == pytest.approx(numbers, abs=1), advice


# --- the operator's view -------------------------------------------------------------------------


def test_the_flight_recorder_names_the_rank_that_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/operators.md").read_text(encoding="utf-8")
    _, _, section = text.partition("\n## The flight recorder\n")
    (block,) = re.findall(r"^```console\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    (simulated, hang), (read, missing) = (
        part.partition("\n")[::2] for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    )
    with pytest.raises(SystemExit):
        main(shlex.split(simulated)[1:])
    printed = "".join(capfd.readouterr())
    assert re.fullmatch(pattern(hang), printed.rstrip("\n") + "\n"), printed
    module = "torch.distributed.flight_recorder.fr_trace"
    words = [sys.executable, "-m", module, *shlex.split(read)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert re.fullmatch(pattern(missing), done.stdout + done.stderr), done


# --- the site ------------------------------------------------------------------------------------


SITE = runpy.run_path(str(ROOT / "scripts/docs_site.py"))
PAGES = [path for path in SITE["shown"]() if path.suffix == ".md"]


def for_mkdocs(text: str, path: Path = Path("docs/launch.md")) -> str:
    return SITE["for_mkdocs"](text, path)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_between_files_lead_to_pages_of_the_site(page: Path) -> None:
    for link in re.findall(
        r"\]\(([^()\s#]+)[^()\s]*\)", for_mkdocs((ROOT / page).read_text(), page)
    ):
        if "://" not in link:
            target = (ROOT / page.parent / link).resolve().relative_to(ROOT)
            assert target in SITE["shown"](), f"{page}: {link}"


@pytest.mark.parametrize(
    ("github", "mkdocs"),
    [
        ("**Pitfalls.**\n- a\n- b\n", "**Pitfalls.**\n\n- a\n- b\n"),
        ("1. a\n   more\n2. b\n", "1. a\n   more\n2. b\n"),
        ("```\na\n- b\n<details>\n```\n", "```\na\n- b\n<details>\n```\n"),
        ("<details><summary>A</summary>\n", '<details markdown="1"><summary>A</summary>\n'),
        ("[a page](install.md#did-it-work)\n", "[a page](install.md#did-it-work)\n"),
        ("[a script](../Makefile) [no file](nothing.py)\n", "a script [no file](nothing.py)\n"),
        ("a [script on\ntwo lines](../Makefile).\n", "a script on\ntwo lines.\n"),
    ],
)
def test_what_github_reads_in_another_way_is_changed_for_the_site(github: str, mkdocs: str) -> None:
    assert for_mkdocs(github) == mkdocs
