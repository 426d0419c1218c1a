"""Checkpoints: what a run leaves behind, so that another can go on from it."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from phase4_production.given import Loaded

# anchor 4.1
MANIFEST = "manifest.json"


def save_checkpoint(state: Mapping[str, Any], folder: Path, step: int, *, keep: int = 3) -> Path:
    """Save ``state`` as the checkpoint of ``step``; a crash leaves it whole or not there at all.

    Three checkpoints; a fourth is being written, and counts only when it has got its final name:
        folder/
            step-00000100/  state.pt  manifest.json
            step-00000200/  state.pt  manifest.json
            step-00000300/  state.pt  manifest.json
            .step-00000400.partial/  state.pt

    Whenever the power fails, whatever was not synced may be lost, in whole or in part: a file's
    content until ``os.fsync`` of the file, and a new, renamed or removed name until ``os.fsync`` of
    the folder that it is in. Nevertheless each ``step-…`` folder that is found then is undamaged;
    and once this function has returned, so is that of ``step``.

    Args:
        state: what ``torch.load(…, weights_only=True)`` can read: tensors, numbers, strings, and
            dicts, lists and tuples of them. Not changed.
        folder: holds the checkpoints of one run, on a file system of which all ranks see the same.
            Made if missing.
        step: of the training, at least 0.
        keep: how many checkpoints stay, at least 1: the newest undamaged ones. Older ones are
            removed, but not before the new one is durable.

    Returns:
        The new checkpoint, ``folder/step-<eight digits>``. The manifest in it, ``manifest.json``,
        is written after its other files, and holds the size and the SHA-256 of each of them.

    Raises:
        FileExistsError: ``folder`` has an undamaged checkpoint of ``step``. A damaged one is
            replaced.
        OSError: the disk is full, read-only or broken. What was written for ``step`` is gone then,
            and all other checkpoints are as they were.

    Cost: the state is written once; the checkpoints in ``folder`` are read once.
    Source: Pillai et al. 2014 (OSDI), for what file systems do to programs that sync too little.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    if final.exists():
        make_room(final)
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        write_durably(partial / "state.pt", lambda file: torch.save(dict(state), file))
        write_durably(partial / MANIFEST, lambda file: file.write(manifest_of(partial, step)))
        sync_folder(partial)
        partial.rename(final)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        raise
    undamaged = [found for found in newest_first(folder) if find_damage(found) is None]
    for checkpoint in undamaged[keep:]:
        remove_checkpoint(checkpoint)
    return final


def make_room(final: Path) -> None:
    """Remove what lies where a checkpoint shall be written, if it is damaged."""
    if find_damage(final) is None:
        raise FileExistsError(f"{final} is there already, and undamaged: it is not overwritten")
    remove_checkpoint(final)


def write_durably(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: those that are new, and those removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; a crash leaves it whole, or without its name."""
    removed = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    checkpoint.rename(removed)
    sync_folder(checkpoint.parent)
    shutil.rmtree(removed)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones too."""
    return sorted(folder.glob("step-????????"), reverse=True)


def manifest_of(checkpoint: Path, step: int) -> bytes:
    """Describe the files of a checkpoint: always the same bytes for the same files."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(checkpoint.iterdir())
        if path.name != MANIFEST
    }
    return json.dumps({"step": step, "files": files}, indent=1).encode()


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def find_damage(checkpoint: Path) -> str | None:
    """Tell what is wrong with a checkpoint: None, or which file and in which way."""
    step = int(checkpoint.name.removeprefix("step-"))
    try:
        written = (checkpoint / MANIFEST).read_bytes()
        found = manifest_of(checkpoint, step)
    except OSError as error:
        return f"{error}"
    return None if written == found else difference(written, found)


def difference(written: bytes, found: bytes) -> str:
    """Tell where the manifest that was written differs from one of the files found."""
    try:
        promised, files = json.loads(written)["files"], json.loads(found)["files"]
        for name in {**promised, **files}:
            if promised.get(name) != files.get(name):
                return f"{name}: {MANIFEST} says {promised.get(name)}, found is {files.get(name)}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return f"{MANIFEST} has changed, or belongs to another step"


def load_checkpoint(folder: Path) -> Loaded | None:
    """Load the newest undamaged checkpoint.

    Args:
        folder: as for ``save_checkpoint``. Nothing in it is changed.

    Returns:
        Its step, its state with all tensors on the CPU, its path, and the damaged ones that are
        newer, each with a reason that names a file: a file is missing, longer, shorter or changed
        in any byte, or belongs to another step. None: there is no checkpoint.

    Raises:
        RuntimeError: there are checkpoints, and all are damaged: it names each of them, with the
            reason. Nothing is trained anew by mistake.

    Cost: each checkpoint that is looked at is read once to be checked; then one is read.
    """
    skipped: dict[Path, str] = {}
    for checkpoint in newest_first(folder):
        damage = find_damage(checkpoint)
        if damage is None:
            state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
            return Loaded(int(checkpoint.name.removeprefix("step-")), state, checkpoint, skipped)
        skipped[checkpoint] = damage
    if skipped:
        reasons = "; ".join(f"{path.name}: {damage}" for path, damage in skipped.items())
        raise RuntimeError(f"all {len(skipped)} checkpoints in {folder} are damaged: {reasons}")
    return None


# end 4.1


# anchor 4.2
# end 4.2


# anchor 4.3
# end 4.3


# anchor 4.4
# end 4.4
