"""The world ``mpi``: ranks that mpirun started, a process group over mpi4py.

    world       join the world, share results
    ending      one rank says why the job ends
    runtime     a rank's knowledge of the others, and its waiting
    group       the process group
    work        one operation under way
    exchanges   the MPI calls of each collective
    memory      tensors in the forms that MPI takes

Only ``launch`` uses it; mpi4py is imported when a world is joined, since that starts MPI.
"""
