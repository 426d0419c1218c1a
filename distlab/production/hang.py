"""The evidence of a hang: where each rank is, and which collectives it has under way.

    run_dir/hang/<start>/rank<r>.txt     stacks of all of the rank's threads, by faulthandler
    run_dir/hang/<start>/rank<r>.json    its collectives, from torch's flight recorder
    run_dir/hang/<start>/reason.json     why the run was ended, and what became of silent processes

Each rank writes its own files once it has been silent for long, without asking another rank: the
one that hosts the store may be the one that hangs. A rank that is stopped writes nothing.
"""

import faulthandler
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distlab.launch.stacks import Frame
from distlab.production.saving import last_line
from distlab.util import files

SHARE = 0.5  # of heartbeat_timeout_s, after which a silent rank writes its evidence
STDERR = 2  # descriptor
DUMP_S = 60.0  # longest time that the flight recorder may take before the process is ended
KEPT = 100  # newest finished collectives that are kept
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # in torch._C._distributed_c10d; gloo: the 2nd
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Byte": "uint8"}
DTYPES |= {"Long": "int64", "Int": "int32"}


class Evidence:
    """This rank's evidence; all methods but the first are called by the watch's thread."""

    def __init__(self, run_dir: Path) -> None:
        """Agree with the other ranks on a folder; called on all ranks."""
        mine = (time.strftime("%Y-%m-%dT%H.%M.%S"), socket.gethostname(), os.getpid())
        self.processes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self.processes, mine)
        self.rank, self.folder = dist.get_rank(), run_dir / "hang" / self.processes[0][0]
        self.files = [self.folder / f"rank{self.rank}.{kind}" for kind in ("txt", "json")]
        self.is_there = False

    def update(self, silent_s: float, timeout_s: float, step: int) -> None:
        """Write the evidence if this rank has been silent for long; remove it if no longer.

        If this is not called again for long, as another thread holds Python's lock, faulthandler,
        which needs no lock, prints all stacks on standard error.
        """
        if len(self.processes) == 1:
            return
        faulthandler.dump_traceback_later(SHARE * timeout_s, file=STDERR)
        if silent_s > SHARE * timeout_s:
            self.write(step)
        elif self.is_there:
            self.is_there = False
            with suppress(OSError):  # the folder may hold another rank's evidence
                for file in self.files:
                    file.unlink(missing_ok=True)
                self.folder.rmdir()

    def close(self) -> None:
        """Expect no further ``update``."""
        faulthandler.cancel_dump_traceback_later()

    def write(self, step: int) -> None:
        """Write the evidence, once."""
        if self.is_there:
            return
        self.is_there = True
        with self._warned():
            self.folder.mkdir(parents=True, exist_ok=True)
            entries = self._write_stacks()
            members = {str(pg.group_name): dist.get_process_group_ranks(pg) for pg in _groups()}
            calls = of_interest(entries, members)
            found = {"ranks": len(self.processes), "step": step, "calls": calls}
            found["said"] = last_line[0]
            files.write_whole(self.files[1], json.dumps(found).encode())

    def conclude(self, reason: str, step: int) -> None:
        """Write why this rank ends the run, and the state of the processes on this host.

        Only the first rank to do so is right: later ones might find that this one has vanished.
        """
        self.write(step)
        path = self.folder / "reason.json"
        with self._warned():
            states = {rank: _state(*process[1:]) for rank, process in enumerate(self.processes)}
            found = {"reason": reason, "ranks": len(states), "states": states}
            if not path.exists():
                files.write_whole(path, json.dumps(found).encode())

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Turn any error into a warning, because the watch must go on."""
        try:
            yield
        except Exception as error:
            text = f"warning: rank {self.rank}: the evidence of the hang is incomplete: {error}"
            print(text, file=sys.stderr, flush=True)

    def _write_stacks(self) -> list[dict[str, Any]]:
        """Write all stacks, and return the recorded collectives.

        If a recorder holds Python's lock and hangs, faulthandler, which needs no lock, ends the
        process; otherwise the watch could not.
        """
        with self.files[0].open("w") as file:
            print(f"main {threading.main_thread().ident:#x}", file=file, flush=True)
            faulthandler.dump_traceback(file)
            faulthandler.dump_traceback_later(DUMP_S, exit=True, file=file)
            try:
                return recorded()
            finally:
                faulthandler.cancel_dump_traceback_later()


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _state(host: str, pid: int) -> str:
    """Return "stopped" or "vanished" for a process of this host that is; otherwise ""."""
    if host != socket.gethostname():
        return ""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "vanished"
    except psutil.AccessDenied:
        return ""
    known = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_ZOMBIE: "vanished"}
    return known.get(status, "")


def recorded() -> list[dict[str, Any]]:
    """Return what torch's flight recorders hold, oldest first; some torch builds lack one."""
    entries: list[dict[str, Any]] = []
    for name in RECORDERS:
        if dump := getattr(torch._C._distributed_c10d, name, None):
            trace = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
            entries += pickle.loads(trace).get("entries", [])
    return sorted(entries, key=lambda entry: int(entry["time_created_ns"]))


def of_interest(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the collectives under way, and the newest of all others and of each group."""
    known = [e for e in entries if not e["is_p2p"] and e["process_group"][0] in groups]
    calls = [_call(entry, groups) for entry in known]
    newest = {call["group"]: k for k, call in enumerate(calls)}.values()
    recent = range(max(len(calls) - KEPT, 0), len(calls))
    kept = {*newest, *recent}
    return [call for k, call in enumerate(calls) if k in kept or not call["is_done"]]


def _call(entry: Mapping[str, Any], groups: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    backend, _, name = entry["profiling_name"].rpartition(":")
    is_retired = entry["retired"] and backend != "nccl"  # NCCL's may have timed out instead
    group = entry["process_group"][0]
    return {
        "group": group,
        "ranks": list(groups[group]),
        "number": entry["collective_seq_id"],
        "name": name,
        "form": _form(entry["input_sizes"], entry["input_dtypes"]),
        "is_done": is_retired or entry["state"] == "completed",
        "site": _site(entry.get("frames", [])),
    }


def _form(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    """Return the form of the first tensor, such as ``(4,) float32``."""
    return f"{tuple(sizes[0])} {DTYPES.get(dtypes[0], dtypes[0].lower())}" if sizes else ""


def _site(frames: Sequence[Mapping[str, Any]]) -> tuple[str, int, str] | None:
    """Return the innermost line of the program; None if a thread of torch called."""
    known = (Frame(frame["filename"], frame["line"], frame["name"]) for frame in frames)
    return next(((f.file, f.line, f.function) for f in known if f.is_users), None)
