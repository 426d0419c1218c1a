"""Collectives among the ranks of one host through shared memory, without messages.

region        memory that all ranks have mapped
meeting       how ranks wait for each other there, and what happens if one does not arrive
staging       the area through which tensors outside that memory pass
collectives   SharedMemory: all-reduce, reduce-scatter and all-gather
"""

from distlab.shared_memory.collectives import SharedMemory

__all__ = ["SharedMemory"]
