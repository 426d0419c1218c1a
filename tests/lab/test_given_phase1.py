"""Given code of Phase 1: messages and a progress bar, each from the right ranks."""

import io
import sys
from pathlib import Path

from ranks import on_ranks

from phase1_data_parallel.given import RankLog


def logs() -> None:
    log = RankLog()
    log.info("the same everywhere")
    log.warning(f"disk {log.rank} is full")


def test_info_comes_from_rank_0_and_warnings_from_all(tmp_path: Path) -> None:
    on_ranks(logs, 3, output_dir=tmp_path)
    lines = [(tmp_path / f"rank-{rank}.log").read_text().splitlines() for rank in range(3)]
    assert lines == [
        ["rank 0/3  the same everywhere", "rank 0/3  disk 0 is full"],
        ["rank 1/3  disk 1 is full"],
        ["rank 2/3  disk 2 is full"],
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draws_bar(where: type[io.StringIO]) -> str:
    sys.stderr = screen = where()
    log = RankLog()
    log.progress("epoch 2", 11, 22)
    log.progress("epoch 2", 22, 22)
    return screen.getvalue()


def test_bar_is_drawn_by_rank_0_in_a_terminal_and_erased_when_full() -> None:
    bar = "\rrank 0/2  epoch 2 [##########··········] 11/22"
    assert on_ranks(draws_bar, 2, Terminal) == [f"{bar}\r\x1b[K", ""]
    assert on_ranks(draws_bar, 2, io.StringIO) == ["", ""]
