"""Checkpoints: what a run leaves behind, so that another can go on from it.

Tasks 4.1, 4.3 and 4.4. The docstring says what a function promises, its TODO what you need for it,
and guidelines.md why and how. To grade one task: ``distlab check 4.1``.
"""

import hashlib
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phase4_production.given import Group, Loaded, Shard, ShardsLoaded

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
    That holds after a kill, too: say an earlier save was killed when it had renamed
    ``step-00000100`` to ``.step-…``, before it synced ``folder``. If the power fails in this save,
    the old name may come back.

    Args:
        state: anything that ``torch.load(…, weights_only=True)`` can read: tensors, numbers,
            strings, and dicts, lists and tuples of them. Not changed.
        folder: holds the checkpoints of one run. Made if missing; its parent must exist.
        step: step of the training, from 0 to 99,999,999.
        keep: how many undamaged checkpoints stay, at least 1: this one and the newest others. What
            is older than all of these is removed, but not before this one is durable.

    Returns:
        The new checkpoint, ``folder/step-<eight digits>``. The manifest in it, ``manifest.json``,
        is written after its other files, and holds the size and the SHA-256 of each of them.

    Raises:
        FileExistsError: ``folder`` has an undamaged checkpoint of ``step``, which stays. A damaged
            one is replaced.
        OSError: the disk is full, read-only or broken: it says what the system said. Nothing of
            ``step`` is left then, and the other checkpoints are as they were. If only an older one
            could not be removed, the new one is there all the same.

    A crash may leave what begins with ``.step-``, and nothing else: the next save removes all that.
    Every file and folder that is opened is closed again, also when the save fails.

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
    """Load the newest undamaged checkpoint: of those in ``folder``, that of the highest step.

    Args:
        folder: the folder, as for ``save_checkpoint``. Nothing in it is changed.

    Returns:
        Its step, its state with all tensors on the CPU, its path, and the newer ones that were
        skipped since they are damaged: each with a reason that names the file that is missing,
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


def save_sharded(
    shards: Mapping[str, Shard], folder: Path, step: int, group: Group = None, *, keep: int = 3
) -> Path:
    """Save what is spread over the ranks as the checkpoint of ``step``, each rank its own part.

    Two ranks, N = 2, hold a tensor of 10 elements and another of 4:
        rank 0    w[0:5]              b[0:4]
        rank 1              w[5:10]
    A third checkpoint is being written: each rank has its own file, and only rank 0 does the rest.
        folder/
            step-00000100/  …  manifest.json
            step-00000200/  …  manifest.json
            .step-00000300.partial/  rank-00000.bin  rank-00001.bin

    A crash of any rank or of all, at any moment, leaves the checkpoint whole or not there at all,
    as in ``save_checkpoint``: each ``step-…`` folder that is found then is undamaged. No rank
    returns before the checkpoint is committed: then its folder is durable.

    Args:
        shards: shards by the tensors' names, which differ from rank to rank, as do the lengths; a
            rank may have none. A part that several ranks hold is the same on all of them. Any
            dtype; values may be a slice of something longer. Not changed.
        folder, step, keep: as for ``save_checkpoint``, the same on all ranks, for checkpoints of
            this function alone.
        group: all its ranks call this; all ranks by default.

    Returns:
        The new checkpoint, ``folder/step-<eight digits>``. It holds the elements of ``shards`` and
        little more, and nothing that an attempt left which was killed, of any number of ranks.

    Raises:
        FileExistsError: on all ranks: ``folder`` has an undamaged checkpoint of ``step``. A damaged
            one is replaced.
        OSError: on all ranks: one could not write. It names each rank that could not, as ``rank
            3``, and its reason. What was written for ``step`` is gone then, and all other
            checkpoints are as they were.

    Cost: each rank writes its own shards; no element travels. Of the checkpoints in ``folder``,
        each rank reads about 1/N once, to be checked. No more memory than one further copy of
        the rank's shards.
    Source: Rajbhandari et al. 2020 (SC), for who holds what; Pillai et al. 2014 (OSDI), for
        crashes.
    """
    # TODO 4.3: save all shards as one checkpoint, or raise on all ranks.
    #   Tools: what you wrote for 4.1; dist.all_gather_object, and dist.broadcast_object_list with
    #   group_src; values.view(torch.uint8).numpy(), whose bytes a file can write.
    #   Example: 1000 elements of float32 on each of 4 ranks: four files of 4000 bytes. The disk of
    #   rank 2 is full: all four raise "rank 2: [Errno 28] No space left on device".
    #   About 60 lines with helpers, of which load_sharded uses half.
    raise NotImplementedError("Task 4.3: save_sharded, see guidelines.md#43-shards-from-all-ranks")


def load_sharded(
    wanted: Mapping[str, Shard], folder: Path, group: Group = None
) -> ShardsLoaded | None:
    """Load the newest undamaged checkpoint in place, on any number of ranks.

    Saved by two ranks, loaded by three:
        saved     |    rank 0    |    rank 1    |
        wanted    | rank 0  | rank 1  | rank 2  |     rank 1 reads the files of both

    Args:
        wanted: shards by the tensors' names: ``values`` are filled with the elements ``start`` to
            ``start + len(values)`` of the tensor, whoever has saved them. The ranks may want
            anything: the same, different parts, nothing.
        folder: the folder, as for ``save_sharded``. Nothing in it is changed.
        group: all its ranks call this; all ranks by default.

    Returns:
        The step, the path, and the damaged checkpoints that are newer, each with a reason that
        names a file, as of ``load_checkpoint``; the same on all ranks. Rank 0 alone lists
        ``folder``, and all go by its list, for file systems may show an older one to the others for
        some seconds. None: there is no checkpoint.

    Raises:
        RuntimeError: on all ranks: there are checkpoints, and all are damaged: it names each of
            them, with the reason.
        ValueError: on all ranks: one of them wants what the newest undamaged checkpoint lacks. It
            names the tensor, and the elements that are missing as ``[5:10]``; or the number of
            elements and the dtype, if these are not as they were saved. ``wanted`` is unchanged.

    Cost: each file is read once to be checked, about 1/N of them by each rank; after that, a rank
        reads only files that hold a part of what it wants.
    """
    # TODO 4.3: agree on a checkpoint, find where the wanted elements lie, and read these alone.
    #   Tools: what you wrote above; file.seek, file.read, and torch.frombuffer of a bytearray.
    #   Example: rank 0 has saved w[0:5] in float32, rank 1 w[5:10]. Who wants w[3:7] reads 8 bytes
    #   of the first file from byte 12 on, and the first 8 of the second.
    #   About 45 lines with helpers.
    raise NotImplementedError("Task 4.3: load_sharded, see guidelines.md#43-shards-from-all-ranks")


class AsyncCheckpointer:
    """Saves checkpoints while training goes on, which waits only while the state is copied.

    Two saves; training goes on where its line says so:
        training    save 1: copy, goes on ………………… save 2: waits, copy, goes on …… wait: waits
        a thread                  writes 1 …………………………………………          writes 2 …………………………

        with AsyncCheckpointer(lambda state, step: save_checkpoint(state, folder, step)) as saver:
            for step in range(num_steps):
                train(step)
                if step % 100 == 0:
                    saver.save({"model": model.state_dict()}, step)

    Attributes:
        snapshot_s: seconds that the last ``save`` took to copy the state, without waiting; 0.0
            before the first.
        write_s: seconds that the last write took; 0.0 before the end of the first.
    """

    def __init__(self, write: Callable[[dict[str, Any], int], object]) -> None:
        """Prepare; nothing is written yet.

        Args:
            write: makes a state durable. It is called with the copy of a state and its step, in
                another thread, and so it calls no collective.
        """
        # TODO 4.4: keep ``write``, and that nothing is being written and nothing has failed.
        #   Tools: none.
        #   Example: AsyncCheckpointer(write).write_s is 0.0.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.__init__, see guidelines.md#44-save-while-training-goes-on"
        )

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Copy the state, and let it be written while training goes on.

        While an earlier write goes on, waits for its end first: there is one at a time.

        Args:
            state: tensors on any device, numbers, strings, and dicts, lists and tuples of them. Not
                changed; and what happens to it after ``save`` does not reach the checkpoint.
            step: step of the training.

        Raises:
            RuntimeError: the write before this one has failed. It names the step of that write, as
                ``step 300``, and the reason; nothing is saved now. An error is told once, here or
                by ``wait``.

        Cost: memory for one copy of the state at a time, on the CPU, and of a slice for its
            elements alone; time for copying it.
        """
        # TODO 4.4: wait for the write before, copy the state, and start a thread that writes.
        #   Tools: threading.Thread, time.perf_counter, tensor.detach().to("cpu", copy=True); a
        #   function that calls itself for dicts, lists and tuples.
        #   Example: the copy takes 0.5 s and the write 20 s: ``save`` returns after 0.5 s.
        #   About 24 lines with helpers.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.save, see guidelines.md#44-save-while-training-goes-on"
        )

    def wait(self) -> None:
        """Wait until all that was saved is written.

        Raises:
            RuntimeError: as for ``save``.

        Without it, Python waits before it exits until the last write has ended; but if that fails,
        nobody is told.
        """
        # TODO 4.4: wait for the thread; if its write has failed, raise that, once.
        #   Tools: thread.join, raise … from ….
        #   Example: the disk is full in step 300: "step 300 is not saved: [Errno 28] No space …".
        #   About 7 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.wait, see guidelines.md#44-save-while-training-goes-on"
        )

    def __enter__(self) -> "AsyncCheckpointer":
        """Return itself."""
        # TODO 4.4: return self.
        #   Tools: none.
        #   Example: ``with AsyncCheckpointer(write) as saver`` gives 1 object its name.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.__enter__, "
            "see guidelines.md#44-save-while-training-goes-on"
        )

    def __exit__(self, *error: object) -> None:
        """Wait as ``wait`` does, also after an error inside of the with statement."""
        # TODO 4.4: wait for what is still being written.
        #   Tools: what you wrote above.
        #   Example: the with statement ends 20 s after ``save``, if the write takes as long.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.__exit__, see guidelines.md#44-save-while-training-goes-on"
        )
