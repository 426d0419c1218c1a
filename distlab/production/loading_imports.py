"""Modules that the loader's fork server imports once, before its first fork."""

import os
import signal
import sys
import warnings

import distlab.production.datasets  # noqa: F401  # needed by every child
from distlab.data.folders import transforms


def _leave_group() -> None:
    """Leave the rank's process group, to which torchrun and terminals send signals.

    The rank started this server with those signals blocked. SIGTERM, with which a rank ends its
    loader, is unblocked here, and dropped if it is pending; the others stay blocked, because Slurm
    sends SIGUSR1 to processes in any group.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


# The server also imports the rank's main module; runpy warns when a child runs it again.
warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
transforms()
if "multiprocessing.forkserver" in sys.orig_argv[-1]:  # not in a process that merely imports this
    _leave_group()
