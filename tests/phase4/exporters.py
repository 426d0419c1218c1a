"""Bodies (functions that ranks run) for task 4.17: fetched pages, damaged files, and curves."""

import _thread
import functools
import http.client
import io
import itertools
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from distlab.grade import WrongResult
from judging.calls import error_of, typed
from judging.folders import own_folder
from phase4.file_history import open_in
from phase4.interleaved import Meetings, threads_left, watched
from phase4_production.given import REQUEST_S

# Pages, fetched by clients of all kinds
#
# Only one thread of the simulated ranks runs at a time, so a rank would wait forever for its own
# server. Therefore, these bodies run in a thread outside the simulated world.

Write = tuple[Mapping[str, float], int]  # metrics and step
Answer = tuple[int, str, str]  # status, content type, text
PATIENCE_S = 20.0  # longest wait for an answer
TRIES = 5  # attempts, since another process may take the port first
LOOPBACK = "127.0.0.1"
FOREIGN = "192.0.2.1"  # an address for documentation, which no machine has
ABOVE = 70_000  # a port that does not exist


def _in_real_world(body: Callable[..., Any]) -> Callable[..., Any]:
    """Make a body run in a thread that belongs to no rank, so that threads it starts are real."""

    @functools.wraps(body)
    def call(*args: object) -> Any:
        done, outcome = _thread.allocate_lock(), []

        def work() -> None:
            # Without this, Python would treat this thread, and all that it starts, as daemons.
            threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
            try:
                outcome.append((body(*args), None))
            except BaseException as error:
                outcome.append((None, error))
            finally:
                done.release()

        done.acquire()
        _thread.start_new_thread(work, ())
        done.acquire()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return call


@_in_real_world
def show(
    lesson: Any, labels: Mapping[str, str], writes: Sequence[Write], path: str = "/metrics"
) -> list[Answer]:
    """Write several times; return the page as fetched after each write."""
    answers = []
    with closing(lesson.PrometheusExporter(labels)) as exporter:
        for metrics, step in writes:
            exporter.write(metrics, step)
            answers.append(_fetch(_port(exporter), path))
    return answers


@_in_real_world
def fetch_at_each_line(
    lesson: Any, names: Sequence[str]
) -> tuple[Answer, Answer, list[tuple[str, Answer]]]:
    """Change all values from 1 to 2, and fetch a page at each line of the lesson that does so.

    Returns:
        The page before, the page after, and each page in between, with the line reached by then.
    """
    with closing(lesson.PrometheusExporter({})) as exporter:
        exporter.write(*_all_are(1, names))
        fetch, during = partial(_fetch, _port(exporter)), list[Answer]()
        meetings = Meetings(lesson.__file__, lambda: during.append(fetch()))
        first = fetch()
        with meetings.in_this_thread():
            exporter.write(*_all_are(2, names))
        by_line = [(meetings.line(place), answer) for place, answer in enumerate(during)]
        return first, fetch(), by_line


@_in_real_world
def write_at_each_line(lesson: Any, names: Sequence[str]) -> tuple[Answer, Answer, int]:
    """Fetch a page, and raise all values by 1 at each line of the lesson that answers the request.

    Returns:
        The page that answers the request, a page fetched afterwards, and the last value.
    """
    values = itertools.count(1)

    def write() -> None:
        exporter.write(*_all_are(next(values), names))

    meetings = Meetings(lesson.__file__, write)
    with meetings.in_new_threads(), closing(lesson.PrometheusExporter({})) as exporter:
        write()
        fetch = partial(_fetch, _port(exporter))
        with meetings.now():
            during = fetch()
        return during, fetch(), next(values) - 1


def _all_are(value: int, names: Sequence[str]) -> Write:
    return dict.fromkeys(names, float(value)), value


@_in_real_world
def be_odd_clients(lesson: Any, paths: Sequence[str]) -> tuple[dict[str, int], str]:
    """Reset connections, then fetch paths; return each path's status, and what is printed."""
    printed = io.StringIO()
    with (
        redirect_stderr(printed),
        redirect_stdout(printed),
        closing(lesson.PrometheusExporter({})) as exporter,
    ):
        exporter.write({"loss": 1.0}, 1)
        serving, port = {*threading.enumerate()}, _port(exporter)
        for request in (b"", b"GET /metr", b"GET /metrics HTTP/1.0\r\n\r\n"):
            with socket.create_connection((LOOPBACK, port), PATIENCE_S) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(request)  # closing the socket then sends a reset
        # Once these requests are answered, the server has accepted all earlier connections.
        statuses = {path: _fetch(port, path)[0] for path in paths}
        threads_left(serving)
    return statuses, printed.getvalue()


@_in_real_world
def say_nothing(lesson: Any) -> tuple[bool, list[str]]:
    """Connect and send nothing; return whether the client is dropped, and the threads left."""
    before = {*threading.enumerate()}
    exporter = lesson.PrometheusExporter({})
    port, limit_s = _port(exporter), 2 * REQUEST_S
    with _short_timeouts(port), socket.create_connection((LOOPBACK, port), limit_s) as client:
        is_dropped = _hears(client, limit_s)
        exporter.close()
    return is_dropped, threads_left(before) if is_dropped else []


def _hears(client: socket.socket, timeout_s: float) -> bool:
    """Return whether data arrives or the connection ends before the timeout."""
    return bool(select.select([client], [], [], timeout_s)[0])


@contextmanager
def _short_timeouts(port: int) -> Iterator[None]:
    """Limit the timeouts of sockets at this port to a tenth of a second."""

    def settimeout(self: socket.socket, value: float | None) -> None:
        is_cut = value is not None and self.getsockname()[1] == port
        super(socket.socket, self).settimeout(min(value, 0.1) if value and is_cut else value)

    socket.socket.settimeout = settimeout  # type: ignore[method-assign]
    try:
        yield
    finally:
        del socket.socket.settimeout  # restores the inherited method


@_in_real_world
def be_refused(lesson: Any) -> dict[str, Any]:
    """Listen at two free ports, then try one in use, a nonexistent one, and a foreign address."""
    with (
        closing(lesson.PrometheusExporter({"rank": "0"})) as first,
        closing(lesson.PrometheusExporter({"rank": "1"})) as second,
    ):
        first.write({"loss": 1.0}, 1)
        second.write({"loss": 2.0}, 1)
        ports = [_port(first), _port(second)]
        texts = [_fetch(port)[2] for port in ports]
        in_use = _refusal(lesson, LOOPBACK, ports[0])
    above, elsewhere = _refusal(lesson, LOOPBACK, ABOVE), _refusal(lesson, FOREIGN, ports[0])
    facts = {"ports": ports, "texts": texts, "in use": in_use, "above": above}
    return facts | ({} if _is_ours(FOREIGN) else {"elsewhere": elsewhere})


def _is_ours(host: str) -> bool:
    """Return whether one can listen at an address; on some machines, at any."""
    with closing(socket.socket()) as own, suppress(OSError):
        own.bind((host, 0))
        return True
    return False


def _refusal(lesson: Any, host: str, port: int) -> dict[str, str]:
    """Try to listen; return the error's type and text."""
    try:
        lesson.PrometheusExporter({}, port, host).close()
    except Exception as error:
        kind = OSError if isinstance(error, OSError) else type(error)
        return {"kind": kind.__name__, "text": f"{error}"}
    return {"kind": "", "text": ""}


@_in_real_world
def listen_again(lesson: Any) -> dict[str, Any]:
    """Close an exporter and take its port again; retry if another process has taken it first."""
    for _ in range(TRIES):
        facts = _listen_again(lesson)
        if not facts["is open"] and not facts["error"]:
            break
    return facts


def _listen_again(lesson: Any) -> dict[str, Any]:
    before = {*threading.enumerate()}
    exporter = lesson.PrometheusExporter({})
    exporter.write({"loss": 1.0}, 1)
    port = _port(exporter)
    _fetch(port)
    threads = [thread.name for thread in threading.enumerate() if thread not in before | _daemons()]
    facts = {"threads": threads, "by default": _addresses(port)}
    exporter.close()
    facts |= {"is open": _is_open(port), "error": "", "ports": [port, port], "localhost": []}
    try:
        with closing(lesson.PrometheusExporter({}, port, "localhost")) as second:
            facts |= {"ports": [port, _port(second)], "localhost": _addresses(port)}
    except OSError as error:
        facts["error"] = f"{error}"
    # Threads that are not daemons are reported as such, not as left over.
    return facts | {"left": [] if threads else threads_left(before)}


def _daemons() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.daemon}


def _port(exporter: Any) -> int:
    port = typed("exporter.port", exporter.port, int)
    if port == 0:
        raise WrongResult(
            "exporter.port is 0, which was asked for; it should be the port that was taken, "
            "server.port."
        )
    return port


def _fetch(port: int, path: str = "/metrics") -> Answer:
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        length = answer.getheader("Content-Length", f"{len(body)}")
        if length != f"{len(body)}":
            raise WrongResult(
                f"the Content-Length of GET {path} is {length!r}, and the page has {len(body)} "
                "bytes; Prometheus refuses the answer. Without the header, the page ends with the "
                "connection."
            )
        return answer.status, answer.getheader("Content-Type") or "", body.decode()


def _addresses(port: int) -> list[str]:
    """Return the addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections("tcp")
    return sorted(
        {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
    )


def _is_open(port: int) -> bool:
    with suppress(OSError), closing(socket.create_connection((LOOPBACK, port), PATIENCE_S)):
        return True
    return False


# Files that are cut, closed or damaged, and curves that are continued

Write = tuple[Mapping[str, float], int]  # metrics and step
NAME = "metrics.jsonl"
Curves = dict[str, list[tuple[int, float]]]


# Lines of JSON

Case = tuple[bytes | None, int | None, Sequence[Write]]  # existing file, resume_after, writes


def write_each(lesson: Any, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Open each case's file and write to it.

    Returns:
        For each case, the errors, the contents of the file after each write and at the end, and the
        records read from it at the end.
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
    """Resume a file, write and close it; return all its successive contents."""
    with own_folder() as folder:
        path = folder / NAME
        path.write_text(text, encoding="utf-8")
        with watched(path) as contents:
            _write(lesson.JsonlWriter(path, resume_after=after), [last])
        return [content.decode() for content in contents]


def close_all(lesson: Any) -> dict[str, list[str]]:
    """Return the files and threads that each writer leaves open after close.

    The writers are kept alive, so that garbage collection cannot close anything.
    """
    with own_folder() as folder:
        before, left_of, kept = {*threading.enumerate()}, {}, []
        for kind, name in (("TensorBoardWriter", "run"), ("JsonlWriter", NAME)):
            writer = getattr(lesson, kind)(folder / name)
            kept.append(writer)
            _write(writer, [({"loss": 1.0}, 1)])
            left_of[kind] = open_in(folder) + threads_left(before)
        return left_of


# TensorBoard

# Writes, resume_after, further writes.
Resumption = tuple[Sequence[Write], int | None, Sequence[Write]]


def draw_each(lesson: Any, cases: Sequence[Resumption]) -> list[tuple[Curves, Curves]]:
    """Write if there is anything to write, resume, and write more.

    Returns:
        For each case, the curves before and after the writer is closed.
    """
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
    """Return the curves that TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
