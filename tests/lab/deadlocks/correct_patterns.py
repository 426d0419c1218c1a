"""Correct programs: pipelines, servers, and training."""

import time

import torch
import torch.distributed as dist
from catalogue import empty, me, received, reduced, returns, size, value
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import Faults


@returns([6, 6, 6])
def one_f_one_b() -> object:
    """1F1B over three stages and four micro-batches; what meets head to head is one batch."""
    micro_batches, stage = 4, me()
    warm_up = min(size() - 1 - stage, micro_batches)
    outputs: list[float] = []
    gradients: list[float] = []

    def receive(peer: int, tag: int) -> float:
        return received(peer, tag) if 0 <= peer < size() else len(outputs)

    def exchange(x: float, peer: int, tag_out: int, tag_in: int) -> float:
        """Send to a neighbour and receive from it, which does the same."""
        if not 0 <= peer < size():
            return x
        inbox = empty()
        works = [dist.isend(value(x), peer, tag=tag_out), dist.irecv(inbox, peer, tag=tag_in)]
        for work in works:
            work.wait()
        return inbox.item()

    forward, backward = 0, 1
    for _ in range(warm_up):
        outputs.append(receive(stage - 1, forward))
        dist.send(value(outputs[-1]), stage + 1, tag=forward)
    x = receive(stage - 1, forward)
    for step in range(micro_batches - warm_up):
        outputs.append(x)
        gradients.append(exchange(x, stage + 1, forward, backward))
        if step < micro_batches - warm_up - 1:
            x = exchange(gradients[-1], stage - 1, backward, forward)
            x = len(outputs) if stage == 0 else x
        elif stage > 0:
            dist.send(value(gradients[-1]), stage - 1, tag=backward)
    for _ in range(warm_up):
        gradients.append(receive(stage + 1, backward))
        if stage > 0:
            dist.send(value(gradients[-1]), stage - 1, tag=backward)
    return sum(gradients)


@returns([[0, 1, 2], None, [0, 10, 20]])
def two_pipelines_that_meet() -> object:
    """Micro-batches run in both directions; the stage in the middle serves them in turn."""
    if me() == 1:
        for _ in range(3):
            right, left = received(0), received(2)
            dist.send(value(right), 2)
            dist.send(value(left), 0)
        return None
    sent = [dist.isend(value(k * (10 if me() == 0 else 1)), 1) for k in range(3)]
    results = [received(1) for _ in range(3)]
    for work in sent:
        work.wait()
    return results


@returns([[2, 2], None, None])
def parameter_server() -> object:
    """The server serves whoever comes, until every worker has said goodbye."""
    if me() > 0:
        for _ in range(2):
            dist.send(value(me()), 0)
            received(0)
        dist.send(value(-me()), 0)
        return None
    served = [0, 0]
    workers = size() - 1
    while workers:
        x = empty()
        worker = dist.recv(x)
        if x.item() < 0:
            workers -= 1
        else:
            served[worker - 1] += 1
            dist.send(x, worker)
    return served


@returns([15, 1, 2, 3, 4, 5])
def returns_early() -> object:
    """A rank whose work is done returns, while others go on for long."""
    if me() > 0:
        time.sleep(size() - me())
        dist.send(value(me()), 0)
        return me()
    return sum(received(rank) for rank in range(1, size()))


@returns([None, None, 4], Faults(kill_ranks={1: 0.5}))
def nobody_waits_for_the_dead() -> object:
    """A fault kills a rank; the others have no more business with it."""
    dist.barrier()
    if me() == 1:
        time.sleep(1)
        dist.barrier()
    elif me() == 0:
        time.sleep(2)
        dist.send(value(4), 2)
    else:
        return received(0)
    return None


@returns([[4, 4], [4, 4]])
def hooks_during_backward() -> object:
    """Hooks start an all_reduce per gradient; the waits come when backward has ended."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    works = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
        )
    loss = sum(parameter.sum() * (1 + 2 * me()) for parameter in parameters)
    loss.backward()
    for work in works:
        work.wait()
    return [parameter.grad.item() for parameter in parameters]


@returns([3, 3])
def unused_parameter_reduced_anyway() -> object:
    """One rank has no gradient for a parameter: it contributes zeros, so the calls agree."""
    parameter = nn.Parameter(torch.ones(1))
    if me() == 0:
        (3 * parameter).sum().backward()
    gradient = torch.zeros(1) if parameter.grad is None else parameter.grad
    dist.all_reduce(gradient)
    return gradient.item()


@returns([2, 2, 2])
def uneven_batches_with_a_flag() -> object:
    """Before each step all ask whether all have a batch; a rank that ran out ends the epoch."""
    batches = [4, 2, 3][me()]
    steps = 0
    while reduced(batches > steps) == size():
        steps += 1
        reduced(1)
    return steps


@returns([3, 1])
def uneven_batches_with_join() -> object:
    """torch's Join shadows the collectives of a rank that has no more batches."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    steps = 0
    with Join([model]):
        for _ in range(3 if me() == 0 else 1):
            model(torch.ones(1, 1)).sum().backward()
            steps += 1
    return steps


@returns([[0, 6], [1, None], [2, None], [3, None]])
def rank_0_reports() -> object:
    """What only rank 0 does, it does without a collective."""
    total = reduced(me())
    if me() == 0:
        return [me(), total]
    return [me(), None]


@returns([0.5, 0.5, 0.5])
def evaluation_on_rank_0() -> object:
    """Rank 0 evaluates alone, the others wait for the result in a broadcast."""
    score = empty()
    if me() == 0:
        time.sleep(5)
        score += 0.5
    dist.broadcast(score, 0)
    return score.item()
