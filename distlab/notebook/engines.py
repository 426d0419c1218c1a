"""Real ranks of a notebook: processes that ipyparallel starts.

If a rank fails, the others may wait for it in C code. After a while they are interrupted, so that
every cell ends; then all ranks join anew, and keep their variables.
"""

import logging
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from distlab.notebook import engine
from distlab.notebook.cells import Cell
from distlab.notebook.world import Ran
from distlab.util.text import counted, rank_names

GRACE_S = 2.0  # real seconds for which the other ranks go on after one has failed
TICK_S = 0.02
ENGINES = {"gloo": "local", "nccl": "local", "mpi": "mpi"}
BACKENDS = {"mpi": "gloo"}


class Engines:
    """Ranks that are processes of this machine.

    Args:
        num_ranks: Number of ranks.
        backend: "gloo", "nccl" or "mpi".

    Raises:
        ImportError: ipyparallel is not installed.
    """

    def __init__(self, num_ranks: int, backend: str) -> None:
        import ipyparallel

        self.num_ranks, self._backend = num_ranks, BACKENDS.get(backend, backend)
        self.title = f"{counted(num_ranks, 'process', 'processes')} with {backend}"
        self._cluster = ipyparallel.Cluster(
            n=num_ranks,
            engines=ENGINES[backend],
            log_level=logging.ERROR,
        )
        self._client = self._cluster.start_and_connect_sync(activate=False)
        self._folder = tempfile.TemporaryDirectory(prefix="distlab-")
        self._num_joins = 0
        self._join()

    def _join(self) -> None:
        self._num_joins += 1
        rendezvous = str(Path(self._folder.name, str(self._num_joins)))
        begun = [
            self._client[rank].apply_async(
                engine.begin, rank, self.num_ranks, self._backend, rendezvous
            )
            for rank in range(self.num_ranks)
        ]
        for result in begun:
            result.get()

    def run(self, cell: Cell, ranks: Collection[int]) -> Ran:
        """Run a cell on ranks."""
        start_s = time.perf_counter()
        under_way = {
            rank: self._client[rank].apply_async(engine.run, cell.source, cell.name)
            for rank in ranks
        }
        is_interrupted = self._await(under_way)
        results = {rank: result.get() for rank, result in under_way.items()}
        outputs = {rank: output for rank, (output, _) in results.items()}
        errors = {rank: error for rank, (_, error) in results.items() if error}
        if errors:
            self._join()
        took = f"{time.perf_counter() - start_s:.2f} s"
        return Ran(outputs, _report(errors, is_interrupted=is_interrupted), [], took)

    def _await(self, under_way: Mapping[int, Any]) -> bool:
        """Wait until a cell has ended everywhere; return whether ranks had to be interrupted."""
        failed_at_s, is_interrupted = None, False
        while not all(result.ready() for result in under_way.values()):
            try:
                time.sleep(TICK_S)
            except KeyboardInterrupt:
                failed_at_s = -GRACE_S
            ended = [result for result in under_way.values() if result.ready()]
            if failed_at_s is None and any(result.get()[1] for result in ended):
                failed_at_s = time.monotonic()
            if failed_at_s is not None and time.monotonic() - failed_at_s > GRACE_S:
                import signal

                self._cluster.signal_engines_sync(signal.SIGINT)
                failed_at_s, is_interrupted = time.monotonic(), True
        return is_interrupted

    def push(self, values: Mapping[str, Any], ranks: Collection[int]) -> None:
        """Give copies of values to ranks, as variables."""
        self._client[[*ranks]].apply_sync(engine.push, dict(values))

    def pull(self, name: str, ranks: Collection[int]) -> dict[int, Any]:
        """Return copies of a variable's values, by rank."""
        return dict(zip(ranks, self._client[[*ranks]].apply_sync(engine.pull, name), strict=True))

    def names(self, rank: int) -> Mapping[str, Any]:
        """Return nothing: the variables are in another process."""
        return {}

    def state(self) -> list[str]:
        """Return lines on what the ranks hold and what is unfinished."""
        return []

    def close(self) -> None:
        """End the ranks."""
        self._client.close()
        self._cluster.stop_cluster_sync()
        self._folder.cleanup()


def _report(errors: Mapping[int, str], *, is_interrupted: bool) -> str:
    """Return the errors of the ranks, the first one in full."""
    if not errors:
        return ""
    causes = {rank: error for rank, error in errors.items() if "closed by peer" not in error}
    first = min(causes or errors)
    others = [rank for rank in errors if rank != first]
    text = f"rank {first} failed:\n{errors[first]}"
    if others and is_interrupted:
        text += f"\n{rank_names(others).capitalize()} waited, and were interrupted."
    return text
