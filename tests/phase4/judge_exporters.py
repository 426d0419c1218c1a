"""Judges task 4.17: the page for Prometheus, its clients, cut files, and curves."""

import errno
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distlab.grade import Grade, check, task
from distlab.util.text import joined
from judging.checks import short
from judging.expect import expect
from phase4 import exporters as b
from phase4.exporters import Answer, Case, Write
from phase4_production.given import CONTENT_TYPE

# The page for Prometheus, and clients that might disturb training

LABELS = {"run": "a", "rank": "3", "host": "n17"}
Sample = tuple[str, float]  # kind and value


def _text(answer: Answer) -> str:
    status, content_type, text = answer
    expect("the status of GET /metrics", status, 200)
    expect(
        "the page's Content-Type",
        *(content_type.lower().replace(" ", ""), CONTENT_TYPE.replace(" ", "")),
        "By it, Prometheus knows the format.",
    )
    check(
        text.endswith("\n"),
        f"the last line of the page should end with a line feed, as all others; the page ends with "
        f"{text[-40:]!r}.",
    )
    return text


def _refused(text: str) -> str:
    """Describe the page's first line that cannot be parsed on its own, or else the whole page."""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            list(text_string_to_metric_families(f"{line}\n"))
        except Exception:
            return f"line {number} of the page, {line[:200]!r}"
    return f"the page as a whole, {text[:200]!r}"


def _samples(answer: Answer, labels: Mapping[str, str]) -> dict[str, Sample]:
    """Return a page's samples as Prometheus' own parser reads them."""
    text = _text(answer)
    try:
        families = [*text_string_to_metric_families(text)]
    except Exception as error:
        check(False, f"Prometheus refuses {_refused(text)}. Its parser says {error!r}.")
    samples = [(f.type, s) for f in families for s in f.samples]
    twice = [name for name, count in Counter(s.name for _, s in samples).items() if count > 1]
    check(
        not twice,
        f"{twice} should be on the page once, with its newest value; it is there more often, and "
        "Prometheus refuses that.",
    )
    for _, sample in samples:
        expect(
            *(f"the labels of the sample {sample.name}", sample.labels, dict(labels)),
            "In a value of a label, backslash, double quote and line feed are escaped.",
        )
    return {sample.name: (kind, float(sample.value)) for kind, sample in samples}


def _check_page(answer: Answer, labels: Mapping[str, str], right: Mapping[str, float]) -> None:
    samples = _samples(answer, labels)
    expect(
        *("the metrics of the page", sorted(samples), sorted(right)),
        "Letters, digits, _ and : stay, all else becomes _, and a digit gets a _ in front of it; "
        "the step is there too.",
    )
    for name, (kind, value) in samples.items():
        spelled = re.search(rf"^{name}\{{.*\}} (\S+)$", answer[2], re.MULTILINE)
        expect(
            *(f"the value of {name} after the last write", str(value), str(float(right[name]))),
            f"A metric that isn't written keeps its value. Its line is {spelled and spelled[0]!r}.",
        )
        if spelled and not math.isfinite(value):
            wanted = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(value)]
            expect(
                *(f"the spelling of {name}, {value},", spelled[1], wanted),
                "Python spells such numbers nan, inf and -inf.",
            )
        wanted = "counter" if name.endswith("_total") else "gauge"
        expect(
            *(f"the type of {name}, in a line '# TYPE {name} {wanted}' before it,", kind, wanted),
            "A name that ends in _total is that of a counter.",
        )


NAMES = ("loss/train", "job:loss", "grad-norm (all)", "5xx.rate", "größe", "9/sent_total")
ODD_LABELS = {
    "quoted": 'a "b" c',
    "path": r"C:\new\run",
    "lines": "first\nsecond",
    "all": 'x\\"\ny\\n',
    "empty": "",
    "odd": "{a=1},größe # 1",
}
PAGES: dict[str, tuple[Mapping[str, str], list[Write]]] = {  # labels and writes
    "numbers": (LABELS, [({"loss": 2.718, "samples_total": 10**12 + 1, "lr": 3e-07}, 123_456)]),
    "names": ({}, [({name: place for place, name in enumerate(NAMES)}, 2)]),
    "labels": (ODD_LABELS, [({"loss": 1.5}, 3)]),
    "not finite": (
        LABELS,
        [({"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "tiny": 1e-300}, 1)],
    ),
    "several writes": (
        LABELS,
        [
            ({"loss": 3.0, "samples_total": 64}, 1),
            ({"loss": 2.0, "samples_total": 128}, 2),
            ({"accuracy": 0.75}, 2),
            ({"samples_total": 192, "loss": 2.5}, 3),
        ],
    ),
}


@task("4.17")
@pytest.mark.parametrize("what", PAGES)
def test_prometheus_reads_the_page(grade: Grade, what: str) -> None:
    labels, writes = PAGES[what]
    known: dict[str, float] = {}
    for (metrics, step), answer in zip(writes, grade.call(b.show, labels, writes), strict=True):
        known |= {_legal(name): value for name, value in metrics.items()} | {"step": step}
        _check_page(answer, labels, known)


def _legal(name: str) -> str:
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    return f"_{name}" if name[0].isdigit() else name


# Threads

METRICS = ("a", "b", "c", "d_total")


def _check_one_value(answer: Answer, allowed: Sequence[int], how: str) -> None:
    """Check that all metrics and the step have the same value, and that it is in ``allowed``."""
    values = {name: value for name, (_, value) in _samples(answer, {}).items()}
    least, most = allowed[0], allowed[-1]
    value = f"the value {least}" if least == most else f"one value, of {least} to {most}"
    check(
        values in [dict.fromkeys((*METRICS, "step"), float(value)) for value in allowed],
        f"{how}: all metrics and the step should have {value}; the page has {values}. Make the "
        "whole page, or a new dict, and put it in the place of the old one at once; or keep "
        "requests waiting until a write is over. A dict that is copied before it is changed, name "
        "by name, has old and new values, too.",
    )


@task("4.17")
def test_a_request_during_a_write_sees_old_or_new(grade: Grade) -> None:
    first, last, during = grade.call(b.fetch_at_each_line, METRICS)
    _check_one_value(first, (1,), "a page before the second write")
    for line, answer in during:
        how = f"a write changes all from 1 to 2, and a request is answered before {line}"
        _check_one_value(answer, (1, 2), how)
    _check_one_value(last, (2,), "a page after the second write")


@task("4.17")
def test_a_write_during_a_request(grade: Grade) -> None:
    during, last, value = grade.call(b.write_at_each_line, METRICS)
    how = "while a page is built, other threads write, and each write adds 1 to all metrics"
    _check_one_value(during, range(1, value + 1), how)
    _check_one_value(last, (value,), "a page after that")


# Clients


@task("4.17")
def test_clients_that_vanish_or_ask_for_other_paths(grade: Grade) -> None:
    statuses, printed = grade.call(b.be_odd_clients, ["/metrics", "/metrics?name=loss", *OTHERS])
    right = {"/metrics": 200, "/metrics?name=loss": 200, **dict.fromkeys(OTHERS, 404)}
    expect(
        "the statuses of GET, after clients that have gone before their answer,",
        *(statuses, right, "In self.path, a query follows the path."),
    )
    check(
        not printed,
        "neither a request nor a client that breaks the connection off should leave anything in "
        f"the log of training; printed was, at the end, {short(printed.strip()[-60:])}. "
        "BaseHTTPRequestHandler writes a line for each request in log_message, and socketserver "
        "prints a traceback in handle_error.",
    )


OTHERS = ("/", "/metric", "/metrics/loss", "/favicon.ico")


@task("4.17")
def test_clients_that_say_nothing(grade: Grade) -> None:
    still_there = (
        "A client has connected and sends nothing. It should be dropped after REQUEST_S, for which "
        "a tenth of a second stands here; it is still connected after twice REQUEST_S. Each such "
        "client keeps a thread and a socket for good: BaseHTTPRequestHandler has a class "
        "attribute timeout, None by default."
    )
    is_dropped, left = grade.run(b.say_nothing, 1, if_stuck=still_there).results[0]
    check(is_dropped, still_there)
    expect("the threads that run when the exporter is closed and its client dropped", left, [])


# Ports


@task("4.17")
def test_an_exporter_takes_a_port_and_frees_it(grade: Grade) -> None:
    facts = grade.call(b.listen_again)
    expect(
        *("the addresses of an exporter by default", facts["by default"], ["127.0.0.1"]),
        "0.0.0.0 and :: are all addresses of the machine: anyone who reaches the port can "
        "read the numbers, without a password.",
    )
    check(
        not facts["threads"],
        f"the threads {facts['threads']} are not daemons: Python waits for them when training has "
        "ended, and the process never does.",
    )
    check(
        not facts["is open"] and not facts["error"],
        f"after close, the port should be free; in {b.TRIES} tries it never was: "
        + (f"another exporter can't take it: {short(facts['error'])}. " if facts["error"] else "")
        + ("a connection is still accepted. " if facts["is open"] else "")
        + "shutdown ends the loop, server_close closes the socket.",
    )
    expect("the threads of exporters that were closed", facts["left"], [])
    asked, taken = facts["ports"]
    expect("exporter.port, where a port is given,", taken, asked)
    check(
        facts["localhost"] in (["127.0.0.1"], ["::1"]),
        f"with host='localhost', the exporter should listen there; it listens at "
        f"{facts['localhost']}.",
    )


@task("4.17")
def test_a_port_that_cannot_be_taken(grade: Grade) -> None:
    facts = grade.call(b.be_refused)
    first, second = facts["ports"]
    check(
        0 not in (first, second) and first != second,
        f"two exporters with port 0 should take two free ports; exporter.port is {first} and "
        f"{second}. Ask the server which port it has taken.",
    )
    for rank, text in enumerate(facts["texts"]):
        check(
            f'rank="{rank}"' in text,
            f"of two exporters in one process, that of rank {rank} answers with {short(text)}. "
            "Each has a page of its own.",
        )
    text = _checked_refusal(facts["in use"], b.LOOPBACK, first, os.strerror(errno.EADDRINUSE))
    check(
        re.search(r"\b0\b|other|free|own|different", text.replace("127.0.0.1", "")),
        f"the port {first} is in use. The text of the OSError should say what to do: another port "
        f"for each rank, or 0 for any free one. It is {text!r}.",
    )
    _check_blame(facts["above"], b.LOOPBACK, b.ABOVE, "port must be 0-65535")
    if "elsewhere" in facts:
        _check_blame(facts["elsewhere"], b.FOREIGN, first, os.strerror(errno.EADDRNOTAVAIL))


def _check_blame(refusal: Mapping[str, str], host: str, port: int, reason: str) -> None:
    text = _checked_refusal(refusal, host, port, reason)
    check(
        not re.search(r"(another|other|different) (process|rank|program)|in use", text),
        f"no program can listen at {host}, port {port}, and no other process is to blame. The text "
        "should say so only if the error is EADDRINUSE, and else what to check: the host, the "
        f"port. It is {text!r}.",
    )


def _checked_refusal(refusal: Mapping[str, str], host: str, port: int, reason: str) -> str:
    names = (host, f"{port}", reason)
    check(
        refusal["kind"] == "OSError" and all(name in refusal["text"] for name in names),
        f"listening at {host}, port {port}, is impossible ({reason}): that should be an OSError "
        f"whose text names host, port and this reason; it is {refusal['kind'] or 'none'} "
        f"{refusal['text']!r}. For ports that don't exist, Python raises an OverflowError.",
    )
    return refusal["text"]


# Files cut off at any point, and TensorBoard's curves


# Lines of JSON


def _check_read(records: Sequence[Any], writes: Sequence[Write], case: str, cause: str) -> None:
    """Check the records that read_jsonl returned; they are compared as text, so NaN equals NaN."""
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
    """Write to files that are not damaged; return what was observed in each case."""
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
DAMAGED = {  # kind of damage -> second line of a file
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
            *(facts["file"], text, "Check all lines before you cut."),
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
