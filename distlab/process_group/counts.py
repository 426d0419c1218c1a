"""Collectives that a rank has called on a group, and their bytes."""

from collections import Counter

from distlab.process_group.call import Call


class Counts:
    """Calls and bytes by the name of the collective.

    Bytes are those of the tensors, as in the cost formulas: the whole buffer of an all_gather. The
    traffic depends on the algorithm. (``torch.distributed`` sends objects as two collectives, sizes
    first; both count.)
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __sub__(self, earlier: "Counts") -> "Counts":
        difference = Counts()
        difference.calls = self.calls - earlier.calls
        difference.num_bytes = self.num_bytes - earlier.num_bytes
        return difference

    def __copy__(self) -> "Counts":
        return self - Counts()

    def add(self, call: Call) -> None:
        """Count a call."""
        self.calls[call.name] += 1
        self.num_bytes[call.name] += call.num_bytes
