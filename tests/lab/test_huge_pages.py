"""The fork server's memory in huge pages: which it is, and that nothing in it changes."""

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


def test_what_is_in_memory_stays() -> None:
    large = bytearray(range(256)) * 2**16
    small = [str(i) for i in range(100_000)]
    huge_pages.collapse()
    assert large == bytearray(range(256)) * 2**16
    assert small == [str(i) for i in range(100_000)]


def test_worlds_go_on_after_the_server_has_moved_its_memory() -> None:
    for _ in range(fork_server_main.MANY_USES + 2):
        assert launch.run(rank_of_one, 1, backend="gloo") == [0]
