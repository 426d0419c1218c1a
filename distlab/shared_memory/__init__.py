"""Collectives among the ranks of one host through memory that they share, without a message.

region        memory that all ranks have mapped
meeting       how they wait for each other there, and what happens when one doesn't come
staging       where tensors that are not there pass through it
collectives   SharedMemory: all-reduce, reduce-scatter and all-gather
"""

from distlab.shared_memory.collectives import SharedMemory

__all__ = ["SharedMemory"]
