"""Judges task 4.17: files that are cut at any moment, and TensorBoard's curves."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import joined
from judging.checks import short
from judging.expect import expect
from phase4 import exports as b
from phase4.exports import Case, Write

# Lines of JSON


def _check_read(records: Sequence[Any], writes: Sequence[Write], case: str, cause: str) -> None:
    """Check the records that read_jsonl has returned; as text, for there NaN equals NaN."""
    right = [(step, {name: float(value) for name, value in m.items()}) for m, step in writes]
    expect(f"{case}: what read_jsonl returns", str(records), str(right), cause)


WRITES: list[Write] = [
    ({"loss": 2.75, "samples_total": 64.0}, 1),
    ({"loss/train": 1e-7, "größe": 2.0, 'a "b"': -3.5}, 2),
    ({}, 2),
    ({"loss": 0.1 + 0.2}, 7),
    ({"loss": math.nan, "grad_norm": math.inf, "low": -math.inf}, 8),
]
STRINGS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _write_each(grade: Grade, cases: Sequence[Case]) -> list[Any]:
    """Write where nothing is damaged; return what came of each case."""
    results: list[Any] = grade.call(b.write_each, cases)
    for (content, after, _), facts in zip(cases, results, strict=True):
        check(
            not facts["error"],
            f"a file that holds {short(content or b'nothing')} is opened with resume_after={after}:"
            f" {facts['error']}. A last line without a line feed is cut off; no other is damaged.",
        )
    return results


@task("4.17")
def test_a_line_is_there_when_write_returns(grade: Grade) -> None:
    (facts,) = _write_each(grade, [(None, None, WRITES)])
    for count, text in enumerate(facts["seen"], start=1):
        expect(
            f"the number of lines, each with a line feed, after {count} writes",
            *([text.count("\n"), text.endswith("\n")], [count, True]),
            "A process that is killed loses Python's buffer: flush each line.",
        )
    for (metrics, step), line in zip(WRITES, facts["file"].splitlines(), strict=True):
        right = {name: STRINGS.get(str(value), value) for name, value in metrics.items()}
        expect(
            *(f"the line of write({metrics}, {step})", _parsed(line), {"step": step, **right}),
            "It is an object with the step and these metrics, and nothing else. Python writes NaN "
            "and Infinity without quotes, which other readers refuse; json.dumps(…, "
            "allow_nan=False) raises.",
        )
    check(not facts["unread"], f"reading what was written fails: {short(facts['unread'])}")
    _check_read(facts["read"], WRITES, "after five writes", "Values are those that were written.")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line, parse_constant=lambda name: f"{name}, which JSON does not have")
    except ValueError:
        return line


def _file_of(grade: Grade, writes: Sequence[Write]) -> bytes:
    content: str = _write_each(grade, [(None, None, writes)])[0]["file"]
    return content.encode()


@task("4.17")
def test_a_file_goes_on_wherever_it_was_cut(grade: Grade) -> None:
    writes: list[Write] = [({"loss": 3.25}, 1), ({"loss": math.nan, "ä": 1.0}, 2), ({"b": 3.5}, 3)]
    last: Write = ({"loss": 0.5}, 4)
    whole = _file_of(grade, writes)
    cases: list[Case] = [(whole[:cut], None, [last]) for cut in range(len(whole) + 1)]
    for (left, *_), facts in zip(cases, _write_each(grade, cases), strict=True):
        assert left is not None
        case = f"a run was killed, which left {left[-30:]!r} at the end; another went on"
        check(
            not facts["unread"],
            f"{case}. Reading then fails with {short(facts['unread'])} The file: "
            f"{short(facts['file'])}. Cut an unfinished last line off before the next is written.",
        )
        kept = writes[: left.count(b"\n")]
        cause = "All lines with a line feed stay; one without is cut off."
        _check_read(facts["read"], [*kept, last], case, cause)


STEPS: list[Write] = [
    ({"loss": float(10 - step), "kind": float(kind)}, step)
    for step in range(6)
    for kind in range(1 + step % 2)
]


def _again(after: int) -> list[Write]:
    return [({"loss": 0.5}, after + 1), ({"loss": 0.25}, after + 2)]


def _kept(writes: Sequence[Write], after: int | None) -> list[Write]:
    return [(m, step) for m, step in writes if after is None or step <= after]


@task("4.17")
def test_no_step_is_there_twice(grade: Grade) -> None:
    whole = _file_of(grade, STEPS)
    cases: list[Case] = [
        *((whole, after, _again(5 if after is None else after)) for after in (None, -1, 0, 3, 9)),
        (None, 3, _again(3)),
    ]
    for (content, after, again), facts in zip(cases, _write_each(grade, cases), strict=True):
        kept = _kept(STEPS, after) if content else []
        _check_read(
            *(facts["read"], [*kept, *again]),
            f"{'lines of the steps 0 to 5' if content else 'no file'}, opened with "
            f"resume_after={after}, and two more",
            "Lines of later steps than resume_after go, all others stay.",
        )


FIRST, THIRD, HALF = '{"step": 1, "loss": 3.5}\n', '{"step": 3, "loss": 1.5}\n', '{"st'
DAMAGED = {  # second lines
    "half a line": '{"step": 2, "lo\n',
    "an empty line": "\n",
    "a line without a step": '{"loss": 2.5}\n',
    "a value that is not a number": '{"step": 2, "loss": null}\n',
    "a list": "[1, 2]\n",
}


@task("4.17")
def test_nothing_is_skipped_silently(grade: Grade) -> None:
    whats = [(what, rest) for what in DAMAGED for rest in ([THIRD], [], [HALF])]
    texts = ["".join((FIRST, DAMAGED[what], *rest)) for what, rest in whats]
    results = grade.call(b.write_each, [(text.encode(), 9, []) for text in texts])
    for (what, rest), text, facts in zip(whats, texts, results, strict=True):
        is_last = "" if THIRD in rest else ", the last one with a line feed"
        for function, error in (("read_jsonl", "before"), ("JsonlWriter", "error")):
            _check_named(facts[error], function, f"line 2 of {b.NAME}{is_last}, is {what}")
        expect(
            f"line 2 of {b.NAME} is {what}: the file after JsonlWriter has raised",
            *(facts["file"], text, "Look at all lines first, and cut then."),
        )


def _check_named(text: str, function: str, case: str) -> None:
    place = text.replace(b.NAME, "", 1).partition("{")[0]
    check(
        b.NAME in text and re.search(r"(?<!\d)2(?!\d)", place),
        f"{case}. {function} should raise a ValueError that names the file and the line, counted "
        f"from 1; it raises {short(text) if text else 'nothing'}.",
    )


@task("4.17")
def test_what_may_be_damaged(grade: Grade) -> None:
    late = '{"step": 5, "loss": 1.5}\n'
    damaged: Case = f"{FIRST}{late}{HALF}\n\n".encode(), 1, []
    cut, unfinished = grade.call(b.write_each, [damaged, (f"{FIRST}{HALF}".encode(), None, [])])
    expect(
        "with resume_after=1, where damaged lines follow one of step 5: error and file",
        *([cut["error"], cut["file"]], ["", FIRST]),
        "JsonlWriter cuts off the first later step and all that follows it, without reading on.",
    )
    _check_named(unfinished["before"], "read_jsonl", "the last line is unfinished")


@task("4.17")
@pytest.mark.parametrize("after", [None, 2])
def test_what_is_kept_is_always_there(grade: Grade, after: int | None) -> None:
    lines = [f'{{"step": {step}, "loss": {step / 4}}}\n' for step in (1, 2, 3, 4)]
    kept = "".join(lines[:after])
    for content in grade.call(b.watch, "".join(lines) + HALF, after, ({"loss": 0.5}, 5)):
        check(
            content.startswith(kept),
            f"a file with the steps 1 to 4 and half a line is opened with resume_after={after}. It "
            f"should never hold less than the lines that are kept, {len(kept)} bytes; at one "
            f"moment it held {len(content)} bytes, {short(content)}. Who is killed then loses "
            "the history: cut it with os.truncate, in place, and don't write again what is there.",
        )


@task("4.17")
def test_files_are_closed(grade: Grade) -> None:
    for writer, left in grade.call(b.close_all).items():
        check(
            not left,
            f"after close, a {writer} should have no file open and no thread; there are still "
            f"{joined(left)}. A run that makes many writers has no descriptors left one day.",
        )


# TensorBoard


def _check_curves(curves: Mapping[str, Any], writes: Sequence[Write], case: str) -> None:
    right: dict[str, list[list[float]]] = {}
    for metrics, step in writes:
        for name, value in metrics.items():
            right.setdefault(name, []).append([step, value])
    drawn = {name: [list(point) for point in points] for name, points in curves.items()}
    what = f"{case}: the points (step, value) that TensorBoard draws"
    expect(what, sorted(drawn.items()), sorted(right.items()))


@task("4.17")
def test_tensorboard_draws_the_curves(grade: Grade) -> None:
    writes: list[Write] = [
        ({"loss/train": 3.0, "accuracy": 0.25}, 1),
        ({"loss/train": 2.5, "accuracy": 0.5}, 2),
        ({"loss/train": 2.25}, 10),
    ]
    ((flushed, closed),) = grade.call(b.draw_each, [([], None, writes)])
    _check_curves(flushed, writes, "after the last write, before close (is it flushed?)")
    _check_curves(closed, writes, "after close")


@task("4.17")
def test_tensorboard_hides_steps_that_come_again(grade: Grade) -> None:
    writes: list[Write] = [({"loss": 4.0 - step / 4}, step) for step in range(1, 5)]
    cases = [(writes, after, _again(4 if after is None else after)) for after in (None, 0, 2)]
    for (_, after, again), (_, curves) in zip(cases, grade.call(b.draw_each, cases), strict=True):
        _check_curves(
            *(curves, [*_kept(writes, after), *again]),
            f"steps 1 to 4, opened with resume_after={after}, and two more",
        )
