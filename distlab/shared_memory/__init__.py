"""Collectives among the ranks of one host through shared memory, without messages.

region        memory that all ranks have mapped
meeting       a barrier in that memory, which raises an error if a rank does not arrive
staging       the area through which tensors outside that memory pass
collectives   SharedMemory: all-reduce, reduce-scatter and all-gather
"""

from distlab.shared_memory.collectives import SharedMemory

__all__ = ["SharedMemory"]
