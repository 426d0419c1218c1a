"""Time limits expire in virtual time, and raise the errors that gloo raises."""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from distlab import launch
from distlab.sim import Deadlock, simulate

SECOND = timedelta(seconds=1)
LATE_S = 2.5


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    """Make a call; return its error text ("" if there is none) and the seconds that it took."""
    start_s, words = time.monotonic(), ""
    try:
        call()
    except RuntimeError as error:
        words = str(error)
    return words, round(time.monotonic() - start_s, 1)


def me() -> int:
    return dist.get_rank()


def say_that_it_is_over() -> None:
    """Release the late ranks, which wait for this so that they are late on any machine."""
    _get_default_store().set("it is over", "")


def wait_until_it_is_over() -> None:
    _get_default_store().wait(["it is over"])


# Messages


def waits_for_a_late_rank(name: str) -> list[tuple[str, float]]:
    """Send or receive (``name``) twice on rank 0, while rank 1 is late with its counterpart."""
    x, other = torch.zeros(2_000_000), 1 - me()
    if me() == 0:
        first = outcome(lambda: getattr(dist, f"i{name}")(x, other).wait(SECOND))
        then = outcome(lambda: getattr(dist, name)(x, other))
        say_that_it_is_over()
        return [first, then]
    wait_until_it_is_over()
    return [outcome(lambda: {"send": dist.recv, "recv": dist.send}[name](x, other))]


# On gloo, a sender may not notice that the receive timed out: its send hung in 2 of 48 runs.
@pytest.mark.parametrize(("name", "world"), [("recv", "sim"), ("send", "sim"), ("send", "gloo")])
def test_a_late_message_closes_its_connection(name: str, world: str) -> None:
    ranks = launch.run(waits_for_a_late_rank, 2, name, backend=world, timeout_s=30)
    (first, then), [peer] = ranks
    assert f"Timed out waiting 1000ms for {name} operation to complete" in first[0]
    assert "Application timeout caused pair closure" in then[0]
    assert "Connection closed by peer" in peer[0]
    if world == "sim":  # how long gloo takes depends on the machine
        assert (first[1], then[1], peer[1]) == (1.0, 0.0, 0.0)


def test_the_error_of_a_late_message_says_which_and_other_connections_stay_open() -> None:
    def program() -> object:
        x = torch.full((1,), float(me()))
        if me() == 0:
            late, _ = outcome(lambda: dist.irecv(x, 1).wait(SECOND))
            dist.recv(x, 2)
            return "recv from rank 1, (1,) float32, test_limits.py:" in late, x.item()
        if me() == 2:
            dist.send(x, 0)
        return None

    assert simulate(program, 3).results == [(True, 2.0), None, None]


# Collectives


def waits_twice() -> list[tuple[str, float]]:
    x = torch.ones(2)
    if me() == 1:
        wait_until_it_is_over()
        time.sleep(LATE_S)
        return [outcome(lambda: dist.all_reduce(x)), outcome(lambda: dist.all_reduce(x))]
    work = dist.all_reduce(x, async_op=True)
    first = outcome(lambda: work.wait(SECOND))
    say_that_it_is_over()
    return [first, outcome(lambda: dist.all_reduce(x))]


def test_a_rank_that_waits_no_longer_does_not_end_a_collective() -> None:
    (first, then), others = simulate(waits_twice, 2).results
    assert "Operation timed out!" in first[0]
    assert then == ("", LATE_S)
    assert [words for words, _ in others] == ["", ""]


def in_a_group_with_a_limit() -> list[tuple[str, float]]:
    # On a busy machine, gloo may be late to notice that a peer has closed its connection.
    limit = SECOND if me() == 0 else 20 * SECOND
    group, x = dist.new_group(timeout=limit), torch.ones(2)
    if me() == 1:
        wait_until_it_is_over()
        return [outcome(lambda: dist.all_reduce(x, group=group))]
    first, then = outcome(lambda: dist.all_reduce(x, group=group)), after_the_limit(group)
    say_that_it_is_over()
    return [first, then]


def after_the_limit(group: dist.ProcessGroup | None) -> tuple[str, float]:
    """Return the outcome of a later call.

    Make the call up to three times, because gloo may be slow to close the pair on a busy machine.
    """
    for _ in range(3):
        found = outcome(lambda: dist.barrier(group=group))
        if "Timed out" not in found[0]:
            break
    return found


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_groups_limit_ends_a_collective_and_closes_the_group(world: str) -> None:
    (first, then), [late] = launch.run(in_a_group_with_a_limit, 2, backend=world, timeout_s=30)
    assert "Timed out waiting 1000ms for" in first[0]
    assert "Application timeout caused pair closure" in then[0]
    # A sender on gloo may not notice the closure, and then waits for its own limit.
    closed = "Connection closed by peer" in late[0]
    assert closed or (world == "gloo" and "Timed out waiting 20000ms" in late[0])


# The monitored barrier


def comes_or_not(*, names_all: bool) -> tuple[str, float]:
    if me() in (1, 2):
        wait_until_it_is_over()
        return "", 0.0
    found = outcome(lambda: dist.monitored_barrier(timeout=SECOND, wait_all_ranks=names_all))
    if me() == 0:
        say_that_it_is_over()
    return found


@pytest.mark.parametrize(("names_all", "who"), [(True, "Ranks 1, 2"), (False, "Rank 1")])
def test_a_monitored_barrier_names_who_does_not_come(names_all: bool, who: str) -> None:
    results = simulate(partial(comes_or_not, names_all=names_all), 4).results
    assert results[0][0].startswith(f"[Rank 0]: {who} failed to pass monitoredBarrier in 1000 ms")
    assert results[3][0].startswith("Rank 3 successfully reached monitoredBarrier, but received")


def rank_0_comes_late() -> tuple[str, float]:
    if me() == 0:
        time.sleep(LATE_S)
    return outcome(lambda: dist.monitored_barrier(timeout=SECOND))


def test_a_monitored_barrier_waits_for_rank_0() -> None:
    assert simulate(rank_0_comes_late, 3).results == [("", 0.0), ("", LATE_S), ("", LATE_S)]


# Without a limit


def retries_forever() -> None:
    store = _get_default_store()
    while me() == 0 and not store.check(["ready"]):
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["ready"], timedelta(seconds=1))
    dist.barrier()


def until_it_passes(post: Callable[[], dist.Work | None]) -> None:
    """On rank 0, retry a call with a limit of one second until it succeeds; rank 1 does nothing."""
    while me() == 0:
        with contextlib.suppress(RuntimeError):
            work = post()
            if work is not None:
                work.wait(SECOND)
            return


def receives_forever() -> None:
    until_it_passes(lambda: dist.irecv(torch.zeros(1), 1))


def reduces_forever() -> None:
    until_it_passes(lambda: dist.all_reduce(torch.ones(1), async_op=True))


def reduces_in_a_group_with_a_limit() -> None:
    group = dist.new_group(timeout=SECOND)
    until_it_passes(lambda: dist.all_reduce(torch.ones(1), group=group))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (retries_forever, "rank 0 waits for the key 'ready', which no rank has set"),
        (receives_forever, "rank 0 waits for rank 1 to send, but rank 1 has returned"),
        (
            receives_forever,
            "The connection of ranks 0 and 1 is closed, because rank 0 had waited long enough in "
            "its recv from rank 1, (1,) float32, test_limits.py:",
        ),
        (reduces_forever, "rank 0 waits in all_reduce (call 1801 of ranks 0 and 1) for rank 1"),
        (reduces_in_a_group_with_a_limit, "rank 0 waits in all_reduce (call 2 of ranks 0 and 1)"),
    ],
)
def test_who_tries_a_call_again_forever_is_found(program: Callable[[], None], words: str) -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(program, 2)
    assert words in str(caught.value)
