"""The states of the disk that a crash may leave of a recorded history."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from phase4.file_history import ROOT, Event, Named, Recorder, Tree, Written, paths_in

State = tuple[tuple[str, bytes | None], ...]  # path -> content; None: a folder
Paths = tuple[tuple[str, int], ...]  # path -> node


@dataclass
class Disk:
    """The part of a history that is safe, and the part that is not yet."""

    names: dict[tuple[int, str], int]
    contents: dict[int, bytes]
    latest: dict[int, bytes]
    pending: list[dict[tuple[int, str], int | None]] = field(default_factory=list)
    trees: list[Paths] = field(default_factory=list)  # cache of ``_trees``, empty if outdated

    @classmethod
    def of(cls, tree: Tree) -> "Disk":
        """A disk on which all of ``tree`` is safe."""
        return cls(dict(tree.names), dict(tree.contents), dict(tree.contents))

    def apply(self, event: Event) -> None:
        """Take one event of the history into account."""
        if isinstance(event, Written):
            self.latest[event.node] = event.content
        elif isinstance(event, Named):
            self.pending.append(event.entries)
            self.trees = []
            self.latest = {**dict.fromkeys(event.files, b""), **self.latest}
        elif event.node is None:
            self._settle(self.pending)
            self.contents.update(self.latest)
        elif event.node in self.latest:
            self.contents[event.node] = self.latest[event.node]
        else:
            self._settle([step for step in self.pending if _is_in(event.node, step)])

    def _settle(self, steps: list[dict[tuple[int, str], int | None]]) -> None:
        for step in steps:
            _rename(self.names, step)
        self.trees = []
        # A change in a folder that has lost its name makes no difference.
        left = [step for step in self.pending if step not in steps]
        named = {ROOT, *self.names.values(), *(node for step in left for node in step.values())}
        self.pending = [step for step in left if any(folder in named for folder, _ in step)]

    def states(self) -> Iterator[State]:
        """Yield the states that a crash may leave now.

        Of the names in one folder that are not safe, the first few have reached the disk; of the
        contents that are not safe, all, nothing, half, or zeros instead of all.
        """
        self.trees = self.trees or list(self._trees())
        for paths, contents in product(self.trees, self._contents()):
            yield tuple((path, contents.get(node)) for path, node in paths)

    def _trees(self) -> Mapping[Paths, None]:
        """Return the trees of names, each once: many differ only where no name leads any more."""
        folders = sorted({folder for step in self.pending for folder, _ in step})
        counts = [sum(_is_in(folder, step) for step in self.pending) for folder in folders]
        every = product(*(range(count + 1) for count in counts))
        names = (self._names(dict(zip(folders, reached, strict=True))) for reached in every)
        return dict.fromkeys(map(paths_in, names))

    def _names(self, reached: Mapping[int, int]) -> dict[tuple[int, str], int]:
        names, left = dict(self.names), dict(reached)
        for step in self.pending:
            folders = {folder for folder, _ in step}
            if all(left[folder] > 0 for folder in folders):
                _rename(names, step)
            for folder in folders:
                left[folder] -= 1
        return names

    def _contents(self) -> Iterator[dict[int, bytes]]:
        unsafe = {n: c for n, c in self.latest.items() if self.contents.get(n) != c}
        yield self.latest
        if unsafe:
            yield {**self.latest, **{node: self.contents.get(node, b"") for node in unsafe}}
        for node, content in unsafe.items():
            yield {**self.latest, node: content[: len(content) // 2]}
            yield {**self.latest, node: bytes(len(content))}
            yield {**self.latest, node: self.contents.get(node, b"")}


def crash_states(recorder: Recorder) -> Iterator[tuple[int, State]]:
    """Yield each state that a crash may leave once, after the number of events before it."""
    disk, seen = Disk.of(recorder.start), set[State]()
    for count in range(len(recorder.events) + 1):
        if count:
            disk.apply(recorder.events[count - 1])
        for state in disk.states():
            if state not in seen:
                seen.add(state)
                yield count, state


def states_at_the_end(recorder: Recorder) -> list[State]:
    """Return the states that a crash may leave after the last event."""
    disk = Disk.of(recorder.start)
    for event in recorder.events:
        disk.apply(event)
    return list(dict.fromkeys(disk.states()))


def build(state: State, folder: Path) -> None:
    """Make a folder that holds ``state``."""
    folder.mkdir(parents=True)
    for path, content in state:
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def _is_in(folder: int, step: Mapping[tuple[int, str], int | None]) -> bool:
    return any(changed == folder for changed, _ in step)


def _rename(names: dict[tuple[int, str], int], step: Mapping[tuple[int, str], int | None]) -> None:
    for key, node in step.items():
        if node is None:
            names.pop(key, None)
        else:
            names[key] = node
