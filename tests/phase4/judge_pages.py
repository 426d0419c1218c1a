"""Judges task 4.17: the page that Prometheus gets to see, and what clients can do to training."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from distlab.grade import Grade, check, task
from judging.checks import short
from phase4 import pages as b
from phase4.pages import Answer, Write

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = {"run": "a", "rank": "3", "host": "n17"}
Sample = tuple[str, float]  # kind and value


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


def _refused(text: str) -> str:
    """Tell which line of a page can't be read, if it is a single one."""
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


NAMES = ("a", "b", "c", "d_total")


def _check_one_value(
    answer: Answer, allowed: Sequence[int], names: Sequence[str], how: str
) -> None:
    """Check that all metrics and the step have one of the values."""
    values = {name: value for name, (_, value) in _samples(answer, {}).items()}
    pages = [dict.fromkeys((*names, "step"), float(value)) for value in allowed]
    least, most = allowed[0], allowed[-1]
    value = f"the value {least}" if least == most else f"one value, of {least} to {most}"
    check(
        values in pages,
        f"{how}: all metrics and the step should have {value}; the page has {values}. Make the "
        "whole page, or a new dict, and put it in the place of the old one at once; or keep "
        "requests waiting until a write is over. A dict that is copied before it is changed, name "
        "by name, has old and new values, too.",
    )


@task("4.17")
def test_a_request_during_a_write_sees_old_or_new(grade: Grade) -> None:
    found = grade.call(b.fetch_at_each_line, NAMES)
    _check_one_value(found["first"], (1,), NAMES, "a page before the second write")
    for line, answer in zip(found["lines"], found["during"], strict=True):
        how = f"a write changes all from 1 to 2, and a request is answered before {line}"
        _check_one_value(answer, (1, 2), NAMES, how)
    _check_one_value(found["last"], (2,), NAMES, "a page after the second write")


@task("4.17")
def test_a_write_during_a_request(grade: Grade) -> None:
    found = grade.call(b.write_at_each_line, NAMES)
    last = found["value"]
    how = "while a page is made, others write, and each write makes all greater by 1"
    _check_one_value(found["during"], range(1, last + 1), NAMES, how)
    _check_one_value(found["last"], (last,), NAMES, "a page after that")


@task("4.17")
def test_many_requests_and_writes(grade: Grade) -> None:
    found = grade.call(b.hammer, [f"m{i}" for i in range(200)], 100)
    wrong = [status for status in found["statuses"] if status != 200]
    check(not wrong, f"100 requests while write is called: some are answered with {wrong[:3]}.")
    check(
        not found["mixed"],
        "a thread calls write all the time, with one value for all of 200 metrics and the step; a "
        f"page has the values {short(found['mixed'])}. A page is made of one write, whole.",
    )


@task("4.17")
def test_clients_that_vanish(grade: Grade) -> None:
    found = grade.call(b.vanish)
    check(
        found["status"] == 200,
        f"after clients that have gone before their answer, another one gets {found['status']}.",
    )
    check(
        not found["printed"],
        "a client that breaks the connection off should leave nothing in the log of training; "
        f"printed was, at the end, {short(found['printed'].strip()[-60:])}. "
        "socketserver prints a traceback in handle_error.",
    )


@task("4.17")
def test_clients_that_say_nothing(grade: Grade) -> None:
    still_there = (
        "A client has connected and sends nothing. It should be dropped after REQUEST_S, for which "
        "a tenth of a second stands here; it is still connected, though the exporter was closed. "
        "Each such client keeps a thread and a socket for good: BaseHTTPRequestHandler has a class "
        "attribute timeout, None by default."
    )
    found = grade.run(b.say_nothing, 1, if_stuck=still_there).results[0]
    check(found["is_dropped"], still_there)
    check(
        not found["left"],
        f"the exporter is closed and its client was dropped, but {found['left']} still run.",
    )


@task("4.17")
def test_where_nobody_can_listen(grade: Grade) -> None:
    for found in grade.call(b.listen_where_nobody_can):
        host, port, reason, text = (found[key] for key in ("host", "port", "reason", "text"))
        if not reason:  # this machine can listen at any address
            continue
        where = f"at {host}, port {port}, nobody can listen ({reason})"
        check(
            found["kind"] == "OSError",
            f"{where}: that should be an OSError; it is {found['kind'] or 'none'} {short(text)}. "
            "For ports that don't exist, Python raises an OverflowError.",
        )
        check(
            host in text and str(port) in text and reason in text,
            f"{where}: the text should name host, port and this reason. It is {text!r}.",
        )
        check(
            not re.search(r"(another|other|different) (process|rank|program)|in use", text),
            f"{where}, and no other process is to blame. The text should say so only if the error "
            f"is EADDRINUSE, and else what to check: the host, the port. It is {text!r}.",
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
    found = grade.call(b.fetch_others, ["/metrics?name=loss", *paths])
    with_query, *others = found["statuses"][1:]
    check(
        with_query == 200,
        f"GET /metrics?name=loss should be answered as /metrics is; the status is {with_query}. In "
        "self.path, a query is behind the path.",
    )
    for path, status in zip(paths, others, strict=True):
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
        f"after close, the port should be free; in {b.TRIES} tries it never was: "
        + (f"another exporter can't take it: {short(found['text'])}. " if found["text"] else "")
        + ("a connection is still accepted. " if found["is_open"] else "")
        + "shutdown ends the loop, server_close closes the socket.",
    )
    check(not found["left"], f"the exporter is closed, but its threads {found['left']} still run.")
