"""``distlab sim --sanitize``: find what ends without an error, and is wrong.

The watchers see what all ranks do, and compare it:

    calls        tensors given to collectives: aliases, another order, another parameter's gradient
    in_flight    tensors touched between a call and its wait()
    cuts         tensors that left autograd in a collective, and came back into the loss
    steps        optimizer steps, for those below
    recorder     what each rank does from one step to the next, for the next two
    ddp          models in DistributedDataParallel, for the next one
    replicas     parameters and gradients of ranks that train the same model, before each step
    shared       those that ranks with different models have in common
    mesh_copies  copies of the shards of DTensors, as in hybrid sharding
    visits       data that an all_to_all brings, from which the gradients of experts come
    draws        random numbers and samplers
    against      parameters and gradients beside those of a run on one rank (--against one)

A watcher reports to ``Findings``. Nothing here changes a number of the program, or virtual time.
"""
