"""The grading suite of Phase 2: less memory on one device, models split over several.

The bodies, in tests/phase2, run on every rank with the learner's lesson as first argument and
return values. What is asserted about these, and about the bytes, messages, memory and times of the
run, is asserted in tests/phase2/judge_*.py, task by task; pytest collects it from here.
"""

import sys

# gradient_accumulation

# mixed_precision

# activation_checkpointing

# model_parallel
from phase2.judge_partition import *
from phase2.judge_stage_messages import *
from phase2.judge_stage_runner import *

# pipeline_parallel
from phase2.judge_schedules import *
from phase2.judge_pipeline import *
from phase2.judge_pipeline_costs import *

# tensor_parallel

from distlab.grade.plugin import main

if __name__ == "__main__":
    sys.exit(main(__file__))
