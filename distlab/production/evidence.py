"""What a rank that hangs writes about itself: its stacks, and its collectives.

FOLDER/rank<r>.txt     stacks of all of the rank's threads, by faulthandler
FOLDER/rank<r>.json    its collectives, from torch's flight recorder
"""

import faulthandler
import json
import pickle
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.launch.stacks import Frame
from distlab.util import files

FLIGHT_RECORDER = "2000"  # for TORCH_FR_BUFFER_SIZE: newest collectives that torch keeps
DUMP_S = 60.0  # longest time that the flight recorder may take before the process is ended
KEPT = 100  # newest finished collectives that are kept
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # in torch._C._distributed_c10d; gloo: the 2nd
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Byte": "uint8"}
DTYPES |= {"Long": "int64", "Int": "int32"}


def write(
    folder: Path,
    rank: int,
    num_ranks: int,
    *,
    has_sites: bool = True,
    since_ns: int = 0,
    **more: Any,
) -> None:
    """Write this rank's evidence into a folder.

    Args:
        folder: Folder, which may not exist yet.
        rank: Rank.
        num_ranks: Number of ranks.
        has_sites: True to write at which lines the collectives were called; torch needs seconds
            for the first one.
        since_ns: Time in ns since 1970; the recorder's older collectives are left out.
        more: Entries for the JSON file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = _write_stacks(folder / f"rank{rank}.txt", has_sites=has_sites)
    entries = [entry for entry in entries if int(entry["time_created_ns"]) >= since_ns]
    members = {str(pg.group_name): dist.get_process_group_ranks(pg) for pg in _groups()}
    content = {"ranks": num_ranks, "calls": of_interest(entries, members), **more}
    files.write_whole(folder / f"rank{rank}.json", json.dumps(content).encode())


def _write_stacks(path: Path, *, has_sites: bool) -> list[dict[str, Any]]:
    """Write all stacks, and return the recorded collectives.

    If a recorder holds Python's lock and hangs, faulthandler, which needs no lock, ends the
    process; otherwise the watch could not.
    """
    with path.open("w") as file:
        print(f"main {threading.main_thread().ident:#x}", file=file, flush=True)
        faulthandler.dump_traceback(file)
        faulthandler.dump_traceback_later(DUMP_S, exit=True, file=file)
        try:
            return recorded(has_sites=has_sites)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def recorded(*, has_sites: bool = True) -> list[dict[str, Any]]:
    """Return what torch's flight recorders hold, oldest first; some torch builds lack one."""
    entries: list[dict[str, Any]] = []
    for name in RECORDERS:
        if dump := getattr(torch._C._distributed_c10d, name, None):
            trace = dump(includeCollectives=True, includeStackTraces=has_sites, onlyActive=False)
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
