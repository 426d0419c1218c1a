"""Collectives in shared memory give correct sums, and clear errors if a process is late."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import MEMBERS, on_members, on_ranks
from torch import Tensor

from distlab.shared_memory import SharedMemory, collectives, staging

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
WORLD_SIZES = (1, 2, 5)
SIZES = (0, 1, 2, 7, 64, 1000, 4099)


@contextmanager
def many_pieces() -> Iterator[None]:
    """Shrink pieces, and the blocks in which they are added, so that a test has many of each."""
    with (
        mock.patch.object(staging, "STAGE_BYTES", 2**15),
        mock.patch.multiple(collectives, SMALL_BYTES=64, CACHE_BYTES=128),
    ):
        yield


def numbers(rank: int, numel: int, dtype: torch.dtype, call: int = 0) -> Tensor:
    """Return a rank's input: small whole numbers, so that sums are exact in all dtypes."""
    return ((torch.arange(numel) * 7 + 3 * rank + call) % 5).to(dtype)


def defined(operation: str, x: Tensor, result: object, group: dist.ProcessGroup | None) -> Tensor:
    """Return the part of ``x`` whose values a collective defines."""
    if operation != "reduce_scatter":
        return x
    assert isinstance(result, Tensor)
    mine = x.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
    assert (result.data_ptr(), len(result)) == (mine.data_ptr(), len(mine)), "not a view of x"
    return result


def expected(
    operation: str, numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> Tensor:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    brought = [numbers(each, numel, dtype) for each in range(world_size)]
    if operation == "all_gather":
        chunks = [x.tensor_split(world_size)[each] for each, x in enumerate(brought)]
        return torch.cat(chunks)
    total = torch.stack(brought).sum(0).to(dtype)
    return total if operation == "all_reduce" else total.tensor_split(world_size)[rank]


def wrong_results(
    sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], group: dist.ProcessGroup | None = None
) -> list[str]:
    """Run collectives of many kinds; return those whose result on this rank is wrong."""
    wrong = []
    with many_pieces():
        shared = SharedMemory(group)
        for dtype in dtypes:
            buffer = shared.buffer(max(sizes) + 3, dtype)
            for numel in sizes:
                for operation in OPERATIONS:
                    for place in (torch.empty(numel, dtype=dtype), buffer[3 : 3 + numel]):
                        x = place.copy_(numbers(dist.get_rank(group), numel, dtype))
                        result = getattr(shared, operation)(x, group)
                        found = defined(operation, x, result, group)
                        if not torch.equal(found, expected(operation, numel, dtype, group)):
                            wrong.append(f"{operation} of {numel} {dtype}")
    return wrong


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_size_is_summed_and_gathered_in_a_buffer_and_outside(world_size: int) -> None:
    wrong = on_ranks(wrong_results, world_size, SIZES, (torch.float32,), backend="gloo")
    assert wrong == [[]] * world_size


def test_a_group_of_some_ranks_needs_no_others() -> None:
    assert on_members(wrong_results, (1, 1000), (torch.float32,)) == [[]] * len(MEMBERS)


def wrong_in_turn(calls: int) -> list[int]:
    """Sum repeatedly on ranks that are late at times; return the calls whose sum is wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with many_pieces():
        shared = SharedMemory()
        buffer, outside, wrong = shared.buffer(900), torch.empty(900), []
        for call in range(calls):
            numel = (1, 10, 300, 900)[call % 4]
            x = (buffer if call // 4 % 2 else outside)[:numel]
            x.copy_(numbers(rank, numel, x.dtype, call))
            if call % 7 == rank:
                time.sleep(0.002)
            shared.all_reduce(x)
            brought = [numbers(each, numel, x.dtype, call) for each in range(world_size)]
            if not torch.equal(x, torch.stack(brought).sum(0)):
                wrong.append(call)
            x.fill_(-1000.0)
    return wrong


def test_the_next_call_never_overtakes_the_last_one() -> None:
    assert on_ranks(wrong_in_turn, 4, 400, backend="gloo") == [[]] * 4


def shared_files() -> set[str]:
    """Return the names of our files in the shared-memory folder."""
    return {path.name for path in Path("/dev/shm").iterdir() if "distlab" in path.name}


def leftovers() -> tuple[int, int]:
    """Return the number of open files before memory is shared and after it is released."""
    before = len(os.listdir("/proc/self/fd"))
    shared = SharedMemory()
    shared.buffer(1000)
    shared.all_reduce(torch.ones(1000))
    del shared
    return before, len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_behind() -> None:
    before = shared_files()
    for files_before, files_after in on_ranks(leftovers, 2, backend="gloo"):
        assert files_before == files_after
    assert shared_files() == before


# Calls that differ, and refusals


def refused(call: Callable[[], object]) -> str:
    """Return the text of the error that a call raises."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


REFUSED_AS = {
    "strides": "x must be contiguous",
    "bool": "x is of torch.bool",
    "group": "group has rank 1, and this memory is shared by the group of ranks 0-2",
}


def differing() -> dict[str, tuple[str, list[float]]]:
    """Make calls that differ on rank 1; return each one's error and the result of the next call."""
    shared, is_odd = SharedMemory(), dist.get_rank() == 1
    alone, _ = dist.new_subgroups(1)
    buffer, x = shared.buffer(10), torch.ones(10)
    calls: dict[str, Callable[[], object]] = {
        "numel": lambda: shared.all_reduce(x[: 9 if is_odd else 10]),
        "dtype": lambda: shared.all_reduce(x.double() if is_odd else x),
        "operation": lambda: (shared.all_gather if is_odd else shared.all_reduce)(x),
        "buffer": lambda: shared.all_reduce(buffer if is_odd else x),
        "part": lambda: shared.all_reduce(buffer[1:] if is_odd else buffer[:9]),
        "strides": lambda: shared.all_reduce(torch.ones(5, 4).T if is_odd else x),
        "bool": lambda: shared.all_reduce(x.bool() if is_odd else x),
        "group": lambda: shared.all_reduce(x, alone if is_odd else None),
    }
    texts = {}
    for name, call in calls.items():
        text = refused(call)
        shared.all_reduce(x.fill_(1.0))
        texts[name] = text, x.tolist()
    return texts


@pytest.fixture(scope="module")
def texts() -> list[dict[str, tuple[str, list[float]]]]:
    return on_ranks(differing, 3, backend="gloo")


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("numel", "rank 1: all_reduce of 9 elements of float32"),
        ("dtype", "rank 1: all_reduce of 10 elements of float64"),
        ("operation", "rank 1: all_gather of 10 elements of float32"),
        ("buffer", "rank 1: all_reduce of 10 elements of float32 at byte 0 of buffer 1"),
        ("part", "rank 1: all_reduce of 9 elements of float32 at byte 4 of buffer 1"),
        ("strides", "rank 1: a tensor that it has refused"),
        ("bool", "rank 1: a tensor that it has refused"),
        ("group", "rank 1: another group, which it has refused"),
    ],
)
def test_calls_that_differ_fail_on_all_ranks_and_the_next_ones_work(
    texts: list[dict[str, tuple[str, list[float]]]], name: str, odd: str
) -> None:
    for rank, (text, total) in enumerate(of_rank[name] for of_rank in texts):
        assert total == [3.0] * 10
        if rank == 1 and name in REFUSED_AS:
            assert REFUSED_AS[name] in text
        else:
            assert text.startswith(f"ValueError: [rank {rank}] SharedMemory of ranks 0-2: call ")
            assert f"{odd}" in text
            assert "ranks 0 and 2: all_reduce of " in text


# Ranks that are late or absent


def with_an_absent_rank() -> tuple[str, str]:
    """Let rank 1 be late for its second call; return the errors that the calling rank gets."""
    shared = SharedMemory(timeout_s=0.3 if dist.get_rank() == 0 else 60.0)
    shared.all_reduce(torch.ones(25))
    if dist.get_rank() == 1:
        dist.barrier()  # alive, but waiting elsewhere
        return refused(lambda: shared.all_reduce(torch.ones(9))), ""
    text = refused(lambda: shared.all_reduce(torch.ones(9)))
    dist.barrier()
    return text, refused(lambda: shared.all_reduce(torch.ones(9)))


def test_a_rank_that_does_not_come_is_named_with_its_last_call() -> None:
    (first, again), (absent, _), (told, _) = on_ranks(with_an_absent_rank, 3, backend="gloo")
    assert first == (
        "RuntimeError: [rank 0] SharedMemory of ranks 0-2: waited in call 2 (all_reduce of 9 "
        "elements of float32), but rank 1 has not come within 0.3 s; call 1 (all_reduce of 25 "
        "elements of float32, finished) was its last. Do all ranks make the same calls?"
    )
    assert "rank 0 has given up waiting for rank 1" in told
    assert "has given up waiting for rank 1" in absent
    assert "has given up before: make a new SharedMemory" in again


RANK = """
import os, signal, sys
import torch, torch.distributed as dist
from distlab.shared_memory import SharedMemory

rank, rendezvous, when = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
shared, x = SharedMemory(), torch.ones(100_000)
shared.all_reduce(x)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if rank == 1 and when == "between calls":
    die()
if rank == 1:
    shared._sum_mine = die
try:
    shared.all_reduce(x)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("when", ["between calls", "inside a call"])
def test_a_killed_rank_is_named_by_all_others(when: str, tmp_path: Path) -> None:
    before = shared_files()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "rendezvous"), when],
            stdout=subprocess.PIPE,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            text=True,
        )
        for rank in range(3)
    ]
    printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert printed[rank].startswith(
            f"[rank {rank}] SharedMemory of ranks 0-2: waited in call 2"
        )
        last = "call 1 (all_reduce of 100,000 elements of float32, finished)"
        if when == "inside a call":
            last = "call 2 (all_reduce of 100,000 elements of float32)"
        assert (
            f"rank 1 has ended; {last} was its last" in printed[rank]
            or "has given up waiting for rank 1" in printed[rank]
        )
    assert shared_files() == before
