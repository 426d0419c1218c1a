"""The open tasks, which time a learner's function against built-in ones on random clusters.

standings    the simulated runs, the table of times, and the overall speedup
large        the open task of Phase 1: one all-reduce of 16 MiB
anywhere     the open task of Phase 3: an all-reduce for clusters and sizes not known in advance
"""

import random

from distlab.course import Challenge
from distlab.grade.submission import Submission
from distlab.races import anywhere, large
from distlab.races.standings import ChallengeError, Standings, figure

__all__ = ["RACES", "ChallengeError", "Standings", "figure", "race"]

RACES = {"fast_all_reduce": large.race, "prepare_all_reduce": anywhere.race}


def race(
    handed_in: Submission, challenge: Challenge, seed: int, num_clusters: int
) -> tuple[Standings, ...]:
    """Check the function, then time it and its rivals on ``num_clusters`` random clusters.

    Raises:
        ChallengeError: A result is wrong, a rank failed or hung, or a collective was called.
    """
    return RACES[challenge.function](handed_in, challenge, random.Random(seed), num_clusters)
