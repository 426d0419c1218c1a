"""The fork server's memory in huge pages: which it is, and that nothing in it changes."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from distlab import launch
from distlab.launch import fork_server_main, huge_pages

MAPS = """\
55d0c0a00000-55d0c0a01000 r--p 00000000 08:01 1234                       /usr/bin/python3.11
55d0c1c00000-55d0c6e00000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000021000 rw-p 00000000 00:00 0
7f1000000000-7f1002600000 rw-p 00000000 00:00 0
7f2000000000-7f2002600000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
7f3000000000-7f3002600000 r--p 00000000 00:00 0
7ffc1c000000-7ffc1c800000 rw-p 00000000 00:00 0                          [stack]
"""


def rank_of_one() -> int:
    return dist.get_rank()


def test_memory_that_a_fork_copies_is_the_heap_and_what_is_no_files() -> None:
    heap, arena = huge_pages._private_memory(MAPS)
    assert heap == (0x55D0C1C00000, 0x5200000)
    assert arena == (0x7F1000000000, 0x2600000)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has it")
def test_the_kernel_is_asked_to_move_what_is_large_and_private(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int, int]] = []

    class Libc:
        @staticmethod
        def madvise(start: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> None:
            asked.append((start.value or 0, size.value, advice))

    def is_asked_for(memory: mmap.mmap) -> bool:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return any(start <= address < start + size for start, size, _ in asked)

    # Not malloc's: what that gives may lie in two areas, the first of them small.
    with (
        mmap.mmap(-1, 16 * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private,
        mmap.mmap(-1, 16 * 2**20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared,
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc)
        huge_pages.collapse()
        maps = Path("/proc/self/maps").read_text()
        assert is_asked_for(private), f"{asked}\n{maps}"
        assert not is_asked_for(shared)
    assert {advice for _, _, advice in asked} == {25}  # MADV_COLLAPSE of linux/mman.h


def test_worlds_go_on_after_the_server_has_moved_its_memory() -> None:
    for _ in range(fork_server_main.MANY_USES + 2):
        assert launch.run(rank_of_one, 1, backend="gloo") == [0]
