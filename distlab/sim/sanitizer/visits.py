"""Data that an ``all_to_all`` has brought to a rank, until another one takes it back.

tokens  ──all_to_all──►  visitors  ──►  expert of another rank  ──all_to_all──►  back at home

The gradients of an expert are computed from visitors, so they may differ from those of experts that
began alike. In sequence parallelism, there is no parameter between the two calls. If visitors stay,
as where a loss is computed from them, nothing tells a rank's own parameters from shared ones.
"""

from collections.abc import MutableMapping, Sequence

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from distlab.process_group.call import Call
from distlab.sim.sanitizer.parameters import Storage, storage_of

CALL = "all_to_all"  # also a part of the names of torch's operations that make the call
COPY = "aten.copy_.default"  # by which the simulator fills the outputs of a call, too


class Visits:
    """Follows visitors through the operations of all ranks."""

    def __init__(self) -> None:
        # False for what has come back.
        self._visitors: MutableMapping[Storage, bool] = WeakIdKeyDictionary()
        self._have_stayed = False

    def posted(self, call: Call) -> None:
        """Look at a call of the running rank."""
        if call.name == CALL:
            are_back = self._are_among(call.inputs)
            for storage in filter(None, map(storage_of, call.outputs)):
                self._visitors[storage] = not are_back

    def operation(self, name: str, args: Sequence[object], out: object) -> None:
        """Look at an operation of the running rank."""
        if not self._visitors or CALL in name or not self._are_among(args):
            return
        for storage in filter(None, map(storage_of, _tensors(out))):
            if name != COPY or storage not in self._visitors:
                self._visitors[storage] = True

    def goes_back(self, roots: object) -> None:
        """Look at the tensors at which a backward pass begins."""
        self._have_stayed |= self._are_among(roots)

    def have_made(self, gradient: Tensor | None) -> bool:
        """Return whether a gradient may have been computed from visitors."""
        return gradient is not None and (self._have_stayed or self._are_among(gradient))

    def _are_among(self, tensors: object) -> bool:
        storages = filter(None, map(storage_of, _tensors(tensors)))
        return any(self._visitors.get(storage) for storage in storages)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
