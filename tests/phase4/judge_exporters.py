"""Judges task 4.17: what Prometheus, a reader of lines and TensorBoard get to see."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distlab.grade import Grade, check, task
from judging.checks import short
from phase4 import exports as b
from phase4.exports import Answer, Write

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = {"run": "a", "rank": "3", "host": "n17"}
Sample = tuple[str, float]  # kind and value


# Prometheus


def _text(answer: Answer) -> str:
    status, content_type, text = answer
    check(
        status == 200,
        f"GET /metrics should be answered with 200; the status is {status}.",
    )
    check(
        content_type.lower().replace(" ", "") == CONTENT_TYPE.replace(" ", ""),
        f"the page's Content-Type should be '{CONTENT_TYPE}', by which Prometheus knows the "
        f"format; it is '{content_type}'.",
    )
    check(
        text.endswith("\n"),
        f"the last line of the page should end with a line feed, as all others; the page ends with "
        f"{text[-40:]!r}.",
    )
    return text


def _samples(answer: Answer, labels: Mapping[str, str]) -> dict[str, Sample]:
    """Return the samples of a page as Prometheus' own parser reads them."""
    text = _text(answer)
    try:
        families = [*text_string_to_metric_families(text)]
    except Exception as error:
        check(False, f"Prometheus can't read the page: {error!r}. The page: {short(text)}")
    samples = [(f.type, s) for f in families for s in f.samples]
    twice = [name for name, count in Counter(s.name for _, s in samples).items() if count > 1]
    check(
        not twice,
        f"{twice} should be on the page once, with its newest value; it is there more often, and "
        "Prometheus refuses that.",
    )
    for _, sample in samples:
        check(
            sample.labels == dict(labels),
            f"the sample {sample.name} should have the labels {dict(labels)}; Prometheus reads "
            f"{sample.labels}. In a value of a label, backslash, double quote and line feed are "
            "escaped.",
        )
    return {sample.name: (kind, float(sample.value)) for kind, sample in samples}


def _check_samples(found: Mapping[str, Sample], metrics: Mapping[str, float], step: int) -> None:
    expected = {**metrics, "step": step}
    check(
        found.keys() == expected.keys(),
        f"the page should have the metrics {sorted(expected)}; it has {sorted(found)}. Letters, "
        "digits, _ and : stay, all else becomes _; the step is there too.",
    )
    for name, (kind, value) in found.items():
        check(
            value == expected[name] or (math.isnan(value) and math.isnan(expected[name])),
            f"{name} should be {expected[name]} after the last write; it is {value}.",
        )
        right = "counter" if name.endswith("_total") else "gauge"
        check(
            kind == right,
            f"{name} should have the type {right}, in a line '# TYPE {name} {right}' before it; "
            f"Prometheus reads {kind}. A name that ends in _total is that of a counter.",
        )


@task("4.17")
def test_prometheus_reads_the_page(grade: Grade) -> None:
    metrics = {
        "loss": grade.random.uniform(0.1, 9.0),
        "samples_total": grade.random.randrange(10**6, 10**12),
        "learning_rate": 3e-07,
        "tokens_per_second": float(grade.random.randrange(10**5)),
    }
    step = grade.random.randrange(10**6)
    (answer,) = grade.call(b.show, LABELS, [(metrics, step)])
    _check_samples(_samples(answer, LABELS), metrics, step)


@task("4.17")
def test_names_become_legal(grade: Grade) -> None:
    names = {
        "loss/train": "loss_train",
        "job:loss": "job:loss",
        "grad-norm (all)": "grad_norm__all_",
        "5xx.rate": "_5xx_rate",
        "größe": "gr__e",
        "9/sent_total": "_9_sent_total",
    }
    values = dict(zip(names, range(1, 9), strict=False))
    (answer,) = grade.call(b.show, {}, [(values, 2)])
    _check_samples(_samples(answer, {}), {names[name]: values[name] for name in names}, 2)


@task("4.17")
def test_values_of_labels_are_escaped(grade: Grade) -> None:
    labels = {
        "quoted": 'a "b" c',
        "path": r"C:\new\run",
        "lines": "first\nsecond",
        "all": 'x\\"\ny\\n',
        "empty": "",
        "odd": "{a=1},größe # 1",
    }
    (answer,) = grade.call(b.show, labels, [({"loss": 1.5}, 3)])
    _check_samples(_samples(answer, labels), {"loss": 1.5}, 3)


@task("4.17")
def test_how_prometheus_spells_numbers(grade: Grade) -> None:
    metrics = {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "tiny": 1e-300}
    (answer,) = grade.call(b.show, LABELS, [(metrics, 1)])
    _check_samples(_samples(answer, LABELS), metrics, 1)
    spelled = dict(re.findall(r"^(\w+)\{[^}]*\} (\S+)$", answer[2], re.MULTILINE))
    for name, right in (("loss", "NaN"), ("grad_norm", "+Inf"), ("low", "-Inf")):
        check(
            spelled.get(name) == right,
            f"the value of {name} should be spelled {right} on the page; it is "
            f"{spelled.get(name)}. Python spells such numbers nan, inf and -inf.",
        )


@task("4.17")
def test_a_page_has_the_newest_values(grade: Grade) -> None:
    writes: list[Write] = [
        ({"loss": 3.0, "samples_total": 64}, 1),
        ({"loss": 2.0, "samples_total": 128}, 2),
        ({"accuracy": 0.75}, 2),
        ({"samples_total": 192, "loss": 2.5}, 3),
    ]
    known: dict[str, float] = {}
    for (metrics, step), answer in zip(writes, grade.call(b.show, LABELS, writes), strict=True):
        known |= metrics
        _check_samples(_samples(answer, LABELS), known, step)


@task("4.17")
def test_a_request_during_a_write_sees_old_or_new(grade: Grade) -> None:
    old = dict.fromkeys("abcdef", 1.0)
    new = dict.fromkeys("abcdef", 2.0)
    first, *during, last = grade.call(b.fetch_during_a_write, (old, 1), (new, 2))
    _check_samples(_samples(first, {}), old, 1)
    _check_samples(_samples(last, {}), new, 2)
    for answer in during:
        values = {name: value for name, (_, value) in _samples(answer, {}).items()}
        check(
            values in ({**old, "step": 1.0}, {**new, "step": 2.0}),
            f"a request came while write was halfway through its metrics, old values 1 and new "
            f"values 2; it was answered with {values}. Build the whole page, then put it in the "
            "place of the old one.",
        )


@task("4.17")
def test_only_this_machine_can_ask(grade: Grade) -> None:
    found = grade.call(b.listen)
    check(
        found["by_default"] == ["127.0.0.1"],
        "by default, an exporter should listen at 127.0.0.1 alone; it listens at "
        f"{found['by_default']} (0.0.0.0 and :: are all addresses of the machine). Whoever reaches "
        "the port reads the numbers, without a password.",
    )
    check(
        found["taken"] == found["asked"],
        f"with port={found['asked']}, exporter.port is {found['taken']}.",
    )
    check(
        found["given"] in (["127.0.0.1"], ["::1"]),
        f"with port={found['asked']} and host='localhost', the exporter should listen there; it "
        f"listens at {found['given']}.",
    )


@task("4.17")
def test_each_exporter_has_a_port(grade: Grade) -> None:
    found = grade.call(b.take_ports)
    first, second = found["ports"]
    check(
        0 not in (first, second) and first != second,
        f"two exporters with port 0 should take two free ports; exporter.port is {first} and "
        f"{second}. Ask the server which port it has taken.",
    )
    for rank, text in enumerate(found["texts"]):
        check(
            f'rank="{rank}"' in text,
            f"of two exporters in one process, that of rank {rank} answers with {short(text)}. "
            "Each has a page of its own.",
        )
    text = found["text"]
    check(
        found["kind"] == "OSError",
        f"a port that is in use should be an OSError; it is {found['kind'] or 'none'} "
        f"{short(text)}.",
    )
    says_what_to_do = re.search(r"\b0\b|other|free|own|different", text.replace("127.0.0.1", ""))
    check(
        str(first) in text and "127.0.0.1" in text and says_what_to_do,
        f"the port {first} is in use at 127.0.0.1. The text of the OSError should name both, and "
        f"say what to do: another port for each rank, or 0 for any free one. It is {short(text)}.",
    )


@task("4.17")
def test_other_paths_and_no_output(grade: Grade) -> None:
    paths = ["/", "/metric", "/metrics/loss", "/favicon.ico"]
    found = grade.call(b.fetch_others, paths)
    for path, status in zip(paths, found["statuses"][1:], strict=True):
        check(status == 404, f"GET {path} should be answered with 404; the status is {status}.")
    check(
        not found["printed"],
        f"requests should print nothing; printed was {short(found['printed'])}. "
        "BaseHTTPRequestHandler writes a line for each in log_message.",
    )


@task("4.17")
def test_close_frees_the_port(grade: Grade) -> None:
    found = grade.call(b.close)
    check(
        not found["threads"],
        f"the threads {found['threads']} are not daemons: Python waits for them when training has "
        "ended, and the process never does.",
    )
    check(
        not found["is_open"] and not found["text"],
        "after close, the port should be free; "
        + (f"another exporter can't take it: {short(found['text'])}. " if found["text"] else "")
        + ("a connection is still accepted. " if found["is_open"] else "")
        + "shutdown ends the loop, server_close closes the socket.",
    )


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
            f"after {count} writes the file should hold {count} lines, each with a line feed; it "
            f"holds {len(lines)}: {short(text)}. A process that is killed loses Python's "
            "buffer: flush each line.",
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
    lines = ['{"step": 1, "loss": 3.5}\n', line, '{"step": 3, "loss": 1.5}\n']
    for function, text in grade.call(b.damage, lines).items():
        said = text.replace(b.NAME, "", 1)
        check(
            b.NAME in text and re.search(r"(?<!\d)2(?!\d)", said.partition("{")[0]),
            f"line 2 of {b.NAME} is {what}. {function} should raise a ValueError that names the "
            f"file and the line, counted from 1; it raises {short(text) if text else 'nothing'}.",
        )


@task("4.17")
def test_a_file_that_is_being_written(grade: Grade) -> None:
    lines = ['{"step": 1, "loss": 3.5}\n', '{"step": 2, "lo']
    text = grade.call(b.damage, lines)["read_jsonl"]
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
