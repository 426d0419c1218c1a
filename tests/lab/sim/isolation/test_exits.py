"""A report names the line on which a rank ended, and says how it ended."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Deadlock, SimulationError, simulate
from distlab.sim.hardware.cluster import choose_cluster
from distlab.sim.results.simulated import Options
from distlab.sim.script import run_script


def line_of(fn: Callable[..., object], mark: str) -> int:
    """Return the number of the first line of ``fn`` that ends with the comment ``mark``."""
    code = fn.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    found = (n for n in range(code.co_firstlineno, len(lines)) if lines[n].endswith(f"# {mark}"))
    return next(found) + 1


def report(fn: Callable[[], object], num_ranks: int = 3) -> str:
    with pytest.raises(Deadlock) as caught:
        simulate(fn, num_ranks)
    return str(caught.value)


def returns_early() -> None:
    if dist.get_rank() == 2:
        return  # HERE
    dist.all_reduce(torch.ones(1))


def ends_after_its_loop() -> None:
    for _ in range(2 if dist.get_rank() else 3):  # HERE
        dist.all_reduce(torch.ones(1))


def leaves_the_group() -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()  # HERE
        return
    dist.barrier()


@pytest.mark.parametrize(
    ("fn", "how"),
    [
        (returns_early, "returned without communicating"),
        (leaves_the_group, "destroyed its process group without communicating"),
        (ends_after_its_loop, "returned after 2 calls, the last: all_reduce"),
    ],
)
def test_the_line_on_which_a_rank_has_ended(fn: Callable[[], None], how: str) -> None:
    text = report(fn)
    assert how in text
    assert f"test_exits.py:{line_of(fn, 'HERE')}" in text.replace("at line ", "test_exits.py:")


def test_a_tracer_of_the_program_is_left_alone() -> None:
    seen: list[str] = []

    def program() -> None:
        sys.settrace(lambda frame, *_: seen.append(frame.f_code.co_name))
        line_of(returns_early, "HERE")

    simulate(program, 1)
    assert "line_of" in seen


def test_what_the_program_has_held_is_let_go() -> None:
    class Held:
        count = 0

        def __init__(self) -> None:
            Held.count += 1

        def __del__(self) -> None:
            Held.count -= 1

    def program() -> None:
        held = Held()
        dist.barrier()
        assert held.count

    simulate(program, 3)
    assert Held.count == 0


SCRIPT = """
import torch.distributed as dist

def main():
    dist.init_process_group()
    if dist.get_rank() == 1:
        return
    dist.barrier()

main()
"""


@pytest.mark.parametrize(("after", "line"), [("", 7), ("x = 1\n", 11)])
def test_a_script_ends_in_its_main_if_nothing_comes_after_it(
    tmp_path: Path, after: str, line: int
) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT + after, encoding="utf-8")
    with pytest.raises(Deadlock, match=f"without communicating +program.py:{line} in "):
        run_script(script, [], 2, choose_cluster(None, 2), Options())


def ends_its_process_in_the_end() -> None:
    try:
        dist.barrier()
    finally:
        os._exit(5)


def ends_its_process_when_it_deadlocks() -> None:
    try:
        if dist.get_rank() == 0:
            dist.barrier()
    except BaseException:
        os._exit(6)


def ends_its_process_when_another_fails() -> None:
    try:
        if dist.get_rank() == 1:
            raise ValueError("bad sample")
        dist.barrier()
    except BaseException:
        os._exit(7)


def kills_its_process_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGTERM)


def kills_its_process_group_by_kill() -> None:
    os.kill(-os.getpgrp(), signal.SIGTERM)


def kills_process_zero() -> None:
    os.kill(0, signal.SIGTERM)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda: os.abort(), "ended by SIGABRT"),
        (kills_its_process_group, "ended by SIGTERM"),
        (kills_its_process_group_by_kill, "ended by SIGTERM"),
        (kills_process_zero, "ended by SIGTERM"),
        (ends_its_process_in_the_end, "ended by os._exit(5)"),
        (ends_its_process_when_it_deadlocks, "rank 0 waits in barrier"),
        (ends_its_process_when_another_fails, "ended by os._exit(7)"),
    ],
)
def test_a_rank_that_ends_itself_while_the_world_ends(fn: Callable[[], None], says: str) -> None:
    with pytest.raises(SimulationError, match=re.escape(says)):
        simulate(fn, 3)
