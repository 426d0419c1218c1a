"""Checkpoints: what a run leaves behind so that another can continue from it."""

import hashlib
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
    _make_folder(folder)
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    _make_room(final)
    try:
        partial.mkdir()
        files = {"state.pt": _write_durably(partial / "state.pt", _serialized(state))}
        _write_durably(partial / MANIFEST, _manifest(step, files))
        _sync_folder(partial)
        partial.rename(final)
        _sync_folder(folder)
    except BaseException:
        _discard(partial, final)
        raise
    _remove_old(folder, final, keep)
    return final


def _discard(partial: Path, final: Path) -> None:
    """Remove what a failed save has written, under whichever of the two names."""
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):  # such as a missing ``final``; what the save raises says more
        _remove_checkpoint(final)


def _remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Remove all checkpoints older than ``newest`` and the ``keep`` - 1 newest undamaged others."""
    others = [found for found in _newest_first(folder) if found != newest]
    later = [found for found in others if found > newest and _find_damage(found) is None]
    earlier = [found for found in others if found < newest and _is_complete(found)]
    oldest_kept = min([newest, *[*later, *earlier][: keep - 1]])
    for checkpoint in others:
        if checkpoint < oldest_kept:
            _remove_checkpoint(checkpoint)


def _is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint's files are those of its manifest, as far as sizes tell."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        promised = {name: file["bytes"] for name, file in manifest["files"].items()}
        paths = [path for path in checkpoint.iterdir() if path.name != MANIFEST]
        sizes = {path.name: path.stat().st_size for path in paths}
        return bool(promised == sizes and manifest["step"] == _step_of(checkpoint))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _make_folder(folder: Path) -> None:
    """Create a run's folder durably, and remove what a crash has left there."""
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)
    _sync_folder(folder)  # an earlier save may have been killed between a rename and its sync
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)


def _make_room(final: Path) -> None:
    """Remove the checkpoint ``final`` if it is damaged; raise if it is undamaged."""
    if final.exists():
        if _find_damage(final) is None:
            raise FileExistsError(f"{final} is there already, and undamaged: it stays as it is")
        _remove_checkpoint(final)


def _serialized(state: Mapping[str, Any]) -> bytes:
    """Return the content of a file that holds ``state``."""
    buffer = io.BytesIO()  # when writing to a file, torch hides why a write failed
    torch.save(dict(state), buffer)
    return buffer.getvalue()


_Description = dict[str, int | str]  # size and SHA-256 of a file, for the manifest


def _write_durably(path: Path, content: bytes) -> _Description:
    """Write a file, wait until it is on the disk, and return its description."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _sync_folder(folder: Path) -> None:
    """Wait until all changes to the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, renaming it first, so that no crash leaves part of it under its name."""
    removed = checkpoint.with_name(f".{checkpoint.name}.removed")
    checkpoint.rename(removed)
    _sync_folder(checkpoint.parent)
    shutil.rmtree(removed)


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first, including damaged ones."""
    return sorted(folder.glob("step-????????"), reverse=True)


def _step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def _manifest(step: int, files: Mapping[str, _Description]) -> bytes:
    """Return a manifest: always the same bytes for the same files."""
    return json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1).encode()


def _description(path: Path) -> _Description:
    """Read a file, and return its description."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _find_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, and in which file; None if it is undamaged."""
    try:
        written = (checkpoint / MANIFEST).read_bytes()
        paths = [path for path in checkpoint.iterdir() if path.name != MANIFEST]
        files = {path.name: _description(path) for path in paths}
    except OSError as error:
        return f"{error}"
    found = _manifest(_step_of(checkpoint), files)
    return None if written == found else _difference(written, found)


def _difference(written: bytes, found: bytes) -> str:
    """Describe where the written manifest differs from that of the files on the disk."""
    try:
        promised, files = json.loads(written)["files"], json.loads(found)["files"]
        for name in {**promised, **files}:
            if promised.get(name) != files.get(name):
                return f"{name}: {promised.get(name)} in {MANIFEST}, {files.get(name)} on the disk"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return f"{MANIFEST} has changed, or is that of another step"


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
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    _on_rank_0(lambda: _make_folder(folder), group)
    _make_room_together(final, group)
    try:
        _on_rank_0(partial.mkdir, group)
        own_file = partial / _file_of(dist.get_rank(group))
        written = _on_all_ranks(lambda: _write_shards(own_file, shards), group)
        _on_rank_0(lambda: _commit(partial, final, step, written), group)
    except OSError:
        _on_rank_0(lambda: _discard(partial, final), group)
        raise
    _on_rank_0(lambda: _remove_old(folder, final, keep), group)
    return final


def _file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.bin"


_Result = TypeVar("_Result")
_Outcome = tuple[Any, str]  # the result, and the error, or "" if there was none


def _on_all_ranks(do: Callable[[], _Result], group: Group) -> list[_Result]:
    """Call ``do`` on every rank; each gets all results, or the errors of the ranks that failed."""
    outcomes: list[_Outcome] = [(None, "")] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome_of(do), group=group)
    return _results_of(outcomes)


def _on_rank_0(do: Callable[[], _Result], group: Group) -> _Result:
    """Call ``do`` on rank 0 only; all ranks get its result, or its error."""
    outcomes = [_outcome_of(do) if dist.get_rank(group) == 0 else (None, "")]
    dist.broadcast_object_list(outcomes, group=group, group_src=0)
    result: _Result = _results_of(outcomes)[0]
    return result


def _outcome_of(do: Callable[[], Any]) -> _Outcome:
    """Call ``do``, and return its result or error, because the other ranks wait for either."""
    try:
        return do(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _results_of(outcomes: Sequence[_Outcome]) -> list[Any]:
    """Return the results by rank; raise if any rank failed."""
    failures = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(outcomes) if reason]
    if failures:
        raise OSError("; ".join(failures))
    return [result for result, _ in outcomes]


def _make_room_together(final: Path, group: Group) -> None:
    """Remove the checkpoint ``final`` if it is damaged; raise if it is undamaged."""
    if _on_rank_0(final.exists, group):
        if _agreed_damage(final, group) is None:
            raise FileExistsError(f"{final} is there already, and undamaged: it stays as it is")
        _on_rank_0(lambda: _remove_checkpoint(final), group)


class _Slice(NamedTuple):
    """Location of elements ``start`` to ``stop`` of a tensor."""

    tensor: str
    dtype: str
    numel: int  # elements of the whole tensor
    start: int
    stop: int
    file: str
    offset: int  # byte offset of the first element


_SLICES = "slices.json"
_Written = tuple[_Description, list[_Slice]]


def _write_shards(path: Path, shards: Mapping[str, Shard]) -> _Written:
    """Write this rank's file, which holds the elements of all its shards, one after another."""
    content = b"".join(_bytes_of(shard.values) for shard in shards.values())
    slices, offset = [], 0
    for name, (values, start, numel) in shards.items():
        stop = start + len(values)
        slices.append(_Slice(name, str(values.dtype), numel, start, stop, path.name, offset))
        offset += values.nbytes
    return _write_durably(path, content), slices


def _bytes_of(values: Tensor) -> Any:
    """Return the bytes of the elements of a slice, without the rest of its storage."""
    return values.detach().cpu().contiguous().view(torch.uint8).numpy()


def _commit(partial: Path, final: Path, step: int, written: Sequence[_Written]) -> None:
    """Describe the ranks' files, now durable, and give the checkpoint its final name."""
    slices = [each for _, slices in written for each in slices]
    files = {_file_of(rank): description for rank, (description, _) in enumerate(written)}
    files[_SLICES] = _write_durably(partial / _SLICES, json.dumps(slices).encode())
    _write_durably(partial / MANIFEST, _manifest(step, files))
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)


def _listed_by_rank_0(folder: Path, group: Group) -> list[Path]:
    """Return the checkpoints that rank 0 sees, the newest first."""
    names = _on_rank_0(lambda: [path.name for path in _newest_first(folder)], group)
    return [folder / name for name in names]


def _agreed_damage(checkpoint: Path, group: Group) -> str | None:
    """Return what is wrong with a checkpoint, the same on all ranks; each reads some files."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    try:
        names = _on_rank_0(lambda: sorted(path.name for path in checkpoint.iterdir()), group)
        mine = [name for name in names if name != MANIFEST][rank::world_size]
        shares = _on_all_ranks(lambda: {n: _description(checkpoint / n) for n in mine}, group)
        found = _manifest(
            _step_of(checkpoint), {name: each for share in shares for name, each in share.items()}
        )
        written = _on_rank_0((checkpoint / MANIFEST).read_bytes, group)
    except OSError as error:
        return f"{error}"
    return None if written == found else _difference(written, found)


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
    skipped: dict[Path, str] = {}
    for checkpoint in _listed_by_rank_0(folder, group):
        damage = _agreed_damage(checkpoint, group)
        if damage is None:
            _fill(wanted, checkpoint, group)
            return ShardsLoaded(_step_of(checkpoint), checkpoint, skipped)
        skipped[checkpoint] = damage
    if skipped:
        reasons = "; ".join(f"{path.name}: {damage}" for path, damage in skipped.items())
        raise RuntimeError(f"all checkpoints in {folder} are damaged: {reasons}")
    return None


def _fill(wanted: Mapping[str, Shard], checkpoint: Path, group: Group) -> None:
    """Read what this rank wants; raise if the checkpoint lacks something that any rank wants."""
    reading = _Reading(checkpoint)
    lacks = _on_all_ranks(lambda: reading.plan(wanted), group)
    if any(lacks):
        told = (f"rank {rank} wants {lack}" for rank, lack in enumerate(lacks) if lack)
        raise ValueError(f"{checkpoint.name} lacks what is wanted: {'; '.join(told)}")
    _on_all_ranks(reading.read, group)


class _Reading:
    """Plans which elements of which files a rank reads into which tensors, then reads them."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.parts: list[tuple[Tensor, str, int]] = []  # tensor to fill, file, byte offset

    def plan(self, wanted: Mapping[str, Shard]) -> str:
        """Locate what is wanted; return a description of what is missing, if anything."""
        slices: dict[str, list[_Slice]] = {}
        for row in json.loads((self.checkpoint / _SLICES).read_bytes()):
            slices.setdefault(row[0], []).append(_Slice(*row))
        lacks = [self._find(name, shard, slices.get(name, [])) for name, shard in wanted.items()]
        return ", ".join(filter(None, lacks))

    def _find(self, name: str, shard: Shard, slices: Sequence[_Slice]) -> str:
        """Locate a shard, slice by slice; return a description of what is missing, if anything."""
        values, position, numel = shard
        stop, kind = position + len(values), (numel, str(values.dtype))
        while position < stop:
            here = [each for each in slices if each.start <= position < each.stop]
            if not here:
                end = min((each.start for each in slices if each.start > position), default=stop)
                return f"{name}[{position}:{min(end, stop)}]"
            best = max(here, key=lambda each: each.stop)
            if (best.numel, best.dtype) != kind:
                return f"{name} as {kind}, saved was {best.numel, best.dtype}"
            end = min(best.stop, stop)
            part = values[position - shard.start : end - shard.start]
            skipped = (position - best.start) * values.element_size()
            self.parts.append((part, best.file, best.offset + skipped))
            position = end
        return ""

    def read(self) -> None:
        """Fill the parts in place, one after another."""
        for values, name, offset in self.parts:
            with open(self.checkpoint / name, "rb") as file:
                file.seek(offset)
                elements = bytearray(values.nbytes)
                if file.readinto(elements) < values.nbytes:
                    raise EOFError(f"{name} has become shorter")
            values.detach().copy_(torch.frombuffer(elements, dtype=values.dtype))


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
        self.write = write
        self.snapshot_s = self.write_s = 0.0
        self._thread: threading.Thread | None = None
        self._failed: tuple[int, Exception] | None = None

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
        self.wait()
        begun_s = time.perf_counter()
        snapshot = {name: _copied(part) for name, part in state.items()}
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # one wait for all copies
        self.snapshot_s = time.perf_counter() - begun_s
        self._thread = threading.Thread(target=self._write, args=(snapshot, step))  # not a daemon
        self._thread.start()

    def _write(self, snapshot: dict[str, Any], step: int) -> None:
        """Write in the thread, and keep any error, which would go unnoticed there."""
        begun_s = time.perf_counter()
        try:
            self.write(snapshot, step)
        except Exception as error:
            self._failed = step, error
        self.write_s = time.perf_counter() - begun_s

    def wait(self) -> None:
        """Wait until every state that was passed to ``save`` is written.

        Raises:
            RuntimeError: as for ``save``.

        Even without this call, Python waits for the last write before it exits, but an error in
        that write then goes unreported.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            step, error = failed
            raise RuntimeError(f"step {step} is not saved: {error}") from error

    def __enter__(self) -> "AsyncCheckpointer":
        """Return self."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait as ``wait`` does, even after an error inside the ``with`` statement."""
        self.wait()


def _copied(part: Any) -> Any:
    """Copy a part of a state, with all tensors on the CPU; copies from a GPU may not be done yet.

    A GPU copies into pinned memory by itself, and about 30 times as fast as into new memory. torch
    keeps pinned memory for the next copy.
    """
    if isinstance(part, Tensor):
        copy = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
        return copy.copy_(part.detach(), non_blocking=True)
    if isinstance(part, Mapping):
        return {key: _copied(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(map(_copied, part))
    return part
