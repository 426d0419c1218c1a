"""Judges tasks 1.5 to 1.7: what arrives, who sends to whom, rounds and memory."""

from collections import Counter
from math import ceil, floor, log2

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging.checks import Edge, edges_of, rounds_of_tree, short
from judging.collective import AllReduce, Broadcast, Call, Contract
from judging.tensors import even_size
from phase1 import collectives as c

OF_MESSAGES = "this all-reduce should be made of messages (send, recv, your exchange and broadcast)"
AT_ONCE = 30  # elements: so few that several messages started at once take as long as one

# 1.5 broadcast


def _check_tree(call: Call) -> None:
    n, src, edges = call.n, call.variant.src, edges_of(call.run)
    check(
        len(edges) == n - 1,
        f"a broadcast on {counted(n, 'rank')} needs {counted(n - 1, 'message')}, one for each rank "
        f"that lacks the data; messages sent per rank, with src = {src}: {call.run.messages}.",
    )
    most, rounds = ceil(log2(n)), rounds_of_tree(edges, src)
    check(
        max(call.run.messages) <= most and rounds <= most,
        f"a broadcast on {counted(n, 'rank')} needs {counted(most, 'round')}, in which no rank "
        f"sends more than {counted(most, 'message')}; with src = {src}, yours takes {rounds:g}. "
        f"Messages sent per rank: {call.run.messages}. Every rank that has the data passes it on.",
    )


BROADCAST = Contract(
    task="1.5",
    name="broadcast",
    collective=Broadcast(
        "broadcast",
        advice="Number the ranks by their distance from src, wrapping around; write into x itself, "
        "and send it in its own dtype: a cast loses digits.",
    ),
    worlds=(2, 3, 5, 6, 7, 8, 16, 1),
    length=lambda random: random.randrange(1, AT_ONCE),
    made_of="broadcast should be made of send and recv",
    traffic=_check_tree,
    messages=lambda num_elements, n: Counter({num_elements: n - 1}),
    rounds=lambda n: ceil(log2(n)),
    late="Every rank that has the data passes it on, and sends first to the rank that must pass it "
    "on to the most others.",
    timed_up_to=AT_ONCE,
    inboxes=lambda _rank: 0,
    memory="Send and receive x itself: no copy or second tensor is needed.",
    kinds_on=(4, 3),
)
globals().update(BROADCAST.tests())


@task("1.5")
def test_two_broadcasts_do_not_mix(grade: Grade) -> None:
    for srcs in ([0, 3], [0, 5]):
        for rank, got in enumerate(grade.run(c.broadcast_twice, 8, 2, srcs).results):
            expected = [float(srcs[0]), 10.0 + srcs[1]]
            check(
                got == expected,
                f"rank {rank} of 8 should get {expected} from two broadcasts, one after the other, "
                f"from ranks {srcs[0]} and {srcs[1]}, even if rank 2 is late; it got {got}. Name "
                "the rank that you receive from: without group_src=, recv accepts any message, "
                "even one from the next broadcast.",
            )


# 1.6 all_reduce_naive


def _check_through_rank_0(call: Call) -> None:
    n, edges = call.n, edges_of(call.run)
    to_rank_0 = [src for src, dst in edges if dst == 0]
    check(
        to_rank_0 == list(range(1, n)),
        f"on {counted(n, 'rank')}, rank 0 should receive one message from every other rank and add "
        f"them up; it receives messages from ranks {to_rank_0}.",
    )
    down = [edge for edge in edges if edge[1] != 0]
    check(
        sorted(dst for _, dst in down) == list(range(1, n)),
        f"on {counted(n, 'rank')}, each rank except rank 0 should receive one message, the sum; "
        f"the messages to these ranks, as (from, to), are {short(down)}.",
    )
    _check_broadcast(call.run, down)


def _check_broadcast(run: Run, down: list[Edge]) -> None:
    n = len(run.results)
    most, rounds = ceil(log2(n)), rounds_of_tree(down, 0)
    check(
        run.messages[0] <= most and rounds <= most,
        f"on {counted(n, 'rank')}, adding up on rank 0 should take {counted(n - 1, 'round')}, and "
        f"broadcasting the sum {most} more; yours takes {n - 1 + rounds} in all. Rank 0 should "
        f"send at most {counted(most, 'message')}; it sends {run.messages[0]:,}. Send the sum with "
        "your broadcast, in which every rank that has the sum passes it on.",
    )


NAIVE = Contract(
    task="1.6",
    name="naive",
    collective=AllReduce("all_reduce_naive"),
    worlds=(2, 3, 5, 6, 8, 16, 1),
    length=lambda random: random.randrange(1, AT_ONCE),
    made_of=OF_MESSAGES,
    traffic=_check_through_rank_0,
    messages=lambda num_elements, n: Counter({num_elements: 2 * (n - 1)}),
    rounds=lambda n: n - 1 + ceil(log2(n)),
    late="Rank 0 receives one message after another, and sends the sum with your broadcast.",
    timed_up_to=AT_ONCE,
    inboxes=lambda rank: int(rank == 0),
    memory="Rank 0 needs x and one tensor to receive into, which it can reuse for every message; "
    "the others need x alone. Add in place: x += …",
    kinds_on=(3,),
)
globals().update(NAIVE.tests())

# 1.7 all_reduce_recursive_doubling


def _check_partners(call: Call) -> None:
    n, edges = call.n, edges_of(call.run)
    expected, core = _edges_of_doubling(n), _core(n)
    handed = f" Each rank r ≥ {core} hands x over to rank r - {core}, and gets the sum back."
    core_only = f" As {n} is a power of two, no rank hands its x over to another."
    for rank in range(n):
        wanted, got = ([dst for src, dst in each if src == rank] for each in (expected, edges))
        check(
            got == wanted,
            f"rank {rank} of {n} should send one message to each of the ranks {wanted}; it sends "
            f"messages to ranks {got}. Among the first {core} ranks, the numbers of two partners "
            f"differ in one bit.{handed if n > core else core_only}",
        )


def _core(n: int) -> int:
    """Return P, the largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _edges_of_doubling(n: int) -> list[Edge]:
    core = _core(n)
    swaps = [(rank, rank ^ 1 << k) for rank in range(core) for k in range(core.bit_length() - 1)]
    handed = [(rank, rank - core) for rank in range(core, n)]
    return sorted([*swaps, *handed, *((dst, src) for src, dst in handed)])


DOUBLING = Contract(
    task="1.7",
    name="doubling",
    collective=AllReduce("all_reduce_recursive_doubling"),
    worlds=(2, 3, 4, 5, 6, 7, 8, 16, 1),
    length=lambda random: even_size(random, 1000, 9000) + random.randrange(2),
    made_of=OF_MESSAGES,
    traffic=_check_partners,
    messages=lambda num_elements, n: Counter({num_elements: len(_edges_of_doubling(n))}),
    rounds=lambda n: floor(log2(n)) + (0 if n == _core(n) else 2),
    late="Partners are at distance 1, 2, 4, … and swap their sums at the same time.",
    inboxes=lambda _rank: 1,
    memory="A rank needs x and one tensor to receive into, which it can reuse in every round. Add "
    "in place: x += …",
    kinds_on=(5,),
    bits_on=(4, 7),
)
globals().update(DOUBLING.tests())
