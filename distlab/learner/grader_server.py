"""A persistent process that loads torch and the grader only once for many grading runs.

    watch ──one line of JSON: arguments of pytest──▶ server
          ◀─one line of JSON: exit code, output──

The learner's code still runs in fresh ranks, which the server's fork server starts.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout

from distlab.learner import child_processes
from distlab.learner.folder import CourseFolder
from distlab.learner.grading import GRADER_FAILED, environment

CLOSE_TIMEOUT_S = 5.0


class WarmGrader:
    """Runs pytest in a persistent process, and starts another one if that process has died."""

    def __init__(self, folder: CourseFolder) -> None:
        """Start the process; it loads torch while the caller continues."""
        self._folder = folder
        self._is_stopped = False
        self._server = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            child_processes.command("from distlab.learner.grader_server import serve; serve()"),
            cwd=self._folder.root,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ctrl-C reaches only the parent, which ends this process
        )

    def __call__(self, arguments: list[str]) -> tuple[int, str]:
        """Run pytest; return its exit code and its output."""
        if self._server.poll() is not None:
            self._server = self._start()
        if self._is_stopped:
            return GRADER_FAILED, ""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        try:
            with child_processes.not_left_stopped(self._server):
                self._server.stdin.write(json.dumps(arguments) + "\n")
                self._server.stdin.flush()
                line = self._server.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # the process was killed before it had written the whole line
            self.close()
            return GRADER_FAILED, "the grader's process ended; the next grading starts another one"
        code, output = json.loads(line)
        return code, output

    def stop(self) -> None:
        """End the process, from any thread; pending and later pytest runs return immediately."""
        self._is_stopped = True
        self._server.terminate()

    def close(self) -> None:
        """End the process, even if it is busy; its ranks end with it."""
        self._server.terminate()
        try:
            self._server.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # raised if a request is left unread
                    pipe.close()


def serve() -> None:
    """Answer requests until the other end closes its pipe; the main function of the process."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    _load()
    for place, request in enumerate(requests):
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = _pytest(json.loads(request))
        print(json.dumps([code, output.getvalue()]), file=answers, flush=True)
        if place == 0:
            _freeze()  # now that the grader and the suite are loaded, too


def _load() -> None:
    """Prepare for the first grading run: start the fork server, and meanwhile import torch."""
    importlib.import_module("distlab.grade.prestart")
    importlib.import_module("torch")
    _freeze()


def _freeze() -> None:
    """Exclude all existing objects from garbage collection, which every pytest run does twice.

    With torch loaded, each collection would take 0.1 s.
    """
    gc.collect()
    gc.freeze()


def _pytest(arguments: list[str]) -> int:
    import pytest

    try:
        return int(pytest.main(arguments))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else GRADER_FAILED
