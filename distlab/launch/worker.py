"""One rank: join the world, call the function, report, wait to be released.

Runs in a fresh process, forked from the fork server or started by it. Its standard output and
error are the parent's pipe; everything else it sends goes through ``protocol``.
"""

import contextlib
import faulthandler
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist

from distlab.launch import protocol, world
from distlab.launch.protocol import Outcome, Report, Spec, WorldFolder
from distlab.launch.rank import encoded, report_of_error, report_of_result
from distlab.util import processes

# A rank that has returned stays connected this long while others still work. Then it disconnects,
# and any rank that waits for it notices immediately.
LINGER_S = 1.0


def main_of_fresh_process() -> None:
    """Run as a rank that was not forked and has imported torch itself."""
    os.setsid()
    main(socket.socket(fileno=int(sys.argv[1])))


def main(control: socket.socket) -> None:
    """Run as the rank that the parent names over ``control``. Does not return."""
    processes.die_with_parent()
    folder_name, rank_text = control.recv(4096).decode().split("\n")
    folder, rank = WorldFolder(Path(folder_name)), int(rank_text)
    stacks = folder.stacks(rank).open("w")
    _keep_stacks(stacks)
    spec = folder.read_spec()
    _take_environment(spec, rank)
    report = _run(spec, rank, folder, control)
    _send(report, rank, folder, control)
    if report.outcome is Outcome.OK:
        _linger(control)
    os._exit(0)  # not sys.exit: a thread that fn left running must not keep the rank alive


def _run(spec: Spec, rank: int, folder: WorldFolder, control: socket.socket) -> Report:
    """Call the function inside the world and turn whatever happens into a report."""
    device = torch.device(spec.devices[rank])
    try:
        if spec.simulation:
            from distlab.launch import simulation  # imports the whole simulator, so not at the top

            _start_together(control)
            return report_of_result(simulation.simulate_in_child(spec, spec.simulation, folder))
        with world.on_device(device):
            world.init_process_group(
                *(spec.backend, device, spec.collective_timeout_s),
                init_method=f"file://{folder.rendezvous}",
                rank=rank,
                world_size=spec.world_size,
            )
            _start_together(control)
            fn, args = spec.function_and_arguments()
            result = encoded(fn(*args), plain_results=spec.plain_results)
            return report_of_result(result)
    except BaseException as error:
        return report_of_error(error, __file__, spec.given)


def _start_together(control: socket.socket) -> None:
    """Wait until all ranks are up, so that none returns and leaves before a late one has joined."""
    control.sendall(protocol.STARTED)
    if control.recv(1) != protocol.GO:
        os._exit(0)  # the parent has ended


def _send(report: Report, rank: int, folder: WorldFolder, control: socket.socket) -> None:
    try:
        folder.write_report(rank, report)
        _flush_output()
        control.sendall(protocol.REPORTED)
    except OSError:  # the disk is full, or fn has closed a descriptor of ours
        with contextlib.suppress(Exception):
            traceback.print_exc()
        os._exit(protocol.CANNOT_REPORT)


def _linger(control: socket.socket) -> None:
    """Stay connected until all ranks are done, but at most for ``LINGER_S``."""
    with contextlib.suppress(OSError):
        readable, _, _ = select.select([control], [], [], LINGER_S)
        if readable and control.recv(1) == protocol.RELEASE and dist.is_initialized():
            dist.destroy_process_group()


def _take_environment(spec: Spec, rank: int) -> None:
    """Adopt the launching process's environment, folder and import path; use one thread.

    The fork copied the random generators of torch, numpy and ``random``; new seeds make the ranks'
    generators independent, as in processes that were started separately.
    """
    os.environ.clear()
    os.environ.update(spec.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(spec.world_size))
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    world.use_loopback()
    os.chdir(spec.working_dir)
    sys.path[:] = spec.sys_path
    sys.argv[:] = spec.argv
    torch.set_num_threads(1)
    random.seed()
    np.random.seed()
    torch.seed()
    _reopen_output()


def _reopen_output() -> None:
    """Buffer output by line, so that lines of different ranks do not mix and a crash loses none."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="replace")
        setattr(sys, name, stream)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # fn may have replaced or closed the stream
            stream.flush()


def _keep_stacks(stacks: IO[str]) -> None:
    """Install handlers that write all stacks on either of the parent's signals and on a crash."""
    print(f"main {threading.main_thread().ident:#x}", file=stacks, flush=True)
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(protocol.DUMP_FROM_C_SIGNAL, file=stacks, all_threads=True, chain=False)
    signal.signal(
        protocol.DUMP_SIGNAL, lambda *_: faulthandler.dump_traceback(stacks, all_threads=True)
    )
