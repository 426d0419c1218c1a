"""The process that starts the ranks: torch is loaded once here, and every rank is a fork of it.

    parent ──PING────────────────────▶ fork server
           ◀──(READY)────────────────
    parent ──START + 2 descriptors──▶ fork server ──fork──▶ rank (own session)
           ◀──────(STARTED, pid)────              ◀─exit──
           ◀──(EXITED, pid, status)─

A forked rank starts in about 20 ms; one that imports torch itself needs a second of processor
time. The server has no threads and never touches a GPU, so forking it is safe. On macOS, where
frameworks that torch loads do not survive a fork, the server starts fresh interpreters instead.

When the parent goes away, for whatever reason, the server finishes any import in progress, kills
all its descendants, removes the folder of its worlds and ends. While the server is still loading
torch, it has neither descendants nor a folder, so the kernel simply kills it.
"""

import contextlib
import importlib
import itertools
import os
import select
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable

import psutil

from distlab.launch.protocol import DUMP_FROM_C_SIGNAL, DUMP_SIGNAL
from distlab.util import processes

START, PRELOAD, PING = b"s", b"p", b"?"
RECORD = struct.Struct("=cqq")  # kind, pid, wait status
READY, STARTED, EXITED = b"R", b"S", b"X"
MANY_USES = 20  # worlds after which collapsing the heap into huge pages pays for itself
METHOD = "spawn" if sys.platform == "darwin" else "fork"
# Not `python -m`: that would run this module a second time, with a warning.
COMMAND = "from distlab.launch.fork_server_main import main; main()"
RANK_COMMAND = "from distlab.launch.worker import main_of_fresh_process; main_of_fresh_process()"

Start = Callable[[socket.socket, int, int, int], int]
_uses = itertools.count(1)


def main() -> None:
    """Serve the parent until it ends; read a socket descriptor, a folder and a method from argv."""
    descriptor, folder, method = sys.argv[1:]
    parent = socket.socket(fileno=int(descriptor))
    start = _fork if method == "fork" else _spawn
    for number in (DUMP_SIGNAL, DUMP_FROM_C_SIGNAL):
        signal.signal(number, signal.SIG_IGN)  # ranks also ignore them until they install handlers
    if method == "fork":
        processes.die_with_parent()  # during the import, nothing watches the socket
        _preload(["torch", "torch.distributed", "numpy", "distlab.launch.worker"])
        processes.outlive_parent()  # from now on, the server must clean up before it ends
    processes.adopt_orphans()
    exits = _wake_on_exit()
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while _serve_one(parent, exits, start):
                pass
    finally:
        _kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


def _serve_one(parent: socket.socket, exits: int, start: Start) -> bool:
    """Wait for a request or an exit and handle it; return False when the parent has gone."""
    watched: list[socket.socket | int] = [parent, exits]
    readable, _, _ = select.select(watched, [], [])
    if exits in readable:
        os.read(exits, 4096)
        for pid, status in _reap():
            parent.sendall(RECORD.pack(EXITED, pid, status))
    if parent not in readable:
        return True
    request, descriptors, _, _ = socket.recv_fds(parent, 1, 2)
    if request == START:
        pid = start(parent, exits, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        parent.sendall(RECORD.pack(STARTED, pid, 0))
    elif request == PRELOAD:
        _preload(_read_line(parent).split())
    elif request == PING:
        parent.sendall(RECORD.pack(READY, 0, 0))
        if next(_uses) == MANY_USES:  # no rank is running, so no pages are shared
            processes.collapse_memory()
    return bool(request)


def _read_line(parent: socket.socket) -> str:
    """Read one line, and not a byte more, because a START with descriptors may follow."""
    line = b""
    while not line.endswith(b"\n"):
        line += parent.recv(1) or b"\n"
    return line.decode()


def _preload(names: list[str]) -> None:
    """Import modules that ranks will need; leave it to ranks to report import errors."""
    processes.pause_collection()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    processes.resume_collection()


def _fork(parent: socket.socket, exits: int, control: int, output: int) -> int:
    """Fork a rank that communicates over ``control`` and prints to ``output``; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        parent.close()
        os.close(exits)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        from distlab.launch import worker  # already loaded; this only binds the name in the rank

        worker.main(socket.socket(fileno=control))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _spawn(_parent: socket.socket, _exits: int, control: int, output: int) -> int:
    """Start a rank in a fresh interpreter; return its pid."""
    os.set_inheritable(control, True)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", RANK_COMMAND, str(control)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)],
    )


def _wake_on_exit() -> int:
    """Return a descriptor that becomes readable when a child exits."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def _reap() -> list[tuple[int, int]]:
    exits = []
    with contextlib.suppress(ChildProcessError):
        while (exit_ := os.waitpid(-1, os.WNOHANG))[0]:
            exits.append(exit_)
    return exits


def _kill_descendants() -> None:
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _reap()
