"""Checkpoints: what a run leaves behind so that another can continue from it.

Tasks 4.1, 4.3 and 4.4. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 4.1``.
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
    """Save ``state`` as the checkpoint of ``step``; a crash leaves a whole checkpoint or none.

    In this example, there are three checkpoints; a fourth is being written, and counts only once it
    has its final name:
        folder/
            step-00000100/  state.pt  manifest.json
            step-00000200/  state.pt  manifest.json
            step-00000300/  state.pt  manifest.json
            .step-00000400.partial/  state.pt

    When the power fails, anything that was not synced may be lost, in whole or in part: the content
    of a file until ``os.fsync`` of the file, and a new, changed or removed name until ``os.fsync``
    of its folder. Even so, whenever the power fails, every ``step-…`` folder that is found
    afterwards is undamaged; and once this function has returned, the folder of ``step`` is one of
    them. This must hold even if an earlier save was killed, for example after renaming
    ``step-00000100`` to ``.step-…`` but before syncing ``folder``: if the power fails during this
    save, the old name may come back.

    Args:
        state: anything that ``torch.load(…, weights_only=True)`` can read: tensors, numbers,
            strings, and dicts, lists and tuples of them. Not changed.
        folder: folder for the checkpoints of one run. Created if missing; its parent must exist.
        step: training step, from 0 to 99,999,999.
        keep: number of undamaged checkpoints to keep, at least 1: this one and the newest others.
            Anything older than all of these is removed, but not before this one is durable. To
            count one of an earlier step, its manifest and the names and sizes of its files are
            enough: reading them all in each save would take as long as the save itself. One of a
            later step is counted only if it is undamaged, because damage may be why the run has
            gone back.

    Returns:
        The new checkpoint, ``folder/step-<eight digits>``. Its manifest, ``manifest.json``, is
        written after the other files, and holds the size and the SHA-256 of each of those.

    Raises:
        FileExistsError: ``folder`` has an undamaged checkpoint of ``step``, which stays. A damaged
            one is replaced.
        OSError: the disk is full, read-only or broken; the system's reason is kept. In that case,
            nothing of ``step`` is left, and the other checkpoints are unchanged. If the removal of
            what was written cannot be synced either, a ``.step-…`` name may stay for the next save.
            But if only the removal of an older checkpoint failed, the new one is complete and
            stays.

    A crash may leave behind names that begin with ``.step-``, and nothing else; the next save
    removes them all. Every file and folder that is opened is closed again, even if the save fails.

    Cost: memory for one more copy of the state, which is written once and not read back. The other
        checkpoints in ``folder`` are read at most once, and need not be read.
    Source: Pillai et al. 2014 (OSDI), for what file systems do to programs that sync too little.
    """
    # TODO 4.1: write the checkpoint under another name, and give it its own when it is durable.
    #   Example: keep=3, and there are steps 1, 2, 3 (damaged) and 4: after step 5, those of 2 to 5
    #   are left, and after step 6 those of 4 to 6.
    #   About 60 lines, with functions for what is done more than once.
    raise NotImplementedError(
        "Task 4.1: save_checkpoint, see guidelines.md#41-save-and-survive-a-crash"
    )


def load_checkpoint(folder: Path) -> Loaded | None:
    """Load the newest undamaged checkpoint in ``folder``: the one with the highest step.

    Args:
        folder: the folder, as for ``save_checkpoint``. Nothing in it is changed.

    Returns:
        Its step, its state with all tensors on the CPU, its path, and the newer checkpoints that
        were skipped because they are damaged, each with a reason. The reason names a file that is
        missing, too long or too short, changed in any byte, not listed in the manifest, or from
        another step. None if there is no checkpoint.

    Raises:
        RuntimeError: there are checkpoints, but all are damaged; the error prevents the run from
            starting over by mistake. The message names each checkpoint with its reason.

    Unlike unpickling, loading executes no code from the checkpoint.

    Cost: each checkpoint that is examined is read once, and the loaded one twice.
    """
    # TODO 4.1: find the newest checkpoint whose files are those of its manifest, and load it.
    #   Example: steps 1, 2 and 3, and state.pt of 3 is a byte too short: step 2, and 3 was skipped.
    #   About 35 lines, with functions for what is done more than once.
    raise NotImplementedError(
        "Task 4.1: load_checkpoint, see guidelines.md#41-save-and-survive-a-crash"
    )


def save_sharded(
    shards: Mapping[str, Shard], folder: Path, step: int, group: Group = None, *, keep: int = 3
) -> Path:
    """Save ``shards`` as the checkpoint of ``step``; each rank writes its own.

    For example, two ranks (N = 2) hold a tensor of 10 elements and one of 4:
        rank 0    w[0:5]              b[0:4]
        rank 1              w[5:10]
    Each rank writes its own file of the third checkpoint, and rank 0 alone does everything else:
        folder/
            step-00000100/  …  manifest.json
            step-00000200/  …  manifest.json
            .step-00000300.partial/  rank-00000.bin  rank-00001.bin

    If any or all ranks crash, at any moment, the checkpoint is whole or absent, as with
    ``save_checkpoint``: each ``step-…`` folder that is found afterwards is undamaged. No rank
    returns before the checkpoint is committed, that is, before its folder is durable.

    Args:
        shards: tensor name -> shard. Names and lengths may differ from rank to rank, and a rank may
            have no shards. Elements that several ranks hold are the same on all of them. Tensors
            may have any dtype, and ``values`` may be a slice of a longer tensor. Not changed.
        folder, step, keep: as for ``save_checkpoint``, and the same on all ranks; the folder is for
            checkpoints of this function only.
        group: the ranks that save, which all call this; all ranks by default.

    Returns:
        The new checkpoint, ``folder/step-<eight digits>``. It holds the elements of ``shards`` and
        little more. In particular, it holds nothing that a killed attempt has left over, even if
        that attempt ran on a different number of ranks.

    Raises:
        FileExistsError: on all ranks, if ``folder`` has an undamaged checkpoint of ``step``. A
            damaged one is replaced.
        OSError: on all ranks, if any of them could not write. The message names each such rank, as
            ``rank 3`` (its number in ``group`` or in the world), and its reason. In that case, what
            was written for ``step`` is removed before any rank raises, as by ``save_checkpoint``,
            and all other checkpoints are unchanged.

    Cost: each rank writes its own shards; no elements are sent, and none are read back. If the
        checkpoints in ``folder`` are read, then by each rank about 1/N of their files, once. Memory
        for at most one more copy of the rank's shards.
    Source: Rajbhandari et al. 2020 (SC), for sharded states; Pillai et al. 2014 (OSDI), for
        crashes.
    """
    # TODO 4.3: save all shards as one checkpoint, or raise on all ranks.
    #   Example: 1000 elements of float32 on each of 4 ranks: four files of 4000 bytes. The disk of
    #   rank 2 is full: all four raise "rank 2: [Errno 28] No space left on device".
    #   About 60 lines with helpers, of which load_sharded uses half.
    raise NotImplementedError("Task 4.3: save_sharded, see guidelines.md#43-shards-from-all-ranks")


def load_sharded(
    wanted: Mapping[str, Shard], folder: Path, group: Group = None
) -> ShardsLoaded | None:
    """Load the newest undamaged checkpoint in place, on any number of ranks.

    In this example, two ranks have saved what three ranks load:
        saved     |    rank 0    |    rank 1    |
        wanted    | rank 0  | rank 1  | rank 2  |     rank 1 reads the files of both

    Args:
        wanted: tensor name -> shard, whose ``values`` are filled with the elements ``start`` to
            ``start + len(values)`` of the tensor, whichever ranks saved them. The ranks may want
            the same parts, different ones or nothing.
        folder: the folder, as for ``save_sharded``. Nothing in it is changed.
        group: the ranks that load, which all call this; all ranks by default.

    Returns:
        The step, the path, and the newer checkpoints that are damaged, each with a reason that
        names a file, as in ``load_checkpoint``; the same on all ranks. None if there is no
        checkpoint. Only rank 0 lists ``folder``, and all ranks use its list, because a file system
        may show the others an outdated list for some seconds.

    Raises:
        RuntimeError: on all ranks, if there are checkpoints, but all are damaged; the message names
            each of them with its reason.
        ValueError: on all ranks, if any of them wants something that the newest undamaged
            checkpoint lacks. The message names the tensor, and the missing elements as ``[5:10]``,
            or the number of elements and the dtype if these differ from what was saved. ``wanted``
            is unchanged. An empty shard of a tensor that was never saved may be refused or ignored.

    Cost: to check the files, each rank reads about 1/N of them once, whatever their sizes; after
        that, a rank reads only files that hold a part of what it wants.
    """
    # TODO 4.3: agree on a checkpoint, find where the wanted elements lie, and read these alone.
    #   Example: rank 0 has saved w[0:5] in float32, rank 1 w[5:10]. Who wants w[3:7] reads 8 bytes
    #   of the first file from byte 12 on, and the first 8 of the second.
    #   About 45 lines with helpers.
    raise NotImplementedError("Task 4.3: load_sharded, see guidelines.md#43-shards-from-all-ranks")


class AsyncCheckpointer:
    """Saves checkpoints in the background; training waits only while the state is copied.

    In this example with two saves, training continues after each copy:
        training    save 1: copy, trains …………………… save 2: waits, copy, trains ……… wait: waits
        a thread                  writes 1 …………………………………………          writes 2 …………………………

        with AsyncCheckpointer(lambda state, step: save_checkpoint(state, folder, step)) as saver:
            for step in range(num_steps):
                train(step)
                if step % 100 == 0:
                    saver.save({"model": model.state_dict()}, step)

    Attributes:
        snapshot_s: seconds that the last ``save`` took to copy the state, without waiting; 0.0
            before the first ``save``.
        write_s: seconds that the last write took; 0.0 until the first has ended.
    """

    def __init__(self, write: Callable[[dict[str, Any], int], object]) -> None:
        """Store ``write``; nothing is written yet.

        Args:
            write: function that makes a state durable. It is called with a copy of a state and
                its step, in another thread, so it must not call collectives.
        """
        # TODO 4.4: keep ``write``, and that nothing is being written and nothing has failed.
        #   Example: AsyncCheckpointer(write).write_s is 0.0.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.__init__, see guidelines.md#44-save-while-training-goes-on"
        )

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Copy the state, and start to write the copy while training continues.

        If an earlier write is still running, wait until it ends first: only one runs at a time.

        Args:
            state: tensors on any device, numbers, strings, and dicts, lists and tuples of them. Not
                changed; later changes to it do not reach the checkpoint. A tensor that is in it
                twice, such as a tied weight, may be copied once or twice.
            step: training step.

        Raises:
            RuntimeError: the previous write has failed; the message names its step, as
                ``step 300``, and the reason. The new state is not saved. Each error is raised once,
                here or by ``wait``.

        Cost: CPU memory for one copy of the state at a time, in which a slice takes only the memory
            of its own elements; and the time to copy the state.
        """
        # TODO 4.4: wait for the write before, copy the state, and start a thread that writes.
        #   Example: the copy takes 0.5 s and the write 20 s: ``save`` returns after 0.5 s.
        #   About 24 lines with helpers.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.save, see guidelines.md#44-save-while-training-goes-on"
        )

    def wait(self) -> None:
        """Wait until every state that was passed to ``save`` is written.

        Raises:
            RuntimeError: as for ``save``.

        Even without this call, Python waits for the last write before it exits, but an error in
        that write then goes unreported.
        """
        # TODO 4.4: wait for the thread; if its write failed, raise that error, but only once.
        #   Example: the disk is full at step 300: "step 300 is not saved: [Errno 28] No space …".
        #   About 7 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.wait, see guidelines.md#44-save-while-training-goes-on"
        )

    def __enter__(self) -> "AsyncCheckpointer":
        """Return self."""
        # TODO 4.4: return self.
        #   Example: ``with AsyncCheckpointer(write) as saver`` gives 1 object its name.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.__enter__, "
            "see guidelines.md#44-save-while-training-goes-on"
        )

    def __exit__(self, *error: object) -> None:
        """Wait as ``wait`` does, even after an error inside the ``with`` statement."""
        # TODO 4.4: wait for what is still being written.
        #   Example: the with statement ends 20 s after ``save``, if the write takes as long.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.4: AsyncCheckpointer.__exit__, see guidelines.md#44-save-while-training-goes-on"
        )
