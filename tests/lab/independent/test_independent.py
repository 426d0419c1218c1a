"""Programs written by somebody who had seen neither the simulator nor our own bank.

``broken_programs`` make one mistake each; ``# BUG`` marks the line that a report has to name. What
``correct_programs`` return on gloo, in real processes, is in ``correct_on_gloo.json``. The programs
are as they were handed in. What the simulator does not yet do with them is listed here, with the
reason; an entry that is no longer true fails, too.
"""

import inspect
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import broken_programs
import correct_programs
import pytest
import torch
from registry import CORRECT
from torch import Tensor

from distlab import launch

HERE = Path(__file__).parent
TIMEOUT_S = 20.0
SHORT_S = 4.0  # for programs that only the limit ends
ONE_PROCESS = "ranks share a process"
OUTSIDE = "waits for something outside of the simulated world, and stops the running rank"
STRICTER = "is refused here, so that it cannot go wrong elsewhere; gloo takes it"
SPINS = "a thread that spins is not interrupted"
MORE_LENIENT = "gloo refuses it, and other backends do not"
DIFFERS = {  # correct programs, and why they do not do what they do on gloo
    "anomaly_mode_one_rank": ONE_PROCESS,
    "broadcast_dtypes": MORE_LENIENT,
    "deterministic_flag_per_rank": ONE_PROCESS,
    "environ_of_thread_beside_main": SPINS,
    "environment": "MASTER_ADDR is set",
    "file_lock_between_ranks": OUTSIDE,
    "introspection": "the backend's name is sim",
    "logging_handlers": ONE_PROCESS,
    "non_contiguous_all_reduce": STRICTER,
    "own_globals": ONE_PROCESS,
    "own_hash_and_file_store": OUTSIDE,
    "own_tcp_store": OUTSIDE,
    "pids_differ": ONE_PROCESS,
    "profiler": ONE_PROCESS,
    "rng_of_main_beside_thread": SPINS,
    "sdpa_and_module_hooks": ONE_PROCESS,
    "signal_delivered": ONE_PROCESS,
    "signal_handler": ONE_PROCESS,
    "socket_between_ranks": OUTSIDE,
    "thread_locals": "a rank is not the main thread",
    "torch_threads_setting": ONE_PROCESS,
    "tp_loss_parallel": "torch keeps it per process",
    "zero_dim_into_tensor": MORE_LENIENT,
}
HANG = {name for name, why in DIFFERS.items() if why in (OUTSIDE, SPINS)}


def plain(value: Any) -> Any:
    """What is compared of a result, and written to the file."""
    if isinstance(value, Tensor):
        numbers = torch.view_as_real(value) if value.is_complex() else value
        return ["tensor", str(value.dtype), [*value.shape], plain(numbers.detach().tolist())]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return value if isinstance(value, int | str | bool | None) else repr(value)


def is_close(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_close(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@cache
def on_gloo() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "correct_on_gloo.json").read_text(encoding="utf-8"))
    return found


def simulated(program: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """What a program returns on simulated ranks, or the message of its error."""
    try:
        return plain(launch.run(program, program.n, backend="sim", timeout_s=timeout_s))
    except launch.LaunchError as error:
        return f"{error}"


@pytest.mark.parametrize("name", sorted(CORRECT.keys() - HANG))
def test_a_correct_program_does_what_it_does_on_gloo(name: str) -> None:
    found, expected = simulated(CORRECT[name]), on_gloo()[name]
    assert is_close(found, expected) is (name not in DIFFERS), (found, expected)


def marked_lines(program: Any) -> set[int]:
    lines, first = inspect.getsourcelines(program)
    return {first + number for number, line in enumerate(lines) if "# BUG" in line}


NEXT_LINE = "the line that waits is named; the one that asked for it, or the loop, is beside it"
LINE = re.compile(r'(?:broken_programs\.py(?:"?, line |:)|waits at line )(\d+)')
CAUGHT = "the except that may have hidden an error is named, and not the line that raised it"
UNNAMED = {  # broken programs that are reported without the marked line, and why
    "coalescing_async_never_waited": NEXT_LINE,
    "context_manager_swallows": CAUGHT,
    "ddp_hook_future_never_set": "torch waits for the future in C++; the time limit ends it",
    "irecv_read_before_wait": "the program's own assertion fails first",
    "logged_and_continue": NEXT_LINE,
    "main_and_thread_recv_same": NEXT_LINE,
    "poll_file_flag": NEXT_LINE,
    "poll_thread_is_alive": NEXT_LINE,
    "store_value_not_decoded": "the wrong value is not known, only who waits",
    "swallowed_and_returned": CAUGHT,
    "swallowed_in_loop": CAUGHT,
}
UNNOTICED = {  # broken programs that end well, and why
    "forgot_wait_used_result": "only strict mode watches buffers",
    "isend_buffer_reused": "only strict mode watches buffers",
    "long_sleep_before_barrier": "there is no limit of 30 minutes, unless the program sets one",
    "poll_irecv_never_completes_on_gloo": "asking is enough, as on NCCL",
}


ENDED_BY_THE_LIMIT = {"busy_loop_pure", "ddp_hook_future_never_set"}  # real time has to pass
BROKEN = {name: fn for name, fn in vars(broken_programs).items() if hasattr(fn, "raises")}
REPORTED = sorted(name for name in BROKEN if not BROKEN[name].raises)


@pytest.mark.parametrize("name", REPORTED)
def test_a_broken_program_is_reported_with_its_line(name: str) -> None:
    program = BROKEN[name]
    found = simulated(program, SHORT_S if name in ENDED_BY_THE_LIMIT else TIMEOUT_S)
    assert isinstance(found, str) is (name not in UNNOTICED), found
    if isinstance(found, str):
        named = set(map(int, LINE.findall(found)))
        assert bool(named & marked_lines(program)) is (name not in UNNAMED), found


def test_the_lists_name_programs_that_are_there() -> None:
    assert inspect.getdoc(broken_programs)
    assert inspect.getdoc(correct_programs)
    assert DIFFERS.keys() <= CORRECT.keys() == on_gloo().keys()
    assert {*UNNAMED, *UNNOTICED, *ENDED_BY_THE_LIMIT} <= BROKEN.keys()
