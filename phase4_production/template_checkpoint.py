"""Checkpoints: what a run leaves behind, so that another can go on from it.

Task 4.1. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade the task: ``distlab check 4.1``.
"""

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
    # TODO 4.1: write the checkpoint under another name, and give it its own when it is durable.
    #   Tools: torch.save, io.BytesIO, os.fsync, os.open and os.O_RDONLY for folders, json.dumps,
    #   hashlib.sha256, Path.mkdir, Path.rename, shutil.rmtree.
    #   Example: keep=3, and there are steps 1, 2, 3 (damaged) and 4: after step 5, those of 2 to 5
    #   are left, and after step 6 those of 4 to 6.
    #   About 60 lines, with functions for what is done more than once.
    raise NotImplementedError(
        "Task 4.1: save_checkpoint, see guidelines.md#41-save-and-survive-a-crash"
    )


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
    # TODO 4.1: find the newest checkpoint whose files are those of its manifest, and load it.
    #   Tools: Path.glob, sorted, json.loads, hashlib.sha256, torch.load, Loaded (given).
    #   Example: steps 1, 2 and 3, and state.pt of 3 is a byte too short: step 2, and 3 was skipped.
    #   About 35 lines, with functions for what is done more than once.
    raise NotImplementedError(
        "Task 4.1: load_checkpoint, see guidelines.md#41-save-and-survive-a-crash"
    )


# anchor 4.2
# end 4.2


# anchor 4.3
# end 4.3


# anchor 4.4
# end 4.4
