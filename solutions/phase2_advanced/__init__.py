"""Phase 2: less memory on one device, and models that are split over several.

Terms used in all lessons of this phase:
    N ranks (world_size), numbered 0 … N-1 inside their ``group``;
    micro-batch: a part of a rank's batch that is processed by itself;
    stage: consecutive layers on one rank;  p stages, m micro-batches;
    shard: the part of a tensor that one rank holds;  α: seconds per message;  β: seconds per byte.
"""
