"""The process from which ``forked_python`` forks programs; each fork then turns into a program."""

import atexit
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from types import CodeType
from typing import NoReturn

from forked_python import LENGTH, UNBUFFERED, Request, fork_from, prctl, read_exactly

MOST_DESCRIPTORS = 16
OUT_OF_THE_WAY = 200  # higher than any descriptor that a new process uses
FORK_SERVER = "distlab.launch.fork_server_main"  # it forks ranks, but starts no programs
PR_SET_PDEATHSIG = 1


def serve() -> NoReturn:
    """Fork a process for each request, and run the program in it, until the socket closes."""
    gc.disable()
    import torch._dynamo  # otherwise, a program's first optimizer spends a second importing it
    import torch.distributed  # noqa: F401

    gc.freeze()  # so that programs collect only their own garbage, and memory pages stay shared
    gc.enable()
    asking = socket.socket(fileno=int(sys.argv[1]))
    own_path = [place for place in sys.path if place not in ("", os.path.dirname(__file__))]
    while True:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is meant for the programs
        request, descriptors = _forked_for(asking)
        its_source = _source_of_its_own(request, descriptors)
        if its_source is None:
            _run(_become(request, descriptors, own_path))
        asking = its_source


def _source_of_its_own(request: Request, descriptors: list[int]) -> socket.socket | None:
    """Fork a source for the programs that this program may start.

    Return the new source's socket in that source, and None in the program.
    """
    if any(FORK_SERVER in word for word in request.arguments):
        return None
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY)
        ours.close()
        fork_from(socket.socket(fileno=number))
        return None
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _close(*descriptors)
    ours.close()
    return theirs


def _forked_for(asking: socket.socket) -> tuple[Request, list[int]]:
    """Fork for each request; return only in a fork, once the requesting process has adopted it."""
    while True:
        start, descriptors, _, _ = socket.recv_fds(asking, LENGTH.size, MOST_DESCRIPTORS)
        if not start:
            os._exit(0)
        request = Request(*json.loads(read_exactly(asking, LENGTH.unpack(start)[0])))
        child = os.fork()
        if not child:
            break
        os.waitpid(child, 0)
        _close(*descriptors)
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    asking.sendall(LENGTH.pack(os.getpid()))
    asking.close()
    return request, descriptors


def _become(request: Request, descriptors: list[int], own_path: list[str]) -> CodeType:
    """Set this process up like a newly started one; return the program's code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.has_own_session:
        os.setsid()
    _place(descriptors, request.places)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.variables)
    if UNBUFFERED in request.arguments[1:2]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        del request.arguments[1]
    first, *rest = request.arguments[1:]
    given = filter(None, request.variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*given, *own_path]
    if first == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        return compile(rest[0], "<string>", "exec")
    if first == "-m":
        sys.argv, sys.path[:0] = rest, [request.folder]
        start = f"run_module({rest[0]!r}, run_name='__main__', alter_sys=True)"
    else:
        sys.argv, sys.path[:0] = [first, *rest], [os.path.dirname(os.path.abspath(first))]
        start = f"run_path({first!r}, run_name='__main__')"
    return compile(f"__import__('runpy').{start}", "<string>", "exec")


def _run(program: CodeType) -> NoReturn:
    """Run a program and exit as Python does, but without torch's teardown, which takes 0.5 s."""
    status = 1
    try:
        status = _status_of(program)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(status)


def _status_of(program: CodeType) -> int:
    try:
        exec(program, vars(sys.modules["__main__"]))
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return (left.code or 0) & 0xFF
        print(left.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _place(descriptors: list[int], places: list[int]) -> None:
    """Move descriptors to ``places``, which other descriptors in the list may still occupy."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY) for number in descriptors]
    _close(*descriptors)
    for number, place in zip(high, places, strict=True):
        os.dup2(number, place)
    _close(*high)


def _close(*descriptors: int) -> None:
    for number in descriptors:
        os.close(number)
