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
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from distlab.production import evidence
from distlab.production.saving import last_line
from distlab.util import files

SHARE = 0.5  # of heartbeat_timeout_s, after which a silent rank writes its evidence
STDERR = 2  # descriptor


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
            more: dict[str, Any] = {"step": step, "said": last_line[0]}
            evidence.write(self.folder, self.rank, len(self.processes), **more)

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
