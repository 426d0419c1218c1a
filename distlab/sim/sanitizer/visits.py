"""Data that an ``all_to_all`` has brought to a rank, until another one takes it back.

tokens  ──all_to_all──►  visitors  ──►  expert of another rank  ──all_to_all──►  back at home

The gradients of an expert are computed from visitors, so they may differ from those of experts that
began alike. In sequence parallelism, there is no parameter between the two calls. If visitors stay,
as where a loss is computed from them, nothing tells a rank's own parameters from shared ones.

Tokens may be brought by an ``all_gather``, too, and taken back by a ``reduce_scatter`` or
``all_reduce``. But ranks also gather what they all train on, so not every watcher counts those.
"""

from collections.abc import MutableMapping, Sequence

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from distlab.process_group.call import Call
from distlab.sim.sanitizer.parameters import Storage, storage_of

CALL = "all_to_all"  # also a part of the names of torch's operations that make the call
GATHER = "all_gather"
SUMS = ("all_reduce", "reduce_scatter")
OF_C10D = "c10d"  # a part of the names of torch's operations that make calls
COPY = "aten.copy_.default"  # by which the simulator fills the outputs of a call, too


class Followed:
    """Tensors that certain calls have made, and what is computed from them on any rank."""

    def __init__(self) -> None:
        # False for what is no longer followed.
        self._marks: MutableMapping[Storage, bool] = WeakIdKeyDictionary()

    def mark(self, call: Call, *, is_followed: bool = True) -> None:
        """Follow the results of a call of the running rank, or stop that."""
        for storage in filter(None, map(storage_of, call.outputs or call.inputs)):
            self._marks[storage] = is_followed

    def operation(self, name: str, args: Sequence[object], out: object) -> None:
        """Look at an operation of the running rank."""
        is_call = CALL in name or OF_C10D in name
        if not self._marks or is_call or not self._are_among(args):
            return
        results = (tensor for tensor in _tensors(out) if not isinstance(tensor, nn.Parameter))
        for storage in filter(None, map(storage_of, results)):
            if name != COPY or storage not in self._marks:
                self._marks[storage] = True

    def have_made(self, gradient: Tensor | None) -> bool:
        """Return whether a gradient may have been computed from what is followed."""
        return gradient is not None and self._are_among(gradient)

    def _are_among(self, tensors: object) -> bool:
        storages = filter(None, map(storage_of, _tensors(tensors)))
        return any(self._marks.get(storage) for storage in storages)


class Visits(Followed):
    """Follows visitors.

    Args:
        are_gathered: True if an all_gather brings visitors, too, and a sum takes them back.
    """

    def __init__(self, *, are_gathered: bool = False) -> None:
        super().__init__()
        self._are_gathered = are_gathered
        self._have_stayed = False

    def posted(self, call: Call) -> None:
        """Look at a call of the running rank."""
        if call.name == CALL:
            self.mark(call, is_followed=not self._are_among(call.inputs))
        elif self._are_gathered and call.name in (GATHER, *SUMS):
            self.mark(call, is_followed=call.name == GATHER)

    def goes_back(self, roots: object) -> None:
        """Look at the tensors at which a backward pass begins."""
        self._have_stayed |= self._are_among(roots)

    def have_made(self, gradient: Tensor | None) -> bool:
        """Return whether a gradient may have been computed from visitors."""
        return super().have_made(gradient) or (gradient is not None and self._have_stayed)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
