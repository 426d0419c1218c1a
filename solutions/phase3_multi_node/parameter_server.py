"""Parameter servers: some ranks hold the parameters, and the others send gradients to them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from phase3_multi_node.given import Group, receive_from_any, start_exchange


def assign_shards(
    sizes: Mapping[str, int], servers: Sequence[int], previous: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Choose a server for every tensor, so that all servers hold about the same number of bytes.

    Tensors are not split. Existing servers keep what they have, except for what exceeds the mean.
    For example, eight tensors of 10 bytes, a to h, lie on servers 0 and 1; then server 2 joins, and
    then server 0 is lost:
        server            0        1        2
        at first       aceg     bdfh                mean 40
        2 joins         ceg      dfh       ab       mean 26.7: 0 and 1 each hold 13.3 too much
        0 is lost               dfhe     abcg       mean 40

    Args:
        sizes: name of a tensor -> size of the tensor in bytes. Not changed.
        servers: ranks of the servers, at least one.
        previous: result of an earlier call, perhaps for other servers and other names; None if no
            server holds anything. Not changed.

    Returns:
        Name -> server. Equal arguments give the same result on all ranks, in whatever order
        ``sizes``, ``servers`` and ``previous`` list their items. No server gets more bytes than the
        mean plus the largest tensor. Without ``previous``, the fullest server gets at most 4/3 of
        what the fullest server gets in the best possible assignment. With ``previous``, a server
        loses at most the bytes that it held above the mean: a tensor may leave only if the server
        still holds at least the mean without it. (If exactly the mean would remain, the tensor may
        also stay.) A server that is not above the mean keeps all its tensors, except for empty
        ones, which may move to any server. Ties may be broken in any way.

    Source: Graham 1969 (largest first: 4/3); Li et al. 2014 (OSDI), for servers that join and
        leave.
    """
    mean = sum(sizes.values()) / len(servers)
    largest_first = sorted(sizes, key=lambda name: (-sizes[name], name))
    loads = dict.fromkeys(servers, 0)
    assigned: dict[str, int] = {}
    for name, server in (previous or {}).items():
        if name in sizes and server in loads:
            assigned[name] = server
            loads[server] += sizes[name]

    for name in largest_first:
        if name in assigned and loads[assigned[name]] - sizes[name] >= mean:
            loads[assigned.pop(name)] -= sizes[name]

    for name in largest_first:
        if name not in assigned:
            assigned[name] = min(loads, key=lambda server: (loads[server], server))
            loads[assigned[name]] += sizes[name]
    return assigned


def push_pull(
    gradients: Mapping[int, Tensor], shards: Mapping[int, Tensor], group: Group = None
) -> None:
    """Send each server the gradient of its shard, and get its new parameters; workers call this.

    All servers work at the same time: with S servers, each one sends and receives 1/S of the bytes.
    A server may answer one worker before another worker has sent anything.

    Args:
        gradients: server -> gradient of its shard, (n,), contiguous. Not changed.
        shards: server -> tensor to fill with its new parameters, (n,), contiguous, of the same
            dtype as the gradient. The servers may be in a different order than in ``gradients``.
        group: the servers and workers; all ranks by default. Servers are named by their ranks in
            this group.

    Cost: one message to each server and one from each; together, they carry the gradients and the
        parameters once.
    """
    works = [
        work
        for server, gradient in gradients.items()
        for work in start_exchange(gradient, server, shards[server], server, group)
    ]
    for work in works:
        work.wait()


def serve_synchronously(
    shard: Tensor, optimizer: Optimizer, workers: Sequence[int], num_steps: int, group: Group = None
) -> None:
    """Update the shard ``num_steps`` times, each time with the mean of the workers' gradients.

    Each step waits for a gradient from every worker; then every worker gets the new parameters. The
    result is the same as with an all-reduce. With parameters 1.0 and SGD at a learning rate of 0.1,
    workers that push 2.0 and 4.0 get 0.7.

    Args:
        shard: this server's parameters, (n,), contiguous, floating-point. Updated in place.
        optimizer: optimizer of ``shard`` alone. Its ``step`` is called once in each step, with the
            mean in ``shard.grad``; the previous value of ``shard.grad`` is ignored.
        workers: ranks of the workers in ``group``; only they send messages to this server. Each
            worker calls ``push_pull`` once per step.
        num_steps: number of steps of each worker.
        group: the servers and workers; all ranks by default.

    Cost: for W workers and a shard of n bytes, W messages in and W messages out per step, of n
        bytes each, which take 2W(α + nβ) seconds. Memory for at most three more tensors of n bytes,
        including the one in ``shard.grad``, whatever W is. The gradients may be added in any order.
        No collective. On return, all messages have arrived.
    Source: Dean et al. 2012 (DistBelief), section 4, for parameter servers; Chen et al. 2016 (arXiv
        1604.00981), for synchronous updates.
    """
    incoming, total = torch.empty_like(shard), torch.empty_like(shard)
    for _ in range(num_steps):
        total.zero_()
        for worker in workers:
            dist.recv(incoming, group=group, group_src=worker)
            total += incoming
        _step(shard, optimizer, total.div_(len(workers)))
        for worker in workers:
            dist.send(shard, group=group, group_dst=worker)


def serve_asynchronously(
    shard: Tensor, optimizer: Optimizer, workers: Sequence[int], num_steps: int, group: Group = None
) -> None:
    """Update the shard with each gradient that arrives, and reply with the newest parameters.

    No worker waits for another. A gradient may be stale, because other gradients have been applied
    since its worker got its parameters. In this example, worker 2 is slower:
        gradient from  1   1   2   1   1   2
        step           1   2   3   4   5   6    the last gradient used step 3's parameters

    Args:
        shard: this server's parameters, (n,), contiguous, floating-point. Updated in place.
        optimizer: optimizer of ``shard`` alone. Its ``step`` is called once for each gradient, with
            that gradient in ``shard.grad``; the previous value of ``shard.grad`` is ignored.
        workers: ranks of the workers in ``group``; only they send messages to this server.
        num_steps: number of steps of each worker; each step calls ``push_pull`` once.
        group: the servers and workers; all ranks by default.

    Cost: for a shard of n bytes, one message in and one message out per gradient, which take
        2(α + nβ) seconds while no other worker is being served. Memory for at most two more tensors
        of n bytes, including the one in ``shard.grad``. No collective. On return, all messages have
        arrived.
    Source: Dean et al. 2012 (DistBelief), section 4.1, Downpour SGD; Recht et al. 2011 (Hogwild).
    """
    incoming = torch.empty_like(shard)
    for _ in range(len(workers) * num_steps):
        worker = receive_from_any(incoming, group)
        _step(shard, optimizer, incoming)
        dist.send(shard, group=group, group_dst=worker)


def serve_with_bounded_staleness(
    shard: Tensor,
    optimizer: Optimizer,
    workers: Sequence[int],
    num_steps: int,
    staleness: int,
    group: Group = None,
) -> None:
    """Update the shard with each gradient that arrives, but hold back workers that are far ahead.

    A worker's clock is the number of its gradients that have been applied. The worker gets its
    reply, the newest parameters, as soon as its clock is at most ``staleness`` above the lowest of
    all clocks. For a staleness of 1, this example shows the clocks after each gradient, and which
    workers get a reply:
        from          1      1      2      1      2      2
        clocks      1 0    2 0    2 1    3 1    3 2    3 3
        reply         1      -    1, 2     -    1, 2     2

    Args:
        shard: this server's parameters, (n,), contiguous, floating-point. Updated in place.
        optimizer: optimizer of ``shard`` alone. Its ``step`` is called once for each gradient, with
            that gradient in ``shard.grad``; the previous value of ``shard.grad`` is ignored.
        workers: ranks of the workers in ``group``; only they send messages to this server.
        num_steps: number of steps of each worker; each step calls ``push_pull`` once. The bound
            applies to the last reply too.
        staleness: the bound. With 0, no worker begins a step before all workers have ended the
            previous one; with ``num_steps`` or more, no worker ever waits for another.
        group: the servers and workers; all ranks by default.

    Cost: as for ``serve_asynchronously``; a reply that is held back takes no memory.
    Source: Ho et al. 2013 (NIPS), section 2, stale synchronous parallel.
    """
    incoming = torch.empty_like(shard)
    clocks = dict.fromkeys(workers, 0)
    held: list[int] = []
    for _ in range(len(workers) * num_steps):
        worker = receive_from_any(incoming, group)
        _step(shard, optimizer, incoming)
        clocks[worker] += 1
        held.append(worker)
        latest = min(clocks.values()) + staleness
        for worker in [worker for worker in held if clocks[worker] <= latest]:
            held.remove(worker)
            dist.send(shard, group=group, group_dst=worker)


def serve_survivors(
    shard: Tensor,
    optimizer: Optimizer,
    pairs: Mapping[int, Group],
    num_steps: int,
    staleness: int,
    timeout_s: float,
) -> list[int]:
    """Serve with bounded staleness, and continue without workers that die.

    A worker counts as dead once receiving from it or sending to it raises a RuntimeError. That
    happens immediately if its process ends, which closes its connection, or after ``timeout_s`` if
    it falls silent. From then on, its clock no longer counts, and workers that were held back only
    because of it get their replies. Its gradients that have already arrived stay applied.

    Args:
        shard: this server's parameters, (n,), contiguous, floating-point. Updated in place.
        optimizer: optimizer of ``shard`` alone. Its ``step`` is called once for each gradient, with
            that gradient in ``shard.grad``; the previous value of ``shard.grad`` is ignored.
        pairs: worker's rank in the world -> group that contains only this worker and this server,
            as made by ``given.pair_groups``. All messages to and from the worker use this group, so
            that pairs fail independently. Not changed.
        num_steps: number of steps of each surviving worker; each step calls ``push_pull`` once, in
            the worker's group.
        staleness: the bound, as in ``serve_with_bounded_staleness``.
        timeout_s: longest time that the server waits for a worker's next gradient, and for a worker
            to receive a reply. The wait for a gradient is counted from the last reply to the worker
            or, before the first reply, from the call. The timeout is longer than the slowest step.

    Returns:
        The workers that have finished all steps, in the order of ``pairs``; an empty list if all
        workers have died.

    Cost: the same messages as for ``serve_asynchronously``. While the server waits for one worker,
        it serves the others. Memory for at most three more tensors of n bytes per worker.
    Source: Li et al. 2014 (OSDI), section 4, for workers that leave.
    """
    limit = timedelta(seconds=timeout_s)
    clocks = dict.fromkeys(pairs, 0)
    changed = threading.Condition()  # its lock guards the shard and the clocks

    def serve(worker: int) -> bool:
        incoming = torch.empty_like(shard)
        for _ in range(num_steps):
            if not _travels(dist.irecv, incoming, worker, pairs[worker], limit):
                return False
            with changed:
                _step(shard, optimizer, incoming)
                clocks[worker] += 1
                changed.notify_all()
                changed.wait_for(lambda: clocks[worker] <= min(clocks.values()) + staleness)
                newest = shard.clone()  # other threads may step before it is sent
            if not _travels(dist.isend, newest, worker, pairs[worker], limit):
                return False
        return True

    def serve_to_the_end(worker: int) -> bool:
        try:
            return serve(worker)
        finally:  # even if the worker died or the optimizer failed: no other may wait forever
            with changed:
                del clocks[worker]
                changed.notify_all()

    with ThreadPoolExecutor(max_workers=len(pairs) or 1) as pool:
        survives = pool.map(serve_to_the_end, pairs)
    return [worker for worker, lives in zip(pairs, survives, strict=True) if lives]


def _travels(
    start: Callable[..., Any], tensor: Tensor, worker: int, pair: Group, limit: timedelta
) -> bool:
    """Send or receive a tensor; return whether the worker is alive."""
    try:
        start(tensor, worker, pair).wait(limit)
    except RuntimeError:
        return False
    return True


def _step(shard: Tensor, optimizer: Optimizer, gradient: Tensor) -> None:
    shard.grad = gradient
    optimizer.step()
