"""Run both campaigns, one after the other, each with a progress bar, and print their results."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from distlab import chosen, launch
from distlab.chaos import corruptions, kills
from distlab.chaos.corruptions import Corruptions
from distlab.chaos.kills import CampaignError, Kills
from distlab.chaos.victim import Training
from distlab.grade.submission import Submission

SHOWN = 5  # maximum number of failures listed
CHUNK = 25  # corruptions per process
LONGEST_S = 600.0  # time limit for a chunk
TASK = "4.1"


def run(num_kills: int, num_corruptions: int, impl: str, seed: int) -> list[str]:
    """Kill training runs and damage checkpoints, and print the results.

    Args:
        impl: "solution" or "mine".

    Returns:
        A line for each of the first failures, then one that names the folder with the remains;
        empty if nothing failed.

    Raises:
        NotThereError, LearnerError: As for ``chosen.find``.
        CampaignError: The training fails even without kills, or hangs.
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
        damaged = damage(
            *(lessons, num_corruptions, seed, scratch),
            lambda number: progress.advance(damaging, number),
        )
        training = Training(lessons, scratch / "run")
        killed = kills.run(
            *(training, num_kills, seed, scratch / "kills"), lambda: progress.advance(killing)
        )
    return damaged, killed


def damage(
    lessons: Submission, count: int, seed: int, scratch: Path, advance: Callable[[int], None]
) -> Corruptions:
    """Damage checkpoints in separate processes, because learners' code may do anything.

    Raises:
        CampaignError: A process failed.
    """
    total = Corruptions({}, [])
    for first in range(0, count, CHUNK):
        number = min(CHUNK, count - first)
        arguments = (lessons, number, f"{seed}-{first}", scratch / f"corruptions-{first}")
        try:
            (part,) = launch.run(
                corruptions.run, 1, *arguments, backend="gloo", timeout_s=LONGEST_S
            )
        except launch.LaunchError as error:
            raise CampaignError(str(error)) from None
        for kind, times in part.by_kind.items():
            total.by_kind[kind] = total.by_kind.get(kind, 0) + times
        total.failures.extend(part.failures)
        advance(number)
    return total


def _report_kills(killed: Kills) -> None:
    """Print the number of kills, the steps lost, and whether the checkpoints were good."""
    lost = f"; {mean(killed.lost_steps):.1f} steps lost on average" if killed.lost_steps else ""
    good = "each left a whole checkpoint, not older than what was reported as saved"
    print(f"{killed.kills} kills, {killed.inside_saves} of them inside a save{lost}")
    print(f"  {_verdict(killed.failures, good)}")
    print(f"  runs that came to their end, with the bits of an undisturbed one: {killed.ended}")


def _report_corruptions(damaged: Corruptions) -> None:
    """Print the number of corruptions of each kind, and whether all were noticed."""
    print(f"{sum(damaged.by_kind.values())} corruptions")
    for kind, number in sorted(damaged.by_kind.items()):
        print(f"  {number:5d}  {kind}")
    print(f"  {_verdict(damaged.failures, 'all noticed, and the checkpoint before loaded')}")


def _verdict(failures: list[str], good: str) -> str:
    return f"{len(failures)} failed" if failures else good
