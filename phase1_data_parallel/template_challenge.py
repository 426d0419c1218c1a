"""The open task of phase 1: your fastest all-reduce, timed by ``distlab challenge``."""

from torch import Tensor

from phase1_data_parallel.given import Group
from phase1_data_parallel.template_collectives import all_reduce_recursive_doubling


def fast_all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place, as fast as you can for 16 MiB.

    ``distlab challenge`` times your function on clusters drawn at random, with 2 to 16 ranks on 1
    to 4 nodes, ranks numbered node by node, and one network card per node. The environment variable
    LOCAL_WORLD_SIZE holds the number of ranks on a node. Your score is the time of recursive
    doubling divided by the time of your function, as a geometric mean over the clusters, so you
    begin at about 1.0.

    Args:
        x: contiguous, same shape and dtype on all ranks, any number of elements; holds the sum on
            return, equal on all ranks.
        group: the ranks that take part; all by default.

    Use only point-to-point messages: dist.send, dist.recv, dist.isend, dist.irecv,
    dist.batch_isend_irecv, and your own functions built on them.
    """
    all_reduce_recursive_doubling(x, group)
