"""Flight recorders: each rank's latest NCCL calls, written as torch writes them after a hang.

NCCL never notices that ranks disagree: they wait, until torch's watchdog ends them after the
timeout of the group, and each rank dumps its calls into a file. ``torchfrtrace FOLDER`` compares
these files and names the first calls that differ. Their format is version 2.10 of torch's
``FlightRecorder``.
"""

import pickle
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.process_group.call import Call, Form
from distlab.sim.engine.scheduler import NEVER
from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.sites import PROGRAM, Places
from distlab.util.text import counted, rank_names, verb

TIMEOUT_S = 600.0  # torch's default for NCCL
PREFIX = "nccl_trace_rank_"
VERSION = "2.10"
MAX_ENTRIES = 2_000  # as in torch
UNCHECKED = (
    "NCCL compares nothing: on GPUs, this hangs or gives wrong numbers, until torch's watchdog "
    "ends the ranks after {}. TORCH_DISTRIBUTED_DEBUG=DETAIL compares collectives."
)
HANGS = (
    "On GPUs, the ranks hang without a word until torch's watchdog ends them after {}. "
    "--watchdog FOLDER writes its flight recorder dumps."
)
_STATES = ("scheduled", "started", "completed")
_DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # NCCL gives one tensor as input and as output
_BARRIER = [Form(torch.Size([1]), torch.float32)]
_OF_ONE_TENSOR = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}


class GroupInfo(NamedTuple):
    """A process group, as dumps describe it.

    Attributes:
        limit_s: Time limit that the program has given; NEVER for the default.
    """

    name: str
    ranks: tuple[int, ...]
    limit_s: float

    @property
    def description(self) -> str:
        """The group's description in torch."""
        return "default_pg" if self.name == "0" else "undefined"

    @property
    def timeout_s(self) -> float:
        """Seconds after which the watchdog ends an operation."""
        return TIMEOUT_S if self.limit_s == NEVER else self.limit_s


class Recorded(NamedTuple):
    """A call, or a batch of messages, in the order of the launches.

    Attributes:
        fields: Part of the entry that never changes.
    """

    pendings: Sequence[Pending]
    fields: dict[str, Any]

    def entry(self) -> dict[str, Any]:
        """Return the entry of a dump: the fields and the state."""
        state = min(_STATES.index(_state(pending)) for pending in self.pendings)
        last = self.pendings[-1]
        return {
            **self.fields,
            "state": _STATES[state],
            "time_discovered_started_ns": _ns(last.posted_s) if state else None,
            "time_discovered_completed_ns": _ns(last.done_s) if state > 1 else None,
            "retired": state > 1,
        }

    @property
    def is_done(self) -> bool:
        """True if the watchdog has nothing to wait for."""
        return all(_state(pending) == "completed" for pending in self.pendings)

    @property
    def fires_s(self) -> float:
        """Virtual time at which the watchdog ends the call unless it is done."""
        return float(self.fields["time_created_ns"] / 1e9 + self.fields["timeout_ms"] / 1e3)


class FlightRecorder:
    """One rank's calls on NCCL.

    Args:
        places: Call sites of the program.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.calls: deque[Recorded] = deque(maxlen=MAX_ENTRIES)
        self._groups: dict[str, GroupInfo] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()  # by group and kind of number
        self._num_calls = 0

    def collective(self, group: GroupInfo, attendance: Attendance, call: Call) -> None:
        """Record a collective."""
        self._numbers[group.name, "collective"] += 1
        self._record(group, _name(call), [attendance], _forms(call), is_p2p=False)

    def message(self, group: GroupInfo, message: Message, *, is_numbered: bool) -> None:
        """Record a message; it gets a number unless it has that of the batch that it is in."""
        if is_numbered:
            self._numbers[group.name, "p2p"] += 1
        rank, peer = group.ranks.index(message.rank), group.ranks.index(message.peer)
        ends = f"{rank}->{peer}" if message.name == "send" else f"{rank}<-{peer}"
        forms = [Form(*message.form)]
        self._record(group, f"{message.name} {ends}", [message], (forms, forms), is_p2p=True)

    def end_batch(self, group: GroupInfo, messages: Sequence[Message]) -> None:
        """Record the end of a batch, which is one operation of the GPU."""
        self._record(group, "coalesced", messages, ([], []), is_p2p=True)

    def _record(
        self,
        group: GroupInfo,
        name: str,
        pendings: Sequence[Pending],
        forms: tuple[Sequence[Form], Sequence[Form]],
        *,
        is_p2p: bool,
    ) -> None:
        self._groups[group.name] = group
        inputs, outputs = forms
        fields = {
            "record_id": self._num_calls,
            "pg_id": list(self._groups).index(group.name),
            "process_group": (group.name, group.description),
            "collective_seq_id": self._numbers[group.name, "collective"],
            "p2p_seq_id": self._numbers[group.name, "p2p"],
            "op_id": self._num_calls + 1,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": _ns(pendings[0].posted_s),
            **_described("input", inputs),
            **_described("output", outputs),
            "timeout_ms": round(group.timeout_s * 1e3),
            "is_p2p": is_p2p,
            "frames": list(_frames(sys._getframe(1), self._places)),
        }
        self._num_calls += 1
        self.calls.append(Recorded(pendings, fields))

    def dump(self) -> dict[str, Any]:
        """Return what torch writes into a rank's file."""
        return {
            "version": VERSION,
            "pg_config": {
                name: {"name": name, "desc": group.description, "ranks": str([*group.ranks])}
                for name, group in self._groups.items()
            },
            "entries": [recorded.entry() for recorded in self.calls],
        }


def minutes(timeout_s: float) -> str:
    """Return a timeout as text, such as ``10 minutes`` or ``90 s``."""
    whole, rest = divmod(timeout_s, 60)
    return f"{timeout_s:g} s" if rest or not whole else counted(int(whole), "minute")


def write_dumps(
    recorders: Mapping[int, FlightRecorder], gone: Sequence[int], folder: Path
) -> list[str]:
    """Write the dumps of all ranks that still run, and return lines on how to read them.

    Args:
        recorders: Recorder of each rank.
        gone: Ranks that have ended, so that they dump nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{PREFIX}*"):
        old.unlink()
    running = {rank: recorder for rank, recorder in recorders.items() if rank not in gone}
    for rank, recorder in running.items():
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(recorder.dump()))
    late = [call for recorder in running.values() for call in recorder.calls if not call.is_done]
    first = min(late, key=lambda call: call.fires_s, default=None)
    return [*_fired(first), *_reading(sorted(gone), folder)]


def _fired(first: Recorded | None) -> list[str]:
    if first is None:
        return []
    fields = first.fields
    number = "p2p_seq_id" if fields["is_p2p"] else "collective_seq_id"
    return [
        f"NCCL compares nothing, so the ranks waited for {fields['timeout_ms'] / 1e3:g} s, until "
        f"the watchdog fired at {first.fires_s:.6f} s, because of {fields['profiling_name']} "
        f"({number} {fields[number]})."
    ]


def _reading(gone: Sequence[int], folder: Path) -> list[str]:
    partly = "--allow-incomplete-ranks " * bool(gone)
    lines = [f"Flight recorder dumps are in {folder}: torchfrtrace {partly}-p {PREFIX} {folder}"]
    if gone:
        lines.append(
            f"{rank_names(gone).capitalize()} had ended before, and {verb(gone, 'have', 'has')} no "
            "dump, as on GPUs."
        )
    return lines


def _state(pending: Pending) -> str:
    """Return how far the GPU has got with an operation."""
    if pending.is_done and pending.error is None:
        return "completed"
    if isinstance(pending, Attendance):
        is_there = pending.error is not None or pending.rank in pending.meeting.attendances
    else:
        is_there = not (isinstance(pending, Message) and pending.is_held)
    return "started" if is_there else "scheduled"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _name(call: Call) -> str:
    """Return torch's name of a collective on NCCL."""
    if call.name == "barrier":
        return "all_reduce_barrier"
    if call.is_coalesced:
        return "allreduce_coalesced"
    parts = call.outputs if call.name == "all_gather" else call.inputs
    is_one = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    return _OF_ONE_TENSOR.get(call.name, call.name) if is_one else call.name


def _forms(call: Call) -> tuple[Sequence[Form], Sequence[Form]]:
    """Return the shapes that NCCL sees as inputs and outputs: lists of tensors are one tensor."""
    if call.name == "barrier":
        return _BARRIER, _BARRIER
    if call.name in _IN_PLACE:
        forms = [_form(tensor) for tensor in call.inputs or call.outputs]
        return forms, forms
    return _flat(call.inputs), _flat(call.outputs)


def _form(tensor: Tensor) -> Form:
    return Form(tensor.shape, tensor.dtype)


def _flat(tensors: Sequence[Tensor]) -> list[Form]:
    if len(tensors) < 2:
        return [_form(tensor) for tensor in tensors]
    first = tensors[0]
    if all(tensor.shape == first.shape for tensor in tensors):
        return [Form(torch.Size([len(tensors), *first.shape]), first.dtype)]
    return [Form(torch.Size([sum(tensor.numel() for tensor in tensors)]), first.dtype)]


def _described(end: str, forms: Sequence[Form]) -> dict[str, Any]:
    return {
        f"{end}_sizes": [list(form.shape) for form in forms],
        f"{end}_dtypes": [_DTYPES.get(form.dtype, str(form.dtype)) for form in forms],
    }


def _frames(frame: FrameType | None, places: Places) -> Iterator[dict[str, Any]]:
    """Yield the program's lines, innermost first."""
    while frame is not None:
        code = frame.f_code
        if places.kind(code.co_filename) == PROGRAM:
            yield {"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno}
        frame = frame.f_back
