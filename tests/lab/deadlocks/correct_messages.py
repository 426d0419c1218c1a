"""Correct programs: sends and receives in unusual orders."""

import time

import torch
import torch.distributed as dist
from catalogue import empty, me, received, returns, size, value


@returns([[1, 11], [0, 10]])
def waits_in_reverse() -> object:
    """All is posted first; the waits come in the opposite order."""
    inbox = [empty(), empty()]
    works = [dist.isend(value(me() + 10 * k), 1 - me()) for k in range(2)]
    works += [dist.irecv(x, 1 - me()) for x in inbox]
    for work in reversed(works):
        work.wait()
    return [x.item() for x in inbox]


@returns([1, 0])
def one_side_first() -> object:
    """Head to head, but rank 1 receives first."""
    if me() == 0:
        dist.send(value(0), 1)
        return received(1)
    x = received(0)
    dist.send(value(1), 0)
    return x


@returns([3, 0, 1, 2])
def ring_with_isend() -> object:
    """Everybody sends to the right and receives from the left, without a first."""
    work = dist.isend(value(me()), (me() + 1) % size())
    x = received((me() - 1) % size())
    work.wait()
    return x


@returns([4, 0, 1, 2, 3])
def ring_with_one_brave() -> object:
    """In a ring of blocking calls it is enough that one rank receives first."""
    right, left = (me() + 1) % size(), (me() - 1) % size()
    if me() == 2:
        x = received(left)
        dist.send(value(me()), right)
    else:
        dist.send(value(me()), right)
        x = received(left)
    return x


@returns([4, 0, 1, 2, 3])
def odd_and_even() -> object:
    """Even ranks send first and odd ones receive first, on a ring of odd length."""
    right, left = (me() + 1) % size(), (me() - 1) % size()
    if me() % 2 == 0:
        dist.send(value(me()), right)
        return received(left)
    x = received(left)
    dist.send(value(me()), right)
    return x


@returns([None, [3, 2, 1]])
def tags_out_of_order() -> object:
    """Messages are told apart by their tags, in whatever order they are awaited."""
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


@returns([[0, 1, 2], None])
def same_tag_in_order() -> object:
    """Messages with the same address come in the order in which they were sent."""
    if me() == 1:
        works = [dist.isend(value(k), 0) for k in range(3)]
        for work in works:
            work.wait()
        return None
    return [received(1) for _ in range(3)]


@returns([6, None, None, None])
def gather_from_any_source() -> object:
    """The root takes what comes."""
    if me() == 0:
        return sum(received() for _ in range(size() - 1))
    dist.send(value(me()), 0)
    return None


@returns([[3, 2, 1], None, None, None])
def gather_from_the_last() -> object:
    """The root asks for the messages in its own order; the others have long been waiting."""
    if me() == 0:
        return [received(rank) for rank in reversed(range(1, size()))]
    dist.send(value(me()), 0)
    return None


@returns([0, 1, 2])
def message_to_oneself() -> object:
    """A rank sends to itself, with both ends posted before it waits. (Not on gloo.)"""
    x = empty()
    works = [dist.isend(value(me()), me()), dist.irecv(x, me())]
    for work in works:
        work.wait()
    return x.item()


@returns([0, 0])
def messages_without_content() -> object:
    """Tensors of size zero are messages like others: each needs its recv."""
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
    """To wait again for what is done does nothing. (gloo waits forever.)"""
    x = value(7) if me() == 0 else empty()
    work = dist.isend(x, 1) if me() == 0 else dist.irecv(x, 0)
    work.wait()
    work.wait()
    return x.item() if me() else None


@returns([None, 5])
def never_waits_for_its_isend() -> object:
    """A rank returns while its message is on its way, which arrives. (A gloo process drops it.)"""
    if me() == 0:
        dist.isend(value(5), 1)
        return None
    time.sleep(1)
    return received(0)


@returns([None, None])
def message_for_nobody() -> object:
    """An isend is never received, an irecv never served, and nobody waits for either."""
    if me() == 0:
        dist.isend(value(5), 1)
    else:
        dist.irecv(empty(), 0, tag=1)


@returns([None, 3])
def asks_until_it_is_there() -> object:
    """A rank polls and computes in between. (On gloo a recv is never completed without wait.)"""
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
    """A halo exchange as one batch, the receives behind the sends."""
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


@returns([None, None, 1])
def passes_it_on() -> object:
    """A chain: every rank but the first waits for the one before it."""
    if me() == 0:
        dist.send(value(1), 1)
        return None
    x = received(me() - 1)
    if me() == size() - 1:
        return x
    dist.send(value(x), me() + 1)
    return None


@returns([6, 6, 6, 6])
def recursive_doubling() -> object:
    """All-reduce by exchanging with partners at distance 1 and 2."""
    total = value(me())
    for distance in (1, 2):
        work = dist.isend(total.clone(), me() ^ distance)
        total += received(me() ^ distance)
        work.wait()
    return total.item()


@returns([6, 6, 6, 6])
def each_half_its_own_distance_first() -> object:
    """Two ranks begin with the far partner: the messages wait until they are asked for."""
    x = [empty(), empty()]
    distances = (1, 2) if me() < 2 else (2, 1)
    works = [dist.isend(value(me()), me() ^ distance) for distance in distances]
    for k, distance in enumerate(distances):
        dist.recv(x[k], me() ^ distance)
    for work in works:
        work.wait()
    diagonal = 3 - me()
    return me() + x[0].item() + x[1].item() + diagonal


@returns([10, 10, 10, 10, 10])
def ring_all_reduce() -> object:
    """Everybody's number travels once around."""
    right, left = (me() + 1) % size(), (me() - 1) % size()
    passing, total = value(me()), value(me())
    for _ in range(size() - 1):
        inbox = empty()
        works = [dist.irecv(inbox, left), dist.isend(passing, right)]
        for work in works:
            work.wait()
        passing = inbox
        total += inbox
    return total.item()


@returns([9, 9, 9, 9, 9, 9])
def tree_broadcast() -> object:
    """A binomial tree: who has the value passes it on, at a distance that doubles."""
    x, distance = value(9 if me() == 0 else 0), 1
    while distance < size():
        if me() < distance and me() + distance < size():
            dist.send(x, me() + distance)
        elif distance <= me() < 2 * distance:
            dist.recv(x, me() - distance)
        distance *= 2
    return x.item()
