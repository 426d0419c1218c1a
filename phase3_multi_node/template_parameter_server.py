"""Parameter servers: some ranks hold the parameters, and the others send gradients to them.

Tasks 3.15 to 3.19. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 3.15``.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

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
    # TODO 3.15: return name -> server.
    #   Example: sizes 7, 6, 5, 4 and 3 on 2 servers: one gets at most 14 bytes, 4/3 of the best
    #   split into 13 and 12.
    #   About 15 lines.
    raise NotImplementedError(
        "Task 3.15: assign_shards, see guidelines.md#315-assign-parameters-to-servers"
    )


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
    # TODO 3.16: push all gradients and pull all shards.
    #   Example: 3 servers with 100 float32 each: 3 messages of 400 bytes leave, and 3 arrive.
    #   About 6 lines.
    raise NotImplementedError("Task 3.16: push_pull, see guidelines.md#316-a-synchronous-server")


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
    # TODO 3.16: serve num_steps steps.
    #   Example: 3 workers push 3.0, 6.0 and 0.0; the optimizer steps once, with 3.0 in shard.grad.
    #   About 10 lines.
    raise NotImplementedError(
        "Task 3.16: serve_synchronously, see guidelines.md#316-a-synchronous-server"
    )


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
    # TODO 3.17: serve the workers in the order in which their gradients come.
    #   Example: 3 workers with 4 steps each: 12 steps of the optimizer. With SGD, a learning rate
    #   of 1.0 and gradients of 1.0, parameters of 0.0 end as -12.0.
    #   About 6 lines.
    raise NotImplementedError(
        "Task 3.17: serve_asynchronously, see guidelines.md#317-an-asynchronous-server"
    )


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
    # TODO 3.18: serve as in 3.17, but hold replies back until the bound allows them.
    #   Example: staleness 2, clocks 5, 3 and 4: the first worker has its reply, for 5 - 3 is 2. Its
    #   next gradient makes the clocks 6, 3 and 4: no reply until the second worker's clock is 4.
    #   About 12 lines.
    raise NotImplementedError(
        "Task 3.18: serve_with_bounded_staleness, see guidelines.md#318-bounded-staleness"
    )


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
    # TODO 3.19: serve every worker by itself, so that none can hold up the others by its death.
    #   Example: staleness 1, clocks 3, 3 and 2, and nothing comes from the third worker in time:
    #   the other two go on from clock 4 to the end, and are returned.
    #   About 30 lines.
    raise NotImplementedError(
        "Task 3.19: serve_survivors, see guidelines.md#319-survive-the-death-of-a-worker"
    )
