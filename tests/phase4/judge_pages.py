"""Judges task 4.17: the page for Prometheus, and clients that might disturb training."""

import errno
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distlab.grade import Grade, check, task
from judging.checks import short
from judging.expect import expect
from phase4 import pages as b
from phase4.pages import Answer, Write

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
    """Return the line of a page that can't be read, if it is a single one."""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            list(text_string_to_metric_families(f"{line}\n"))
        except Exception:
            return f"line {number} of the page, {line[:200]!r}"
    return f"the page as a whole, {text[:200]!r}"


def _samples(answer: Answer, labels: Mapping[str, str]) -> dict[str, Sample]:
    """Return the samples of a page as Prometheus' own parser reads them."""
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
    """Check that all metrics and the step have one of the values."""
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
    how = "while a page is made, others write, and each write makes all greater by 1"
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
        "0.0.0.0 and :: are all addresses of the machine: whoever reaches the port reads the "
        "numbers, without a password.",
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
    text = _checked_refusal(facts["in use"], first, os.strerror(errno.EADDRINUSE))
    check(
        re.search(r"\b0\b|other|free|own|different", text.replace("127.0.0.1", "")),
        f"the port {first} is in use. The text of the OSError should say what to do: another port "
        f"for each rank, or 0 for any free one. It is {text!r}.",
    )
    text = _checked_refusal(facts["above"], b.ABOVE, "port must be 0-65535")
    check(
        not re.search(r"(another|other|different) (process|rank|program)|in use", text),
        f"no program can listen at the port {b.ABOVE}, and no other process is to blame. The text "
        "should say so only if the error is EADDRINUSE, and else what to check: the host, the "
        f"port. It is {text!r}.",
    )


def _checked_refusal(refusal: Mapping[str, str], port: int, reason: str) -> str:
    names = ("127.0.0.1", f"{port}", reason)
    check(
        refusal["kind"] == "OSError" and all(name in refusal["text"] for name in names),
        f"listening at 127.0.0.1, port {port}, is impossible ({reason}): that should be an OSError "
        f"whose text names host, port and this reason; it is {refusal['kind'] or 'none'} "
        f"{refusal['text']!r}. For ports that don't exist, Python raises an OverflowError.",
    )
    return refusal["text"]
