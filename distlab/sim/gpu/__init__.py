"""GPUs as NCCL programs see them: a host that runs ahead, streams, and communicators.

streams         when a stream gets to its work, and which work it comes after
accesses        which bytes an operation uses, on which stream
placement       which GPU holds a tensor
syncs           operations for which the host waits
hazards         memory used before it is ready, or after it may be used for something else
strays          tensors on the GPU of another rank
device          one rank's host and GPUs, in which its operations run
communicators   NCCL's communicators: who shares one, and who creates it
orders          the order in which ranks come to collectives and new communicators
flight_recorder dumps of calls after a hang, as torch writes them
group           a process group whose calls run on streams
shards          random numbers of sharded tensors
composites      operations whose C++ code makes tensors beside those of a GPU
tensors, cuda   what torch shows of it to the program
"""
