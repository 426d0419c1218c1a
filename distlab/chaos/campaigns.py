"""Both campaigns, one after the other, with a bar for each, and what came of them."""

import shutil
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from distlab import chosen
from distlab.chaos import corruptions, kills, processes
from distlab.chaos.corruptions import Corruptions
from distlab.chaos.kills import Kills
from distlab.chaos.victim import Training
from distlab.grade.submission import Submission

SHOWN = 5  # failures
TASK = "4.1"


def run(num_kills: int, num_corruptions: int, impl: str, seed: int) -> list[str]:
    """Kill trainings and damage checkpoints, and print what came of it.

    Args:
        impl: "solution" or "mine".

    Returns:
        A line for each of the first failures, and where to find what was left; empty: none.

    Raises:
        NotThereError, LearnerError: as ``chosen.find``.
        CampaignError: the training fails undisturbed, or hangs.
    """
    lessons = chosen.find(impl, [TASK])
    scratch = Path(mkdtemp(prefix="distlab-chaos-"))
    damaged, killed = _with_bars(lessons, num_kills, num_corruptions, seed, scratch)
    if num_corruptions:
        _report_corruptions(damaged)
    if num_kills:
        _report_kills(killed)
    failures = [*damaged.failures, *killed.failures]
    if not failures:
        shutil.rmtree(scratch)
        return []
    more = f"{len(failures) - SHOWN} more failures; " if len(failures) > SHOWN else ""
    return [*failures[:SHOWN], f"{more}what was left is in {scratch}"]


def _with_bars(
    lessons: Submission, num_kills: int, num_corruptions: int, seed: int, scratch: Path
) -> tuple[Corruptions, Kills]:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        damaging = progress.add_task("corruptions", total=num_corruptions)
        killing = progress.add_task("kills", total=num_kills)
        damaged = processes.call(
            corruptions.run,
            *(lessons, num_corruptions, seed, scratch / "corruptions"),
            advance=lambda: progress.advance(damaging),
        )
        training = Training(lessons, scratch / "run")
        killed = kills.run(
            *(training, num_kills, seed, scratch / "kills"), lambda: progress.advance(killing)
        )
    return damaged, killed


def _report_kills(killed: Kills) -> None:
    """Say how often a process was killed, and what came of it."""
    lost = f"; {mean(killed.lost_steps):.1f} steps lost on average" if killed.lost_steps else ""
    good = "each left a whole checkpoint, not older than what was reported as saved"
    print(f"{killed.kills} kills, {killed.inside_saves} of them inside a save{lost}")
    print(f"  {_verdict(killed.failures, good)}")
    print(f"  runs that came to their end, with the bits of an undisturbed one: {killed.ended}")


def _report_corruptions(damaged: Corruptions) -> None:
    """Say what was damaged, and whether that was noticed."""
    print(f"{sum(damaged.by_kind.values())} corruptions")
    for kind, number in sorted(damaged.by_kind.items()):
        print(f"  {number:5d}  {kind}")
    print(f"  {_verdict(damaged.failures, 'all noticed, and the checkpoint before loaded')}")


def _verdict(failures: list[str], good: str) -> str:
    return f"{len(failures)} failed" if failures else good
