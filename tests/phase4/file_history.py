"""The changes that a program makes to the files in a folder, in order.

A history is recorded from outside, so it does not matter how the program writes. Whenever Python
opens, renames, removes or syncs something, the folder is inspected, and all changes since the last
inspection are added to the history. This includes files that C++ code has written in the meantime.

The states that a crash may leave follow the rules of POSIX. The content of a file is safe once the
file has been synced, and a name that is new or gone is safe once its folder has been synced. All
other changes may or may not have reached the disk, and the content of a file may be torn.
"""

import os
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from distlab.util.text import joined

WATCHED = frozenset(
    f"{module}.{name}" if module else name
    for module, names in (
        ("", "open"),
        ("os", "mkdir rename remove rmdir link symlink truncate"),
        ("shutil", "rmtree move copyfile"),
    )
    for name in names.split()
)
RETURNED = "phase4.returned"  # audit event that a body raises
ROOT = 0  # node of the recorded folder
EVERYTHING = -1  # in place of a node: all files and folders are synced
Names = Mapping[tuple[int, str], int]  # (folder, name) -> node


@dataclass
class Tree:
    """The folder as seen while the program runs."""

    names: dict[tuple[int, str], int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)  # node of a file -> content
    nodes: dict[int, int] = field(default_factory=dict)  # inode -> node


class Event(NamedTuple):
    """A change, or a sync that makes a file's content or the names in a folder safe."""

    text: str  # such as "writes run/state.pt (1,705 bytes)"
    tree: Tree  # the folder after the event
    synced: int | None = None  # node of the synced file or folder


class Recorder:
    """Records all changes in ``folder``, whose content is safe at the start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.returns: list[int] = []  # number of events before each ``RETURNED``
        self.seen = Tree()
        self._next_node = ROOT + 1
        self._is_looking = threading.local()
        self._lock = threading.RLock()
        self.look()
        self.start = self.seen
        self.events.clear()

    def look(self) -> None:
        """Record all changes since the last look."""
        if getattr(self._is_looking, "now", False):
            return
        self._is_looking.now = True
        try:
            with self._lock:
                now = self._read()
                self._note(now)
                self.seen = now
        finally:
            self._is_looking.now = False

    def sync(self, inode: int | None) -> None:
        """Record that a file or a folder has been synced, or everything if the inode is None."""
        self.look()
        nodes = {**self.seen.nodes, self.folder.stat().st_ino: ROOT, None: EVERYTHING}
        if inode in nodes:
            paths = {**_paths_by_node(self.seen.names), ROOT: ".", EVERYTHING: "everything"}
            node = nodes[inode]
            self.events.append(Event(f"syncs {paths[node]}", self.seen, node))

    def _read(self) -> Tree:
        tree = Tree()
        waiting = [(ROOT, self.folder)]
        while waiting:
            parent, folder = waiting.pop()
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except FileNotFoundError:  # just removed by another thread
                continue
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                node = self._node(tree, status.st_ino)
                tree.names[parent, entry.name] = node
                if stat.S_ISDIR(status.st_mode):
                    waiting.append((node, Path(entry.path)))
                else:
                    tree.contents[node] = Path(entry.path).read_bytes()
        return tree

    def _node(self, tree: Tree, inode: int) -> int:
        """Return the node of an inode, which is new unless the inode was there at the last look."""
        if inode not in tree.nodes:
            known = self.seen.nodes.get(inode)
            tree.nodes[inode] = self._next_node if known is None else known
            self._next_node += known is None
        return tree.nodes[inode]

    def _note(self, now: Tree) -> None:
        """Record an event for names that are new or gone, and one for each file that changed."""
        before, old_paths, paths = self.seen, *map(_paths_by_node, (self.seen.names, now.names))
        new = [node for key, node in now.names.items() if before.names.get(key) != node]
        verbs = {
            "renames": [f"{old_paths[node]} to {paths[node]}" for node in new if node in old_paths],
            "makes": [paths[node] for node in new],
            "removes": [old_paths[n] for key, n in before.names.items() if key not in now.names],
        }
        texts = [f"{verb} {joined(names)}" for verb, names in verbs.items() if names][:1]
        texts += [
            f"writes {paths[node]} ({len(content):,} bytes)"
            for node, content in now.contents.items()
            if before.contents.get(node, b"") != content
        ]
        self.events += [Event(text, now) for text in texts]


def paths_in(names: Names) -> tuple[tuple[str, int], ...]:
    """Return the paths in the folder, each with its node."""
    children: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), node in sorted(names.items()):
        children.setdefault(folder, []).append((name, node))
    paths: list[tuple[str, int]] = []

    def collect(folder: int, prefix: str) -> None:
        for name, node in children.get(folder, ()):
            paths.append((prefix + name, node))
            collect(node, f"{prefix}{name}/")

    collect(ROOT, "")
    return tuple(paths)


def _paths_by_node(names: Names) -> dict[int, str]:
    return {node: path for path, node in paths_in(names)}


@contextmanager
def recorded(
    folder: Path, *modules: Any, before_sync: Callable[[], object] = lambda: None
) -> Iterator[Recorder]:
    """Record all changes in ``folder`` while the context is open.

    Args:
        folder: The folder, which must exist.
        modules: Modules that may have imported ``os.fsync`` by name; it is replaced there too.
        before_sync: Called before each sync, for example to imitate a slow disk.
    """
    recorder = Recorder(folder)

    def noted(sync: Sync, descriptors: tuple[int, ...]) -> None:
        before_sync()
        sync(*descriptors)
        inodes = [os.fstat(descriptor).st_ino for descriptor in descriptors]
        recorder.sync(inodes[0] if inodes else None)

    with listening(partial(_look_at, recorder)), syncs_replaced(noted, *modules):
        yield recorder
        recorder.look()


def _look_at(recorder: Recorder, name: str, _arguments: tuple[Any, ...]) -> None:
    if name in (*WATCHED, RETURNED):
        recorder.look()
    if name == RETURNED:
        recorder.returns.append(len(recorder.events))


# Audit events, which announce Python's file operations

Listener = Callable[[str, tuple[Any, ...]], None]  # name and arguments of an event
_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` before every file operation of Python, in any thread."""
    if not hasattr(sys, "_watches_files"):
        sys.addaudithook(_notify)  # only once, since it cannot be removed
        sys._watches_files = True  # type: ignore[attr-defined]
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _notify(name: str, arguments: tuple[Any, ...]) -> None:
    for listener in _listeners:
        listener(name, arguments)


Sync = Callable[..., None]
SYNCING = [getattr(os, name) for name in ("fsync", "fdatasync", "sync") if hasattr(os, name)]


@contextmanager
def syncs_replaced(
    replacement: Callable[[Sync, tuple[int, ...]], None], *modules: Any
) -> Iterator[None]:
    """Make ``os.fsync`` and the like call ``replacement`` with the real function and its arguments.

    Args:
        replacement: Calls the real function, or raises an error instead.
        modules: Modules that may have imported ``os.fsync`` by name; it is replaced there too.
    """
    replaced = {
        (module, name): value
        for module in (os, *modules)
        for name, value in vars(module).items()
        if value in SYNCING
    }
    for (module, name), sync in replaced.items():
        setattr(module, name, lambda *descriptors, sync=sync: replacement(sync, descriptors))
    try:
        yield
    finally:
        for (module, name), value in replaced.items():
            setattr(module, name, value)


# Disk states that a crash may leave, computed from a recorded history

State = tuple[tuple[str, bytes | None], ...]  # paths and contents; None for a folder


class Disk:
    """A disk: the names and contents that are safe, and the latest ones, which may be lost."""

    def __init__(self, tree: Tree) -> None:
        """Start from a state in which all of ``tree`` is safe."""
        self.names, self.latest_names = tree.names, tree.names
        self.contents, self.latest = dict(tree.contents), dict(tree.contents)

    def apply(self, event: Event) -> None:
        """Apply one event of the history."""
        self.latest_names = event.tree.names
        self.latest.update(event.tree.contents)
        if event.synced == EVERYTHING:
            self.names, self.contents = self.latest_names, dict(self.latest)
        elif event.synced in self.latest:
            self.contents[event.synced] = self.latest[event.synced]
        elif event.synced is not None:
            self.names = self._names_with({event.synced})

    def states(self) -> Iterator[State]:
        """Yield the states that a crash may leave now, some of them more than once.

        Each folder has either its safe names or its latest ones; contents that are not safe are
        complete, old, cut in half or replaced by zeros.
        """
        changed = self.names.items() ^ self.latest_names.items()
        folders = sorted({folder for (folder, _), _ in changed})
        late = chain.from_iterable(combinations(folders, k) for k in range(len(folders) + 1))
        trees = dict.fromkeys(paths_in(self._names_with(some)) for some in late)
        for paths, contents in product(trees, self._contents()):
            yield tuple((path, contents.get(node)) for path, node in paths)

    def _names_with(self, late: Collection[int]) -> Names:
        """Return the latest names in the folders ``late``, and the safe names in all others."""
        names = {key: node for key, node in self.names.items() if key[0] not in late}
        return names | {key: node for key, node in self.latest_names.items() if key[0] in late}

    def _contents(self) -> Iterator[dict[int, bytes]]:
        unsafe = {n: c for n, c in self.latest.items() if self.contents.get(n) != c}
        yield self.latest
        if unsafe:
            yield {**self.latest, **{node: self.contents.get(node, b"") for node in unsafe}}
        for node, content in unsafe.items():
            yield {**self.latest, node: content[: len(content) // 2]}
            yield {**self.latest, node: bytes(len(content))}
            yield {**self.latest, node: self.contents.get(node, b"")}


def crash_states(recorder: Recorder, end: int) -> Iterator[tuple[int, bool, State]]:
    """Yield each state that a crash may leave, with the number of events before it, and a flag.

    Each state is yielded once with False. Those that a crash may leave after ``end`` events are
    yielded again, with True.
    """
    disk, seen = Disk(recorder.start), set[State]()
    for count in range(len(recorder.events) + 1):
        if count:
            disk.apply(recorder.events[count - 1])
        states = dict.fromkeys(disk.states())
        yield from ((count, False, state) for state in states if state not in seen)
        seen.update(states)
        if count == end:
            yield from ((count, True, state) for state in states)


def kill_states(recorder: Recorder) -> Iterator[tuple[int, bool, State]]:
    """Yield what is left if the process is killed after each number of events: all it has done."""
    trees = [recorder.start, *(event.tree for event in recorder.events)]
    for count, tree in enumerate(trees):
        (state,) = Disk(tree).states()
        yield count, False, state


def build(state: State, folder: Path) -> None:
    """Make a folder that holds ``state``."""
    folder.mkdir(parents=True)
    for path, content in state:
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


# Files that are read or still open

Identity = tuple[int, int]  # device, and inode of a file or folder on it


class Read(NamedTuple):
    """One occasion on which a rank opened a file for reading."""

    rank: int
    path: Path  # relative to the folder


@contextmanager
def reads_in(folder: Path, rank_of_caller: Callable[[], int] = int) -> Iterator[list[Read]]:
    """Yield a list that collects reads of files in ``folder``, however Python opens the files.

    Args:
        folder: An absolute path. The folder need not exist yet.
        rank_of_caller: Returns the calling thread's rank; by default, always 0.
    """
    reads: list[Read] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        path = _read_file(*arguments) if name == "open" else None
        if path is not None and path.is_relative_to(folder):
            reads.append(Read(rank_of_caller(), path.relative_to(folder)))

    with listening(note):
        yield reads


def _read_file(path: Any, _mode: object, flags: int) -> Path | None:
    """Return the path of the file that is opened to be read.

    Return None if it is opened for writing or by a descriptor, or if it is a folder.
    """
    if flags & os.O_ACCMODE != os.O_RDONLY or isinstance(path, int):
        return None
    file = Path(os.path.abspath(os.fsdecode(path)))
    return file if file.is_file() else None


def open_in(folder: Path) -> list[str]:
    """Return the open files in a folder, once per descriptor, with ``.`` for the folder itself.

    Files that have lost their names are not included.
    """
    names = {_identity(os.stat(path)): path for path in (folder, *folder.rglob("*"))}
    paths = (names.get(identity) for identity in _open_identities())
    return sorted(str(path.relative_to(folder)) for path in paths if path is not None)


def _open_identities() -> Iterator[Identity]:
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            yield _identity(os.fstat(descriptor))
        except OSError:  # the listing's own descriptor is already closed
            continue


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino
