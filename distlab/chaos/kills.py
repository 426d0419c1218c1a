"""Kill training processes at random moments, and check the checkpoints that they leave."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from distlab import launch
from distlab.chaos import victim
from distlab.chaos.victim import Death, Event, Left, Training
from distlab.util.text import counted

LONGEST_S = 300.0  # a training run that takes longer counts as hung


class CampaignError(Exception):
    """A campaign cannot continue; the message is one line, plus a traceback if there is one."""


class Kills(NamedTuple):
    """The results of a campaign."""

    kills: int
    inside_saves: int
    ended: int  # training runs that finished despite the kills
    lost_steps: list[int]  # number of steps to repeat after each kill
    failures: list[str]


class Undisturbed(NamedTuple):
    """Results of a training run without kills."""

    digests: Mapping[int, str]  # step -> digest of the saved state
    duration_s: float
    save_s: float


def run(
    training: Training, count: int, seed: int, scratch: Path, advance: Callable[[], None]
) -> Kills:
    """Kill processes of training runs one by one, and check ``training.folder`` after each kill.

    After each kill, the newest checkpoint must be undamaged, no older than the last one reported
    as saved, and bit for bit equal to the undisturbed run's after the same step. The next start
    continues from this checkpoint. At the end, the state must be that of the undisturbed run.

    Args:
        training: Training to disturb.
        count: Number of kills. About half of them are aimed at a save, so that at least a third
            of all kills happen during one.
        seed: Seed for the choice of victims and moments.
        scratch: Folder for other files, which does not exist yet.
        advance: Function to call after each kill.

    Raises:
        CampaignError: The training fails even without kills, or hangs.
    """
    if not count:
        return Kills(0, 0, 0, [], [])
    scratch.mkdir(parents=True)
    undisturbed = _undisturbed(training._replace(folder=scratch / "run"), scratch / "undisturbed")
    return _Campaign(training, undisturbed, Random(seed), scratch).run(count, advance)


def _undisturbed(training: Training, log: Path) -> Undisturbed:
    """Train to the end once, to learn the correct results and how long a run takes."""
    try:
        seconds = _start(training, log, None)
    except launch.LaunchError as error:
        raise CampaignError(f"the training fails undisturbed: {error}") from None
    noted = victim.events(log)
    begun_s = {event.step: event.at_s for event in noted if event.what == "saving"}
    saved = [event for event in noted if event.what == "saved"]
    save_s = median(event.at_s - begun_s[event.step] for event in saved)
    return Undisturbed({event.step: event.digest for event in saved}, seconds, save_s)


def _start(training: Training, log: Path, death: Death | None) -> float:
    """Run all ranks; return the seconds that rank 0 took."""
    arguments = (training, log, death)
    size = training.world_size
    return launch.run(victim.train, size, *arguments, backend="gloo", timeout_s=LONGEST_S)[0]


class _Campaign:
    """A campaign in progress: the training runs that it kills, and the results so far."""

    def __init__(
        self, training: Training, undisturbed: Undisturbed, random: Random, scratch: Path
    ) -> None:
        self.training, self.right, self.random = training, undisturbed, random
        self.log = scratch / "events"
        self.results = Kills(0, 0, 0, [], [])
        self.saved = 0  # newest step that was reported as saved

    def run(self, count: int, advance: Callable[[], None]) -> Kills:
        while self.results.kills < count and not self.results.failures:
            if self._attempt(self._death()):
                advance()
        while not self.results.failures and not self.results.ended:
            self._attempt(None)
        return self.results

    def _death(self) -> Death:
        """Choose a rank's death: any rank at any remaining moment, or rank 0 during a save."""
        random, steps = self.random, self.training.num_steps
        left = steps - self.saved
        if 2 * self.results.inside_saves > self.results.kills:
            rank = random.randrange(self.training.world_size)
            return Death(rank, random.uniform(0, self.right.duration_s * left / steps))
        saves = max(1, min(4, left // self.training.save_every))
        return Death(0, random.uniform(0, self.right.save_s), random.randint(1, saves))

    def _attempt(self, death: Death | None) -> bool:
        """Start the training; return True if a rank was killed before the end."""
        self.log.unlink(missing_ok=True)
        try:
            _start(self.training, self.log, death)
        except launch.RankHung as error:
            raise CampaignError(str(error)) from None
        except launch.LaunchError as error:
            was_killed = death is not None and "SIGALRM" in str(error)
            problem = "" if was_killed else str(error)
        else:
            was_killed, problem = False, ""
        noted = victim.events(self.log)
        self.saved = max([self.saved, *(event.step for event in noted if event.what == "saved")])
        if was_killed:
            self._check_after_kill(noted)
        elif problem:
            self._fail(f"a training that was not killed has failed: {problem}")
        else:
            self._check_end()
        return was_killed

    def _check_after_kill(self, noted: list[Event]) -> None:
        is_inside = bool(noted) and noted[-1].what == "saving"
        reached = max((event.step for event in noted), default=self.saved)
        left = self._check_left("after a kill in a save" if is_inside else "after a kill")
        self.results.lost_steps.append(max(0, reached - left.step))
        self.results = self.results._replace(
            kills=self.results.kills + 1, inside_saves=self.results.inside_saves + is_inside
        )

    def _check_left(self, when: str) -> Left:
        """Check the checkpoint that the next start will find."""
        (left,) = launch.run(victim.look, 1, self.training, backend="gloo", timeout_s=LONGEST_S)
        if problem := problem_of(left, self.saved, self.right.digests):
            self._fail(f"{when}, {problem}")
        return left

    def _check_end(self) -> None:
        """Check a training run that has reached its end, and prepare for a new one."""
        self._check_left("at the end")
        self.results = self.results._replace(ended=self.results.ended + 1)
        if not self.results.failures:
            shutil.rmtree(self.training.folder)
            self.saved = 0

    def _fail(self, text: str) -> None:
        self.results.failures.append(f"{text} ({counted(self.results.kills, 'kill')} before)")


def problem_of(left: Left, saved: int, digests: Mapping[int, str]) -> str:
    """Return what is wrong with the checkpoint that was left, or "".

    Args:
        left: Checkpoint that the next start finds.
        saved: Newest step that was reported as saved.
        digests: Digests of the undisturbed run's states, by step.
    """
    if left.error:
        return f"load_checkpoint raises {left.error}"
    if left.step < saved:
        step = f"step {left.step}" if left.step else "nothing"
        return f"step {saved} is gone, which was saved: {step} is found"
    if left.damaged:
        return f"a damaged checkpoint has its final name: {left.damaged}"
    if left.step and left.digest != digests[left.step]:
        return f"step {left.step} is not that of the undisturbed training, bit for bit"
    return ""
