"""The part of a ``torch.distributed`` process group that the worlds written here have in common.

    base    the many forms of a call become one ``Call``
    call    one rank's part in a collective, and counts of calls and bytes
    checks  refusals at the call
    moves   effects of collectives on tensors, if one process sees the calls of all ranks

It does not depend on any world; ``sim`` and ``mpi`` build on it.
"""
