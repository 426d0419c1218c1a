"""Files from the internet: their folder, and one rank per machine that fetches them first."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from distlab.data.splits import DataError


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of the data files: ``root``, else ``$DISTLAB_DATA``, else ``./data``."""
    return Path(root or os.environ.get("DISTLAB_DATA") or "data").expanduser().absolute()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the body on the first rank of each machine, and on the others after its success.

        rank 0   body ──┐ all_gather(ok)
        rank 1   wait ──┴──────────────── body
        rank 2   wait ──┴──────────────── body

    The first rank has LOCAL_RANK 0 if a launcher has set that, else it is rank 0. Without an
    initialised `torch.distributed` world the body simply runs.

    Raises: DataError: The body failed on a first rank; raised on all other ranks, which would
        otherwise wait forever. The message names that rank and its error.
    Cost: one `all_gather_object` over the default group, which all ranks must call.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    if first:
        try:
            yield
        except BaseException as error:
            _exchange(f"{type(error).__name__}: {error}")  # releases the others, which wait for it
            raise
    failures = _exchange(None)
    if failures:
        consequence = DataError(
            "another rank was to fetch the data first and failed.\n" + failures[0]
        )
        consequence.is_secondary = True  # the launcher then blames that rank, not this one
        raise consequence
    if not first:
        yield


def _exchange(failure: str | None) -> list[str]:
    """Wait until all ranks are here; return the failures that they report, each naming its rank."""
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, failure)
    return [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]
