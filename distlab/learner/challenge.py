"""The open task at the end of a phase: a learner's function against built-in ones, by a figure."""

import random

from distlab.course import Challenge
from distlab.grade import submission
from distlab.learner import race_16mib, race_anywhere
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.racing import Standings

RACES = {"fast_all_reduce": race_16mib.race, "prepare_all_reduce": race_anywhere.race}


def run(
    folder: CourseFolder, challenge: Challenge, impl: str, seed: int, num_clusters: int
) -> tuple[Standings, ...]:
    """Check the function, then time it and its rivals on ``num_clusters`` drawn clusters.

    Raises:
        LearnerError: there is no phase in the folder that ``impl`` names.
        ChallengeError: a result is wrong, a rank failed or hung, or a collective was called.
    """
    try:
        handed_in = submission.find(impl, folder.root)
    except ValueError as error:
        raise LearnerError(str(error)) from None
    return RACES[challenge.function](handed_in, challenge, random.Random(seed), num_clusters)
