"""Measure how long learners wait for a verdict.

    python benchmarks/verdicts.py        run this on an idle machine

A cold wait is one ``distlab check`` in a new process, with unsolved templates. A warm wait lasts
from saving a solved template until ``distlab watch`` has drawn the resulting screen on a terminal.
Each figure is the median of ``RUNS`` runs; each phase ends with the median over its tasks.
"""

import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from distlab import course
from distlab.course import Task

ROOT = Path(__file__).parents[1]
RUNS = 5
COLD = ("1.1", "1.3")
DISTLAB = [sys.executable, "-m", "distlab"]
MENU = b"grades on every save"
LONGEST_S = 60.0
NOT_COPIED = shutil.ignore_patterns(".venv", ".git", ".distlab", "__pycache__", "out")


def main() -> None:
    """Measure cold and warm waits, and print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder, "course")
        shutil.copytree(ROOT, here, ignore=NOT_COPIED)
        for task_id in COLD:
            runs = [cold_check_s(here, task_id) for _ in range(RUNS)]
            print(f"cold  distlab check {task_id:<5} {median(runs):6.2f} s")
        fill_in(here)
        for phase in course.load(here).phases:
            medians = [median(from_save_to_verdict_s(here, task)) for task in phase.tasks]
            print(
                f"watch median over {len(medians)} tasks of {phase.folder} {median(medians):6.2f} s"
            )


def cold_check_s(here: Path, task_id: str) -> float:
    """Return how long one ``distlab check`` takes."""
    start = time.monotonic()
    subprocess.run([*DISTLAB, "check", task_id], cwd=here, capture_output=True, check=False)
    return time.monotonic() - start


def fill_in(here: Path) -> None:
    """Copy the solutions into the templates."""
    for phase in course.load(here).phases:
        for template in (here / phase.folder).glob("template_*.py"):
            name = template.name.removeprefix("template_")
            text = (here / "solutions" / phase.folder / name).read_text()
            package = f"solutions.{phase.folder}."
            template.write_text(text.replace(package, f"{phase.folder}.template_"))


def from_save_to_verdict_s(here: Path, task: Task) -> list[float]:
    """Save a template ``RUNS`` times, each time longer; return the seconds until each verdict."""
    template, seconds = here / task.folder / f"template_{task.lesson}.py", []
    with watching(here, task) as terminal:
        for _ in range(RUNS):
            time.sleep(0.5)  # learners do not save right after a verdict
            start = time.monotonic()
            template.write_text(f"{template.read_text()}\n")
            screen = read_screen(terminal)
            seconds.append(time.monotonic() - start)
            assert f"{task.id} {task.label}: passed".encode() in screen, screen.decode()
    print(f"watch {task.id:<5} {task.label:<40} {median(seconds):6.2f} s", flush=True)
    return seconds


@contextmanager
def watching(here: Path, task: Task) -> Iterator[int]:
    """Run ``distlab watch`` up to its first verdict; yield our end of its terminal."""
    ours, theirs = pty.openpty()
    command = [*DISTLAB, "watch", task.id]
    with subprocess.Popen(
        command, cwd=here, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            read_screen(ours)
            yield ours
        finally:  # otherwise, after a failure, Popen.__exit__ would wait forever
            process.terminate()
            os.close(ours)


def read_screen(terminal: int) -> bytes:
    """Read the terminal's output up to the menu.

    Raises:
        TimeoutError: No menu appeared; the message contains the output.
    """
    screen, deadline = b"", time.monotonic() + LONGEST_S
    while MENU not in screen:
        if not select.select([terminal], [], [], deadline - time.monotonic())[0]:
            raise TimeoutError(f"no menu after {LONGEST_S:g} s: {screen.decode()}")
        screen += os.read(terminal, 4096)
    return screen


if __name__ == "__main__":
    main()
