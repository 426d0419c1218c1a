"""pytest as a new process runs it, without the two seconds in which that imports torch.

    FreshPytest ──a line of JSON: arguments, folder, variables──▶ a process with torch imported
                ◀─a line of JSON: exit code, output, errors────── └─fork──▶ pytest.main(arguments)

Nothing of the grader is imported before the fork, and it starts a fork server of its own for ranks.
Tests of how a process starts, or of signals to it, start a real one.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_S = 240.0
SERVE = "import fresh_pytest; fresh_pytest.serve()"


class FreshPytest:
    """Runs pytest again and again, each time in a fork."""

    def __init__(self) -> None:
        """Start the process that is forked."""
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, *arguments: object, folder: Path = ROOT, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run pytest, and wait for it.

        Args:
            arguments: pytest's.
            folder: to run it in.
            environment: more variables.
        """
        assert self._server.stdin
        assert self._server.stdout
        asked = [*map(str, arguments)]
        variables = {**os.environ, "PYTHONPATH": str(folder), **environment}
        late = threading.Timer(LONGEST_S, self._server.kill)
        late.start()
        print(json.dumps([asked, str(folder), variables]), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        late.cancel()
        assert answer, f"pytest {' '.join(asked)} did not end within {LONGEST_S:g} s"
        return subprocess.CompletedProcess(asked, *json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._server.communicate(timeout=240)


def serve() -> None:
    """Be the process: answer requests until the other end closes."""
    import torch.distributed  # noqa: F401 what is imported here need not be in the fork

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for request in requests:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            pid = os.fork()
            if not pid:
                _be_pytest(request, output.fileno(), errors.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = [os.pread(file.fileno(), 2**24, 0).decode() for file in (output, errors)]
        print(json.dumps([code, *texts]), file=answers, flush=True)


def _be_pytest(request: str, output: int, errors: int) -> None:
    code = 3
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        arguments, folder, variables = json.loads(request)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        sys.argv = ["pytest", *arguments]
        sys.path[:0] = [folder]
        import pytest

        code = int(pytest.main([*arguments]))
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
