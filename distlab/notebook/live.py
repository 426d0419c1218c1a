"""Show what a cell prints while it runs, if it takes longer than a moment."""

import contextvars
import threading
from collections.abc import Callable

from IPython.display import DisplayHandle, display

from distlab.notebook.page import RUNNING, Page
from distlab.notebook.world import Ran

PERIOD_S = 0.5  # between two updates of the page


def show_while(run: Callable[[], Ran], page: Callable[[Ran], Page], *, is_live: bool) -> Ran:
    """Run a cell, and show its page.

    Args:
        run: Function that runs the cell.
        page: Function that returns what is shown at the time of its call.
        is_live: True to show the page also while the cell runs, for shells that can replace it.
    """
    updates = _Updates(page)
    if is_live:
        updates.start()
    try:
        ran = run()
    finally:
        updates.stop()
    updates.show(page(ran))
    return ran


class _Updates:
    """Shows a page anew from time to time, in a thread of its own."""

    def __init__(self, page: Callable[[Ran], Page]) -> None:
        self._page, self._has_ended = page, threading.Event()
        self._handle: DisplayHandle | None = None
        self._last = ""
        # The context says to which cell of the notebook the output belongs.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def show(self, page: Page) -> None:
        if page.text() == self._last:
            return
        self._last = page.text()
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)

    def _run(self) -> None:
        while not self._has_ended.wait(PERIOD_S):
            self.show(self._page(RUNNING))
