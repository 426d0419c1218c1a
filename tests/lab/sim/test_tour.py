"""docs/simulator.md is up to date: its commands give the outputs and pictures that it shows.

After a change to the simulator's output, ``python tests/lab/sim/test_tour.py`` rewrites the outputs
and pictures. Outputs that were shortened with "…" must then be shortened again by hand.
"""

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.distributed as dist

from distlab.cli import main
from distlab.sim import Options, simulate

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs/simulator.md"
IMAGES = ROOT / "docs/images"
SCRIPTS = ROOT / "examples/simulator"
MAX_IMAGE_BYTES = 150_000
TIMEOUT_S = 600  # only a hang takes this long, even on a busy machine
COMMAND = r"((?:[^\n]*\\\n)*[^\n]*)\n(.*)"  # groups: the command and its output
PROMPT = "(Pdb) "  # the debugger's prompt; the reader types the rest of the line


@dataclass(frozen=True)
class Example:
    """A command or a program, and the output that the document shows for it."""

    source: str
    output: str
    is_program: bool = False

    def words(self) -> list[str]:
        """Return the command's words."""
        if self.is_program:
            return ["python", "-c", self.source]
        return shlex.split(self.source.replace("\\\n", " "))

    def typed(self) -> str:
        """Return what the reader types at the debugger's prompt."""
        lines = self.output.splitlines(keepends=True)
        return "".join(line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT))

    def pattern(self) -> str:
        """Return a pattern for the output; … matches any text or, if alone on a line, any lines."""
        return "".join(map(_line_pattern, self.output.splitlines()))


def _line_pattern(line: str) -> str:
    if line == "…":
        return r"(.*\n)*?"
    if line.startswith(PROMPT):
        return re.escape(PROMPT)
    return ".*".join(map(re.escape, line.split("…"))) + r"\n"


def examples() -> Iterator[Example]:
    """Yield the commands and the program in the document."""
    text = DOCUMENT.read_text()
    block = r"^```(console|python)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?"
    for kind, content, output in re.findall(block, text, re.MULTILINE | re.DOTALL):
        if kind == "python":
            yield Example(content, output, is_program=True)
            continue
        for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
            command, printed = re.fullmatch(COMMAND, part, re.DOTALL).groups()
            yield Example(command, printed)


EXAMPLES = list(examples())


def run_here(words: list[str]) -> str:
    """Run ``distlab`` or a Python script in this process; return what it printed."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),
        pytest.MonkeyPatch.context() as patch,
    ):
        if words[0] == "distlab":
            main(words[1:])
        else:
            patch.setattr(sys, "argv", words[1:])
            patch.syspath_prepend(str(SCRIPTS))
            runpy.run_path(words[1], run_name="__main__")
    return printed.getvalue()


def run_elsewhere(words: list[str], typed: str = "") -> str:
    """Run a command in a separate process; return what it printed."""
    known = {"distlab": [sys.executable, "-m", "distlab"], "python": [sys.executable]}
    done = subprocess.run(
        [*known.get(words[0], words[:1]), *words[1:]],
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stdout


def output_of(example: Example) -> str:
    """Run an example, in this process if possible; return its output, ending in one newline."""
    words, typed = example.words(), example.typed()
    is_script = words[0] in ("distlab", "python") and not example.is_program
    can_be_here = is_script and not typed  # in this process, pytest would replace the debugger
    printed = run_here(words) if can_be_here else run_elsewhere(words, typed)
    return printed.rstrip("\n") + "\n" if printed else ""


def pictures_of(example: Example) -> list[Path]:
    """Return the paths of the pictures that an example draws."""
    words = example.words()
    return [Path(words[i + 1]) for i, word in enumerate(words) if word == "--plot"]


def blurred(picture: Path) -> np.ndarray:
    """Return the mean colour of each large square, which hardly depends on letters and edges."""
    pixels = matplotlib.image.imread(picture)[..., :3]
    rows, columns = (size // 30 for size in pixels.shape[:2])
    squares = pixels[: 30 * rows, : 30 * columns].reshape(rows, 30, columns, 30, 3)
    return squares.mean(axis=(1, 3))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary folder with the examples, where no other files can be overwritten."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)


def name(example: Example) -> str:
    if example.is_program:
        return "program"
    return " ".join(word for word in example.words() if "examples/" in word or "--" in word)[:60]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_an_example_prints_and_draws_what_the_document_shows(example: Example) -> None:
    printed = output_of(example)
    assert re.fullmatch(example.pattern(), printed), f"it printed\n{printed}"
    for picture in pictures_of(example):
        drawn, shown = blurred(picture), blurred(IMAGES / picture.name)
        assert drawn.shape == shown.shape
        assert abs(drawn - shown).max() < 0.1, f"docs/images/{picture.name} is another picture"


def test_the_pictures_are_those_of_the_examples_and_small() -> None:
    shown = set(re.findall(r"\]\(images/(.*?)\)", DOCUMENT.read_text()))
    assert shown == {path.name for example in EXAMPLES for path in pictures_of(example)}
    assert shown <= {path.name for path in IMAGES.iterdir()}
    for picture in shown:
        assert (IMAGES / picture).stat().st_size < MAX_IMAGE_BYTES


def test_the_files_and_options_named_in_the_text_exist() -> None:
    text = DOCUMENT.read_text()
    used = {word for example in EXAMPLES for word in example.words()}
    scripts = {path.name for path in SCRIPTS.glob("*.py")}
    assert {Path(word).name for word in used if "examples/" in word} == scripts
    assert set(re.findall(r"`(\w+\.py)`", text)) <= scripts
    known = run_here(["distlab", "sim", "--help"])
    for option in re.findall(r"`--([\w-]+)", text):
        assert f"--{option} " in known


# The text's claims about ring and tree


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_the_built_in_algorithms_take_as_long_as_the_scripts(algorithm: str) -> None:
    by_hand = importlib.import_module(algorithm).all_reduce

    def seconds(all_reduce: object) -> float:
        def run() -> None:
            all_reduce(torch.empty(2**16, device="meta"))

        options = Options(algorithm=algorithm, has_devices=False)
        return simulate(run, 16, cluster="gb200-nvl72", options=options).seconds

    assert seconds(dist.all_reduce) == pytest.approx(seconds(by_hand), rel=1e-9)


# The scripts on real processes

RUN_ALL = """
import runpy, sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.init_process_group = dist.destroy_process_group = lambda: None
for path in sys.argv[1:]:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


def test_torchrun_runs_the_scripts_that_are_right_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "run_all.py").write_text(RUN_ALL)
    right = [str(SCRIPTS / f"{script}.py") for script in ("ring", "tree", "train")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run_elsewhere(["python", *torchrun, str(tmp_path / "run_all.py"), *right])
    assert printed.count("64 KiB of ones, summed over 2 ranks: the first is 2, the last 2\n") == 2
    assert "526,336 parameters, 2 steps\n" in printed


# Rewriting the document


def _renew() -> None:
    """Rewrite the outputs that are out of date, and redraw all pictures."""
    os.chdir(ROOT)
    for example in EXAMPLES:
        printed = output_of(example)
        for picture in pictures_of(example):
            _save_small(picture, IMAGES / picture.name)
        if not re.fullmatch(example.pattern(), printed):
            print(f"new: {name(example)}")
            _replace_output(example, printed)


def _replace_output(example: Example, printed: str) -> None:
    head = f"{example.source}```\n\n```text\n" if example.is_program else f"$ {example.source}\n"
    text = DOCUMENT.read_text()
    assert text.count(head + example.output) == 1
    DOCUMENT.write_text(text.replace(head + example.output, head + printed))


def _save_small(picture: Path, small: Path) -> None:
    """Save a picture in 64 colours, which look the same and make the file half as large."""
    from PIL import Image

    Image.open(picture).convert("RGB").quantize(64).save(small, optimize=True)


if __name__ == "__main__":
    _renew()
