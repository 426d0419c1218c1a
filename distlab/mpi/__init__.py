"""The world ``mpi``: ranks started by mpirun, and a process group on top of mpi4py.

    world       join the world, share results
    ending      end the job if a rank fails, after one rank has reported why
    runtime     a rank's view of the others, and how it waits for them
    group       the process group
    work        one operation in progress
    exchanges   the MPI calls of each collective
    memory      tensors in the forms that MPI accepts

Only ``launch`` uses it. mpi4py is not imported before a world is joined, because its import starts
MPI.
"""
