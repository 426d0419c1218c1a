"""Judges task 4.17: files that are cut at any moment, and what TensorBoard draws."""

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
from phase4.exports import Resumption, Write

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


@task("4.17")
def test_a_line_is_there_when_write_returns(grade: Grade) -> None:
    facts = grade.call(b.append, WRITES)
    for count, text in enumerate(facts["seen"], start=1):
        expect(
            f"the number of lines, each with a line feed, after {count} writes",
            *([text.count("\n"), text.endswith("\n")], [count, True]),
            "A process that is killed loses Python's buffer: flush each line.",
        )
    for (metrics, step), line in zip(WRITES, facts["seen"][-1].splitlines(), strict=True):
        right = {name: STRINGS.get(str(value), value) for name, value in metrics.items()}
        expect(
            *(f"the line of write({metrics}, {step})", _parsed(line), {"step": step, **right}),
            "It is an object with the step and these metrics, and nothing else. Python writes NaN "
            "and Infinity without quotes, which other readers refuse; json.dumps(…, "
            "allow_nan=False) raises.",
        )
    check(not facts["error"], f"reading what was written fails: {short(facts['error'])}")
    _check_read(facts["read"], WRITES, "after five writes", "Values are those that were written.")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line, parse_constant=lambda name: f"{name}, which JSON does not have")
    except ValueError:
        return line


@task("4.17")
def test_a_file_goes_on_wherever_it_was_cut(grade: Grade) -> None:
    writes: list[Write] = [({"loss": 3.25}, 1), ({"loss": math.nan, "ä": 1.0}, 2), ({"b": 3.5}, 3)]
    last: Write = ({"loss": 0.5}, 4)
    for facts in grade.call(b.kill_and_go_on, writes, last):
        case = f"a run was killed, which left {facts['left'][-30:]!r} at the end; another went on"
        check(
            not facts["error"],
            f"{case}. Reading then fails with {short(facts['error'])} The file: "
            f"{short(facts['text'])}. Cut an unfinished last line off before the next is written.",
        )
        kept = writes[: facts["left"].count("\n")]
        cause = "All lines with a line feed stay; one without is cut off."
        _check_read(facts["read"], [*kept, last], case, cause)


STEPS: list[Write] = [
    ({"loss": float(10 - step), "kind": float(kind)}, step)
    for step in range(6)
    for kind in range(1 + step % 2)
]


def _resumption(writes: list[Write], after: int | None) -> Resumption:
    step = (writes[-1][1] if writes else 0) + 1 if after is None else after + 1
    return writes, after, [({"loss": 0.5}, step), ({"loss": 0.25}, step + 1)]


def _left(case: Resumption) -> list[Write]:
    """Return the writes that stay."""
    writes, after, again = case
    return [(m, s) for m, s in writes if after is None or s <= after] + [*again]


@task("4.17")
def test_no_step_is_there_twice(grade: Grade) -> None:
    cases = [_resumption(STEPS, after) for after in (None, -1, 0, 3, 5, 9)] + [_resumption([], 3)]
    for case, records in zip(cases, grade.call(b.resume_each, cases), strict=True):
        writes, after, _ = case
        _check_read(
            *(records, _left(case)),
            f"{len(writes)} lines of the steps 0 to 5, opened with resume_after={after}, and two "
            "more",
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
    cases = [([FIRST, DAMAGED[what], *rest], 9) for what, rest in whats]
    for (what, rest), (lines, _), facts in zip(
        whats, cases, grade.call(b.damage_each, cases), strict=True
    ):
        is_last = "" if THIRD in rest else ", the last one with a line feed"
        for function in ("read_jsonl", "JsonlWriter"):
            _check_named(facts[function], function, 2, f"line 2 of {b.NAME}{is_last}, is {what}")
        expect(
            f"line 2 of {b.NAME} is {what}: the file after JsonlWriter has raised",
            *(facts["file"], "".join(lines), "Look at all lines first, and cut then."),
        )


def _check_named(text: str, function: str, line: int, case: str) -> None:
    place = text.replace(b.NAME, "", 1).partition("{")[0]
    check(
        b.NAME in text and re.search(rf"(?<!\d){line}(?!\d)", place),
        f"{case}. {function} should raise a ValueError that names the file and the line, counted "
        f"from 1; it raises {short(text) if text else 'nothing'}.",
    )


@task("4.17")
def test_what_may_be_damaged(grade: Grade) -> None:
    late = '{"step": 5, "loss": 1.5}\n'
    cases = [([FIRST, late, HALF + "\n", "\n"], 1), ([FIRST, HALF], None)]
    cut, unfinished = grade.call(b.damage_each, cases)
    expect(
        "with resume_after=1, where damaged lines follow one of step 5: error and file",
        *([cut["JsonlWriter"], cut["file"]], ["", FIRST]),
        "JsonlWriter cuts off the first later step and all that follows it, without reading on.",
    )
    _check_named(unfinished["read_jsonl"], "read_jsonl", 2, "the last line is unfinished")


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
    flushed, closed = grade.call(b.draw, writes)
    _check_curves(flushed, writes, "after the last write, before close (is it flushed?)")
    _check_curves(closed, writes, "after close")


@task("4.17")
def test_tensorboard_hides_steps_that_come_again(grade: Grade) -> None:
    writes: list[Write] = [({"loss": 4.0 - step / 4}, step) for step in range(1, 5)]
    cases = [_resumption(writes, after) for after in (None, 0, 2)]
    for case, curves in zip(cases, grade.call(b.draw_each, cases), strict=True):
        _check_curves(
            *(curves, _left(case)),
            f"steps 1 to 4, opened with resume_after={case[1]}, and two more",
        )
