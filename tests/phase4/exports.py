"""Bodies for task 4.17: files that are cut, closed and damaged, and curves that are continued."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from judging.calls import error_of, typed
from judging.folders import own_folder
from phase4.file_history import open_in
from phase4.interleaved import threads_left
from phase4.watched_file import watched

Write = tuple[Mapping[str, float], int]  # metrics and step
NAME = "metrics.jsonl"
Curves = dict[str, list[tuple[int, float]]]


# Lines of JSON

Case = tuple[bytes | None, int | None, Sequence[Write]]  # file that is there, resume_after, writes


def write_each(lesson: Any, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Open a file of each case and write; return the errors, and the contents of the file.

    Also the records that are read in the end.
    """
    return [_write_one(lesson, *case) for case in cases]


def _write_one(
    lesson: Any, content: bytes | None, after: int | None, writes: Sequence[Write]
) -> dict[str, Any]:
    with own_folder() as folder:
        path, seen, records = folder / NAME, list[str](), list[Any]()

        def write() -> None:
            with closing(_writer(lesson.JsonlWriter, path, after)) as writer:
                for metrics, step in writes:
                    writer.write(metrics, step)
                    seen.append(path.read_text(encoding="utf-8"))

        if content is not None:
            path.write_bytes(content)
        before = "" if content is None else error_of(lambda: lesson.read_jsonl(path))
        facts = {"before": before, "error": error_of(write), "seen": seen}
        facts["file"] = path.read_text(encoding="utf-8")
        return facts | {
            "unread": error_of(lambda: records.extend(_read(lesson, path))),
            "read": records,
        }


def _writer(kind: Any, path: Path, after: int | None) -> Any:
    return kind(path) if after is None else kind(path, resume_after=after)


def _read(lesson: Any, path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(r.step, dict(r.metrics)) for r in typed("read_jsonl", lesson.read_jsonl(path), list)]


def _write(writer: Any, writes: Sequence[Write]) -> None:
    with closing(writer):
        for metrics, step in writes:
            writer.write(metrics, step)


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
            left_of[kind] = open_in(folder) + threads_left(before)
        return left_of


# TensorBoard


Resumption = tuple[Sequence[Write], int | None, Sequence[Write]]  # writes, after which step, again


def draw_each(lesson: Any, cases: Sequence[Resumption]) -> list[tuple[Curves, Curves]]:
    """Write, if there is anything, resume and write again; return the curves, also before close."""
    curves = []
    for writes, after, again in cases:
        with own_folder() as folder:
            if writes:
                _write(lesson.TensorBoardWriter(folder), writes)
            with closing(_writer(lesson.TensorBoardWriter, folder, after)) as writer:
                for metrics, step in again:
                    writer.write(metrics, step)
                flushed = _curves(folder)
            curves.append((flushed, _curves(folder)))
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
