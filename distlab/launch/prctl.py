"""What only Linux can promise about processes: none is left when its parent has gone.

Elsewhere these calls do nothing, and the fork server's own clean-up has to suffice.
"""

import ctypes
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of whatever descendants leave behind, so that it is found and ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None)
        libc.prctl(option, value)
