"""guidelines.md has a section and hints for every task, and quotes what programs print."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from own_phases import shipped

from distlab.cli import main
from distlab.course import Phase, Task, load
from distlab.sim import Cluster, Options, Simulated
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.results.summary import totals
from distlab.sim.script import run_script
from distlab.util.text import counted, seconds_text

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
COURSE = shipped(load(ROOT))
PROGRAM = Path("scripts/phase1.py")
WAITING = "What `wait()` means"
READINGS = {  # each before a task
    WAITING: "1.14 Remove the host syncs",
    "The stages of ZeRO": "3.12 Shard the optimizer's state",
}
MEMORY, CHOICE = "Where the memory goes", "Which method when"
TIMEOUT_S = 120

each_task = pytest.mark.parametrize("task", COURSE.tasks, ids=lambda task: task.id)
each_phase = pytest.mark.parametrize("phase", COURSE.phases, ids=lambda phase: phase.folder)


@cache
def text_of(folder: str) -> str:
    return (ROOT / folder / "guidelines.md").read_text(encoding="utf-8")


@cache
def sections(folder: str) -> dict[str, str]:
    """Return the text under each ## heading."""
    outside_code = re.split(r"^## (.+)$", text_of(folder), flags=re.MULTILINE)
    return dict(zip(outside_code[1::2], outside_code[2::2], strict=True))


def section(task: Task) -> str:
    return sections(task.folder)[task.heading]


def summary(task: Task) -> str:
    """Return the lines below a task's heading, as course.toml has them."""
    stars = "★" * task.difficulty + "☆" * (5 - task.difficulty)
    names = ", ".join(f"`{name}`" for name in task.names)
    parts = [
        f"({letter}) {part.title}, {counted(part.points, 'point')}"
        for letter, part in task.graded_parts.items()
    ]
    return (
        f"Difficulty {stars} · {task.minutes} minutes · {task.points} points · {names} in "
        f"`{task.template.name}`" + (f" Graded in parts: {'; '.join(parts)}." if task.parts else "")
    )


# --- the sections --------------------------------------------------------------------------------


@each_task
def test_a_section_begins_with_what_there_is_to_write_and_to_score(task: Task) -> None:
    assert " ".join(section(task).split()).startswith(summary(task))


@each_phase
def test_tasks_are_explained_in_order_between_an_introduction_and_an_ending(phase: Phase) -> None:
    headings = list(sections(phase.folder))
    numbered = [task.heading for task in phase.tasks]
    for heading, task in READINGS.items():
        if task in numbered:
            numbered.insert(numbered.index(task), heading)
    opening = ["The words", *[MEMORY] * (phase.number == 2), "How to work"]
    choice = [CHOICE] * (phase.number in (2, 3))
    ending = ["The open task"] * bool(phase.challenge) + choice + ["What you have built"]
    assert headings == [*opening, *numbered, *ending]


@each_task
def test_task_has_three_hints_and_the_last_tells_the_number_of_lines(task: Task) -> None:
    hints = re.findall(r"<details>.*?</summary>\n\n(.+?)\n\n</details>", section(task), re.DOTALL)
    assert len(hints) == 3 == section(task).count("<details>") == section(task).count("</details>")
    question, _, names = hints
    assert "?" in question
    assert re.search(r"\d lines", names)
    assert "`" in names


# --- quoted output -------------------------------------------------------------------------------


def simulated(subject: str, cluster: str, ranks: int) -> Simulated[None]:
    nodes = ranks if cluster.startswith("ethernet") else 1
    world = Cluster.preset(cluster, nodes)
    return run_script(ROOT / PROGRAM, [subject], ranks, world, Options())


@pytest.mark.parametrize(
    ("id", "subject", "cluster", "ranks", "quoted"),
    [
        ("1.5", "scatter_batch", "laptop", 4, "305 µs"),
        ("1.3", "exchange", "laptop", 4, "159 µs"),
        ("1.4", "broadcast", "laptop", 8, "478 µs"),
        ("1.6", "all_reduce_naive", "laptop", 8, "1.59 ms"),
        ("1.7", "all_reduce_recursive_doubling", "laptop", 8, "478 µs"),
        ("1.7", "all_reduce_recursive_doubling", "laptop", 6, "638 µs"),
        ("1.11", "train_step", "dgx-h100", 4, "564 µs"),
        ("1.11", "train_step", "ethernet-10g", 4, "22.3 ms"),
    ],
)
def test_seconds_under_a_picture_are_those_of_the_simulator(
    id: str, subject: str, cluster: str, ranks: int, quoted: str
) -> None:
    run = simulated(subject, cluster, ranks)
    assert seconds_text(run.seconds) == quoted
    text = " ".join(section(COURSE.task(id)).split())
    assert quoted in text
    if cluster == "dgx-h100":
        assert f"{seconds_text(totals(run)[0].exposed_s)} are spent on messages" in text


def test_deadlock_that_is_quoted_is_the_one_that_comes() -> None:
    with pytest.raises(SimulationError) as error:
        simulated("both_send_first", "laptop", 4)
    report = "\n".join(str(error.value).splitlines()[:6])
    assert f"```\n{report}\n```" in section(COURSE.task("1.3"))


def test_table_that_is_quoted_is_the_one_that_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    simulated("measure", "laptop", 8)
    assert f"```\n{capfd.readouterr().out.strip(chr(10))}\n```" in section(COURSE.task("1.8"))


def test_program_of_the_reading_prints_the_times_that_are_quoted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = sections("phase1_data_parallel")[WAITING]
    command, quoted = re.findall(r"^\$ distlab (.*)\n([^…]*)", text, re.MULTILINE)[0]
    with pytest.raises(SystemExit):
        main(command.split())
    assert capfd.readouterr().out.startswith(quoted)
    (lines,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program = (ROOT / command.split()[-1]).read_text(encoding="utf-8")
    assert [line for line in lines.splitlines() if f"    {line}\n" not in program] == []


def after_wait() -> Iterator[tuple[str, str]]:
    """Yield each command that runs after_wait.py on simulated GPUs, and its output."""
    for phase in COURSE.phases:
        for block in re.findall(r"^```console\n(.*?)^```$", text_of(phase.folder), re.M | re.S):
            if "after_wait.py" in block:
                for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                    command, _, quoted = part.partition("\n")
                    yield command, quoted


@pytest.mark.parametrize(
    ("command", "quoted"), [pytest.param(*both, id=both[0].split()[-1]) for both in after_wait()]
)
def test_what_follows_from_wait_is_printed(
    command: str, quoted: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name, *words = command.split()
    assert name == "distlab"
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    with pytest.raises(SystemExit):
        main(words)
    lines = [
        r"(.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in quoted.splitlines()
    ]
    printed = capfd.readouterr().out
    assert re.fullmatch("".join(lines), printed), printed


def test_program_at_the_end_trains(tmp_path: Path) -> None:
    ending = sections("phase1_data_parallel")["What you have built"]
    (program,) = re.findall(r"```python\n(.*?)```", ending, re.DOTALL)
    quick = {
        "phase1_data_parallel.template_": "solutions.phase1_data_parallel.",
        "epochs=10": "epochs=1",
        "in (1, 4)": "in (1, 2)",
        'launch.run(train, workers, backend="gloo")': 'launch.run(train, workers, backend="sim")',
    }
    for old, new in quick.items():
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "mine.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "mine.py")],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^workers: (\d), (loss .*, accuracy .*%)$", done.stdout, re.MULTILINE)
    assert [workers for workers, _ in ends] == ["1", "2"], done.stdout
    assert ends[0][1] == ends[1][1]
