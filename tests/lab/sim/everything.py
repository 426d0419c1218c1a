"""A program that does a bit of everything, for tests that compare histories."""

import time

import torch
import torch.distributed as dist
from programs import me, neighbours, size


def a_bit_of_everything() -> list[object]:
    """Use messages, collectives and receives from any rank; sleep for times that differ by rank."""
    right, left = neighbours()
    results: list[object] = []
    for step in range(5):
        time.sleep(1e-5 * ((3 * me() + step) % 4))
        x, y = torch.full((100 * step + 1,), float(me())), torch.zeros(100 * step + 1)
        works = [dist.isend(x, right), dist.irecv(y, left), dist.all_reduce(x, async_op=True)]
        for work in works:
            work.wait()
        results.append(float((x + y).sum()))
    if me() == 0:
        results += [dist.recv(torch.zeros(1)) for _ in range(1, size())]
    else:
        dist.send(torch.ones(1), 0)
    return results
