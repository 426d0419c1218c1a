"""Judges task 4.17: what is in files, whoever is killed when, and what TensorBoard draws."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted, joined
from judging.checks import short
from phase4 import exports as b
from phase4.exports import Write

# Lines of JSON


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_read(found: Sequence[Any], expected: Sequence[Write], case: str, cause: str) -> None:
    """Check what read_jsonl has returned."""
    right = [(step, {name: float(value) for name, value in m.items()}) for m, step in expected]
    check(
        str(found) == str(right),  # as text, in which NaN equals NaN
        f"{case}, read_jsonl should return {short(str(right))}; it returns {short(str(found))}. "
        f"{cause}",
    )


@task("4.17")
def test_a_line_is_there_when_write_returns(grade: Grade) -> None:
    writes: list[Write] = [
        ({"loss": grade.random.uniform(1, 9), "samples_total": 64.0}, 1),
        ({"loss/train": 1e-7, "größe": 2.0, 'a "b"': -3.5}, 2),
        ({}, 2),
        ({"loss": 0.1 + 0.2}, 7),
    ]
    found = grade.call(b.append, writes)
    for count, text in enumerate(found["seen"], start=1):
        lines = text.splitlines()
        check(
            len(lines) == count and text.endswith("\n"),
            f"after {counted(count, 'write')} the file should hold {counted(count, 'line')}, each "
            f"with a line feed; it holds {len(lines)}: {short(text)}. A process that "
            "is killed loses Python's buffer: flush each line.",
        )
    for (metrics, step), line in zip(writes, found["closed"].splitlines(), strict=True):
        check(
            json.loads(line) == {"step": step, **metrics},
            f"the line of write({metrics}, {step}) should be an object with the step and these "
            f"metrics, and nothing else; it is {short(line)}.",
        )
    check(not found["error"], f"reading what was written fails: {short(found['error'])}")
    _check_read(found["read"], writes, "after four writes", "Values are those that were written.")


@task("4.17")
def test_numbers_that_json_does_not_have(grade: Grade) -> None:
    metrics = {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf}
    found = grade.call(b.append, [(metrics, 4)])
    line = found["closed"]
    try:
        fields = json.loads(line, parse_constant=_no_constant)
    except ValueError as error:
        check(
            False,
            f"the line {short(line)} should be JSON: {error}. Python writes NaN and Infinity "
            "without quotes, which other readers refuse; json.dumps(…, allow_nan=False) says so.",
        )
    right = {"step": 4, "loss": "NaN", "grad_norm": "Infinity", "low": "-Infinity"}
    check(fields == right, f"the line should hold {right}; it holds {fields}.")
    check(not found["error"], f"reading what was written fails: {short(found['error'])}")
    _check_read(found["read"], [(metrics, 4)], "with these", "They come back as numbers.")


@task("4.17")
def test_a_file_goes_on_wherever_it_was_cut(grade: Grade) -> None:
    writes: list[Write] = [({"loss": 3.25}, 1), ({"loss": math.nan, "ä": 1.0}, 2), ({"b": 3.5}, 3)]
    last: Write = ({"loss": 0.5}, 4)
    for found in grade.call(b.kill_and_go_on, writes, last):
        count = found["left"].count("\n")
        case = f"a run was killed, which left {found['left'][-30:]!r} at the end; another went on"
        check(
            not found["error"],
            f"{case}. Reading then fails with {short(found['error'])} The file: "
            f"{short(found['text'])}. Cut an unfinished last line off before the next is written.",
        )
        _check_read(
            found["read"],
            [*writes[:count], last],
            case,
            "All lines with a line feed stay; one without is cut off.",
        )


@task("4.17")
@pytest.mark.parametrize("after", [None, -1, 0, 3, 5, 9])
def test_no_step_is_there_twice(grade: Grade, after: int | None) -> None:
    writes: list[Write] = [
        ({"loss": float(10 - step), "kind": float(kind)}, step)
        for step in range(6)
        for kind in range(1 + step % 2)
    ]
    step = 6 if after is None else after + 1
    again: list[Write] = [({"loss": 0.5}, step), ({"loss": 0.25}, step + 1)]
    found = grade.call(b.resume, writes, after, again)
    kept = [(m, s) for m, s in writes if after is None or s <= after]
    _check_read(
        found,
        [*kept, *again],
        f"lines of the steps 0 to 5, opened with resume_after={after}, and two more",
        "Lines of later steps than resume_after go, all others stay.",
    )


@task("4.17")
def test_resume_where_no_file_is(grade: Grade) -> None:
    last: Write = ({"loss": 0.5}, 4)
    _check_read(grade.call(b.begin_with_resume, last), [last], "in a new file", "")


@task("4.17")
@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"step": 2, "lo\n', "half a line"),
        ("\n", "an empty line"),
        ('{"loss": 2.5}\n', "a line without a step"),
        ('{"step": 2, "loss": null}\n', "a value that is no number"),
        ("[1, 2]\n", "a list"),
    ],
)
def test_nothing_is_skipped_silently(grade: Grade, line: str, what: str) -> None:
    first, third, half = '{"step": 1, "loss": 3.5}\n', '{"step": 3, "loss": 1.5}\n', '{"st'
    cases = [([first, line, *rest], 9) for rest in ([third], [], [half])]
    for (lines, _), found in zip(cases, grade.call(b.damage_each, cases), strict=True):
        is_last = "" if third in lines else ", the last one with a line feed"
        for function in ("read_jsonl", "JsonlWriter"):
            text = found[function]
            said = text.replace(b.NAME, "", 1)
            check(
                b.NAME in text and re.search(r"(?<!\d)2(?!\d)", said.partition("{")[0]),
                f"line 2 of {b.NAME}{is_last}, is {what}. {function} should raise a ValueError "
                f"that names the file and the line, counted from 1; it raises "
                f"{short(text) if text else 'nothing'}.",
            )
        check(
            found["file"] == "".join(lines),
            f"line 2 of {b.NAME} is {what}. JsonlWriter should leave the file as it is when it "
            f"raises; it held {short(''.join(lines))}, and holds {short(found['file'])}. Look at "
            "all lines first, and cut then.",
        )


@task("4.17")
def test_damage_behind_the_cut(grade: Grade) -> None:
    kept, behind = '{"step": 1, "loss": 3.5}\n', ['{"step": 5, "loss": 1.5}\n', '{"st\n', "\n"]
    found = grade.call(b.damage, [kept, *behind], 1)
    check(
        not found["JsonlWriter"] and found["file"] == kept,
        f"with resume_after=1, {b.NAME} holds a line of step 1, one of step 5 and damaged ones. "
        "JsonlWriter should cut off the line of step 5 and all that follows it, without reading "
        f"on; it raises {short(found['JsonlWriter']) if found['JsonlWriter'] else 'nothing'}, and "
        f"the file then holds {short(found['file'])}.",
    )


@task("4.17")
@pytest.mark.parametrize("after", [None, 2])
def test_what_is_kept_is_always_there(grade: Grade, after: int | None) -> None:
    lines = [f'{{"step": {step}, "loss": {step / 4}}}\n' for step in (1, 2, 3, 4)]
    kept = "".join(lines[:after])
    for held in grade.call(b.watch, "".join(lines) + '{"st', after, ({"loss": 0.5}, 5)):
        check(
            held.startswith(kept),
            f"a file with the steps 1 to 4 and half a line is opened with resume_after={after}. It "
            f"should never hold less than the lines that are kept, {len(kept)} bytes; at one "
            f"moment it held {len(held)} bytes, {short(held)}. Who is killed then loses "
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


@task("4.17")
def test_a_file_that_is_being_written(grade: Grade) -> None:
    lines = ['{"step": 1, "loss": 3.5}\n', '{"step": 2, "lo']
    text = grade.call(b.damage, lines, None)["read_jsonl"]
    check(
        b.NAME in text,
        "the last line is unfinished. read_jsonl should raise a ValueError that names the file; it "
        f"raises {short(text) if text else 'nothing'}.",
    )


# TensorBoard


def _check_curves(found: Mapping[str, Any], expected: Mapping[str, Any], case: str) -> None:
    as_lists = {name: [list(point) for point in points] for name, points in found.items()}
    right = {name: [list(point) for point in points] for name, points in expected.items()}
    check(
        as_lists == right,
        f"{case}, TensorBoard should draw {short(str(right))} (step, value); it draws "
        f"{short(str(as_lists))}.",
    )


@task("4.17")
def test_tensorboard_draws_the_curves(grade: Grade) -> None:
    writes: list[Write] = [
        ({"loss/train": 3.0, "accuracy": 0.25}, 1),
        ({"loss/train": 2.5, "accuracy": 0.5}, 2),
        ({"loss/train": 2.25}, 10),
    ]
    flushed, closed = grade.call(b.draw, writes)
    expected = {
        "loss/train": [(1, 3.0), (2, 2.5), (10, 2.25)],
        "accuracy": [(1, 0.25), (2, 0.5)],
    }
    _check_curves(flushed, expected, "after the last write, before close (is it flushed?)")
    _check_curves(closed, expected, "after close")


@task("4.17")
@pytest.mark.parametrize("after", [None, 0, 2])
def test_tensorboard_hides_steps_that_come_again(grade: Grade, after: int | None) -> None:
    writes: list[Write] = [({"loss": 4.0 - step / 4}, step) for step in range(1, 5)]
    begin = 5 if after is None else after + 1
    again: list[Write] = [({"loss": 0.5}, begin), ({"loss": 0.25}, begin + 1)]
    found = grade.call(b.draw_on, writes, after, again)
    kept = [(m, s) for m, s in writes if after is None or s <= after]
    expected = {"loss": [(step, metrics["loss"]) for metrics, step in [*kept, *again]]}
    case = f"steps 1 to 4, opened with resume_after={after}, and {begin} and {begin + 1}"
    _check_curves(found, expected, case)
