"""Bodies for task 4.17: a page that is fetched, files that are cut, curves that go on.

Of the threads of simulated ranks one runs at a time, so that a rank would wait forever for its own
server. Bodies with servers leave the simulated world, for a thread that it doesn't know.
"""

import _thread
import functools
import http.client
import io
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from distlab.grade import WrongResult
from judging.calls import error_of, typed

Write = tuple[Mapping[str, float], int]  # metrics and step
Answer = tuple[int, str, str]  # status, content type, text
PATIENCE_S = 20.0  # for an answer
PAUSE_S = 0.3  # of a write, in which a request may be answered
LOOPBACK = "127.0.0.1"
NAME = "metrics.jsonl"


def _in_real_world(body: Callable[..., Any]) -> Callable[..., Any]:
    """Let a body run in a thread that belongs to no rank: what it starts is real."""

    @functools.wraps(body)
    def call(*args: object) -> Any:
        done, outcome = _thread.allocate_lock(), []

        def work() -> None:
            # Python takes it for a daemon, and so would be what it starts
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


# Prometheus


@_in_real_world
def show(
    lesson: Any, labels: Mapping[str, str], writes: Sequence[Write], path: str = "/metrics"
) -> list[Answer]:
    """Fetch the page after each write."""
    answers = []
    with closing(lesson.PrometheusExporter(labels)) as exporter:
        for metrics, step in writes:
            exporter.write(metrics, step)
            answers.append(_fetch(_port(exporter), path))
    return answers


@_in_real_world
def fetch_others(lesson: Any, paths: Sequence[str]) -> dict[str, Any]:
    """Fetch other pages too; return the answers, and what was printed meanwhile."""
    printed = io.StringIO()
    with (
        redirect_stderr(printed),
        redirect_stdout(printed),
        closing(lesson.PrometheusExporter({"rank": "0"})) as exporter,
    ):
        exporter.write({"loss": 1.0}, 1)
        answers = [_fetch(_port(exporter), path)[0] for path in ("/metrics", *paths)]
    return {"statuses": answers, "printed": printed.getvalue()}


@_in_real_world
def fetch_during_a_write(lesson: Any, before: Write, during: Write) -> list[Answer]:
    """Return the pages before, during and after a write; the write takes its time."""
    during_answers: list[Answer] = []
    with closing(lesson.PrometheusExporter({})) as exporter:
        exporter.write(*before)
        fetch = partial(_fetch, _port(exporter))
        slow = Slow(during[0], lambda: during_answers.append(fetch()))
        first = fetch()
        exporter.write(slow, during[1])
        slow.finish()
        return [first, *during_answers, fetch()]


class Slow(Mapping[str, float]):
    """Metrics that are slow to read: halfway, something happens in another thread."""

    def __init__(self, values: Mapping[str, float], event: Callable[[], None]) -> None:
        self.values_, self.event = values, event
        self.threads: list[threading.Thread] = []

    def __getitem__(self, name: str) -> float:
        return self.values_[name]

    def __len__(self) -> int:
        return len(self.values_)

    def __iter__(self) -> Iterator[str]:
        for index, name in enumerate(self.values_):
            if index == len(self) // 2:
                self._begin()
            yield name

    def _begin(self) -> None:
        thread = threading.Thread(target=self.event)
        thread.start()
        thread.join(PAUSE_S)  # an exporter may let it wait until the write is over
        self.threads.append(thread)

    def finish(self) -> None:
        """Wait until what happens has happened."""
        for thread in self.threads:
            thread.join(PATIENCE_S)


@_in_real_world
def listen(lesson: Any) -> dict[str, Any]:
    """Return at which addresses exporters listen: by default, and at one that is given."""
    with closing(lesson.PrometheusExporter({})) as exporter:
        by_default = _addresses(_port(exporter))
    port = _free_port()
    with closing(lesson.PrometheusExporter({}, port, "localhost")) as exporter:
        return {
            "by_default": by_default,
            "asked": port,
            "taken": _port(exporter),
            "given": _addresses(port),
        }


@_in_real_world
def take_ports(lesson: Any) -> dict[str, Any]:
    """Take free ports, and one that is in use."""
    with (
        closing(lesson.PrometheusExporter({"rank": "0"})) as first,
        closing(lesson.PrometheusExporter({"rank": "1"})) as second,
    ):
        first.write({"loss": 1.0}, 1)
        second.write({"loss": 2.0}, 1)
        ports = [_port(first), _port(second)]
        texts = [_fetch(port)[2] for port in ports]
        kind, text = "", ""
        try:
            lesson.PrometheusExporter({}, ports[0]).close()
        except Exception as error:
            kind, text = (
                "OSError" if isinstance(error, OSError) else type(error).__name__,
                f"{error}",
            )
        return {"ports": ports, "texts": texts, "kind": kind, "text": text}


@_in_real_world
def close(lesson: Any) -> dict[str, Any]:
    """Close an exporter, and take its port again; return which threads are none of a daemon's."""
    before = set(threading.enumerate())
    exporter = lesson.PrometheusExporter({})
    exporter.write({"loss": 1.0}, 1)
    port = _port(exporter)
    _fetch(port)
    threads = [
        each.name for each in threading.enumerate() if each not in before and not each.daemon
    ]
    exporter.close()
    is_open = _is_open(port)
    text = ""
    try:
        lesson.PrometheusExporter({}, port).close()
    except OSError as error:
        text = f"{error}"
    return {"threads": threads, "is_open": is_open, "text": text}


def _port(exporter: Any) -> int:
    port = typed("exporter.port", exporter.port, int)
    if port == 0:
        raise WrongResult(
            "exporter.port is 0, which was asked for; it should be the port that was taken. The "
            "server's server_address tells it."
        )
    return port


def _fetch(port: int, path: str = "/metrics") -> Answer:
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        return answer.status, answer.getheader("Content-Type") or "", body


def _addresses(port: int) -> list[str]:
    """Return the addresses at which this process listens to a port."""
    found = psutil.Process().net_connections("tcp")
    return sorted(
        {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
    )


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _is_open(port: int) -> bool:
    with suppress(OSError), closing(socket.create_connection((LOOPBACK, port), PATIENCE_S)):
        return True
    return False


# Lines of JSON


def append(lesson: Any, writes: Sequence[Write]) -> dict[str, Any]:
    """Write lines; return what is in the file after each write, and what is read in the end."""
    with tempfile.TemporaryDirectory() as folder:
        path, seen = Path(folder) / NAME, []
        with closing(lesson.JsonlWriter(path)) as writer:
            for metrics, step in writes:
                writer.write(metrics, step)
                seen.append(path.read_text(encoding="utf-8"))
        return {"seen": seen, "closed": path.read_text("utf-8"), **_read(lesson, path)}


def kill_and_go_on(
    lesson: Any, writes: Sequence[Write], last: Write, cuts: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Cut the file after each number of bytes, and let another process go on.

    Returns:
        For each cut what was left, and what is read when one more line was written.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, found = Path(folder) / NAME, []
        _write(lesson, path, writes)
        whole = path.read_bytes()
        for cut in range(len(whole) + 1) if cuts is None else cuts:
            path.write_bytes(whole[:cut])
            _write(lesson, path, [last])
            text = path.read_text(encoding="utf-8")
            found.append({"left": whole[:cut].decode(), "text": text, **_read(lesson, path)})
        return found


def resume(lesson: Any, writes: Sequence[Write], after: int | None, again: Sequence[Write]) -> Any:
    """Write, resume after a step, write again; return what is read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        _write(lesson, path, writes)
        with closing(lesson.JsonlWriter(path, resume_after=after)) as writer:
            for metrics, step in again:
                writer.write(metrics, step)
        return _records(lesson, path)


def begin_with_resume(lesson: Any, last: Write) -> Any:
    """Resume where no file is yet."""
    return resume(lesson, [], 3, [last])


def damage(lesson: Any, lines: Sequence[str]) -> dict[str, str]:
    """Read, and resume from, a file with a line that is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NAME
        path.write_text("".join(lines), encoding="utf-8")
        return {
            "read_jsonl": error_of(lambda: lesson.read_jsonl(path)),
            "JsonlWriter": error_of(lambda: lesson.JsonlWriter(path, resume_after=9).close()),
        }


def _write(lesson: Any, path: Path, writes: Sequence[Write]) -> None:
    with closing(lesson.JsonlWriter(path)) as writer:
        for metrics, step in writes:
            writer.write(metrics, step)


def _read(lesson: Any, path: Path) -> dict[str, Any]:
    """Read what is there; an error is told."""
    read: list[Any] = []
    error = error_of(lambda: read.extend(_records(lesson, path)))
    return {"read": read, "error": error}


def _records(lesson: Any, path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(r.step, dict(r.metrics)) for r in typed("read_jsonl", lesson.read_jsonl(path), list)]


# TensorBoard


def draw(lesson: Any, writes: Sequence[Write]) -> list[dict[str, list[tuple[int, float]]]]:
    """Return the curves after the last write, and after close."""
    with tempfile.TemporaryDirectory() as folder:
        with closing(lesson.TensorBoardWriter(Path(folder) / "run")) as writer:
            for metrics, step in writes:
                writer.write(metrics, step)
            curves = _curves(Path(folder) / "run")
        return [curves, _curves(Path(folder) / "run")]


def draw_on(
    lesson: Any, writes: Sequence[Write], after: int | None, again: Sequence[Write]
) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a run that was resumed."""
    with tempfile.TemporaryDirectory() as folder:
        for options, part in (({}, writes), ({"resume_after": after}, again)):
            with closing(lesson.TensorBoardWriter(Path(folder), **options)) as writer:
                for metrics, step in part:
                    writer.write(metrics, step)
        return _curves(Path(folder))


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }
