"""One real rank of a notebook, in a process of ipyparallel: what runs there.

A cell may wait in C code for a rank that has failed, where no exception reaches it. A thread hears
of SIGINT even then, and closes the connections of the rank's groups, so that the wait fails:

    main thread     dist.barrier() · · · · · · · · · Connection closed by peer
    this thread                     SIGINT ─ closes ─┘
"""

import contextlib
import os
import signal
import socket
import threading
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.notebook.cells import compiled
from distlab.notebook.output import RankOutput, shown_in

_names: dict[str, Any] = {}
_own: set[tuple[Any, ...]] = set()  # connections that are not those of the groups


def begin(rank: int, num_ranks: int, backend: str, rendezvous: str) -> None:
    """Join the other ranks, as under torchrun; called again after connections were closed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        _listen()
        _own.update(_connections())
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    gpu = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    given = {"rank": rank, "world_size": num_ranks, "device": gpu, "torch": torch, "dist": dist}
    _names.update(__name__="__main__", **given)


def run(source: str, name: str) -> tuple[RankOutput, str]:
    """Run a cell; return what it has shown, and its error or ""."""
    output = RankOutput()
    try:
        with shown_in(output):
            output.value = _portable(compiled(source, name).run(_names))
    except BaseException as error:  # KeyboardInterrupt, too
        return output, _report(error, name)
    return output, ""


def push(values: dict[str, Any]) -> None:
    """Set variables."""
    _names.update(values)


def pull(name: str) -> Any:
    """Return a variable."""
    return _portable(_names[name])


def _listen() -> None:
    """Close the groups' connections at each SIGINT, whatever the main thread does."""
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)

    def close() -> None:
        while read.recv(1):
            if dist.is_initialized() and dist.get_backend() == "nccl":
                dist.distributed_c10d._abort_process_group()
            for number, *_ in _connections() - _own:
                with contextlib.suppress(OSError):  # the other side was faster
                    with socket.socket(fileno=os.dup(number)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=close, name="distlab", daemon=True).start()
    _names["_kept"] = read, write


def _connections() -> set[tuple[Any, ...]]:
    """Return the process's connections as (number, own address, other address)."""
    tcp = psutil.Process().net_connections(kind="tcp")
    return {(c.fd, c.laddr, c.raddr) for c in tcp if c.status == "ESTABLISHED"}


def _portable(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _report(error: BaseException, name: str) -> str:
    """Return a traceback of the cell's lines, and of what they called outside this package."""
    import traceback

    shown = traceback.TracebackException.from_exception(error)
    ours = os.path.dirname(__file__)
    shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(ours)]
    return "".join(shown.format()).rstrip()
