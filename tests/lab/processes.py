"""Finding processes that a test has started, however many parents ended in between."""

import gc
from multiprocessing import forkserver, resource_tracker

import forked_python
import psutil

MARK = "DISTLAB_OF_TEST"  # in the environment of the first, and so of all that it starts


def children(*, recursive: bool = True) -> list[psutil.Process]:
    """Return what this process has started, but for the source that programs are forked from."""
    found = psutil.Process().children(recursive=recursive)
    return [process for process in found if process.pid != forked_python.source_pid]


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has ``mark``; ended ones are left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # it ended, or is another user's
    return found


def end_fork_server() -> None:
    """End the processes that multiprocessing keeps once it has started others by its fork server.

    It has no public way, and otherwise ends them when Python exits: other tests would see them.
    Semaphores that are garbage go first, for the tracker that ends removes what is left of them.
    """
    gc.collect()
    for server in (forkserver._forkserver, resource_tracker._resource_tracker):
        server._stop()  # type: ignore[attr-defined]
