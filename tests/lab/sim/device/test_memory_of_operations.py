"""Finished operations keep no tensors alive: each rank's memory is what its program holds."""

import gc

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Options, simulate

NUM_BYTES = 4000


def collectives() -> None:
    x = torch.ones(NUM_BYTES // 4)
    dist.broadcast(x, 0)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    del x
    dist.barrier()
    torch.ones(NUM_BYTES // 4)


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        x, y = torch.ones(NUM_BYTES // 4), torch.empty(NUM_BYTES // 4)
        send = dist.isend(x, (rank + 1) % size)
        dist.recv(y, (rank - 1) % size)
        assert send is not None
        send.wait()
        del x, y, send


@pytest.mark.parametrize(("program", "peak_bytes"), [(collectives, 4000), (messages, 8000)])
def test_tensors_die_with_the_programs_last_reference(program: object, peak_bytes: int) -> None:
    assert callable(program)
    gc.collect()
    gc.disable()  # a lucky collection must not hide a reference cycle
    try:
        trace = simulate(program, 3, options=Options(has_devices=True)).trace
    finally:
        gc.enable()
    assert trace.peak_bytes == [peak_bytes] * 3
