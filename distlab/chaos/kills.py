"""Kill training processes at random moments, and look at what they have left."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from distlab.chaos import processes, victim
from distlab.chaos.attempt import Attempt
from distlab.chaos.processes import CampaignError
from distlab.chaos.victim import Told, Training
from distlab.util.text import counted


class Kills(NamedTuple):
    """What came of a campaign."""

    kills: int
    inside_saves: int
    ended: int  # trainings that came to their end, after kills
    lost_steps: list[int]  # at each kill: that must be trained again
    failures: list[str]


class Undisturbed(NamedTuple):
    """A training that nobody disturbs."""

    digests: dict[int, str]  # of what is saved after a step
    duration_s: float
    save_s: float


def run(
    training: Training, count: int, seed: int, scratch: Path, advance: Callable[[], None]
) -> Kills:
    """Kill processes of trainings in ``training.folder``, one after the other, and check each time.

    After each kill the newest checkpoint must be there, undamaged, not older than what was
    reported as saved, and bit for bit that of the undisturbed training after the same step. The
    next start goes on from it; in the end the parameters must be those of the undisturbed training.

    Args:
        count: how many kills; about every second one is aimed at a save, so that at least a third
            of all hit one.
        scratch: a folder for other files, which is not there yet.
        advance: called after each kill.

    Raises:
        CampaignError: the training fails undisturbed, or hangs.
    """
    if not count:
        return Kills(0, 0, 0, [], [])
    undisturbed = _undisturbed(training, scratch / "undisturbed")
    return _Campaign(training, undisturbed, Random(seed), scratch).run(count, advance)


def _undisturbed(training: Training, scratch: Path) -> Undisturbed:
    """Train to the end once, for what is right and how long it takes."""
    (scratch / "attempt").mkdir(parents=True)
    alone = training._replace(folder=scratch / "run")
    with Attempt(alone, scratch / "attempt") as attempt:
        is_well = attempt.wait()
    if not is_well:
        raise CampaignError(f"the training fails undisturbed: {attempt.log.read_text()[-2000:]}")
    digests = {told.step: told.digest for told in attempt.told if told.what == "saved"}
    return Undisturbed(digests, attempt.lasted_s, median(_saves_s(attempt)))


def _saves_s(attempt: Attempt) -> list[float]:
    """Return how long each save took."""
    names = [(told.what, told.step) for told in attempt.told]
    heard_s = dict(zip(names, attempt.heard_s, strict=True))
    steps = [told.step for told in attempt.told if told.what == "saved"]
    return [heard_s["saved", step] - heard_s["saving", step] for step in steps]


class _Campaign:
    """The trainings that are killed, and what was found."""

    def __init__(
        self, training: Training, undisturbed: Undisturbed, random: Random, scratch: Path
    ) -> None:
        self.training, self.right, self.random = training, undisturbed, random
        self.scratch = scratch
        self.found = Kills(0, 0, 0, [], [])
        self.saved = 0  # the newest step in the folder that was reported as saved

    def run(self, count: int, advance: Callable[[], None]) -> Kills:
        while self.found.kills < count and not self.found.failures:
            if self._attempt(is_disturbed=True):
                advance()
        while not self.found.failures and not self.found.ended:
            self._attempt(is_disturbed=False)
        return self.found

    def _attempt(self, is_disturbed: bool) -> bool:
        """Start the training; return whether a rank was killed before its end."""
        place = self.scratch / "attempt"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        with Attempt(self.training, place) as attempt:
            was_killed = is_disturbed and self._kill(attempt)
            is_well = was_killed or attempt.wait()
        self._note(attempt.told)
        if was_killed:
            self._check_after_kill(attempt.told)
        elif is_well:
            self._check_end()
        else:
            self._fail(f"a training that nobody killed has failed: {attempt.log.read_text()}")
        return was_killed

    def _kill(self, attempt: Attempt) -> bool:
        """Kill any rank at any moment, or rank 0 in a save."""
        if 2 * self.found.inside_saves > self.found.kills:
            rank = self.random.randrange(self.training.world_size)
            return attempt.kill_after(rank, self.random.uniform(0, self.right.duration_s))
        number = self.random.randint(1, 4)
        return attempt.kill_in_save(0, number, self.random.uniform(0, self.right.save_s))

    def _note(self, told: list[Told]) -> None:
        self.saved = max([self.saved, *(each.step for each in told if each.what == "saved")])

    def _check_after_kill(self, told: list[Told]) -> None:
        is_inside = bool(told) and told[-1].what == "saving"
        reached = max((each.step for each in told), default=self.saved)
        left = self._check_left("after a kill in a save" if is_inside else "after a kill")
        self.found.lost_steps.append(max(0, reached - left))
        self.found = self.found._replace(
            kills=self.found.kills + 1, inside_saves=self.found.inside_saves + is_inside
        )

    def _check_left(self, when: str) -> int:
        """Look at what the next start will find; return its step."""
        left = processes.call(victim.look, self.training, advance=lambda: None)
        if left.error:
            self._fail(f"{when}, load_checkpoint raises {left.error}")
        elif left.step < self.saved:
            step = f"step {left.step}" if left.step else "nothing"
            self._fail(f"{when}, step {self.saved} is gone, which was saved: {step} is found")
        elif left.damaged:
            self._fail(f"{when}, a damaged checkpoint has its final name: {left.damaged}")
        elif left.step and left.digest != self.right.digests[left.step]:
            self._fail(
                f"{when}, step {left.step} is not that of the undisturbed training, bit for bit"
            )
        return left.step

    def _check_end(self) -> None:
        """Compare what a training has reached over all its starts; the next begins anew."""
        self._check_left("at the end")
        self.found = self.found._replace(ended=self.found.ended + 1)
        if not self.found.failures:
            shutil.rmtree(self.training.folder)
            self.saved = 0

    def _fail(self, text: str) -> None:
        self.found.failures.append(f"{text} ({counted(self.found.kills, 'kill')} before)")
