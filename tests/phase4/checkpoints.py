"""Bodies for task 4.1: one process that saves, also on disks that are full or broken."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from judging.calls import returned, typed
from phase4 import stores
from phase4.file_history import Sync, listening, open_in, syncs_replaced
from phase4.states import same
from phase4.stores import MANIFEST, Facts, Plan, Store, error_text, listing, name_of
from phase4_production.given import Group, Loaded

REMOVALS = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree")  # names of audit events


def state_of(step: int) -> dict[str, Any]:
    """Return a state of all kinds; those of two steps need the same number of bytes."""
    weight = torch.arange(60, dtype=torch.float32).view(6, 10) + step
    return {
        "model": {"weight": weight, "bias": weight[0].bfloat16(), "empty": torch.zeros(0)},
        "optimizer": {"state": {0: {"step": torch.tensor(step)}}, "lrs": [0.1, 1e-3 * step]},
        "position": (step, None, True),
        "name": f"run {step:03d}",
    }


class Checkpoints(Store):
    """The checkpoints of one process."""

    loads = "load_checkpoint"

    def save(self, step: int, *, keep: int = 9) -> Path:
        state = state_of(step)
        path = self.lesson.save_checkpoint(state, self.folder, step, keep=keep)
        self.is_unchanged &= same(state, state_of(step))
        return Path(returned("save_checkpoint", path))

    def _load(self, folder: Path, alone: Group) -> tuple[Any, bool] | None:
        del alone
        loaded = self.lesson.load_checkpoint(folder)
        if loaded is None:
            return None
        loaded = typed("load_checkpoint", loaded, Loaded)
        return loaded, same(loaded.state, state_of(loaded.step))


def run(lesson: Any, root: str, body: str, *args: object) -> Any:
    """Run a body of ``stores``."""
    return getattr(stores, body)(Checkpoints(lesson, root), *args)


class _Runs:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def load_code(lesson: Any, root: str) -> bool:
    """Load a checkpoint that would run code if it were unpickled; return whether it did."""
    folder, trap = Path(root) / "run", Path(root) / "trap"
    with suppress(Exception):
        lesson.save_checkpoint({"model": _Runs(str(trap))}, folder, 1)
        lesson.load_checkpoint(folder)
    return trap.exists()


# Disks that are full, or broken at one place


def save_where_it_fails(lesson: Any, root: str, limit_bytes: int | None) -> Facts:
    """Save on a disk that is full, or (None) where nothing can be written."""
    store = Checkpoints(lesson, root).prepare(Plan(0, there=(1, 2)))
    target = store.folder / name_of(1) / MANIFEST if limit_bytes is None else store.folder
    with _files_of_at_most(limit_bytes):
        return _failed_save(store, target, keep=1)


def save_where_a_sync_fails(lesson: Any, root: str) -> list[Facts]:
    """Save on a disk whose first sync of a file or folder fails, then its second, and so on.

    All checkpoints are to be kept: an answer that removes one has saved the new one.
    """
    saves: list[Facts] = []
    while True:
        left = [len(saves)]  # number of syncs that do not fail

        def failing(sync: Sync, descriptors: tuple[int, ...], left: list[int] = left) -> None:
            left[0] -= bool(descriptors)  # os.sync has none, and never fails
            if descriptors and left[0] == -1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(*descriptors)

        store = Checkpoints(lesson, root).prepare(Plan(0, there=(1, 2)))
        with syncs_replaced(failing, lesson):
            saved = _failed_save(store, store.folder, keep=9)
        if left[0] >= 0:
            return saves
        saves.append(saved)


def save_where_an_old_one_stays(lesson: Any, root: str) -> Facts:
    """Save step 3 where step 1 is to go, and can neither be renamed nor removed; then load."""

    def failing(name: str, arguments: tuple[Any, ...]) -> None:
        if name in REMOVALS and any(name_of(1) in str(argument) for argument in arguments):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = Checkpoints(lesson, root).prepare(Plan(0, there=(1, 2)))
    with suppress(OSError), listening(failing):
        store.save(3, keep=2)
    return {"left": listing(store.folder), **store.load()}


def _failed_save(store: Store, target: Path, keep: int) -> Facts:
    """Save step 3; return the error, whether the folder is as before, and what is open."""
    before, error, reason = _content_of(store.folder), "", ""
    try:
        store.lesson.save_checkpoint({"model": torch.zeros(100_000)}, target, 3, keep=keep)
    except NotImplementedError:
        raise
    except OSError as raised:
        error, reason = "OSError", "; ".join(_reasons(raised))
    except Exception as raised:
        error = error_text(raised)
    is_same, left = _content_of(store.folder) == before, listing(store.folder)
    texts = {"error": error, "reason": reason}
    return {**texts, "same": is_same, "left": left, "open": open_in(store.folder.parent)}


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
