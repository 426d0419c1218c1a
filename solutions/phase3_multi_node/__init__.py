"""Phase 3: collectives for clusters, and training on many nodes.

Terms used in all lessons of this phase:
    N ranks (world_size), numbered 0 … N-1 inside their ``group``;
    chunk: one of N nearly equal parts of a tensor;  segment: a part of a chunk, sent on its own;
    node: the ranks that share a host;  bucket: several gradients that travel in one message;
    shard: the part of a tensor that one rank holds;  α: seconds per message;  β: seconds per byte.
"""
