"""Hostile hand-ins and accidents: each gets a correct verdict in seconds and leaves nothing behind.

One table holds attacks that run at import, the other those that run in the function. None of them
solves the task, so none may pass.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import processes
import psutil
import pytest
import torch

from distlab import course, launch
from distlab.grade.outcomes import Outcome, verdict_on
from distlab.grade.running import Grade
from distlab.grade.submission import Submission, reference
from distlab.launch import fork_server

ROOT = Path(__file__).parents[3]
PHASE = "phase1_data_parallel"
TIMEOUT_S = 2.0  # an attack may hang until then, which is a correct verdict too
LEARNERS = {Outcome.FAILED, Outcome.HANG, Outcome.CRASH, Outcome.OOM, Outcome.IMPORT_ERROR}

AT_IMPORT = {
    "replaces json, pickle and dist": (
        "import pickle, json, torch.distributed as dist\n"
        "pickle.dumps = pickle.loads = json.dumps = lambda *a, **k: b''\n"
        "dist.get_rank = dist.send = dist.recv = lambda *a, **k: 0"
    ),
    "replaces builtins": "import builtins as b; b.isinstance = lambda *a: True; b.len = abs",
    "changes folder, mask and limits": (
        "import os, resource; os.chdir('/'); os.umask(0o777)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))"
    ),
    "may write nothing": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "raises what never ends": (
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E()"
    ),
    "raises BaseException": "raise BaseException('base')",
    "standard output of its own": "import sys; sys.stdout = open('/dev/full', 'w'); print(1)",
    "imports a judge by path": (
        "import importlib.util as u, glob\n"
        "s = u.spec_from_file_location('x', glob.glob('tests/phase1/judge_coll*.py')[0])\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)"
    ),
    "leaves an exit handler": "import atexit, time; atexit.register(lambda: time.sleep(99))",
}
IN_THE_FUNCTION = {
    "os.fork": "import os; os.fork()",
    "fork that goes on alone": "import os, time; os.fork() or (os.setsid(), time.sleep(99))",
    "thread that survives": (
        "import threading, time; threading.Thread(target=lambda: time.sleep(99)).start()"
    ),
    "closes all descriptors": "import os; os.closerange(0, 4096)",
    "deletes the world's folder": (
        "import gc, shutil; from distlab.launch.protocol import WorldFolder\n"
        "    [shutil.rmtree(o.path, True) for o in gc.get_objects() if isinstance(o, WorldFolder)]"
    ),
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores signals and sleeps": (
        "import signal as s, time; [s.signal(n, s.SIG_IGN) for n in (2, 10, 15)]; time.sleep(99)"
    ),
}


def calls_it(lesson: Any) -> str:
    incoming = torch.zeros(1)
    lesson.exchange(torch.ones(1), 0, incoming, 0)
    return "wrong" if float(incoming) != 7 else "right"


def attack(folder: Path, world: str, *, at_import: str = "", body: str = "pass") -> Outcome:
    """Run an attack on two ranks, as a suite would; return its outcome: FAILED if both return."""
    (folder / PHASE).mkdir()
    text = f"{at_import}\ndef exchange(outgoing, dst, incoming, src, group=None):\n    {body}\n"
    (folder / PHASE / "collectives.py").write_text(text)
    task, right = course.load(ROOT).task("1.3"), reference(ROOT)
    grade = Grade(Submission(folder), task, world, TIMEOUT_S, reference=right)
    try:
        results = grade.run(calls_it, 2).results
    except launch.LaunchError as error:
        return verdict_on(error).outcome
    assert results == ["wrong", "wrong"]
    return Outcome.FAILED


def survivors() -> list[psutil.Process]:
    """Wait up to a minute for the processes of worlds to end; return those still running."""
    servers = {home.process.pid for home in fork_server._idle}
    deadline = time.monotonic() + 60
    while True:
        left = [child for child in processes.children() if child.pid not in servers]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)  # fork servers take some time to reap ended processes


def holds(folder: Path, world: str, **code: str) -> None:
    assert attack(folder, world, **code) in LEARNERS
    assert survivors() == []


@pytest.mark.parametrize("name", AT_IMPORT)
def test_at_import(tmp_path: Path, name: str) -> None:
    holds(tmp_path, "sim", at_import=AT_IMPORT[name])


@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize("name", IN_THE_FUNCTION)
def test_in_the_function(tmp_path: Path, name: str, world: str) -> None:
    holds(tmp_path, world, body=IN_THE_FUNCTION[name])


@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_to_the_fork_server_is_the_graders_error_and_the_next_world_works(
    tmp_path: Path, world: str, number: signal.Signals
) -> None:
    body = f"import os, time; os.kill(os.getppid(), {number.value}); time.sleep(99)"
    outcome = attack(tmp_path, world, body=body)
    assert outcome in (Outcome.GRADER_ERROR, Outcome.HANG)
    assert survivors() == []
    assert launch.run(os.getppid, 1, backend="gloo") != [os.getpid()]
