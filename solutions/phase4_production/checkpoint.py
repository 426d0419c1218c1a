"""Checkpoints: what a run leaves behind, so that another can go on from it."""

import hashlib
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
    _remove_before(min([newest, *undamaged[: keep - 1]]), others)


def _remove_before(oldest_kept: Path, checkpoints: Sequence[Path]) -> None:
    """Remove those of an earlier step than the oldest that stays."""
    for checkpoint in checkpoints:
        if checkpoint < oldest_kept:
            _remove_checkpoint(checkpoint)


def _make_folder(folder: Path) -> None:
    """Make the folder of a run durably, without what a crash has left in it."""
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)
    _sync_folder(folder)  # a kill may have come between a renaming and its sync
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
    buffer = io.BytesIO()  # writing into a file, torch would hide why a write has failed
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
    _remove_old_together(folder, final, keep, group)
    return final


def _file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.bin"


_Result = TypeVar("_Result")
_Outcome = tuple[Any, str]  # result, and the reason if there is none


def _on_all_ranks(do: Callable[[], _Result], group: Group) -> list[_Result]:
    """Do something on every rank: all get all results, or the error of those that failed."""
    outcomes: list[_Outcome] = [(None, "")] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome_of(do), group=group)
    return _results_of(outcomes)


def _on_rank_0(do: Callable[[], _Result], group: Group) -> _Result:
    """Do something on rank 0 alone: all get its result, or its error."""
    outcomes = [_outcome_of(do) if dist.get_rank(group) == 0 else (None, "")]
    dist.broadcast_object_list(outcomes, group=group, group_src=0)
    result: _Result = _results_of(outcomes)[0]
    return result


def _outcome_of(do: Callable[[], Any]) -> _Outcome:
    """Do something; an error is a result too, for the others wait for one."""
    try:
        return do(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _results_of(outcomes: Sequence[_Outcome]) -> list[Any]:
    """Return the results by rank, if all ranks have one."""
    failures = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(outcomes) if reason]
    if failures:
        raise OSError("; ".join(failures))
    return [result for result, _ in outcomes]


def _make_room_together(final: Path, group: Group) -> None:
    """Remove what lies where a checkpoint shall be, if it is damaged."""
    if _on_rank_0(final.exists, group):
        if _agreed_damage(final, group) is None:
            raise FileExistsError(f"{final} is there already, and undamaged: it stays as it is")
        _on_rank_0(lambda: _remove_checkpoint(final), group)


def _remove_old_together(folder: Path, newest: Path, keep: int, group: Group) -> None:
    """Remove what is older than ``newest`` and the ``keep`` - 1 newest undamaged others."""
    others = [found for found in _listed_by_rank_0(folder, group) if found != newest]
    undamaged = [found for found in others if _agreed_damage(found, group) is None]
    oldest_kept = min([newest, *undamaged[: keep - 1]])
    _on_rank_0(lambda: _remove_before(oldest_kept, others), group)


class _Slice(NamedTuple):
    """Where elements ``start`` to ``stop`` of a tensor lie."""

    tensor: str
    dtype: str
    numel: int  # elements of the whole tensor
    start: int
    stop: int
    file: str
    offset: int  # byte offset of the first element


_SLICES = "slices.json"
_Description = dict[str, int | str]  # size and SHA-256 of a file
_Written = tuple[_Description, list[_Slice]]


def _write_shards(path: Path, shards: Mapping[str, Shard]) -> _Written:
    """Write this rank's file: the elements of all its shards, one behind the other."""
    _write_durably(path, b"".join(_bytes_of(shard.values) for shard in shards.values()))
    slices, offset = [], 0
    for name, (values, start, numel) in shards.items():
        stop = start + len(values)
        slices.append(_Slice(name, str(values.dtype), numel, start, stop, path.name, offset))
        offset += values.nbytes
    return _description(path), slices


def _bytes_of(values: Tensor) -> Any:
    """Return the elements as they lie in memory: those of the slice, not its whole storage."""
    return values.detach().cpu().contiguous().view(torch.uint8).numpy()


def _description(path: Path) -> _Description:
    """Describe a file, as the manifest does."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _commit(partial: Path, final: Path, step: int, written: Sequence[_Written]) -> None:
    """Write what describes the files of the ranks, which are durable, and name the checkpoint."""
    slices = [each for _, slices in written for each in slices]
    _write_durably(partial / _SLICES, json.dumps(slices).encode())
    files = {_file_of(rank): description for rank, (description, _) in enumerate(written)}
    files[_SLICES] = _description(partial / _SLICES)
    _write_durably(partial / MANIFEST, _manifest(step, files))
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)


def _manifest(step: int, files: Mapping[str, _Description]) -> bytes:
    """Describe a checkpoint as ``save_checkpoint`` does: the same bytes for the same files."""
    return json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1).encode()


def _discard(partial: Path, final: Path) -> None:
    """Remove what was written, under both of its names."""
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)


def _listed_by_rank_0(folder: Path, group: Group) -> list[Path]:
    """Return the checkpoints that rank 0 sees, the newest first."""
    names = _on_rank_0(lambda: [path.name for path in _newest_first(folder)], group)
    return [folder / name for name in names]


def _agreed_damage(checkpoint: Path, group: Group) -> str | None:
    """Tell all ranks what is wrong with a checkpoint; each reads about 1/N of the files."""
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
    """Read what is wanted, if all of it is there on all ranks."""
    reading = _Reading(checkpoint)
    lacks = _on_all_ranks(lambda: reading.plan(wanted), group)
    if any(lacks):
        told = (f"rank {rank} wants {lack}" for rank, lack in enumerate(lacks) if lack)
        raise ValueError(f"{checkpoint.name} lacks what is wanted: {'; '.join(told)}")
    _on_all_ranks(reading.read, group)


class _Reading:
    """What a rank reads of a checkpoint: which elements of which file, and where they go."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.parts: list[tuple[Tensor, str, int]] = []  # tensor to fill, file, byte offset

    def plan(self, wanted: Mapping[str, Shard]) -> str:
        """Find what is wanted; return what is not there."""
        slices: dict[str, list[_Slice]] = {}
        for row in json.loads((self.checkpoint / _SLICES).read_bytes()):
            slices.setdefault(row[0], []).append(_Slice(*row))
        lacks = [self._find(name, shard, slices.get(name, [])) for name, shard in wanted.items()]
        return ", ".join(filter(None, lacks))

    def _find(self, name: str, shard: Shard, slices: Sequence[_Slice]) -> str:
        """Go along a shard from slice to slice; return what is not there."""
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
        """Fill the parts in place, one after the other."""
        for values, name, offset in self.parts:
            with open(self.checkpoint / name, "rb") as file:
                file.seek(offset)
                elements = bytearray(file.read(values.nbytes))
            values.detach().copy_(torch.frombuffer(elements, dtype=values.dtype))


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
        self.write = write
        self.snapshot_s = self.write_s = 0.0
        self._thread: threading.Thread | None = None
        self._failed: tuple[int, Exception] | None = None

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
        self.wait()
        begun_s = time.perf_counter()
        snapshot = {name: _copied(part) for name, part in state.items()}
        self.snapshot_s = time.perf_counter() - begun_s
        self._thread = threading.Thread(target=self._write, args=(snapshot, step))  # no daemon
        self._thread.start()

    def _write(self, snapshot: dict[str, Any], step: int) -> None:
        """Write in the thread, whose errors nobody would see."""
        begun_s = time.perf_counter()
        try:
            self.write(snapshot, step)
        except Exception as error:
            self._failed = step, error
        self.write_s = time.perf_counter() - begun_s

    def wait(self) -> None:
        """Wait until all that was saved is written.

        Raises:
            RuntimeError: as for ``save``.

        Without it, Python waits before it exits until the last write has ended; but if that fails,
        nobody is told.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            step, error = failed
            raise RuntimeError(f"step {step} is not saved: {error}") from error

    def __enter__(self) -> "AsyncCheckpointer":
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait as ``wait`` does, also after an error inside of the with statement."""
        self.wait()


def _copied(part: Any) -> Any:
    """Copy a part of a state, with all tensors on the CPU."""
    if isinstance(part, Tensor):
        return part.detach().to("cpu", copy=True)
    if isinstance(part, Mapping):
        return {key: _copied(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(map(_copied, part))
    return part
