"""Bodies for task 4.17: files that are cut, closed and damaged, and curves that go on."""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from judging.calls import error_of, typed
from judging.folders import own_folder
from phase4.watched_file import watched

Write = tuple[Mapping[str, float], int]  # metrics and step
NAME = "metrics.jsonl"
NUM_LOOKS, LOOK_S = 100, 0.01


# Lines of JSON


def append(lesson: Any, writes: Sequence[Write]) -> dict[str, Any]:
    """Write lines; return what is in the file after each write, and what is read in the end."""
    with own_folder() as folder:
        path, seen = folder / NAME, []
        with closing(lesson.JsonlWriter(path)) as writer:
            for metrics, step in writes:
                writer.write(metrics, step)
                seen.append(path.read_text(encoding="utf-8"))
        return {"seen": seen, "closed": path.read_text("utf-8"), **_read(lesson, path)}


def kill_and_go_on(
    lesson: Any, writes: Sequence[Write], last: Write, cuts: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Cut the file after each number of bytes, and let another process go on.

    Returns:
        For each cut what was left, and what is read when one more line was written.
    """
    with own_folder() as folder:
        path, found = folder / NAME, []
        _write(lesson, path, writes)
        whole = path.read_bytes()
        for cut in range(len(whole) + 1) if cuts is None else cuts:
            path.write_bytes(whole[:cut])
            _write(lesson, path, [last])
            text = path.read_text(encoding="utf-8")
            found.append({"left": whole[:cut].decode(), "text": text, **_read(lesson, path)})
        return found


def resume(lesson: Any, writes: Sequence[Write], after: int | None, again: Sequence[Write]) -> Any:
    """Write, resume after a step, write again; return what is read."""
    with own_folder() as folder:
        path = folder / NAME
        _write(lesson, path, writes)
        with closing(lesson.JsonlWriter(path, resume_after=after)) as writer:
            for metrics, step in again:
                writer.write(metrics, step)
        return _records(lesson, path)


def begin_with_resume(lesson: Any, last: Write) -> Any:
    """Resume where no file is yet."""
    return resume(lesson, [], 3, [last])


def damage(lesson: Any, lines: Sequence[str], after: int | None) -> dict[str, str]:
    """Read and open a file with a damaged line; return the errors, and what it holds then."""
    with own_folder() as folder:
        path = folder / NAME
        path.write_text("".join(lines), encoding="utf-8")
        return {
            "read_jsonl": error_of(lambda: lesson.read_jsonl(path)),
            "JsonlWriter": error_of(lambda: lesson.JsonlWriter(path, resume_after=after).close()),
            "file": path.read_text(encoding="utf-8"),
        }


def damage_each(
    lesson: Any, cases: Sequence[tuple[Sequence[str], int | None]]
) -> list[dict[str, str]]:
    """Do so with several files."""
    return [damage(lesson, *case) for case in cases]


def watch(lesson: Any, text: str, after: int | None, last: Write) -> list[str]:
    """Resume, write and close; return what the file has held meanwhile, in order."""
    with own_folder() as folder:
        path = folder / NAME
        path.write_text(text, encoding="utf-8")
        with watched(path) as file, closing(lesson.JsonlWriter(path, resume_after=after)) as writer:
            writer.write(*last)
        return [content.decode() for content in file.seen]


def close_all(lesson: Any) -> dict[str, list[str]]:
    """Return the files and threads of each writer after it was closed, while it is still there."""
    with own_folder() as folder:
        before, found, kept = {*threading.enumerate()}, {}, []
        for kind, name in (("TensorBoardWriter", "run"), ("JsonlWriter", NAME)):
            writer = getattr(lesson, kind)(folder / name)
            kept.append(writer)
            writer.write({"loss": 1.0}, 1)
            writer.close()
            threads = [f"the thread {thread.name}" for thread in _left_after(before)]
            found[kind] = _open_files(folder) + threads
        return found


def _left_after(before: Collection[threading.Thread]) -> list[threading.Thread]:
    """New threads; they have a second to end, on a busy machine more."""
    for _ in range(NUM_LOOKS):
        if not (left := {*threading.enumerate()} - {*before}):
            break
        threading.Event().wait(LOOK_S)
    return sorted(left, key=lambda thread: thread.name)


def _open_files(folder: Path) -> list[str]:
    paths = [Path(file.path) for file in psutil.Process().open_files()]
    return [path.name for path in paths if folder.resolve() in path.resolve().parents]


def _write(lesson: Any, path: Path, writes: Sequence[Write]) -> None:
    with closing(lesson.JsonlWriter(path)) as writer:
        for metrics, step in writes:
            writer.write(metrics, step)


def _read(lesson: Any, path: Path) -> dict[str, Any]:
    """Read what is there; an error is told."""
    read: list[Any] = []
    error = error_of(lambda: read.extend(_records(lesson, path)))
    return {"read": read, "error": error}


def _records(lesson: Any, path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(r.step, dict(r.metrics)) for r in typed("read_jsonl", lesson.read_jsonl(path), list)]


# TensorBoard


def draw(lesson: Any, writes: Sequence[Write]) -> list[dict[str, list[tuple[int, float]]]]:
    """Return the curves after the last write, and after close."""
    with own_folder() as folder:
        with closing(lesson.TensorBoardWriter(folder / "run")) as writer:
            for metrics, step in writes:
                writer.write(metrics, step)
            curves = _curves(folder / "run")
        return [curves, _curves(folder / "run")]


def draw_on(
    lesson: Any, writes: Sequence[Write], after: int | None, again: Sequence[Write]
) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a run that was resumed."""
    with own_folder() as folder:
        for options, part in (({}, writes), ({"resume_after": after}, again)):
            with closing(lesson.TensorBoardWriter(folder, **options)) as writer:
                for metrics, step in part:
                    writer.write(metrics, step)
        return _curves(folder)


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }
