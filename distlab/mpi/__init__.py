"""The world ``mpi``: ranks that mpirun started, a process group over mpi4py.

    world       join the world, share results
    ending      one rank says why the job ends
    runtime     what a rank knows of the others; how it waits
    group       the process group
    work        one operation under way
    exchanges   how each collective is put to MPI
    memory      tensors as MPI sees them

Only ``launch`` uses it; mpi4py is imported when a world is joined, since that starts MPI.
"""
