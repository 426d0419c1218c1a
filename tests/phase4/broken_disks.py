"""Bodies for task 4.1: saves on disks that are full, or broken at one place."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from phase4.checkpoints import (
    MANIFEST,
    Plan,
    error_text,
    folder_of,
    listing,
    load_from,
    name_of,
    state_of,
)
from phase4.file_history import Sync, listening, syncs_replaced
from phase4.open_files import open_in

REMOVALS = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree")  # names of audit events


def save_where_it_fails(lesson: Any, how: str, limit_bytes: int) -> dict[str, Any]:
    """Save on a disk that is full, or where nothing can be written."""
    with folder_of(lesson, Plan(0, there=(1, 2))) as folder:
        target = folder if how == "full" else folder / name_of(1) / MANIFEST
        with _files_of_at_most(limit_bytes if how == "full" else None):
            return _failed_save(lesson, folder, target, keep=1)


def save_where_a_sync_fails(lesson: Any) -> list[dict[str, Any]]:
    """Save on a disk whose first sync of a file or folder fails, then its second, and so on.

    All checkpoints are to be kept: an answer that removes one has saved the new one.
    """
    saves: list[dict[str, Any]] = []
    while True:
        left = [len(saves)]  # number of syncs that do not fail

        def failing(sync: Sync, descriptors: tuple[int, ...], left: list[int] = left) -> None:
            left[0] -= bool(descriptors)  # os.sync has none, and never fails
            if descriptors and left[0] == -1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(*descriptors)

        with folder_of(lesson, Plan(0, there=(1, 2))) as folder, syncs_replaced(failing, lesson):
            saved = _failed_save(lesson, folder, folder, keep=9)
        if left[0] >= 0:
            return saves
        saves.append(saved)


def save_where_an_old_one_stays(lesson: Any) -> dict[str, Any]:
    """Save step 3 where step 1 is to go, and can neither be renamed nor removed; then load."""

    def failing(name: str, arguments: tuple[Any, ...]) -> None:
        if name in REMOVALS and any(name_of(1) in str(argument) for argument in arguments):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with folder_of(lesson, Plan(0, there=(1, 2))) as folder:
        with suppress(OSError), listening(failing):
            lesson.save_checkpoint(state_of(3), folder, 3, keep=2)
        return {"left": listing(folder), **load_from(lesson, folder)}


def _failed_save(lesson: Any, folder: Path, target: Path, keep: int) -> dict[str, Any]:
    """Save step 3; return the error, whether ``folder`` is as before, and what is open."""
    before, error, reason = _content_of(folder), "", ""
    try:
        lesson.save_checkpoint({"model": torch.zeros(100_000)}, target, 3, keep=keep)
    except NotImplementedError:
        raise
    except OSError as raised:
        error, reason = "OSError", "; ".join(_reasons(raised))
    except Exception as raised:
        error = error_text(raised)
    is_same, left = _content_of(folder) == before, listing(folder)
    texts = {"error": error, "reason": reason}
    return {**texts, "same": is_same, "left": left, "open": open_in(folder.parent)}


def _reasons(error: BaseException | None) -> Iterator[str]:
    """Yield the texts of an error and of its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def _content_of(folder: Path) -> dict[str, bytes]:
    """Return all files in a folder."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextmanager
def _files_of_at_most(num_bytes: int | None) -> Iterator[None]:
    """Let writes beyond a file's limit fail, as on a full disk, whatever they are made with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if num_bytes is None else num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
