"""Runs torchrun, and exits with the trainer's exit code, which torchrun does not pass on.

    python entrypoint.py torchrun … -m solutions.phase4_production.imagenet_trainer … --run_dir DIR

When a worker fails, torchrun exits with 1, whatever the worker's code was; but Kubernetes and Slurm
have to tell 75 (stopped, run it again) from 78 (restarting does not help). So the trainer writes
its exit code into ``DIR/exit_code``, and this process exits with that code if the file has changed
during the run.

This process also handles signals for torchrun. As process 1 of a container, torchrun would ignore
SIGTERM until it has started its workers, that is, while it waits for the other nodes. SIGUSR1,
which Slurm sends to every process of a task, would kill it. So torchrun ignores SIGUSR1, runs in
its own session, which signals from a terminal don't reach, and gets a single SIGTERM from here,
which it forwards to its workers.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

# By default, torchrun shares the address of rank 0 only in the first round of a rendezvous, so a
# node that replaces another waits for it in vain.
NEW_ADDRESS_IN_EACH_ROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED = 75
USAGE = 2


def main(command: Sequence[str]) -> int:
    """Run the command, and return the exit code of the trainer that it started.

    Args:
        command: command that contains ``--run_dir DIR``, for the trainer.

    Returns:
        0 if the command exited with 0; STOPPED if SIGTERM killed torchrun itself, which then had
        not started any worker. Otherwise, the code that the trainer has written or, if there is
        none, the command's own code, or 128 plus the number of the signal that killed it.
    """
    if "--run_dir" not in command[:-1]:
        print("usage: entrypoint.py COMMAND … --run_dir DIR", file=sys.stderr)
        return USAGE
    code_file = Path(command[command.index("--run_dir") + 1]) / "exit_code"
    code_file.parent.mkdir(parents=True, exist_ok=True)  # the trainer may fail before making it
    before = _version(code_file)
    status = _run(command)
    if status == -signal.SIGTERM:
        return STOPPED
    written = _written(code_file) if status and _version(code_file) != before else 0
    return written or (status if status >= 0 else 128 - status)


def _run(command: Sequence[str]) -> int:
    """Run the command, and send it SIGTERM when the first signal arrives.

    Returns:
        The command's exit code, or minus the number of the signal that killed it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # none arrives before the handlers are set
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # torchrun inherits this
    environment = {**os.environ, **NEW_ADDRESS_IN_EACH_ROUND}
    pid = os.posix_spawnp(command[0], [*command], environment, setsid=True, setsigmask=())

    def stop(_number: int, _frame: FrameType | None) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    for number in SIGNALS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while True:
        ended, status = os.wait()  # process 1 also reaps orphans of killed workers
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _version(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is written, without comparing any clocks."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _written(path: Path) -> int:
    """Return the code in the file, or 0 if there is none."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
