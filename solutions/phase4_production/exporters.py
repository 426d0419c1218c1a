"""Exporters: where the numbers of a run go."""

import errno
import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from phase4_production.given import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLOSE_S = 0.05  # how often the server looks whether it should stop
REQUEST_S = 5.0  # how long a client may be connected and send nothing


class PrometheusExporter:
    """Serves the newest numbers at ``/metrics``, from where a Prometheus server fetches them.

    With the labels ``{"run": "a", "rank": "3"}``, and after
    ``write({"loss/train": 2.5, "samples_total": 4096}, step=7)``, the text there is, in any order,
    and with 7 or 7.0 for the same number:
        # TYPE step gauge
        step{run="a",rank="3"} 7
        # TYPE loss_train gauge
        loss_train{run="a",rank="3"} 2.5
        # TYPE samples_total counter
        samples_total{run="a",rank="3"} 4096.0
    """

    def __init__(self, labels: Mapping[str, str], port: int = 0, host: str = "127.0.0.1") -> None:
        """Serve from now on, in a daemon thread that prints nothing.

        Every path but ``/metrics`` is answered with 404; what is behind a ``?`` doesn't matter.
        Content-Type is CONTENT_TYPE. A client that sends nothing for REQUEST_S is dropped.

        Args:
            labels: labels of every sample: legal names, with any values.
            port: 0 takes a free one; ``exporter.port`` is the one that was taken.
            host: the address to listen at. With the default, only this machine can ask: whoever
                reaches the port reads the numbers, without a password.

        Raises:
            OSError: it can't listen there. The text names host and port, the system's reason, and
                what to do. If the port is in use: take another port, one for each rank, or 0. If
                not, no other process is to blame: check that the host is an address of this
                machine, and the port one that this user may take, 65535 at most.
        """
        pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
        self.labels, self.samples, self.page = ",".join(pairs), dict[str, str](), b""
        try:
            self.server = _Server((host, port), _handler_of(lambda: self.page))
        except (OSError, OverflowError) as error:  # the latter for ports that don't exist
            raise OSError(f"no metrics at {host}:{port} ({error}). {_advice(error)}") from error
        self.port: int = self.server.server_address[1]
        self.thread = threading.Thread(
            target=self.server.serve_forever, args=(CLOSE_S,), daemon=True
        )
        self.thread.start()

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Show these values from now on. A metric that isn't among them keeps its value.

        A request during the write is answered with the old values or with the new ones, never with
        some of both.

        Args:
            metrics: those whose names end in ``_total`` are counters, all others are gauges. In a
                name, what is not an ASCII letter, a digit, ``_`` or ``:`` becomes ``_``, and one
                that begins with a digit gets a ``_`` in front of it. No name is empty, none becomes
                ``step``, and no two become the same one, as ``loss/train`` and ``loss.train``
                would: one of the two would be lost.
            step: shown as the gauge ``step``.

        Format: text format 0.0.4. In values of labels, backslash, double quote and line feed are
        escaped. NaN and the infinities are spelled NaN, +Inf and -Inf.
        """
        shown = {_legal(name): _spelled(value) for name, value in metrics.items()}
        self.samples = {**self.samples, "step": str(step), **shown}
        texts = [_sample(name, self.labels, value) for name, value in self.samples.items()]
        self.page = "".join(texts).encode()  # one assignment: a request sees one page or the other

    def close(self) -> None:
        """Stop serving. When it returns, the port is free.

        Threads that serve clients end with them: the last one when its client was dropped. A child
        that was forked meanwhile, such as a worker of a DataLoader, keeps the port until it ends.
        """
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Server(ThreadingHTTPServer):
    """Answers each client in a thread of its own."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a client that has left before its answer is no failure of training."""


def _advice(error: Exception) -> str:
    """Say what to do if nobody can listen there."""
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return (
            "Another process listens there, perhaps another rank. Give each rank a port of its "
            "own, such as 9400 + its local rank, or 0 for any free port."
        )
    return (
        "Check that the host is an address of this machine, and that this user may take the port: "
        "1024 to 65535, or 0 for any free one."
    )


def _handler_of(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    """Return what answers requests with the page of the moment."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            body = page() if is_known else b"metrics are at /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: a request every 15 s would fill the log."""

    return Handler


def _sample(name: str, labels: str, value: str) -> str:
    """Return a metric and its type, as two lines."""
    kind = "counter" if name.endswith("_total") else "gauge"
    return f"# TYPE {name} {kind}\n{name}{{{labels}}} {value}\n"


def _legal(name: str) -> str:
    """Return a name that Prometheus accepts."""
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    return f"_{name}" if name[:1].isdigit() else name


def _escaped(value: str) -> str:
    """Return the value of a label as it is written between quotes."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _spelled(value: float) -> str:
    """Return a number as Prometheus spells it."""
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)


class JsonlWriter:
    """Appends the numbers of each step to a file, as a line of JSON.

    After ``write({"loss": 2.5, "grad_norm": math.inf}, step=7)``, the last line is:
        {"step": 7, "loss": 2.5, "grad_norm": "Infinity"}
    """

    def __init__(self, path: Path, resume_after: int | None = None) -> None:
        """Open the file, new or behind what is there.

        A last line without a line feed, which a killed process has left, is cut off. The file never
        holds less than what is kept: a kill in the middle of this loses nothing.

        Args:
            path: path of the file; its folder exists.
            resume_after: the step of the checkpoint from which training continues. Lines of later
                steps are cut off, because these steps will come again: the first one, and all that
                follows it, unread. None: none are.

        Raises:
            ValueError: a line before the cut is damaged, though it has a line feed, be it the last
                one: as from ``read_jsonl``. The file stays as it is.
        """
        if path.exists():
            os.truncate(path, _bytes_to_keep(path, resume_after))
        self.file = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line. When it returns, the line survives the end of the process.

        The same numbers make the same line: there is no time in it. NaN and the infinities, for
        which JSON has no number, are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

        Args:
            metrics: any names but ``step``.
            step: step of the training, not below that of the line before.
        """
        fields = {name: _as_json(value) for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **fields}, allow_nan=False) + "\n")
        self.file.flush()  # the kernel keeps it when the process is killed

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _bytes_to_keep(path: Path, resume_after: int | None) -> int:
    """Return where the first line begins that is unfinished or too late."""
    kept = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")
            if not is_whole or _is_later(_record(path, number, line), resume_after):
                break
            kept += len(line)
    return kept


def _is_later(record: Record, step: int | None) -> bool:
    """Tell whether a record is of a step that will come again."""
    return step is not None and record.step > step


def _as_json(value: float) -> float | str:
    """Return the text of a number in JSON."""
    value = float(value)
    return value if math.isfinite(value) else json.dumps(value)  # "NaN", "Infinity", "-Infinity"


def read_jsonl(path: Path) -> list[Record]:
    """Return what a JsonlWriter has written, line by line, as the numbers that they were.

    Raises:
        ValueError: a line is not one of a JsonlWriter: damaged, say, or unfinished. The text names
            the file and the number of the line, from 1.
    """
    with path.open("rb") as file:
        return [_record(path, number, line) for number, line in enumerate(file, start=1)]


def _record(path: Path, number: int, line: bytes) -> Record:
    """Return what a line says."""
    try:
        fields = json.loads(line)
        step = int(fields.pop("step"))
        return Record(step, {name: float(value) for name, value in fields.items()})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: no record, but {line[:60]!r}") from error


class TensorBoardWriter:
    """Draws the numbers of a run as curves in TensorBoard, one for each metric."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        """Open a new file in the folder, beside those of earlier processes of this run.

        Args:
            folder: folder of the run. One rank writes into it.
            resume_after: the step of the checkpoint from which training continues: TensorBoard
                hides the points of later steps that are there already. None: it hides none.
        """
        purge_step = None if resume_after is None else resume_after + 1
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each metric. When it returns, TensorBoard can show them."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the file, and end the thread that writes into it."""
        self.writer.close()
