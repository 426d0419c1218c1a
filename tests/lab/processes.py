"""Finding processes that a test has started, however many parents ended in between."""

import psutil

MARK = "DISTLAB_OF_TEST"  # in the environment of the first, and so of all that it starts


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
