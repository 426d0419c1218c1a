"""Phase 1, data parallelism: every rank holds the whole model and a shard of the data.

Words used in all lessons of this phase:
    N ranks (world_size), numbered 0 … N-1 inside their ``group``;
    shard: what one rank sees of the data set;  batch: what one rank computes in a step;
    global batch: the N batches of a step together;
    α: seconds per message;  β: seconds per byte;  n: bytes of the tensor that is reduced.
"""
