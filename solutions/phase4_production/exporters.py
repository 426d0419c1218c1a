"""Exporters: where the metrics of a run go."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from phase4_production.given import PageServer, Record


class PrometheusExporter:
    """Serves the newest values at ``/metrics``, where a Prometheus server fetches them.

    With the labels ``{"run": "a", "rank": "3"}``, and after
    ``write({"loss/train": 2.5, "samples_total": 4096}, step=7)``, it serves the following text;
    metrics may be in any order, and 7 may be written as 7.0:
        # TYPE step gauge
        step{run="a",rank="3"} 7
        # TYPE loss_train gauge
        loss_train{run="a",rank="3"} 2.5
        # TYPE samples_total counter
        samples_total{run="a",rank="3"} 4096.0
    """

    def __init__(self, labels: Mapping[str, str], port: int = 0, host: str = "127.0.0.1") -> None:
        """Start serving the page, in the way of ``PageServer``; at first, it may be empty.

        Args:
            labels: labels of every sample, with legal names and any values.
            port: port to listen on; 0 for any free one. ``exporter.port`` is the port in use.
            host: address to listen on. With the default, only this machine can connect; otherwise,
                anyone who can reach the port can read the values, without a password.

        Raises:
            OSError: the server cannot listen. The message is that of ``PageServer``: it names the
                host, the port and the system's reason, says to take another port or 0 if the port
                is in use, and blames no other process otherwise.
        """
        pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
        self.labels, self.samples, self.page = ",".join(pairs), dict[str, str](), b""
        self.server = PageServer(lambda: self.page, port, host)
        self.port = self.server.port

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Show these values from now on. A metric that isn't among them keeps its value.

        A request during the write is answered with the old values or the new ones, never with a
        mix.

        Args:
            metrics: values by name. Names that end in ``_total`` are counters, all others are
                gauges. In a name, any character except an ASCII letter, a digit, ``_`` or ``:``
                becomes ``_``, and a name that begins with a digit gets a ``_`` in front of it. No
                name is empty, no name becomes ``step``, and no two names become the same, as
                ``loss/train`` and ``loss.train`` would: one of the two metrics would be lost.
            step: training step, shown as the gauge ``step``.

        Format: text format 0.0.4. In label values, backslash, double quote and line feed are
        escaped. NaN and the infinities are spelled NaN, +Inf and -Inf.
        """
        shown = {_legal(name): _spelled(value) for name, value in metrics.items()}
        self.samples = {**self.samples, "step": str(step), **shown}
        texts = [_sample(name, self.labels, value) for name, value in self.samples.items()]
        self.page = "".join(texts).encode()  # one assignment: a request sees one page or the other

    def close(self) -> None:
        """Stop serving. When this returns, the port is free.

        A child process that was forked while the server was running, such as a DataLoader worker,
        keeps the port in use until the child ends.
        """
        self.server.close()


def _sample(name: str, labels: str, value: str) -> str:
    """Return a metric and its type, as two lines."""
    kind = "counter" if name.endswith("_total") else "gauge"
    return f"# TYPE {name} {kind}\n{name}{{{labels}}} {value}\n"


def _legal(name: str) -> str:
    """Return a name that Prometheus accepts."""
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    return f"_{name}" if name[:1].isdigit() else name


def _escaped(value: str) -> str:
    """Return a label's value as it is written between quotes."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _spelled(value: float) -> str:
    """Return a number as Prometheus spells it."""
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)


class JsonlWriter:
    """Appends the metrics of each step to a file, as a line of JSON.

    After ``write({"loss": 2.5, "grad_norm": math.inf}, step=7)``, the last line is:
        {"step": 7, "loss": 2.5, "grad_norm": "Infinity"}
    """

    def __init__(self, path: Path, resume_after: int | None = None) -> None:
        """Open the file for appending; create it if it is missing.

        If the last line has no line feed, because the process that wrote it was killed, it is cut
        off. At no time does the file hold less than what is to be kept, so nothing is lost if this
        process is killed meanwhile.

        Args:
            path: path of the file; its folder exists.
            resume_after: step of the checkpoint from which training continues. The first line of a
                later step and everything after it are cut off, because these steps will be
                repeated; what comes after that line is not even read. With None, lines of all steps
                are kept.

        Raises:
            ValueError: a line that would be kept is damaged although it ends with a line feed, even
                if it is the last line of the file. The message is as in ``read_jsonl``, and the
                file stays unchanged.
        """
        if path.exists():
            os.truncate(path, _bytes_to_keep(path, resume_after))
        self.file = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line. Once this returns, the line survives even if the process is killed.

        The same metrics always give the same line, which contains no timestamp. NaN and the
        infinities, which JSON lacks, become the strings ``"NaN"``, ``"Infinity"`` and
        ``"-Infinity"``.

        Args:
            metrics: values by name; any names except ``step``.
            step: training step, not below that of the previous line.
        """
        fields = {name: _as_json(value) for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, **fields}, allow_nan=False) + "\n")
        self.file.flush()  # the kernel keeps it even if the process is killed

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _bytes_to_keep(path: Path, resume_after: int | None) -> int:
    """Return the offset of the first line that is unfinished or belongs to a later step."""
    kept = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")
            if not is_whole or _is_later(_record(path, number, line), resume_after):
                break
            kept += len(line)
    return kept


def _is_later(record: Record, step: int | None) -> bool:
    """Return whether a record belongs to a later step, which will be repeated."""
    return step is not None and record.step > step


def _as_json(value: float) -> float | str:
    """Return a number in a form that JSON has: a string if it is not finite."""
    value = float(value)
    return value if math.isfinite(value) else json.dumps(value)  # "NaN", "Infinity", "-Infinity"


def read_jsonl(path: Path) -> list[Record]:
    """Return the records that a JsonlWriter wrote, line by line, with their original values.

    Raises:
        ValueError: a line does not come from a JsonlWriter, for example because it is damaged or
            unfinished. The message names the file and the line, counted from 1.
    """
    with path.open("rb") as file:
        return [_record(path, number, line) for number, line in enumerate(file, start=1)]


def _record(path: Path, number: int, line: bytes) -> Record:
    """Return the record in a line."""
    try:
        fields = json.loads(line)
        step = int(fields.pop("step"))
        return Record(step, {name: float(value) for name, value in fields.items()})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: no record, but {line[:60]!r}") from error


class TensorBoardWriter:
    """Draws the metrics of a run as curves in TensorBoard, one for each metric."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        """Open a new file in the folder, beside those of earlier processes of this run.

        Args:
            folder: folder of the run, into which only one rank writes.
            resume_after: step of the checkpoint from which training continues; TensorBoard hides
                points of later steps that are already there. With None, it hides none.
        """
        purge_step = None if resume_after is None else resume_after + 1
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each metric; once this returns, TensorBoard can show it."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the file, and end the thread that writes into it."""
        self.writer.close()
