"""The grading suite of Phase 4: training that survives failures.

The bodies, in tests/phase4, run on every rank, take the learner's lesson as their first argument,
and return values. The judges, tests/phase4/judge_*.py, check these values and the bytes, messages,
memory and times of the run, task by task; pytest collects their tests from here.
"""

import sys

# checkpoint
from phase4.judge_checkpoint import *

# training_state
from phase4.judge_resumed import *

# fault_tolerance
from phase4.judge_fault_tolerance import *

# elastic
from phase4.judge_elastic import *

# gradient_compression
from phase4.judge_compression import *

# power_sgd
from phase4.judge_power_sgd import *

# comm_hook
from phase4.judge_comm_hook import *

# monitoring
from phase4.judge_monitoring import *

# exporters
from phase4.judge_exporters import *

# profiling
from phase4.judge_profiling import *

from distlab.grade.plugin import main

if __name__ == "__main__":
    sys.exit(main(__file__))
