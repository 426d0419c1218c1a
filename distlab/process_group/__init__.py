"""The parts of a ``torch.distributed`` process group that the course's own worlds share.

    base    conversion of the many forms of a call into one ``Call``
    call    one rank's part in a collective, and counts of calls and bytes
    checks  argument checks at the time of the call
    joining handles of DistributedDataParallel's join()
    moves   effects of collectives on tensors, where one process sees all ranks' calls

They do not depend on any world; ``sim`` and ``mpi`` build on them.
"""
