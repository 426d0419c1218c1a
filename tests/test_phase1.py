"""The grading suite of Phase 1: data-parallel training.

The bodies, in tests/phase1, run on every rank, take the learner's lesson as their first argument,
and return values. The judges, tests/phase1/judge_*.py, check these values and the bytes, messages
and times of the run, task by task; pytest collects their tests from here.
"""

import sys

from phase1.judge_data import *
from phase1.judge_collectives import *
from phase1.judge_measurement import *
from phase1.judge_step import *
from phase1.judge_trainer import *
from phase1.judge_gpu import *

from distlab.grade.plugin import main

if __name__ == "__main__":
    sys.exit(main(__file__))
