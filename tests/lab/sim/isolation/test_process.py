"""Each rank has its own process state or, where that is impossible, gets a one-line error."""

import contextlib
import io
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

from distlab.sim import Mismatch, Options, simulate


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


def test_signals_are_refused_in_one_line() -> None:
    def program() -> str:
        with pytest.raises(ValueError, match="cannot handle SIGUSR1") as refused:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return str(refused.value)

    for rank, text in enumerate(simulate(program, 2).results):
        assert text.startswith(f"rank {rank} cannot handle SIGUSR1: signals come to the process")
        assert "\n" not in text
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.filterwarnings("ignore")
def test_one_rank_may_profile_and_a_second_profiler_is_refused() -> None:
    def program() -> list[str]:
        names = []
        try:
            with profile() as profiled:
                torch.ones(8, 8) @ torch.ones(8, 8)
                dist.barrier()
            names = [event.name for event in profiled.events() or ()]
        except RuntimeError as error:
            dist.barrier()
            names = [str(error)]
        return names

    first, [second] = simulate(program, 2, options=Options(has_devices=False)).results
    assert "aten::mm" in first
    assert second.startswith("rank 1 cannot start a profiler while rank 0 has one")
    assert "\n" not in second


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
