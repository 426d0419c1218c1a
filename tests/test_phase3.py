"""The grading suite of Phase 3: collectives for clusters, and training on many nodes.

The bodies, in tests/phase3, run on every rank, take the learner's lesson as their first argument,
and return values. The judges, tests/phase3/judge_*.py, check these values and the bytes, messages,
memory and times of the run, task by task; pytest collects their tests from here.
"""

import sys

# ring_allreduce
from phase3.judge_ring import *

# tree_allreduce
from phase3.judge_tree import *

# topology
from phase3.judge_topology import *
from phase3.judge_node_groups import *
from phase3.judge_hierarchical import *
from phase3.judge_ring_order import *
from phase3.judge_algorithms import *

# ddp
from phase3.judge_buckets import *
from phase3.judge_ddp import *

# parameter_server
from phase3.judge_shards import *
from phase3.judge_servers import *

# zero
from phase3.judge_zero import *
from phase3.judge_fully_sharded import *

# auto_sharding
from phase3.judge_planner import *
from phase3.judge_plans import *

from distlab.grade.plugin import main

if __name__ == "__main__":
    sys.exit(main(__file__))
