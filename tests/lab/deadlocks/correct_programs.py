"""Correct programs: messages in unusual orders, collectives on several groups, early ends."""

import time

import torch
import torch.distributed as dist
from catalogue import empty, me, received, reduced, returns, size, value
from torch.distributed.distributed_c10d import _get_default_store

from distlab.sim import Faults

# Messages


@returns([[1, 11], [0, 10]])
def waits_in_reverse() -> object:
    """All calls are posted first, and then awaited in reverse order."""
    inbox = [empty(), empty()]
    works = [dist.isend(value(me() + 10 * k), 1 - me()) for k in range(2)]
    works += [dist.irecv(x, 1 - me()) for x in inbox]
    for work in reversed(works):
        work.wait()
    return [x.item() for x in inbox]


@returns([3, 0, 1, 2])
def ring_with_isend() -> object:
    """Every rank sends to the right and receives from the left; none has to go first."""
    work = dist.isend(value(me()), (me() + 1) % size())
    x = received((me() - 1) % size())
    work.wait()
    return x


@returns([None, [3, 2, 1]])
def tags_out_of_order() -> object:
    """Tags distinguish messages, in whatever order they are awaited."""
    if me() == 0:
        works = [dist.isend(value(tag), 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
        return None
    inbox = [empty() for _ in range(3)]
    works = [dist.irecv(x, 0, tag=tag) for x, tag in zip(inbox, (3, 2, 1), strict=True)]
    for work in works:
        work.wait()
    return [x.item() for x in inbox]


@returns([6, None, None, None])
def gather_from_any_source() -> object:
    """The root receives messages in whatever order they arrive."""
    if me() == 0:
        return sum(received() for _ in range(size() - 1))
    dist.send(value(me()), 0)
    return None


@returns([0, 1, 2])
def message_to_oneself() -> object:
    """A rank sends to itself, and posts both ends before it waits. (gloo does not support this.)"""
    x = empty()
    works = [dist.isend(value(me()), me()), dist.irecv(x, me())]
    for work in works:
        work.wait()
    return x.item()


@returns([0, 0])
def messages_without_content() -> object:
    """Empty tensors are messages like any other: each needs its recv."""
    x = torch.zeros(0)
    if me() == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        dist.recv(x, 0)
        dist.send(x, 0)
    dist.all_reduce(x)
    return x.numel()


@returns([None, 7])
def waits_twice() -> object:
    """Waiting again for a completed call does nothing. (gloo waits forever.)"""
    x = value(7) if me() == 0 else empty()
    work = dist.isend(x, 1) if me() == 0 else dist.irecv(x, 0)
    work.wait()
    work.wait()
    return x.item() if me() else None


@returns([None, 5])
def never_waits_for_its_isend() -> object:
    """A rank returns while its message is in flight; the message still arrives. (gloo drops it.)"""
    if me() == 0:
        dist.isend(value(5), 1)
        return None
    time.sleep(1)
    return received(0)


@returns([None, None])
def message_for_nobody() -> object:
    """An isend is never received, an irecv never matched, and no rank waits for either."""
    if me() == 0:
        dist.isend(value(5), 1)
    else:
        dist.irecv(empty(), 0, tag=1)


@returns([None, 3])
def asks_until_it_is_there() -> object:
    """A rank sleeps between its polls. (On gloo, a recv never completes without wait.)"""
    if me() == 0:
        time.sleep(1e-4)
        dist.send(value(3), 1)
        return None
    x = empty()
    work = dist.irecv(x, 0)
    while not work.is_completed():
        time.sleep(1e-5)
    return x.item()


@returns([[2, 1], [0, 2], [1, 0]])
def batch_in_both_directions() -> object:
    """A halo exchange as one batch, with the receives after the sends."""
    right, left = (me() + 1) % size(), (me() - 1) % size()
    from_left, from_right = empty(), empty()
    calls = [
        dist.P2POp(dist.isend, value(me()), right),
        dist.P2POp(dist.isend, value(me()), left, tag=1),
        dist.P2POp(dist.irecv, from_right, right, tag=1),
        dist.P2POp(dist.irecv, from_left, left),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return [from_left.item(), from_right.item()]


# Groups and collectives


@returns([[5, 2], [None, 2]])
def message_under_a_collective() -> object:
    """A rank receives while a collective that it has begun waits for the sender."""
    x = value(1)
    if me() == 0:
        work = dist.all_reduce(x, async_op=True)
        message = received(1)
        work.wait()
        return [message, x.item()]
    dist.send(value(5), 0)
    dist.all_reduce(x)
    return [None, x.item()]


@returns([[1, 3], [1, 3, 3], [3, 3]])
def overlapping_groups() -> object:
    """Two groups share a rank, and every rank uses its groups in the same order."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    results = [
        reduced(me(), group)
        for group, ranks in zip(groups, ((0, 1), (1, 2)), strict=True)
        if me() in ranks
    ]
    return [*results, reduced(me())]


@returns([[1, 2], [1, 4], [5, 2], [5, 4]])
def rows_then_columns_for_some() -> object:
    """On a 2×2 mesh, one rank begins with its column; the others' order still avoids a cycle."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    both = [("row", rows[me() // 2]), ("column", columns[me() % 2])]
    sums = {name: reduced(me(), group) for name, group in (both[::-1] if me() == 0 else both)}
    return [sums["row"], sums["column"]]


# Early ends


@returns([[2, 2], None, None])
def parameter_server() -> object:
    """The server answers any worker until every worker has said goodbye."""
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
    """A rank whose work is done returns long before the others."""
    if me() > 0:
        time.sleep(size() - me())
        dist.send(value(me()), 0)
        return me()
    return sum(received(rank) for rank in range(1, size()))


@returns([None, None, 4], Faults(kill_ranks={1: 0.5}))
def nobody_waits_for_the_dead() -> object:
    """A fault kills a rank with which the others no longer communicate."""
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


# Keys


@returns([2, 2, 2])
def asks_until_a_counter_is_complete() -> object:
    """Every rank polls the store without a pause."""
    store = _get_default_store()
    dist.barrier()
    if me():
        store.add("arrived", 1)
    while store.add("arrived", 0) < 2:
        pass
    return int(store.get("arrived"))


@returns([b"w", b"w"])
def asks_for_a_key_that_is_deleted_and_set_again() -> object:
    """Rank 1 polls a key until it changes; for a while, the key does not exist."""
    store = _get_default_store()
    if me() == 0:
        store.set("k", "v")
        dist.barrier()
        time.sleep(0.0005)
        store.delete_key("k")
        time.sleep(1)
        store.set("k", "w")
        return b"w"
    dist.barrier()
    while (value := store.get("k")) == b"v":
        pass
    return value


@returns([None, True])
def asks_for_two_keys_in_turn() -> object:
    """Rank 1 polls two keys in turn until one of them, the second, changes."""
    store = _get_default_store()
    if me() == 0:
        store.set("a", "0")
        store.set("b", "0")
    dist.barrier()
    if me() == 0:
        time.sleep(0.01)
        store.set("b", "1")
        return None
    while b"1" not in (store.get("a"), store.get("b")):
        pass
    return True
