"""The states of the disk that a crash may leave of a recorded history."""

from collections.abc import Collection, Iterator
from itertools import chain, combinations, product
from pathlib import Path

from phase4.file_history import EVERYTHING, Event, Names, Recorder, Tree, paths_in

State = tuple[tuple[str, bytes | None], ...]  # path -> content; None: a folder


class Disk:
    """The names and contents that are safe, and the latest ones, which may be lost."""

    def __init__(self, tree: Tree) -> None:
        """Begin where all of ``tree`` is safe."""
        self.names, self.latest_names = tree.names, tree.names
        self.contents, self.latest = dict(tree.contents), dict(tree.contents)

    def apply(self, event: Event) -> None:
        """Take one event of the history into account."""
        self.latest_names = event.tree.names
        self.latest.update(event.tree.contents)
        if event.synced == EVERYTHING:
            self.names, self.contents = self.latest_names, dict(self.latest)
        elif event.synced in self.latest:
            self.contents[event.synced] = self.latest[event.synced]
        elif event.synced is not None:
            self.names = self._names_with({event.synced})

    def states(self) -> Iterator[State]:
        """Yield the states that a crash may leave now, some of them several times.

        Of each folder, either the safe names or the latest ones are there; of the contents that
        are not safe, all, nothing, half, or zeros instead of all.
        """
        changed = self.names.items() ^ self.latest_names.items()
        folders = sorted({folder for (folder, _), _ in changed})
        late = chain.from_iterable(combinations(folders, k) for k in range(len(folders) + 1))
        trees = dict.fromkeys(paths_in(self._names_with(some)) for some in late)
        for paths, contents in product(trees, self._contents()):
            yield tuple((path, contents.get(node)) for path, node in paths)

    def _names_with(self, late: Collection[int]) -> Names:
        """Return the safe names, but the latest ones of some folders."""
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
    """Yield each state that a crash may leave once, after the number of events before it.

    The states that it may leave after ``end`` events come again, marked by True.
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


def build(state: State, folder: Path) -> None:
    """Make a folder that holds ``state``."""
    folder.mkdir(parents=True)
    for path, content in state:
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
