"""``p2p_order="pair"`` starts point-to-point operations in NCCL's order; reports say so."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from programs import me, neighbours

from distlab.sim import Deadlock, Mismatch, Options, simulate

PAIR = Options(p2p_order="pair")
PLAIN_RULE = "on NCCL, operations of a pair that are not batched run one after the other"
Program = Callable[..., object]


def posted(order: str, dst: int, src: int) -> tuple[list[dist.Work], torch.Tensor]:
    x, y = torch.full((4,), float(me())), torch.zeros(4)
    calls: dict[str, Callable[[], dist.Work]] = {
        "s": lambda: dist.isend(x, dst),
        "r": lambda: dist.irecv(y, src),
    }
    return [calls[letter]() for letter in order], y


def exchange(order: str) -> float:
    works, y = posted(order, 1 - me(), 1 - me())
    for work in works:
        work.wait()
    return float(y[0])


def report(program: Program, num_ranks: int, *args: object) -> Deadlock:
    with pytest.raises(Deadlock) as caught:
        simulate(program, num_ranks, *args, options=PAIR)
    return caught.value


def test_an_unbatched_exchange_of_a_pair_hangs_as_on_nccl() -> None:
    assert simulate(exchange, 2, "sr").results == [1.0, 0.0]
    error = report(exchange, 2, "sr")
    assert (error.kind, error.ranks) == ("send/recv cycle", (0, 1))
    assert "All of them send first" not in str(error)


def sends_and_receives() -> None:
    work = dist.isend(torch.ones(4), 1 - me())
    dist.recv(torch.zeros(4), 1 - me())
    work.wait()


def opposite_orders() -> float:
    return exchange("sr" if me() == 0 else "rs")


def batched(num_batches: int = 1) -> float:
    right, left = neighbours()
    y = torch.zeros(4)
    ops = [
        dist.P2POp(dist.isend, torch.full((4,), float(me())), right),
        dist.P2POp(dist.irecv, y, left),
    ]
    batches = [ops] if num_batches == 1 else [[op] for op in ops]
    for work in [work for some in batches for work in dist.batch_isend_irecv(some)]:
        work.wait()
    return float(y[0])


def ring() -> float:
    right, left = neighbours()
    works, y = posted("sr", right, left)
    for work in works:
        work.wait()
    return float(y[0])


def batch_between_unbatched() -> float:
    """Run a batch while an unbatched operation is in flight.

    The batch runs on the group's stream and the operation on the pair's, so neither waits.
    """
    y = torch.zeros(4)
    first = dist.irecv(y, 1 - me()) if me() == 0 else dist.isend(torch.full((4,), 5.0), 1 - me())
    batched()
    first.wait()  # type: ignore[union-attr]
    return float(y[0])


def own_group_each_way() -> float:
    """Send on one group and receive on another: each group has its own streams."""
    up, down = dist.new_group([0, 1]), dist.new_group([0, 1])
    y = torch.zeros(4)
    groups = (up, down) if me() == 0 else (down, up)
    sending = dist.isend(torch.full((4,), float(me())), 1 - me(), group=groups[0])
    receiving = dist.irecv(y, 1 - me(), group=groups[1])
    sending.wait()  # type: ignore[union-attr]
    receiving.wait()  # type: ignore[union-attr]
    return float(y[0])


def batched_to_itself() -> float:
    y = torch.zeros(1)
    works = [dist.P2POp(dist.isend, torch.ones(1), me()), dist.P2POp(dist.irecv, y, me())]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return float(y)


@pytest.mark.parametrize(
    ("program", "results"),
    [
        (opposite_orders, [1.0, 0.0]),
        (batched, [1.0, 0.0]),
        (own_group_each_way, [1.0, 0.0]),
        (batch_between_unbatched, [5.0, 0.0]),
        (batched_to_itself, [1.0, 1.0]),
        (ring, [2.0, 0.0, 1.0]),
    ],
)
def test_what_passes_on_nccl_passes(program: Program, results: list[float]) -> None:
    assert simulate(program, len(results), options=PAIR).results == results


@pytest.mark.parametrize(
    ("program", "num_ranks", "says"),
    [
        (
            partial(exchange, "sr"),
            2,
            (
                "rank 0's irecv from rank 1 waits behind its isend to rank 1",
                "rank 1's irecv from rank 0 waits behind its isend to rank 0",
                "batch_isend_irecv",
                "also posted, and not started:",
                PLAIN_RULE,
            ),
        ),
        (sends_and_receives, 2, ("rank 0 waits in recv behind its isend to rank 1",)),
        (ring, 2, (PLAIN_RULE,)),
        (
            partial(batched, 2),
            3,
            (
                "rank 0's irecv from rank 2 waits behind its batch with the isend to rank 1",
                "on NCCL, the batches of a group run one after the other",
                "one batch_isend_irecv",
            ),
        ),
    ],
)
def test_a_report_says_what_waits_behind_what(
    program: Program, num_ranks: int, says: tuple[str, ...]
) -> None:
    text = str(report(program, num_ranks)).lower()
    assert [words for words in says if words.lower() not in text] == [], text


def head_to_head() -> None:
    dist.send(torch.ones(4), 1 - me())
    dist.recv(torch.zeros(4), 1 - me())


def two_sends_and_an_early_return() -> None:
    if me() == 0:
        works = [dist.isend(torch.ones(4), 1) for _ in range(2)]
        works[1].wait()  # type: ignore[union-attr]


@pytest.mark.parametrize("program", [head_to_head, two_sends_and_an_early_return])
def test_the_order_is_not_blamed_where_it_is_not_the_cause(program: Program) -> None:
    assert "NCCL" not in str(report(program, 2))


def many_small_messages() -> float:
    """Queue 2,000 receives behind a send; once it is done, each completes as soon as it starts."""
    y = torch.zeros(1)
    if me() == 0:
        work = dist.isend(torch.zeros(8), 1)
        receiving = [dist.irecv(y, 1) for _ in range(2000)]
        receiving[-1].wait()  # type: ignore[union-attr]
        work.wait()  # type: ignore[union-attr]
    else:
        for step in range(2000):
            dist.send(torch.full((1,), float(step)), 0)
        dist.recv(torch.zeros(8), 0)
    return float(y)


def test_a_long_queue_is_no_deep_recursion() -> None:
    options = Options(p2p_order="pair", eager_bytes=4)
    assert simulate(many_small_messages, 2, options=options).results == [1999.0, 0.0]


def received_in_another_order(*sizes: int) -> list[float]:
    """Send a message with each tag, and receive the last tag first."""
    if me() == 0:
        works = [dist.isend(torch.full((n,), float(t)), 1, tag=t) for t, n in enumerate(sizes)]
    else:
        buffers = [torch.zeros(n) for n in sizes]
        works = [dist.irecv(buffers[t], 0, tag=t) for t in reversed(range(len(sizes)))]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return [float(x[0]) for x in buffers] if me() else []


def test_tags_do_not_count_as_on_nccl() -> None:
    assert simulate(received_in_another_order, 2, 4, 4).results[1] == [0.0, 1.0]
    options = Options(p2p_order="pair", is_sanitized=True)
    simulated = simulate(received_in_another_order, 2, 4, 4, options=options)
    assert simulated.results[1] == [1.0, 0.0]
    [line] = simulated.findings
    assert "rank 1 receives with tag 1 (test_p2p_order.py:" in line
    assert "what rank 0 sent with tag 0 (test_p2p_order.py:" in line
    assert "NCCL ignores tags" in line


def test_a_mismatch_says_that_tags_do_not_count() -> None:
    with pytest.raises(Mismatch, match="NCCL ignores tags: messages from one rank to another meet"):
        simulate(received_in_another_order, 2, 4, 2, options=PAIR)


def behind_another_send() -> None:
    if me() == 0:
        dist.isend(torch.ones(4), 1, tag=1).wait()  # type: ignore[union-attr]
    else:
        works = [dist.isend(torch.ones(4), 0), dist.irecv(torch.zeros(4), 0, tag=2)]
        works[1].wait()  # type: ignore[union-attr]


def test_a_report_counts_no_tags() -> None:
    text = str(report(behind_another_send, 2))
    assert "Rank 1's recv from rank 0 waits behind its isend to rank 0" in text
