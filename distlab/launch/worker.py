"""One rank: join the world, call the function, report, wait to be released.

Runs in a fresh process, forked from the fork server or started by it. Its standard output and
error are the parent's pipe; everything it has to say besides goes through ``protocol``.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import random
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from distlab.launch import world
from distlab.launch.protocol import (
    RELEASE,
    REPORTED,
    STARTED,
    Outcome,
    Report,
    Spec,
    WorldFolder,
)

DUMP_SIGNAL = signal.SIGUSR1  # the parent asks for the stacks of all threads
# A rank that has returned stays connected for so long while others still work. Then it closes, and
# whoever waits for it learns at once that it has gone.
LINGER_S = 1.0
# Imports that take about a second and that many functions need.
SLOW_IMPORTS = (
    *("torch._dynamo", "distlab.launch.simulated"),
    *("sklearn.datasets", "pytest", "hypothesis", "matplotlib.pyplot"),
)

_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|Timed out waiting|"
    r"ncclRemoteError|NCCL communicator was aborted|failed to (recv|send), got 0 bytes",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


def main(control: socket.socket) -> None:
    """Be the rank that the other end of ``control`` names. Does not return."""
    _die_with_parent()
    folder_name, rank_text = control.recv(4096).decode().split("\n")
    folder, rank = WorldFolder(Path(folder_name)), int(rank_text)
    stacks = folder.stacks(rank).open("w")
    _keep_stacks(stacks)
    spec = folder.read_spec()
    _take_environment(spec, rank)
    report = _run(spec, rank, folder, control)
    folder.write_report(rank, report)
    _flush_output()
    control.sendall(REPORTED)
    if report.outcome is Outcome.OK:
        _linger(control)
    os._exit(0)  # not sys.exit: a thread that fn left running must not keep the rank alive


def _run(spec: Spec, rank: int, folder: WorldFolder, control: socket.socket) -> Report:
    """Call the function inside the world and turn whatever happens into a report."""
    device = torch.device(spec.devices[rank])
    try:
        if spec.simulation:
            from distlab.launch import simulated  # with all of the simulator: only where needed

            control.sendall(STARTED)
            simulation = simulated.simulate_in_child(spec, spec.simulation, folder)
            return _report(Outcome.OK, result=simulation)
        with world.on_device(device):
            world.init_process_group(
                spec.backend,
                device,
                init_method=f"file://{folder.rendezvous}",
                rank=rank,
                world_size=spec.world_size,
                timeout_s=spec.collective_timeout_s,
            )
            control.sendall(STARTED)
            fn, args = pickle.loads(spec.payload)
            result = _pickled(fn(*args))
        return _report(Outcome.OK, result=result)
    except SystemExit as error:
        return _report(Outcome.EXIT, error, headline=f"sys.exit({error.code!r})")
    except BaseException as error:
        return _report(_outcome_of(error), error)


def _pickled(result: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be sent to the parent ({error}): "
            "return tensors, numbers, strings or containers of them"
        ) from None


def _report(
    outcome: Outcome, error: BaseException | None = None, *, result: bytes = b"", headline: str = ""
) -> Report:
    return Report(
        outcome=outcome,
        at_ns=time.monotonic_ns(),
        result=result,
        headline=headline or (_headline(error) if error else ""),
        traceback=_traceback(error) if error else "",
        modules=tuple(name for name in SLOW_IMPORTS if name in sys.modules),
    )


def _outcome_of(error: BaseException) -> Outcome:
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(text):
        return Outcome.OUT_OF_MEMORY
    if isinstance(error, RuntimeError | ConnectionError) and _LOST_PEER.search(text):
        return Outcome.SECONDARY
    if getattr(error, "is_secondary", False):  # raised because another rank had failed
        return Outcome.SECONDARY
    return Outcome.EXCEPTION


def _headline(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _traceback(error: BaseException) -> str:
    if type(error).__module__.startswith("distlab."):
        return ""  # made for people: the message says it all
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)) if frames else ""


def _linger(control: socket.socket) -> None:
    """Stay connected until all ranks are done, or for a moment."""
    with contextlib.suppress(OSError):
        readable, _, _ = select.select([control], [], [], LINGER_S)
        if readable and control.recv(1) == RELEASE and dist.is_initialized():
            dist.destroy_process_group()


def _take_environment(spec: Spec, rank: int) -> None:
    """Take over the launching process's environment, folder and import path; one thread per rank.

    The generators of numpy and ``random`` were copied by the fork; new seeds make them independent
    of each other, as they are in processes that were started one by one.
    """
    os.environ.clear()
    os.environ.update(spec.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(spec.world_size))
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    world.use_loopback()
    os.chdir(spec.working_dir)
    sys.path[:] = spec.sys_path
    torch.set_num_threads(1)
    random.seed()
    np.random.seed()
    _reopen_output()


def _reopen_output() -> None:
    """Write a line at a time, so that lines of several ranks do not mix and a crash loses none."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="replace")
        setattr(sys, name, stream)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # fn may have replaced or closed it
            stream.flush()


def _keep_stacks(stacks: IO[str]) -> None:
    """Let faulthandler write all stacks, from C, when the parent asks and when the rank crashes."""
    print(f"main {threading.main_thread().ident:#x}", file=stacks, flush=True)
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True, chain=False)


def _die_with_parent() -> None:
    """Ask Linux to kill this rank when the fork server ends. Elsewhere the fork server does it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        libc: Any = ctypes.CDLL(None)
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    os.setsid()
    main(socket.socket(fileno=int(sys.argv[1])))
