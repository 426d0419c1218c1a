"""The grading suite of Phase 2: less memory on one device, models split over several.

The bodies, in tests/phase2, run on every rank with the learner's lesson as first argument and
return values. What is asserted about these, and about the bytes, messages, memory and times of the
run, is asserted in tests/phase2/judge_*.py, task by task; pytest collects it from here.
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
