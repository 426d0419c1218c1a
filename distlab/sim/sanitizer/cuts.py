"""Tensors that left autograd in a collective, and came back into the loss.

features  (requires grad)  ──all_gather──►  gathered  (no grad)  ──┐
    └──────────────────────────────────────────────── logits ◄─────┘    no gradient flows back
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from distlab.sim.messages.meetings import Attendance
from distlab.sim.reporting.report import WHO, place
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.parameters import Storage, storage_of

CUTTING = ("all_gather", "all_to_all", "reduce_scatter")
JOINING = ("aten.cat.default", "aten.stack.default")


class Cut:
    """A collective whose results have no gradient, though an input required one."""

    def __init__(self, attendance: Attendance) -> None:
        self.rank, self.name, self.site = attendance.rank, attendance.name, attendance.site
        storages = (storage_of(tensor) for tensor in attendance.call.inputs)
        self.inputs = {ref(storage) for storage in storages if storage is not None}


class Cuts:
    """Follows results of collectives through the operations of all ranks."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        # For each storage, the collective that its values come from.
        self._cut_of: MutableMapping[Storage, Cut] = WeakIdKeyDictionary()

    def posted(self, attendance: Attendance) -> None:
        """Look at a call of the running rank."""
        call = attendance.call
        is_cut = any(tensor.requires_grad for tensor in call.inputs) and torch.is_grad_enabled()
        if call.name in CUTTING and is_cut:
            self._mark(call.outputs, Cut(attendance))

    def _mark(self, tensors: Iterable[Tensor], cut: Cut) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and not tensor.requires_grad and tensor.is_floating_point():
                self._cut_of[storage] = cut

    def operation(self, name: str, args: Sequence[object], out: object) -> None:
        """Look at an operation of the running rank."""
        if not self._cut_of:
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        cuts = {cut for t in tensors if (s := storage_of(t)) and (cut := self._cut_of.get(s))}
        for cut in cuts:
            joined = [t for t in tensors if t.requires_grad]
            if not joined or not torch.is_grad_enabled():
                self._mark((t for t in tree_leaves(out) if isinstance(t, Tensor)), cut)
            elif name in JOINING and any(
                s and ref(s) in cut.inputs for s in map(storage_of, joined)
            ):
                self._forget(cut)  # the rank has put its own tensor, with its gradient, in place
            else:
                self._report(cut)

    def _forget(self, cut: Cut) -> None:
        for storage in [s for s, other in self._cut_of.items() if other is cut]:
            del self._cut_of[storage]

    def _report(self, cut: Cut) -> None:
        self._findings.add(
            ("cut", cut.site),
            f"{cut.name} was given a tensor that requires a gradient on {WHO}, and its results, "
            "which have none, are used in the loss: no gradient flows back to the ranks that sent "
            "them. Call it in the forward of an autograd.Function whose backward sums the results' "
            f"gradients over the ranks and sends them back; {place(cut.site)}",
            cut.rank,
        )
        self._forget(cut)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a thread's operations to the watchers that follow tensors.

    Args:
        touched: Function that gets each operation with its arguments.
        watchers: Those that get its name, its arguments and its results.
    """

    def __init__(self, touched: Callable[[Any, Any, Any], None], *watchers: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._touched, self._watchers = touched, watchers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, and show it."""
        out = func(*args, **(kwargs or {}))
        self._touched(func, args, kwargs)
        for watcher in self._watchers:
            watcher.operation(str(func), args, out)
        return out
