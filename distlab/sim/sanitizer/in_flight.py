"""Tensors of operations in flight, which the program may not touch before ``wait()``.

    isend(x)   ──────── x may be read ─────────  wait()    x may be changed
    irecv(x)   ──── neither read nor changed ──  wait()    x has the values

A message or collective may read or fill its tensors at any time until then, so the program gets
what chance brings. An operation on tensors shows where it touches them; what changes them in
another way, as numpy does, shows in their bytes later.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import Pending, same_bytes
from distlab.sim.messages.work import row_of
from distlab.sim.reporting.report import WHO, place
from distlab.sim.reporting.sites import GIVEN, PROGRAM, SIMULATOR, Places, Site
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.parameters import Storage, storage_of

_READ, _CHANGED, _PASSED_ON = "read", "changed", "passed another operation"
_WITHOUT_VALUES = ("_like", ".new_", "detach_", "record_stream")  # in names of operations
_OF_CALLS = "c10d"  # in names of the operations by which torch makes calls


@dataclass(frozen=True)
class _Lent:
    """A part of a tensor's memory, from the call to which it was given until ``wait()``.

    Attributes:
        start: Number of its first element in the storage.
        kept: Copy of its values at the call.
        is_filled: True if the operation fills it.
    """

    pending: Pending
    storage: ref[Storage]
    start: int
    kept: Tensor
    is_filled: bool

    def overlaps(self, tensor: Tensor) -> bool:
        """Return whether a tensor has an element in this part."""
        storage = storage_of(tensor)
        if storage is None or storage is not self.storage() or not tensor.numel():
            return False
        size = self.kept.element_size()
        return _is_within(tensor, self.start * size, (self.start + self.kept.numel()) * size)

    def now(self) -> Tensor:
        """Return the values of this part, or those at the call if its memory is gone."""
        if (storage := self.storage()) is None:
            return self.kept
        now = self.kept.new_empty(0)
        now.set_(storage, self.start, self.kept.shape, (1,))
        return now

    def is_changed(self) -> bool:
        """Return whether the values are others than at the call."""
        return not same_bytes(self.now(), self.kept)


class InFlight:
    """Watches the tensors of operations in flight.

    Args:
        findings: The mistakes found so far.
        places: Finds the program's lines.
        open_handles: The operations for which no rank has waited yet.
        step_of: Function that returns the number of a rank's next optimizer step, or 0 if it has
            nothing to optimize.
    """

    def __init__(
        self,
        findings: Findings,
        places: Places,
        open_handles: Collection[Pending],
        step_of: Callable[[int], int],
    ) -> None:
        self._findings, self._places = findings, places
        self._open, self._step_of = open_handles, step_of
        self._lent: defaultdict[int, list[_Lent]] = defaultdict(list)  # by rank

    # Events

    def sent(self, message: Message) -> None:
        """Look at a message that the running rank posts."""
        tensors = [message.tensor]
        is_send = message.name == "send"
        self._posted(message, tensors if is_send else [], [] if is_send else tensors)

    def posted(self, attendance: Attendance) -> None:
        """Look at a collective call of the running rank."""
        self._posted(attendance, attendance.call.inputs, attendance.call.outputs)

    def met(self, members: Iterable[Attendance]) -> None:
        """Look at the tensors of a collective before they change."""
        for member in members:
            for lent in self._of(member):
                self._compare(lent)

    def waits(self, pending: Pending) -> None:
        """Look at the tensors of an operation for which its rank begins to wait."""
        if pending in self._open:
            for lent in self._of(pending):
                if pending.kind == "send" or not pending.is_done:  # later it may fill them itself
                    self._compare(lent)
        self._lent[pending.rank] = [x for x in self._lent[pending.rank] if x.pending is not pending]

    def has_lent(self, rank: int) -> bool:
        """Return whether a rank may have operations in flight."""
        return bool(self._lent[rank])

    def touched(self, rank: int, operation: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Look at an operation of the running rank on tensors."""
        if _has_no_values(str(operation)):
            return
        lent = self._still_lent(rank)
        for tensor, is_written in _touched(operation, args, kwargs):
            for part in (part for part in lent if part.overlaps(tensor)):
                is_wrong = part.is_filled or (is_written and part.is_changed())
                if is_wrong and not _is_by_simulator(self._places):
                    how = _CHANGED if is_written else _READ
                    self._report(part, how, self._places.call_site()[0])

    # Lent tensors

    def _posted(
        self, pending: Pending, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        lent = self._lent[pending.rank] = self._still_lent(pending.rank)
        for tensors, is_filled in ((inputs, False), (outputs, True)):
            for other in lent:
                if (is_filled or other.is_filled) and any(map(other.overlaps, tensors)):
                    self._report(other, _PASSED_ON, pending.site)
        if not pending.is_by_torch:
            filled = [_lent(pending, tensor, is_filled=True) for tensor in outputs]
            given = [_lent(pending, x, is_filled=False) for x in inputs if not _is_in(x, outputs)]
            lent += filter(None, [*filled, *given])

    def _still_lent(self, rank: int) -> list[_Lent]:
        return [x for x in self._lent[rank] if x.pending in self._open and x.storage() is not None]

    def _of(self, pending: Pending) -> list[_Lent]:
        return [lent for lent in self._lent[pending.rank] if lent.pending is pending]

    def _compare(self, lent: _Lent) -> None:
        if lent.is_changed():
            self._report(lent, _CHANGED, None)

    def _report(self, lent: _Lent, how: str, site: Site | None) -> None:
        row, step = row_of(lent.pending), self._step_of(lent.pending.rank)
        self._findings.add(
            ("in flight", lent.pending.site),
            f"{f'step {step}: ' if step else ''}{WHO} {how} the tensor of {row.text} "
            f"({row.where}) before its wait() had returned{f', in {place(site)}' if site else ''}: "
            f"{_values(lent)}. Until then it may be sent or filled at any time: call wait() first, "
            "or use a copy",
            lent.pending.rank,
        )


def _lent(pending: Pending, tensor: Tensor, *, is_filled: bool) -> _Lent | None:
    """Return a tensor's memory as lent to an operation; None if it has none that can be read."""
    storage = storage_of(tensor)
    is_lazy = tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    is_plain = not (is_lazy or is_traceable_wrapper_subclass(tensor))
    if storage is None or not is_plain or not _is_dense(tensor):
        return None
    plain = tensor.detach().as_strided((tensor.numel(),), (1,))
    kept = plain.view(torch.uint8).clone().view(plain.dtype)  # a bool's clone may have other bytes
    return _Lent(pending, ref(storage), int(tensor.storage_offset()), kept, is_filled)


def _is_in(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first place in memory to its last."""
    return 1 + sum((n - 1) * k for n, k in zip(tensor.shape, tensor.stride(), strict=True))


def _is_dense(tensor: Tensor) -> bool:
    return 0 < tensor.numel() == _extent(tensor)


def _is_within(tensor: Tensor, begin: int, end: int) -> bool:
    """Return whether an element of a tensor lies in a range of its storage's bytes."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    extent = _extent(tensor)
    if _is_dense(tensor) or first + extent * size <= begin or end <= first:
        return first < end and begin < first + extent * size
    numbers = torch.arange(extent, device="cpu").as_strided(tensor.shape, tensor.stride())
    places = first + numbers * size
    return bool(((places < end) & (places + size > begin)).any())


def _touched(operation: Any, args: Sequence[Any], kwargs: Any) -> list[tuple[Tensor, bool]]:
    """Return the tensors whose values an operation writes, with True, and those that it reads."""
    touched = []
    for number, argument in enumerate(operation._schema.arguments):
        given = args[number] if number < len(args) else (kwargs or {}).get(argument.name)
        alias = argument.alias_info
        if alias is None or alias.is_write:  # otherwise it makes a view
            tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            touched += [(tensor, alias is not None) for tensor in tensors]
    return sorted(touched, key=lambda pair: not pair[1])


def _has_no_values(operation: str) -> bool:
    return _OF_CALLS in operation or any(part in operation for part in _WITHOUT_VALUES)


def _is_by_simulator(places: Places) -> bool:
    """Return whether the simulator itself calls the operation that is being shown."""
    frame = sys._getframe()
    while frame.f_code.co_name != "__torch_dispatch__" and frame.f_back is not None:
        frame = frame.f_back
    kind = None
    while kind not in (PROGRAM, GIVEN, SIMULATOR) and frame.f_back is not None:
        frame = frame.f_back
        kind = places.kind(frame.f_code.co_filename)
    return kind == SIMULATOR


def _values(lent: _Lent) -> str:
    """Return an element that has changed, or the first one."""
    then, now = lent.kept, lent.now()
    size = then.element_size()
    is_other = torch.ne(then.view(torch.uint8), now.view(torch.uint8)).view(-1, size).any(dim=1)
    number = int(is_other.to(torch.uint8).argmax())
    was = f"was {then[number].item():g} at the call, and " if is_other[number] else ""
    return f"element {number} {was}is {now[number].item():g} now"
