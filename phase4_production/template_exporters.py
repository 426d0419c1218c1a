"""Exporters: where the metrics of a run go.

Task 4.17. The docstring says what a function promises, its TODO gives an example, and guidelines.md
explains why and how. To grade it: ``distlab check 4.17``.
"""

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
        # TODO 4.17: keep the labels as text, and let the server find the newest page.
        #   Example: a value of 1 line feed stands as 2 characters, backslash and n.
        #   About 5 lines, and one of a helper.
        raise NotImplementedError(
            "Task 4.17: PrometheusExporter.__init__, see guidelines.md#417-where-the-numbers-go"
        )

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
        # TODO 4.17: make the new page, and put it in the place of the old one.
        #   Example: the name 5xx/rate becomes _5xx_rate, and the value inf is +Inf.
        #   About 18 lines with helpers.
        raise NotImplementedError(
            "Task 4.17: PrometheusExporter.write, see guidelines.md#417-where-the-numbers-go"
        )

    def close(self) -> None:
        """Stop serving. When this returns, the port is free.

        A child process that was forked while the server was running, such as a DataLoader worker,
        keeps the port in use until the child ends.
        """
        # TODO 4.17: free the port.
        #   Example: after close, another exporter can take port 9400.
        #   About 1 line.
        raise NotImplementedError(
            "Task 4.17: PrometheusExporter.close, see guidelines.md#417-where-the-numbers-go"
        )


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
        # TODO 4.17: cut off what must go, and open the file to append.
        #   Example: the steps 8, 9 and 10 are there, and resume_after=8: only that of 8 stays.
        #   About 16 lines with helpers.
        raise NotImplementedError(
            "Task 4.17: JsonlWriter.__init__, see guidelines.md#417-where-the-numbers-go"
        )

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line. Once this returns, the line survives even if the process is killed.

        The same metrics always give the same line, which contains no timestamp. NaN and the
        infinities, which JSON lacks, become the strings ``"NaN"``, ``"Infinity"`` and
        ``"-Infinity"``.

        Args:
            metrics: values by name; any names except ``step``.
            step: training step, not below that of the previous line.
        """
        # TODO 4.17: append one line, and flush it.
        #   Example: step 7 with a loss of 2.5: {"step": 7, "loss": 2.5}.
        #   About 6 lines with a helper.
        raise NotImplementedError(
            "Task 4.17: JsonlWriter.write, see guidelines.md#417-where-the-numbers-go"
        )

    def close(self) -> None:
        """Close the file."""
        # TODO 4.17: close the file.
        #   Example: after 2 writes, the file ends with the 2nd.
        #   About 1 to 2 lines.
        raise NotImplementedError(
            "Task 4.17: JsonlWriter.close, see guidelines.md#417-where-the-numbers-go"
        )


def read_jsonl(path: Path) -> list[Record]:
    """Return the records that a JsonlWriter wrote, line by line, with their original values.

    Raises:
        ValueError: a line does not come from a JsonlWriter, for example because it is damaged or
            unfinished. The message names the file and the line, counted from 1.
    """
    # TODO 4.17: return a Record for each line, or raise.
    #   Example: {"step": 7, "loss": "NaN"} is Record(7, {"loss": nan}).
    #   About 10 lines with a helper.
    raise NotImplementedError("Task 4.17: read_jsonl, see guidelines.md#417-where-the-numbers-go")


class TensorBoardWriter:
    """Draws the metrics of a run as curves in TensorBoard, one for each metric."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        """Open a new file in the folder, beside those of earlier processes of this run.

        Args:
            folder: folder of the run, into which only one rank writes.
            resume_after: step of the checkpoint from which training continues; TensorBoard hides
                points of later steps that are already there. With None, it hides none.
        """
        # TODO 4.17: open a SummaryWriter.
        #   Example: resume_after=8 hides what is there of step 9 and later.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.17: TensorBoardWriter.__init__, see guidelines.md#417-where-the-numbers-go"
        )

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each metric; once this returns, TensorBoard can show it."""
        # TODO 4.17: add a point for each metric, and flush.
        #   Example: 2 metrics are 2 points, both at the same step.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.17: TensorBoardWriter.write, see guidelines.md#417-where-the-numbers-go"
        )

    def close(self) -> None:
        """Close the file, and end the thread that writes into it."""
        # TODO 4.17: close the SummaryWriter.
        #   Example: a folder with 1 file more than before.
        #   About 1 to 2 lines.
        raise NotImplementedError(
            "Task 4.17: TensorBoardWriter.close, see guidelines.md#417-where-the-numbers-go"
        )
