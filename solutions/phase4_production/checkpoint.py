"""Checkpoints: what a run leaves behind, so that another can go on from it."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phase4_production.given import Loaded

MANIFEST = "manifest.json"


def save_checkpoint(state: Mapping[str, Any], folder: Path, step: int, *, keep: int = 3) -> Path:
    """Save ``state`` as the checkpoint of ``step``; a crash leaves it whole or not there at all.

    Three checkpoints; a fourth is being written, and counts only when it has got its final name:
        folder/
            step-00000100/  state.pt  manifest.json
            step-00000200/  state.pt  manifest.json
            step-00000300/  state.pt  manifest.json
            .step-00000400.partial/  state.pt

    When the power fails, whatever was not synced may be lost, in whole or in part: the content of a
    file until ``os.fsync`` of the file, and a name that is new, changed or gone until ``os.fsync``
    of the folder that it is in. Nevertheless, whenever that happens, every ``step-…`` folder that
    is found afterwards is undamaged; and once this function has returned, so is that of ``step``.

    Args:
        state: what ``torch.load(…, weights_only=True)`` can read: tensors, numbers, strings, and
            dicts, lists and tuples of them. Not changed.
        folder: holds the checkpoints of one run. Made if missing; its parent must exist.
        step: of the training, from 0 to 99,999,999.
        keep: how many undamaged checkpoints stay, at least 1: this one and the newest others. What
            is older than all of these is removed, but not before this one is durable.

    Returns:
        The new checkpoint, ``folder/step-<eight digits>``. The manifest in it, ``manifest.json``,
        is written after its other files, and holds the size and the SHA-256 of each of them.

    Raises:
        FileExistsError: ``folder`` has an undamaged checkpoint of ``step``, which stays. A damaged
            one is replaced.
        OSError: the disk is full, read-only or broken. Nothing of ``step`` is left then, and the
            other checkpoints are as they were.

    What a crash has left, besides checkpoints, is removed by the next save.

    Cost: memory for one more copy of the state; it is written once, and the checkpoints in
        ``folder`` are read once.
    Source: Pillai et al. 2014 (OSDI), for what file systems do to programs that sync too little.
    """
    _make_folder(folder)
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    _make_room(final)
    try:
        partial.mkdir()
        _write_durably(partial / "state.pt", _serialized(state))
        _write_durably(partial / MANIFEST, _manifest_of(partial, step))
        _sync_folder(partial)
        partial.rename(final)
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        raise
    _remove_old(folder, final, keep)
    return final


def _remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Remove what is older than ``newest`` and the ``keep`` - 1 newest undamaged others."""
    others = [found for found in _newest_first(folder) if found != newest]
    undamaged = [found for found in others if _find_damage(found) is None]
    oldest_kept = min([newest, *undamaged[: keep - 1]])
    for checkpoint in others:
        if checkpoint < oldest_kept:
            _remove_checkpoint(checkpoint)


def _make_folder(folder: Path) -> None:
    """Make the folder of a run durably, without what a crash has left in it."""
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)


def _make_room(final: Path) -> None:
    """Remove what lies where a checkpoint shall be, if it is damaged."""
    if final.exists():
        if _find_damage(final) is None:
            raise FileExistsError(f"{final} is there already, and undamaged: it stays as it is")
        _remove_checkpoint(final)


def _serialized(state: Mapping[str, Any]) -> bytes:
    """Return what a file of ``state`` holds."""
    buffer = io.BytesIO()  # into a file, torch would hide why a write has failed
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: those that are new, and those gone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint: it loses its name first, so that no crash leaves a part under it."""
    removed = checkpoint.with_name(f".{checkpoint.name}.removed")
    checkpoint.rename(removed)
    _sync_folder(checkpoint.parent)
    shutil.rmtree(removed)


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, damaged ones too."""
    return sorted(folder.glob("step-????????"), reverse=True)


def _step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's name tells."""
    return int(checkpoint.name.removeprefix("step-"))


def _manifest_of(checkpoint: Path, step: int) -> bytes:
    """Describe the files of a checkpoint: always the same bytes for the same files."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(checkpoint.iterdir())
        if path.name != MANIFEST
    }
    return json.dumps({"step": step, "files": files}, indent=1).encode()


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _find_damage(checkpoint: Path) -> str | None:
    """Tell what is wrong with a checkpoint: None, or which file and in which way."""
    try:
        written = (checkpoint / MANIFEST).read_bytes()
        found = _manifest_of(checkpoint, _step_of(checkpoint))
    except OSError as error:
        return f"{error}"
    return None if written == found else _difference(written, found)


def _difference(written: bytes, found: bytes) -> str:
    """Tell in which file the manifest that was written differs from the files that are found."""
    try:
        promised, files = json.loads(written)["files"], json.loads(found)["files"]
        for name in {**promised, **files}:
            if promised.get(name) != files.get(name):
                return f"{name}: {promised.get(name)} in {MANIFEST}, {files.get(name)} on the disk"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return f"{MANIFEST} has changed, or is that of another step"


def load_checkpoint(folder: Path) -> Loaded | None:
    """Load the newest undamaged checkpoint.

    Args:
        folder: as for ``save_checkpoint``. Nothing in it is changed.

    Returns:
        Its step, its state with all tensors on the CPU, its path, and the newer ones that were
        skipped since they are damaged: each with a reason that names a file, which is missing,
        longer, shorter, changed in any byte, not listed, or of another step. None: there is no
        checkpoint.

    Raises:
        RuntimeError: there are checkpoints, and all are damaged: it names each, with the reason, so
            that nobody begins anew by mistake.

    Nothing that a checkpoint holds is run, as unpickling would.

    Cost: each checkpoint that is looked at is read once, and the loaded one twice.
    """
    skipped: dict[Path, str] = {}
    for checkpoint in _newest_first(folder):
        damage = _find_damage(checkpoint)
        if damage is None:
            state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
            return Loaded(_step_of(checkpoint), state, checkpoint, skipped)
        skipped[checkpoint] = damage
    if skipped:
        reasons = "; ".join(f"{path.name}: {damage}" for path, damage in skipped.items())
        raise RuntimeError(f"all checkpoints in {folder} are damaged: {reasons}")
    return None


# anchor 4.2
# end 4.2


# anchor 4.3
# end 4.3


# anchor 4.4
# end 4.4
