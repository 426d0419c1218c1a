"""Bodies (functions that ranks run) for tasks 4.1, 4.3 and 4.4, which save checkpoints."""

import errno
import os
import resource
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from distlab.util.text import lowered
from judging.calls import refusal_of, returned, typed
from judging.pretend_device import PretendDevice, device_of
from judging.tensors import given_group
from phase4 import stores
from phase4.file_history import Sync, listening, open_in, reads_in, syncs_replaced
from phase4.states import on_cpu, plain, same
from phase4.stores import MANIFEST, Facts, Plan, Store, error_text, listing, name_of
from phase4_production.given import Group, Loaded, Shard

# Saves by one process, also on full or broken disks

REMOVALS = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree")  # names of audit events


def state_of(step: int) -> dict[str, Any]:
    """Return a state with values of all kinds; its size in bytes is the same for every step."""
    with torch.device("cpu"):  # where a checkpoint is loaded
        weight = torch.arange(60, dtype=torch.float32).view(6, 10) + step
        return {
            "model": {"weight": weight, "bias": weight[0].bfloat16(), "empty": torch.zeros(0)},
            "optimizer": {"state": {0: {"step": torch.tensor(step)}}, "lrs": [0.1, 1e-3 * step]},
            "position": (step, None, True),
            "name": f"run {step:03d}",
        }


class Checkpoints(Store):
    """The checkpoints of a single process."""

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
    """Run a function of ``stores``, given its name."""
    return getattr(stores, body)(Checkpoints(lesson, root), *args)


class _Runs:
    """An object that runs code when it is unpickled."""

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


# Disks that are full, or that fail at one point


def save_where_it_fails(lesson: Any, root: str, limit_bytes: int | None) -> Facts:
    """Save on a full disk or, if the limit is None, into a folder that cannot be made."""
    store = Checkpoints(lesson, root).prepare(Plan(0, there=(1, 2)))
    target = store.folder / name_of(1) / MANIFEST if limit_bytes is None else store.folder
    with _files_of_at_most(limit_bytes):
        return _failed_save(store, target, keep=1)


def save_where_a_sync_fails(lesson: Any, root: str) -> list[Facts]:
    """Save repeatedly; each time, a later sync of a file or folder fails.

    In the first save, the first sync fails; in the second save, the second sync fails, and so on.
    ``keep`` is large, so that no checkpoint is removed before the save fails.
    """
    saves: list[Facts] = []
    while True:
        left = [len(saves)]  # number of syncs before the one that fails

        def failing(sync: Sync, descriptors: tuple[int, ...], left: list[int] = left) -> None:
            left[0] -= bool(descriptors)  # os.sync takes no descriptor, and never fails
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
    """Save step 3 when step 1 should be removed, but cannot be removed or renamed; then load."""

    def failing(name: str, arguments: tuple[Any, ...]) -> None:
        if name in REMOVALS and any(name_of(1) in str(argument) for argument in arguments):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = Checkpoints(lesson, root).prepare(Plan(0, there=(1, 2)))
    with suppress(OSError), listening(failing):
        store.save(3, keep=2)
    return {"left": listing(store.folder), **store.load()}


def _failed_save(store: Store, target: Path, keep: int) -> Facts:
    """Save step 3; return the error, whether the folder has changed, and the files left open."""
    before, error, reason = _content_of(store.folder), "", ""
    try:
        store.lesson.save_checkpoint({"model": torch.zeros(100_000)}, target, 3, keep=keep)
    except NotImplementedError:
        raise
    except OSError as raised:
        error, reason = "OSError", "; ".join(_reasons(raised))
    except Exception as raised:
        error = error_text(raised)
    after, left = _content_of(store.folder), listing(store.folder)
    facts = {"error": error, "reason": reason, "left": left, "open": open_in(store.folder.parent)}
    return {**facts, "same": after == before, "lost": not before.items() <= after.items()}


def _reasons(error: BaseException | None) -> Iterator[str]:
    """Yield the texts of an error and of its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__


def _content_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder, by path."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextmanager
def _files_of_at_most(num_bytes: int | None) -> Iterator[None]:
    """Make writes beyond a file size of ``num_bytes`` fail, as on a full disk; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if num_bytes is None else num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Shards saved by all ranks, and loaded by any number of ranks

Cut = tuple[str, int, int]  # tensor, start, stop


class Slices(NamedTuple):
    """Tensors, and the slices of them that each rank saves."""

    tensors: Mapping[str, tuple[int, str]]  # name -> number of elements, dtype
    by_rank: Sequence[Sequence[Cut]]

    def tensor(self, name: str, step: int) -> Tensor:
        """Return a whole tensor as it is at a step."""
        numel, dtype = self.tensors[name]
        return (torch.arange(numel) * 7 + 3 * step).remainder(101).to(getattr(torch, dtype))

    def shards(self, rank: int, step: int) -> dict[str, Shard]:
        """Return a rank's shards as views of whole tensors, as with flattened parameters."""
        cuts = self.by_rank[rank]
        return {n: Shard(self.tensor(n, step)[a:b], a, self.tensors[n][0]) for n, a, b in cuts}

    def empty(self, cuts: Sequence[Cut]) -> dict[str, Shard]:
        """Return shards to load into, filled with a wrong value."""
        shards = {}
        for name, a, b in cuts:
            numel, dtype = self.tensors[name]
            shards[name] = Shard(torch.full((b - a,), 113).to(getattr(torch, dtype)), a, numel)
        return shards

    def whole(self) -> list[Cut]:
        """Return one cut per tensor, spanning all of it."""
        return [(name, 0, numel) for name, (numel, _) in self.tensors.items()]


def values_of(shards: Mapping[str, Shard]) -> dict[str, list[float]]:
    """Return the values of shards by name."""
    return {name: shard.values.tolist() for name, shard in shards.items()}


class Shards(Store):
    """The checkpoints of several ranks, each of which saves its own slices."""

    loads = "load_sharded"

    def __init__(self, lesson: Any, root: str, slices: Slices, group: Group = None) -> None:
        super().__init__(lesson, root, group)
        self.slices, self.options = slices, given_group(group)

    def save(self, step: int, *, keep: int = 9) -> Path:
        shards = self.slices.shards(self.rank, step)
        before = values_of(shards)
        path = self.lesson.save_sharded(shards, self.folder, step, keep=keep, **self.options)
        self.is_unchanged &= values_of(shards) == before
        return Path(returned("save_sharded", path))

    def _load(self, folder: Path, alone: Group) -> tuple[Any, bool] | None:
        cuts = self.slices.whole() if alone else self.slices.by_rank[self.rank]
        wanted = self.slices.empty(cuts)
        options = self.options if alone is None else {"group": alone}
        loaded = self.lesson.load_sharded(wanted, folder, **options)
        if loaded is None:
            return None
        right = {name: self.slices.tensor(name, loaded.step)[a:b].tolist() for name, a, b in cuts}
        return loaded, values_of(wanted) == right


def run_shards(
    lesson: Any, root: str, slices: Slices, body: str, *args: object, group: Group = None
) -> Any:
    """Run a function of ``stores``, given its name, on all ranks."""
    return getattr(stores, body)(Shards(lesson, root, slices, group), *args)


def save_and_load(
    lesson: Any, root: str, slices: Slices, wanted: Sequence[Sequence[Cut]], group: Group = None
) -> Facts:
    """Save steps 1 and 2 on ``len(slices.by_rank)`` ranks, and load on ``len(wanted)`` ranks."""
    rank, members = dist.get_rank(group), dist.get_process_group_ranks(group)
    writers, readers = (dist.new_group(members[: len(r)]) for r in (slices.by_rank, wanted))
    store = Shards(lesson, root, slices, group)
    facts: Facts = {}
    if rank < len(slices.by_rank):
        store.options = given_group(writers)
        path = [store.save(step) for step in (1, 2)][-1]
        place, is_there = str(path.relative_to(store.folder)), (store.folder / name_of(2)).is_dir()
        facts |= {"saved": [place, is_there], "unchanged": store.is_unchanged}
    dist.barrier(group)
    if rank < len(wanted):
        shards = slices.empty(wanted[rank])
        loaded = returned("load_sharded", lesson.load_sharded(shards, store.folder, group=readers))
        right = {name: slices.tensor(name, 2)[a:b].tolist() for name, a, b in wanted[rank]}
        facts |= {"loaded": [loaded.step, str(Path(loaded.path).relative_to(store.folder))]}
        facts |= {"values": values_of(shards), "right": right}
    return facts


OUTDATED = (
    "In this test, the ranks 1 and 2 see an outdated list of the folder, with a step 3 that rank 0 "
    "does not see. Let rank 0 list the folder for all."
)


def load_with_other_lists(lesson: Any, root: str, slices: Slices) -> Facts:
    """Save steps 1 to 3, hide step 3 from rank 0 only, and load."""
    store = Shards(lesson, root, slices).prepare(Plan(0, there=(1, 2, 3)))
    others = store.folder.with_name("as-the-others-see-it")

    def hide_step_3() -> None:
        others.mkdir()
        (store.folder / name_of(3)).rename(others / name_of(3))
        for step in (1, 2):
            (others / name_of(step)).symlink_to(store.folder / name_of(step), True)

    store.on_rank_0(hide_step_3)
    facts = store.load(store.folder if store.rank == 0 else others)
    if facts["error"]:  # raise it here, since the other ranks may be waiting
        raise WrongResult(f"{lowered(OUTDATED)} load_sharded raised {facts['error']}")
    return facts


class Broken(NamedTuple):
    """Disks on which syncs fail."""

    reasons: Mapping[int, tuple[int, str]]  # rank -> number and text of its OSError
    is_late: bool = False  # True if only syncs of the run's folder fail, once step 2 has its name

    def fail(self, folder: Path, sync: Sync, descriptors: tuple[int, ...]) -> None:
        """Sync, or raise an error instead."""
        rank = dist.get_rank()
        inodes = [os.fstat(descriptor).st_ino for descriptor in descriptors]
        is_named = (folder / name_of(2)).exists()
        fails_now = not self.is_late or (is_named and folder.stat().st_ino in inodes)
        if rank in self.reasons and fails_now:
            raise OSError(*self.reasons[rank])
        sync(*descriptors)


def save_on_a_broken_disk(
    lesson: Any, root: str, slices: Slices, broken: Broken
) -> tuple[str, list[str]]:
    """Save step 2 while disks fail, and once more afterwards.

    Returns:
        The OSError of the first save as text, and the names in the folder after that save.
    """
    store, text = Shards(lesson, root, slices).prepare(Plan(0, there=(1,))), ""
    failing = syncs_replaced(partial(broken.fail, store.folder), lesson)
    with failing if store.rank == 0 else nullcontext():  # one patch covers all ranks of the process
        dist.barrier()
        try:
            store.save(2)
        except OSError as error:
            text = f"OSError: {error}"
        left = listing(store.folder)
        dist.barrier()
    dist.barrier()
    with suppress(FileExistsError):  # a save that failed late may have left step 2
        store.save(2)
    return text, left


def load_what_is_missing(lesson: Any, root: str, slices: Slices, wanted: Slices) -> Facts:
    """Try to load slices that the checkpoint lacks; return the refusal."""
    store = Shards(lesson, root, slices).prepare(Plan(0, there=(1,)))
    shards = wanted.empty(wanted.by_rank[store.rank])
    before = values_of(shards)
    try:
        refusal = refusal_of(lambda: lesson.load_sharded(shards, store.folder))
    except OSError as error:
        refusal = {"type": "OSError", "text": f"{error}"}
    return {"refusal": refusal, "unchanged": before == values_of(shards)}


# Disk space, memory and reads of a sharded checkpoint

NUM_BYTES, NUM_SHARDS = 8_000_000, 8
LARGE_BYTES = 10_000  # smallest size of a file with elements; smaller files hold metadata


def save_large(lesson: Any, root: str, slices: Slices) -> int:
    """Save a sharded checkpoint; return its size in bytes."""
    return sum(file.stat().st_size for file in Shards(lesson, root, slices).save(1).iterdir())


def memory_of_save(lesson: Any, root: str) -> int:
    """Save ``NUM_BYTES`` of shards on one rank; return the peak memory that Python used for it."""
    parts = torch.zeros(NUM_BYTES // 4).chunk(NUM_SHARDS)
    shards = {f"layer.{place}": Shard(part, 0, len(part)) for place, part in enumerate(parts)}
    tracemalloc.start()
    try:
        lesson.save_sharded(shards, Path(root) / "run", 1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def who_reads(
    lesson: Any, root: str, slices: Slices, wanted: Sequence[Sequence[Cut]]
) -> dict[str, list[tuple[int, str]]]:
    """Save, load nothing, and load slices; return which rank reads which large files each time."""
    store = Shards(lesson, root, slices).prepare(Plan(0, there=(1,)))
    shards = slices.empty(wanted[store.rank])
    doing: dict[str, tuple[int, Callable[[], object]]] = {
        "save": (1, lambda: store.save(2)),
        "load nothing": (2, lambda: lesson.load_sharded({}, store.folder)),
        "load": (2, lambda: lesson.load_sharded(shards, store.folder)),
    }
    facts = {}
    for what, (step, do) in doing.items():
        checkpoint = store.folder / name_of(step)
        dist.barrier()
        with reads_in(checkpoint, dist.get_rank) if store.rank == 0 else nullcontext([]) as reads:
            dist.barrier()
            do()
            dist.barrier()
        large = {read for read in reads if (checkpoint / read.path).stat().st_size > LARGE_BYTES}
        facts[what] = sorted((read.rank, str(read.path)) for read in large)
    return facts


# Writes that are held up while training continues

HELD_S = 3.0  # limit on a write's wait, so that a save that waits for its own write still ends
LATE_S = 0.3
TRAINING_S = 600.0
NUM_ELEMENTS = 100_000
FULL = "No space left on device"
FAILURES = {  # errors in writes, by the call that reports them
    "save": OSError(28, FULL),
    "wait": ValueError("the manifest is too long"),
    "with": RuntimeError("enforce fail at inline_container.cc"),
}


class Writer:
    """A writer that records the states it gets; its writes may wait, and may fail.

    Args:
        is_held: Whether each write waits for ``may_go``.
        fails: The errors to raise in writes, by step.
        keeps: Whether to keep the states themselves, rather than copies without tensors.
    """

    def __init__(
        self,
        *,
        is_held: bool = False,
        fails: Mapping[int, Exception] | None = None,
        keeps: bool = True,
    ) -> None:
        self.fails, self.keeps = fails or {}, keeps
        self.steps: list[int] = []
        self.states: list[Any] = []
        self.is_daemon = self.is_callers_thread = self.was_held_too_long = False
        self.most_at_once = 0
        self.may_go = threading.Event()
        if not is_held:
            self.may_go.set()
        self._caller = threading.get_ident()
        self._at_once, self._lock = 0, threading.Lock()

    def __call__(self, state: Any, step: int) -> None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self.is_daemon |= threading.current_thread().daemon
        self.is_callers_thread |= threading.get_ident() == self._caller
        self.was_held_too_long |= not self.may_go.wait(HELD_S)
        time.sleep(0.01)
        with self._lock:
            self._at_once -= 1
        if step in self.fails:
            raise self.fails[step]
        self.states.append(state if self.keeps else plain(state))
        self.steps.append(step)


def state_of_training() -> dict[str, Any]:
    """Return a state with values of all kinds."""
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    return {
        "model": {"weight": weight, "bias": torch.arange(8).bfloat16()[3:5]},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "losses": [2.5, 1.25],
        "position": (4, torch.tensor([7, 8])),
        "loss": weight.sum(),  # has an autograd history
        "name": "run 3",
        "best": None,
    }


def change(state: dict[str, Any]) -> None:
    """Change everything in a state that can be changed in place."""
    with torch.no_grad():
        state["model"]["weight"].add_(1)
        state["model"]["bias"].zero_()
        state["position"][1].zero_()
        for value in state["optimizer"]["state"][0].values():
            value.mul_(5)
    state["optimizer"]["param_groups"][0]["lr"] = 9.0
    state["optimizer"]["param_groups"][0]["params"].append(1)
    state["losses"].append(0.0)
    state["name"] = "run 4"


def save_and_change(lesson: Any) -> dict[str, Any]:
    """Save a state, and change it while the write is held up; return what is written."""
    writer, state = Writer(is_held=True), state_of_training()
    before, copied = plain(state), plain(on_cpu(state))
    saver = lesson.AsyncCheckpointer(writer)
    saver.save(state, 3)
    has_waited = writer.was_held_too_long or writer.is_callers_thread
    is_unchanged = plain(state) == before
    change(state)
    writer.may_go.set()
    saver.wait()
    written = plain(writer.states[0]) if writer.states else {}
    different = [name for name in copied if written.get(name) != copied[name]]
    return {
        "waited": has_waited,
        "unchanged": is_unchanged,
        "right": {name: copied[name] for name in different},
        "written": {name: written.get(name) for name in different},
        "steps": writer.steps,
        "is_daemon": writer.is_daemon,
    }


def copy_of_a_slice(lesson: Any) -> tuple[int, list[str]]:
    """Save a slice, and a tensor on a device; return the bytes and the devices of the copies."""
    writer = Writer()
    with PretendDevice() as pretended, lesson.AsyncCheckpointer(writer) as saver:
        elsewhere = torch.ones(NUM_ELEMENTS).to(pretended)
        saver.save({"slice": torch.zeros(NUM_ELEMENTS)[:2], "elsewhere": elsewhere}, 1)
    tensors = writer.states[0].values()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), [str(device_of(tensor)) for tensor in tensors]


def save_four(lesson: Any) -> dict[str, Any]:
    """Save four steps as fast as possible; return what is written."""
    writer = Writer(keeps=False)
    saver = lesson.AsyncCheckpointer(writer)
    tensor = torch.zeros(NUM_ELEMENTS)
    for step in (1, 2, 3, 4):
        saver.save({"x": tensor.fill_(step)}, step)
    saver.wait()
    values = [set(state["x"][-1]) for state in writer.states]
    return {"steps": writer.steps, "values": values, "most_at_once": writer.most_at_once}


def wait(lesson: Any) -> dict[str, Any]:
    """Save, and wait for the write in several ways.

    Returns:
        The steps written by the end of each way, and whether an error inside a with
        statement is passed on.
    """
    steps, comes_out, writer = {}, False, Writer()
    saver = lesson.AsyncCheckpointer(writer)
    saver.wait()
    saver.save({"x": torch.ones(1)}, 1)
    saver.wait()
    steps["wait()"] = [*writer.steps]
    with lesson.AsyncCheckpointer(writer) as saver:
        saver.save({"x": torch.ones(1)}, 2)
    steps["the end of the with statement"] = [*writer.steps]
    try:
        with lesson.AsyncCheckpointer(writer) as saver:
            saver.save({"x": torch.ones(1)}, 3)
            raise ArithmeticError("in a step")
    except ArithmeticError:
        comes_out = True
    steps["an error inside of the with statement"] = [*writer.steps]
    return {"steps": steps, "comes out": comes_out}


def fail(lesson: Any, how: str) -> dict[str, Any]:
    """Save step 300, whose write fails; return the errors, and the steps that are written."""
    writer = Writer(fails={300: FAILURES[how]})
    saver = lesson.AsyncCheckpointer(writer)
    saver.save({"x": torch.ones(1)}, 300)
    ways = {
        "save": lambda: saver.save({"x": torch.ones(1)}, 301),
        "wait": saver.wait,
        "with": lambda: saver.__exit__(None, None, None),
    }
    first, second = _raised(ways[how]), _raised(saver.wait)
    written = [*writer.steps]
    later = _raised(lambda: saver.save({"x": torch.ones(1)}, 302)) + _raised(saver.wait)
    errors = {"first": first or ["nothing", ""], "second": second, "later": later}
    return {**errors, "written": written, "afterwards": [*writer.steps]}


def _raised(call: Any) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def seconds(lesson: Any) -> dict[str, float]:
    """Make a save wait for the previous write; return the saver's times and the actual times.

    After the second save, training continues for a long time on the simulated clock.
    """
    writer = Writer(is_held=True)
    saver = lesson.AsyncCheckpointer(writer)
    facts = {"before": saver.snapshot_s + saver.write_s}
    saver.save({"x": torch.ones(1000)}, 1)
    begun_s = time.perf_counter()
    threading.Timer(LATE_S, writer.may_go.set).start()
    saver.save({"x": torch.ones(1000)}, 2)
    facts["save_s"] = time.perf_counter() - begun_s
    facts["write_s"] = saver.write_s
    facts["snapshot_s"] = saver.snapshot_s
    all_s = time.perf_counter() - begun_s
    time.sleep(TRAINING_S)
    saver.wait()
    return {**facts, "second_write_s": saver.write_s, "all_s": all_s}
