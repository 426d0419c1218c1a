"""Phase 1, data parallelism: every rank holds the whole model and a shard of the data.

Terms used in all lessons of this phase:
    N ranks (world_size), numbered 0 … N-1 inside their ``group``;
    shard: the samples that one rank sees;  batch: the samples it processes in one step;
    global batch: all N batches of one step;
    α: seconds per message;  β: seconds per byte;  n: size of the reduced tensor in bytes.
"""
