"""The part of a ``torch.distributed`` process group that the worlds written here have in common.

    base    the many forms of a call become one ``Call``
    call    what one rank asks of a collective
    checks  refusals at the call
    moves   effects of collectives on tensors, if one process sees the calls of all ranks
    counts  calls and bytes

It does not depend on any world; ``sim`` and ``mpi`` build on it.
"""
