"""Judges tasks 1.6 and 1.7: sums, bits, who sends to whom, rounds and memory."""

from math import ceil, floor, log2

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted
from judging import tensors as t
from judging.checks import (
    MEASURED,
    UNIFORM,
    Edge,
    check_no_collective,
    check_peak,
    check_sizes,
    check_waited,
    edges_of,
    rounds_of,
    rounds_of_tree,
    short,
    uneven,
)
from judging.sums import (
    check_inside_a_group,
    check_same_bits,
    check_sums,
    check_sums_of_powers,
)

NAIVE, DOUBLING = "all_reduce_naive", "all_reduce_recursive_doubling"
OF_MESSAGES = "this all-reduce should be made of messages (send, recv, your exchange and broadcast)"

# 1.6 all_reduce_naive


@task("1.6")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8, 16])
def test_naive_sum_passes_through_rank_0(grade: Grade, n: int) -> None:
    num_elements = grade.random.randrange(1, 30)
    run = grade.run(t.reduce_my_rank, n, NAIVE, num_elements, cluster=UNIFORM)
    check_sums_of_powers(run.results)
    check_no_collective(run, OF_MESSAGES)
    _check_who_sends(run)
    _check_rounds(run, rounds_of(run, 4 * num_elements))
    check_waited(run)


def _check_who_sends(run: Run) -> None:
    n, edges = len(run.results), edges_of(run)
    to_rank_0 = [src for src, dst in edges if dst == 0]
    check(
        to_rank_0 == list(range(1, n)),
        f"on {counted(n, 'rank')}, rank 0 should receive one message from every other rank and add "
        f"them up; it receives messages from ranks {to_rank_0}.",
    )
    tree = [edge for edge in edges if edge[1] != 0]
    check(
        sorted(dst for _, dst in tree) == list(range(1, n)),
        f"on {counted(n, 'rank')}, each rank except rank 0 should receive one message, the sum; "
        f"the messages to these ranks, as (from, to), are {short(tree)}.",
    )
    _check_rounds(run, n - 1 + rounds_of_tree(tree, 0))


def _check_rounds(run: Run, rounds: float) -> None:
    n = len(run.results)
    most = ceil(log2(n))
    check(
        run.messages[0] <= most and rounds <= n - 1 + most + 0.01,
        f"on {counted(n, 'rank')}, adding up on rank 0 should take {counted(n - 1, 'round')}, and "
        f"broadcasting the sum {most} more; yours takes {rounds:g} in all. Rank 0 should send at "
        f"most {counted(most, 'message')}; it sends {run.messages[0]:,}. Send the sum with your "
        "broadcast, in which every rank that has the sum passes it on.",
    )


@task("1.6")
def test_naive_needs_one_more_tensor_on_rank_0_alone(grade: Grade) -> None:
    num_elements = t.even_size(grade.random, *t.LARGE)
    run = grade.run(t.reduce_my_rank, 5, NAIVE, num_elements, options=MEASURED)
    check_no_collective(run, OF_MESSAGES)
    _check_who_sends(run)
    check_peak(
        *(run, [8 * num_elements + 256] + [4 * num_elements + 256] * 4),
        "Rank 0 needs x and one tensor to receive into, which it can reuse for every message; the "
        "others need x alone. Add in place: x += …",
    )


@task("1.6", real=True)
def test_naive_sums_every_kind(grade: Grade) -> None:
    _check_every_kind(grade, NAIVE, 3, num_messages=4)


def _check_every_kind(grade: Grade, name: str, n: int, num_messages: int) -> None:
    run = grade.run(t.reduce_all_kinds, n, name, options=uneven(grade.random, n))
    check_sums(run.results)
    if grade.is_simulated:
        check_no_collective(run, OF_MESSAGES)
        sizes = t.sizes_of_kinds()
        check_sizes(run, {size: count * num_messages for size, count in sizes.items()})


@task("1.6")
def test_naive_gives_all_ranks_the_same_bits(grade: Grade) -> None:
    check_same_bits(grade, NAIVE, 5)


@task("1.6")
def test_naive_inside_a_group(grade: Grade) -> None:
    check_inside_a_group(grade, NAIVE)


# 1.7 all_reduce_recursive_doubling


@task("1.7")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_doubling_takes_logarithmically_many_rounds(grade: Grade, n: int) -> None:
    num_elements = t.even_size(grade.random, 1000, 9000) + n % 2
    run = grade.run(t.reduce_my_rank, n, DOUBLING, num_elements, cluster=UNIFORM)
    check_sums_of_powers(run.results)
    check_no_collective(run, OF_MESSAGES)
    is_power = n & (n - 1) == 0
    rounds = floor(log2(n)) + (0 if is_power else 2)
    taken = rounds_of(run, 4 * num_elements)
    core = f" As {n} is a power of two, no rank hands its x over to another." if is_power else ""
    check(
        taken <= rounds + 0.01,
        f"recursive doubling on {counted(n, 'rank')} should take {counted(rounds, 'round')}, but "
        f"yours takes {taken:g}. Partners are at distance 1, 2, 4, … and swap their sums at the "
        f"same time.{core}",
    )
    _check_partners(run)
    check_waited(run)


def _check_partners(run: Run) -> None:
    n, found = len(run.results), edges_of(run)
    expected, core = _edges_of_doubling(n), _core(n)
    handed = f" Each rank r ≥ {core} hands x over to rank r - {core}, and gets the sum back."
    for rank in range(n):
        wanted, got = ([dst for src, dst in edges if src == rank] for edges in (expected, found))
        check(
            got == wanted,
            f"rank {rank} of {n} should send one message to each of the ranks {wanted}; it sends "
            f"messages to ranks {got}. Among the first {core} ranks, the numbers of two partners "
            f"differ in one bit.{handed if n > core else ''}",
        )


def _core(n: int) -> int:
    """P, the largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _edges_of_doubling(n: int) -> list[Edge]:
    core = _core(n)
    swaps = [(rank, rank ^ 1 << k) for rank in range(core) for k in range(core.bit_length() - 1)]
    handed = [(rank, rank - core) for rank in range(core, n)]
    return sorted([*swaps, *handed, *((dst, src) for src, dst in handed)])


@task("1.7")
def test_doubling_needs_one_more_tensor(grade: Grade) -> None:
    num_elements = t.even_size(grade.random, *t.LARGE)
    run = grade.run(t.reduce_my_rank, 5, DOUBLING, num_elements, options=MEASURED)
    check_no_collective(run, OF_MESSAGES)
    _check_partners(run)
    check_peak(
        *(run, [8 * num_elements + 256] * 5),
        "A rank needs x and one tensor to receive into, which it can reuse in every round. Add in "
        "place: x += …",
    )


@task("1.7", real=True)
def test_doubling_sums_every_kind(grade: Grade) -> None:
    _check_every_kind(grade, DOUBLING, 5, num_messages=10)


@task("1.7")
@pytest.mark.parametrize("n", [4, 7])
def test_doubling_gives_all_ranks_the_same_bits(grade: Grade, n: int) -> None:
    check_same_bits(grade, DOUBLING, n)


@task("1.7")
def test_doubling_inside_a_group(grade: Grade) -> None:
    check_inside_a_group(grade, DOUBLING)
