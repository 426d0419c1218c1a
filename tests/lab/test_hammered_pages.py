"""The judge that lets a thread write all the time while pages are fetched (task 4.17)."""

import threading
from collections.abc import Mapping
from statistics import mean
from types import SimpleNamespace
from typing import Any

from phase4.pages import hammer

from solutions.phase4_production.exporters import PrometheusExporter

NAMES = [f"m{i}" for i in range(200)]
REQUESTS = 100


class Locking(PrometheusExporter):
    """An exporter whose requests wait for a write to end."""

    def __init__(self, waited: list[int], labels: Mapping[str, str]) -> None:
        self.lock, self.writes, self.shown, self.waited = threading.Lock(), 0, b"", waited
        super().__init__(labels)

    @property
    def page(self) -> bytes:  # type: ignore[override]
        """The last page, as soon as nobody writes."""
        before = self.writes
        with self.lock:
            self.waited.append(self.writes - before)
            return self.shown

    @page.setter
    def page(self, page: bytes) -> None:
        self.shown = page

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write while no request reads."""
        with self.lock:
            self.writes += 1
            super().write(metrics, step)


def test_requests_that_wait_for_a_lock_get_their_turn() -> None:
    waited: list[int] = []
    lesson: Any = SimpleNamespace(PrometheusExporter=lambda labels: Locking(waited, labels))
    found = hammer(lesson, NAMES, REQUESTS)
    assert found == {"statuses": [200] * REQUESTS, "mixed": []}
    assert mean(waited) < 2, "writes that began while a request waited for the lock"
