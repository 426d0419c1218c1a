"""Imported once by the server that forks who loads images, before its first fork."""

import os
import signal
import sys
import warnings

from distlab.production.images import transforms


def _leave_group() -> None:
    """Leave the rank's group, to whose processes torchrun or a terminal sends what stops a rank.

    The rank has blocked these signals when it started the server: one that has come is dropped.
    SIGTERM, by which a rank ends who loads, comes through from now on; the others need not, as
    Slurm sends SIGUSR1 to processes in any group.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


# the server imports the rank's main module, too; runpy wonders when a child runs it once more
warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
transforms()
if "multiprocessing.forkserver" in sys.orig_argv[-1]:  # anybody else stays where he is
    _leave_group()
