"""Phase 4: training that continues when machines fail, links are slow and nobody is watching.

Terms used in all lessons of this phase:
    N ranks, numbered 0 … N-1;  checkpoint: a folder from which training can continue;
    durable: still there after a power failure;  committed: durable, complete and found by name.
"""
