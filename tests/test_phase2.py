"""The grading suite of Phase 2: less memory on one device, and models split over several.

The bodies, in tests/phase2, run on every rank, take the learner's lesson as their first argument,
and return values. The judges, tests/phase2/judge_*.py, check these values and the bytes, messages,
memory and times of the run, task by task; pytest collects their tests from here.
"""

import sys

# gradient_accumulation
from phase2.judge_accumulation import *

# mixed_precision
from phase2.judge_mixed_precision import *

# activation_checkpointing
from phase2.judge_checkpoint import *

# model_parallel
from phase2.judge_stages import *

# pipeline_parallel
from phase2.judge_pipeline import *

# tensor_parallel
from phase2.judge_regions import *
from phase2.judge_split import *

from distlab.grade.plugin import main

if __name__ == "__main__":
    sys.exit(main(__file__))
