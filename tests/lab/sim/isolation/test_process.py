"""Each rank has its own process state or, where that is impossible, gets a one-line error."""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.profiler import profile

from distlab.sim import Mismatch, Options, RankError, simulate
from distlab.sim.isolation.profiler import NoProfile


def me() -> int:
    return dist.get_rank()


def prints_into_a_buffer() -> str:
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        print("first", me())
        dist.barrier()
        print("second", me())
    return buffer.getvalue()


def test_redirected_output_is_the_ranks_own() -> None:
    before = sys.stdout
    results = simulate(prints_into_a_buffer, 3).results
    assert results == [f"first {rank}\nsecond {rank}\n" for rank in range(3)]
    assert sys.stdout is before


def has_another_dtype() -> torch.dtype:
    if me() % 2:
        torch.set_default_dtype(torch.float64)
    dist.barrier()
    return torch.ones(1).dtype


def test_the_default_dtype_is_the_ranks_own() -> None:
    assert simulate(has_another_dtype, 3).results == [torch.float32, torch.float64, torch.float32]
    assert torch.get_default_dtype() is torch.float32


def takes_an_argument() -> tuple[str, list[str]]:
    taken = sys.argv.pop(1)
    dist.barrier()
    sys.argv = [*sys.argv, str(me())]
    dist.barrier()
    return taken, sys.argv


def test_arguments_are_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["script.py", "a", "b"]
    monkeypatch.setattr(sys, "argv", given)
    results = simulate(takes_an_argument, 3).results
    assert results == [("a", ["script.py", "b", str(rank)]) for rank in range(3)]
    assert sys.argv is given == ["script.py", "a", "b"]


def works_in(folders: list[str]) -> list[str]:
    seen = [os.getcwd()]
    if me() < len(folders):
        os.chdir(folders[me()])
    dist.barrier()
    seen.append(os.getcwd())
    Path("note.txt").write_text(f"rank {me()}")
    dist.barrier()
    return [*seen, Path("note.txt").read_text()]


def test_the_working_folder_is_the_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, *folders = (tmp_path / name for name in ("home", "a", "b"))
    for folder in (home, *folders):
        folder.mkdir()
    monkeypatch.chdir(home)
    results = simulate(works_in, 3, [str(folder) for folder in folders]).results
    assert results == [
        [str(home), str(folders[0]), "rank 0"],
        [str(home), str(folders[1]), "rank 1"],
        [str(home), str(home), "rank 2"],
    ]
    assert os.getcwd() == str(home)


def handles_its_own_signals() -> list[object]:
    caught: list[object] = []
    first = signal.signal(signal.SIGUSR1, lambda number, _: caught.append((me(), number)))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGUSR1)
    if me() == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    dist.barrier()
    signal.raise_signal(signal.SIGUSR1)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        caught.append("interrupted")
    return [first, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, *caught]


def test_each_rank_has_its_own_signal_handlers() -> None:
    number = int(signal.SIGUSR1)
    assert simulate(handles_its_own_signals, 2).results == [
        [signal.SIG_DFL, True, (0, number), "interrupted"],
        [signal.SIG_DFL, False, (1, number), (1, number), "interrupted"],
    ]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_without_a_handler_ends_the_rank_and_the_world() -> None:
    def terminates() -> None:
        if me() == 1:
            signal.raise_signal(signal.SIGTERM)
        dist.barrier()

    with pytest.raises(RankError, match=r"rank 1 of 2 ended by SIGTERM, .*in terminates"):
        simulate(terminates, 2)


@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [
        (signal.SIGKILL, signal.SIG_IGN, OSError),
        (signal.SIGTERM, "stop", TypeError),
        (0, signal.SIG_IGN, ValueError),
    ],
)
def test_handlers_that_no_process_can_have_are_refused(
    number: int, handler: Any, error: type[Exception]
) -> None:
    def program() -> None:
        with pytest.raises(error):
            signal.signal(number, handler)

    simulate(program, 1)


def test_timers_that_send_signals_are_refused_in_one_line() -> None:
    def program() -> str:
        with pytest.raises(ValueError, match="cannot set a timer that sends a signal") as refused:
            signal.alarm(1)
        return str(refused.value)

    for rank, text in enumerate(simulate(program, 2).results):
        assert text.startswith(f"rank {rank} cannot")
        assert "\n" not in text


def profiles(folder: str) -> tuple[list[int], str, dict[str, Any]]:
    """Profile in two cycles; return the products of each, a table and the last trace."""
    trace, counts = Path(folder) / f"{me()}.json", []

    def ready(profiled: profile) -> None:
        counts.append([event.name for event in profiled.events() or ()].count("aten::mm"))
        profiled.export_chrome_trace(str(trace))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    with profile(schedule=schedule, on_trace_ready=ready, record_shapes=True) as profiled:
        for _ in range(7):
            with torch.autograd.profiler.record_function("work"):
                torch.ones(8, 8) @ torch.ones(8, 8)
                dist.barrier()
            profiled.step()
    return counts, profiled.key_averages().table(), json.loads(trace.read_text())


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_where_all_ranks_profile_the_first_one_does(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 0 profiles, .* --trace FILE.json") as warned:
        results = simulate(profiles, 3, str(tmp_path), options=Options(has_devices=False)).results
    assert [counts for counts, *_ in results] == [[1, 1], [0, 0], [0, 0]]
    assert ["aten::mm" in table for _, table, _ in results] == [True, False, False]
    assert [bool(trace["traceEvents"]) for *_, trace in results] == [True, False, False]
    assert results[0][2]["distributedInfo"]["rank"] == 0
    [only] = [warning for warning in warned if "rank 0 profiles" in str(warning.message)]
    assert only.filename == __file__


def profiles_in_turn() -> bool:
    for rank in range(dist.get_world_size()):
        if rank == me():
            with profile() as profiled:
                torch.ones(8, 8) @ torch.ones(8, 8)
        dist.barrier()
    return "aten::mm" in [event.name for event in profiled.events() or ()]


def test_ranks_that_take_turns_all_profile() -> None:
    assert simulate(profiles_in_turn, 2).results == [True, True]


def test_an_empty_trace_replaces_no_other(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("of rank 0")
    NoProfile().save(str(file))
    assert file.read_text() == "of rank 0"


def saves_in_the_background(folder: str) -> list[float]:
    state: dict[str, Any] = {"weight": torch.full((3,), 7.0)}
    dcp.async_save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]
    loaded = {"weight": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=folder)
    return loaded["weight"].tolist()


def test_checkpoints_are_saved_in_the_background(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    assert simulate(saves_in_the_background, 3, folder).results == [[7.0] * 3] * 3


def reduces(sizes: list[int]) -> None:
    with _coalescing_manager():
        for size in sizes:
            dist.all_reduce(torch.ones(size + me()))


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([2, 3], ["(2,) float32, (3,) float32 test", "(3,) float32, (4,) float32 test"]),
        ([*range(1, 10)], ["(5,) float32, (6,) float32, … test", "(6,) float32, (7,) float32, … "]),
    ],
)
def test_a_coalesced_call_shows_all_its_shapes(sizes: list[int], shown: list[str]) -> None:
    with pytest.raises(Mismatch) as caught:
        simulate(reduces, 2, sizes)
    text = " ".join(str(caught.value).split())
    assert [words for words in shown if words not in text] == []
    assert text.count("in reduces") == 2
