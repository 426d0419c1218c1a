"""The grading suite of Phase 4: training that survives failures, sends less and is watched.

The bodies, in tests/phase4, run on every rank with the learner's lesson as first argument and
return values. What is asserted about these, and about the bytes, messages, memory and times of the
run, is asserted in tests/phase4/judge_*.py, task by task; pytest collects it from here.
"""

import sys

# checkpoint
# anchor 4.1
# end 4.1
# anchor 4.2
# end 4.2
# anchor 4.3
from phase4.judge_sharded import *
# end 4.3
# anchor 4.4
# end 4.4

# fault_tolerance
# anchor 4.5
# end 4.5
# anchor 4.6
# end 4.6
# anchor 4.7
# end 4.7
# anchor 4.8
# end 4.8

# gradient_compression
# anchor 4.9
# end 4.9
# anchor 4.10
# end 4.10
# anchor 4.11
# end 4.11
# anchor 4.12
# end 4.12
# anchor 4.13
# end 4.13

# monitoring
# anchor 4.14
# end 4.14
# anchor 4.15
# end 4.15
# anchor 4.16
# end 4.16
# anchor 4.17
# end 4.17
# anchor 4.18
# end 4.18

from distlab.grade.plugin import main

if __name__ == "__main__":
    sys.exit(main(__file__))
