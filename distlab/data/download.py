"""MNIST and CIFAR-10: fetched and checked by torchvision, then held in memory.

One rank of each machine fetches the files before the others read them.
"""

import http.client
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.data.splits import DataError, ImageTensors, Splits
from distlab.torchvision_repair import import_torchvision

_WHITE = 255
_SILENCE_S = 30.0  # time limit for a silent connection; a firewall may just drop its packets
# Errors that torchvision raises for a missing, incomplete or damaged file; one reader uses assert.
_FAILURES = (OSError, http.client.HTTPException, EOFError, RuntimeError, ValueError, AssertionError)


def load_mnist(root: Path) -> Splits:
    """Return the 70,000 handwritten digits of MNIST, 28 x 28, downloaded to ``root`` if missing.

    Raises: DataError: The files are damaged, or neither present nor downloadable.
    Cost: 66 MB on disk, 55 MB in memory; in a world, one collective (see `rank_zero_first`).
    """
    names = "{train,t10k}-images-idx3-ubyte.gz and {train,t10k}-labels-idx1-ubyte.gz"
    files = f"{names} into {root / 'MNIST' / 'raw'}"
    train, test = _fetch("MNIST", root, files)
    halves = [(half.data.unsqueeze(1), half.targets) for half in (train, test)]
    return _splits("mnist", halves, mean=(0.1307,), std=(0.3081,))


def load_cifar10(root: Path) -> Splits:
    """Return the 60,000 photographs of CIFAR-10, 32 x 32, downloaded to ``root`` if missing.

    Raises: DataError: The files are damaged, or neither present nor downloadable.
    Cost: 356 MB on disk, 184 MB in memory; in a world, one collective (see `rank_zero_first`).
    """
    train, test = _fetch("CIFAR10", root, f"cifar-10-python.tar.gz into {root}")
    halves = [
        (torch.from_numpy(half.data).movedim(-1, 1).contiguous(), torch.tensor(half.targets))
        for half in (train, test)
    ]
    return _splits("cifar10", halves, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def _splits(
    name: str,
    halves: list[tuple[torch.Tensor, torch.Tensor]],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Splits:
    train, test = (
        ImageTensors(pixels, labels, white=_WHITE, mean=mean, std=std) for pixels, labels in halves
    )
    channels, height, width = train.pixels.shape[1:]
    return Splits(name, train, test, 10, (channels, height, width), mean, std)


def _fetch(dataset: str, root: Path, files: str) -> list[Any]:
    """Return torchvision's training and test sets; errors say to copy ``files`` by hand."""
    source = getattr(import_torchvision().datasets, dataset)
    with rank_zero_first(), _give_up_after(_SILENCE_S):
        try:
            return [source(root, train=train, download=True) for train in (True, False)]
        except _FAILURES as error:
            raise DataError(_advice(dataset, root, files, error)) from None


def _advice(dataset: str, root: Path, files: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    return (
        f"{dataset} could not be read from {root}, nor downloaded to it.\n"
        f"  cause: {type(error).__name__}: {reason}\n"
        f"  do one of these:\n"
        f"  - put {files} (from a machine with internet)\n"
        f"  - give the folder that has them by --data_dir (or DISTLAB_DATA)\n"
        f"  - use --data digits, which needs no download\n"
        f"  If the files are there, they are damaged: delete them and try again."
    )


@contextmanager
def _give_up_after(seconds: float) -> Iterator[None]:
    """Make connections fail after ``seconds`` of silence, because torchvision sets no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# The data folder, and which ranks load first


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of the data files: ``root``, else ``$DISTLAB_DATA``, else ``./data``."""
    return Path(root or os.environ.get("DISTLAB_DATA") or "data").expanduser().absolute()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the body on the first rank of each machine, then, if it succeeds, on the others.

        rank 0   body ──┐ all_gather(ok)
        rank 1   wait ──┴──────────────── body
        rank 2   wait ──┴──────────────── body

    The first rank is the one with LOCAL_RANK 0 if a launcher has set it, else rank 0. Without an
    initialised `torch.distributed` world, the body simply runs.

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
            _exchange(f"{type(error).__name__}: {error}")  # releases the waiting ranks
            raise
    failures = _exchange(None)
    if failures:
        consequence = DataError(
            "another rank was to fetch the data first and failed.\n" + failures[0]
        )
        consequence.is_secondary = True  # so that the launcher blames the other rank
        raise consequence
    if not first:
        yield


def _exchange(failure: str | None) -> list[str]:
    """Wait for all ranks; return the failures that they report, each with its rank."""
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, failure)
    return [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]
