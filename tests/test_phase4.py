"""The grading suite of Phase 4: training that survives failures.

The bodies, in tests/phase4, run on every rank with the learner's lesson as first argument and
return values. What is asserted about these, and about the bytes, messages, memory and times of the
run, is asserted in tests/phase4/judge_*.py, task by task; pytest collects it from here.
"""

import sys

# checkpoint
from phase4.judge_checkpoint import *

# anchor 4.2
# end 4.2

from phase4.judge_sharded import *

# anchor 4.4
# end 4.4

# fault_tolerance
# anchor 4.5
# end 4.5

# anchor 4.6
# end 4.6

from phase4.judge_stops import *
from phase4.judge_intervals import *

# anchor 4.9 to 4.13
# end 4.9 to 4.13

# anchor 4.14 to 4.18
# end 4.14 to 4.18


from distlab.grade.plugin import main

if __name__ == "__main__":
    sys.exit(main(__file__))
