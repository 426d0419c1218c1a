"""Bodies for task 4.17: files that are cut, closed and damaged, and curves that are continued."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from judging.calls import error_of, typed
from judging.folders import own_folder
from phase4.file_access import open_in
from phase4.watched_file import watched

Write = tuple[Mapping[str, float], int]  # metrics and step
NAME = "metrics.jsonl"
NUM_LOOKS, LOOK_S = 100, 0.01
Curves = dict[str, list[tuple[int, float]]]


# Lines of JSON


def _write(writer: Any, writes: Sequence[Write]) -> None:
    with closing(writer):
        for metrics, step in writes:
            writer.write(metrics, step)


def _read(lesson: Any, path: Path) -> dict[str, Any]:
    """Read a file; return the records, or the error."""
    records: list[Any] = []
    error = error_of(lambda: records.extend(_records(lesson, path)))
    return {"read": records, "error": error}


def _records(lesson: Any, path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(r.step, dict(r.metrics)) for r in typed("read_jsonl", lesson.read_jsonl(path), list)]


def append(lesson: Any, writes: Sequence[Write]) -> dict[str, Any]:
    """Write lines; return the file after each write, and what is read in the end."""
    with own_folder() as folder:
        path, seen = folder / NAME, []
        with closing(lesson.JsonlWriter(path)) as writer:
            for metrics, step in writes:
                writer.write(metrics, step)
                seen.append(path.read_text(encoding="utf-8"))
        return {"seen": seen, **_read(lesson, path)}


def kill_and_go_on(lesson: Any, writes: Sequence[Write], last: Write) -> list[dict[str, Any]]:
    """Cut the file after each number of bytes; return what is read after one more write."""
    with own_folder() as folder:
        path, results = folder / NAME, []
        _write(lesson.JsonlWriter(path), writes)
        whole = path.read_bytes()
        for cut in range(len(whole) + 1):
            path.write_bytes(whole[:cut])
            _write(lesson.JsonlWriter(path), [last])
            text = path.read_text(encoding="utf-8")
            results.append({"left": whole[:cut].decode(), "text": text, **_read(lesson, path)})
        return results


Resumption = tuple[Sequence[Write], int | None, Sequence[Write]]  # writes, after which step, again


def resume_each(lesson: Any, cases: Sequence[Resumption]) -> list[Any]:
    """Write, if there is anything, resume after a step and write again; return what is read."""
    return [_resume(lesson, *case) for case in cases]


def _resume(
    lesson: Any, writes: Sequence[Write], after: int | None, again: Sequence[Write]
) -> list[tuple[int, dict[str, float]]]:
    with own_folder() as folder:
        path = folder / NAME
        if writes:
            _write(lesson.JsonlWriter(path), writes)
        _write(lesson.JsonlWriter(path, resume_after=after), again)
        return _records(lesson, path)


def damage_each(
    lesson: Any, cases: Sequence[tuple[Sequence[str], int | None]]
) -> list[dict[str, str]]:
    """Read and open files of these lines; return the errors, and the files in the end."""
    return [_damage(lesson, "".join(lines), after) for lines, after in cases]


def _damage(lesson: Any, text: str, after: int | None) -> dict[str, str]:
    with own_folder() as folder:
        path = folder / NAME
        path.write_text(text, encoding="utf-8")
        return {
            "read_jsonl": error_of(lambda: lesson.read_jsonl(path)),
            "JsonlWriter": error_of(lambda: lesson.JsonlWriter(path, resume_after=after).close()),
            "file": path.read_text(encoding="utf-8"),
        }


def watch(lesson: Any, text: str, after: int | None, last: Write) -> list[str]:
    """Resume, write and close; return all contents that the file had, in order."""
    with own_folder() as folder:
        path = folder / NAME
        path.write_text(text, encoding="utf-8")
        with watched(path) as contents:
            _write(lesson.JsonlWriter(path, resume_after=after), [last])
        return [content.decode() for content in contents]


def close_all(lesson: Any) -> dict[str, list[str]]:
    """Return the files and threads of each writer after it was closed, while it still exists."""
    with own_folder() as folder:
        before, left_of, kept = {*threading.enumerate()}, {}, []
        for kind, name in (("TensorBoardWriter", "run"), ("JsonlWriter", NAME)):
            writer = getattr(lesson, kind)(folder / name)
            kept.append(writer)
            _write(writer, [({"loss": 1.0}, 1)])
            left_of[kind] = open_in(folder) + _threads_after(before)
        return left_of


def _threads_after(before: set[threading.Thread]) -> list[str]:
    """Name the new threads that don't end within a second, or longer on a busy machine."""
    for _ in range(NUM_LOOKS):
        if not (left := {*threading.enumerate()} - before):
            break
        threading.Event().wait(LOOK_S)
    return sorted(f"the thread {thread.name}" for thread in left)


# TensorBoard


def draw(lesson: Any, writes: Sequence[Write]) -> list[Curves]:
    """Return the curves after the last write, and after close."""
    with own_folder() as folder:
        with closing(lesson.TensorBoardWriter(folder / "run")) as writer:
            for metrics, step in writes:
                writer.write(metrics, step)
            curves = _curves(folder / "run")
        return [curves, _curves(folder / "run")]


def draw_each(lesson: Any, cases: Sequence[Resumption]) -> list[Curves]:
    """Return the curves of runs that were resumed."""
    curves = []
    for writes, after, again in cases:
        with own_folder() as folder:
            _write(lesson.TensorBoardWriter(folder), writes)
            _write(lesson.TensorBoardWriter(folder, resume_after=after), again)
            curves.append(_curves(folder))
    return curves


def _curves(folder: Path) -> Curves:
    """Return what TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
