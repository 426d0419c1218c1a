"""Collectives from messages: values on every rank, who sends what to whom, and what it costs."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import floor, log2
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import (
    TIMEOUT_S,
    WORLD_SIZES,
    Message,
    Step,
    num_rounds,
    on_members,
    on_ranks,
    received,
    recorded,
    refusal,
    sent,
)
from torch import Tensor

from solutions.phase1_data_parallel import collectives
from solutions.phase1_data_parallel.collectives import (
    ALL_REDUCES,
    AllReduceTimes,
    Group,
    fit_alpha_beta,
    measure_all_reduce,
)

SHAPES = ((), (0,), (1,), (3,), (7, 2), (1009,))  # 0-dim, empty, fewer than N, no multiple of N
FLOATS = (torch.float32, torch.float64)
EXACT = (torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}  # of a sum; all others are exact


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What ``rank`` starts with; small whole numbers where sums of floats would round much."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    if dtype in FLOATS:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


# --- exchange ------------------------------------------------------------------------------------


def exchanges(group: Group = None) -> list[Tensor]:
    """Round the ring both ways, rank r sending r + 1 rows; then swap with rank ^ 1, if any."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    arrived = []
    for dtype, to_right in itertools.product((*FLOATS, *EXACT), (1, -1)):
        dst, src = (rank + to_right) % world_size, (rank - to_right) % world_size
        incoming = torch.zeros(src + 1, 2, dtype=dtype)
        collectives.exchange(values(rank, (rank + 1, 2), dtype), dst, incoming, src, group)
        arrived.append(incoming)
    if rank ^ 1 < world_size:
        incoming = torch.zeros((rank ^ 1) + 1)
        collectives.exchange(
            values(rank, (rank + 1,), torch.float32), rank ^ 1, incoming, rank ^ 1, group
        )
        arrived.append(incoming)
    return arrived


def check_exchanged(by_rank: list[list[Tensor]]) -> None:
    world_size = len(by_rank)
    for rank, arrived in enumerate(by_rank):
        expected = []
        for dtype, to_right in itertools.product((*FLOATS, *EXACT), (1, -1)):
            src = (rank - to_right) % world_size
            expected.append(values(src, (src + 1, 2), dtype))
        if rank ^ 1 < world_size:
            expected.append(values(rank ^ 1, ((rank ^ 1) + 1,), torch.float32))
        assert all(map(torch.equal, arrived, expected))
        assert len(arrived) == len(expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_exchange_brings_what_the_source_sent_also_of_another_size(world_size: int) -> None:
    check_exchanged(on_ranks(exchanges, world_size))


# --- values of broadcast and the all-reduces -----------------------------------------------------

REDUCED = [*itertools.product(SHAPES, FLOATS), *itertools.product([(7, 2)], EXACT)]
BROADCAST = [*REDUCED, ((7, 2), torch.bool), ((7, 2), torch.complex64)]


def broadcasts(group: Group = None) -> list[list[Tensor]]:
    """Every tensor from every source."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    by_src = []
    for src in range(world_size):
        tensors = [values(rank, shape, dtype) for shape, dtype in BROADCAST]
        for tensor in tensors:
            collectives.broadcast(tensor, src, group)
        by_src.append(tensors)
    return by_src


def check_broadcast(by_rank: list[list[list[Tensor]]]) -> None:
    for src in range(len(by_rank)):
        expected = [values(src, shape, dtype) for shape, dtype in BROADCAST]
        for rank, by_src in enumerate(by_rank):
            assert list(map(torch.equal, by_src[src], expected)) == [True] * len(BROADCAST), rank


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_copies_from_every_source_to_every_rank(world_size: int) -> None:
    check_broadcast(on_ranks(broadcasts, world_size))


def reduces(group: Group = None) -> dict[str, list[Tensor]]:
    """Every tensor by every strategy."""
    rank = dist.get_rank(group)
    sums = {}
    for name, all_reduce in ALL_REDUCES.items():
        sums[name] = [values(rank, shape, dtype) for shape, dtype in REDUCED]
        for tensor in sums[name]:
            all_reduce(tensor, group)
    return sums


@cache
def reduced(world_size: int) -> list[dict[str, list[Tensor]]]:
    return on_ranks(reduces, world_size)


def check_sums(by_rank: list[dict[str, list[Tensor]]], name: str) -> None:
    world_size = len(by_rank)
    for case, (shape, dtype) in enumerate(REDUCED):
        exact = sum(values(rank, shape, dtype).double() for rank in range(world_size))
        for sums in by_rank:
            assert sums[name][case].dtype == dtype
            error = (sums[name][case].double() - exact).abs().flatten().tolist()
            assert max(error, default=0.0) <= TOLERANCE.get(dtype, 0.0), (name, shape, dtype)


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_sums_over_all_ranks(world_size: int, name: str) -> None:
    check_sums(reduced(world_size), name)


@pytest.mark.parametrize("name", ["naive", "recursive_doubling"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sum_is_the_same_bit_for_bit_on_all_ranks(world_size: int, name: str) -> None:
    first, *others = (sums[name] for sums in reduced(world_size))
    for tensors in others:
        assert list(map(torch.equal, tensors, first)) == [True] * len(REDUCED)


def test_in_a_group_the_ranks_are_those_inside_it_and_nobody_else_takes_part() -> None:
    check_exchanged(on_members(exchanges))
    check_broadcast(on_members(broadcasts))
    by_rank = on_members(reduces)
    for name in ALL_REDUCES:
        check_sums(by_rank, name)


# --- messages ------------------------------------------------------------------------------------

NUM_ELEMENTS = 11
NUM_BYTES = 4 * NUM_ELEMENTS
TRACED = ("exchange", "naive", "recursive_doubling")
Trace = Sequence[list[Step]]  # by rank


def steps_of(call: Callable[..., object], *args: object) -> list[Step]:
    with recorded() as steps:
        call(*args)
    return steps


def traces() -> dict[str, list[Step]]:
    """What this rank posts in every algorithm, on 11 floats; broadcast also by source."""
    world_size, x = dist.get_world_size(), torch.ones(NUM_ELEMENTS)
    right, left = (dist.get_rank() + 1) % world_size, (dist.get_rank() - 1) % world_size
    ring = [(collectives.exchange, x, right, torch.empty_like(x), left)] if world_size > 1 else []
    calls: dict[str, tuple[Any, ...]] = {
        **{f"exchange {position}": call for position, call in enumerate(ring)},
        **{f"broadcast {src}": (collectives.broadcast, x, src) for src in range(world_size)},
        "naive": (collectives.all_reduce_naive, x),
        "recursive_doubling": (collectives.all_reduce_recursive_doubling, x),
    }
    return {name: steps_of(*call) for name, call in calls.items()}


@cache
def traced(world_size: int) -> dict[str, Trace]:
    by_rank = on_ranks(traces, world_size)
    return {name: [rank[name] for rank in by_rank] for name in by_rank[0]}


def num_sent(trace: Trace) -> list[int]:
    return [len(sent(steps)) for steps in trace]


def ceil_log2(number: int) -> int:
    return (number - 1).bit_length()


def edges_by_step(trace: Trace) -> list[set[tuple[int, int]]]:
    """(from, to) of the messages that the ranks send in their first step, second step, …"""
    by_step = itertools.zip_longest(*trace, fillvalue=())
    return [
        {(rank, message.peer) for rank, step in enumerate(steps) for message in sent([step])}
        for steps in by_step
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nothing_but_whole_messages_is_sent_and_all_of_them_are_received(world_size: int) -> None:
    for name, trace in traced(world_size).items():
        messages = [message for steps in trace for step in steps for message in step]
        assert {message.kind for message in messages} <= {"send", "recv"}, name
        assert {message.num_bytes for message in messages} <= {NUM_BYTES}, name
        pairs_sent = sorted((r, m.peer) for r, steps in enumerate(trace) for m in sent(steps))
        pairs_received = sorted(
            (m.peer, r) for r, steps in enumerate(trace) for m in received(steps)
        )
        assert pairs_sent == pairs_received, name


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_exchange_posts_one_message_each_way_before_it_waits(world_size: int) -> None:
    for rank, steps in enumerate(traced(world_size)["exchange 0"]):
        outgoing = Message("send", (rank + 1) % world_size, NUM_BYTES)
        incoming = Message("recv", (rank - 1) % world_size, NUM_BYTES)
        assert [set(step) for step in steps] == [{outgoing, incoming}]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_reaches_every_rank_once_in_log2_rounds(world_size: int) -> None:
    for src in range(world_size):
        trace = traced(world_size)[f"broadcast {src}"]
        arrivals = [len(received(steps)) for steps in trace]
        assert arrivals == [int(rank != src) for rank in range(world_size)]
        assert sum(num_sent(trace)) == world_size - 1
        assert max(num_sent(trace)) == ceil_log2(world_size)
        assert num_rounds(trace) == ceil_log2(world_size)


def test_broadcast_follows_the_tree_of_the_docstring() -> None:
    trace = traced(6)["broadcast 0"]
    to = [[message.peer for message in sent(steps)] for steps in trace]
    assert to == [[1, 2, 4], [3, 5], [], [], [], []]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_naive_all_reduce_waits_for_one_rank_after_another(world_size: int) -> None:
    trace = traced(world_size)["naive"]
    arrivals = [len(received(steps)) for steps in trace]
    assert arrivals == [world_size - 1] + [1] * (world_size - 1)
    assert num_rounds(trace) == world_size - 1 + ceil_log2(world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_recursive_doubling_needs_log2_rounds_and_two_for_the_ranks_beyond(world_size: int) -> None:
    trace = traced(world_size)["recursive_doubling"]
    doublings = floor(log2(world_size))
    beyond = world_size - 2**doublings
    assert num_rounds(trace) == doublings + (2 if beyond else 0)
    in_core = [doublings + int(rank < beyond) for rank in range(2**doublings)]
    assert num_sent(trace) == in_core + [1] * beyond


def test_recursive_doubling_pairs_ranks_as_in_the_docstring() -> None:
    assert edges_by_step(traced(4)["recursive_doubling"]) == [
        {(0, 1), (1, 0), (2, 3), (3, 2)},
        {(0, 2), (1, 3), (2, 0), (3, 1)},
    ]


# --- α and β -------------------------------------------------------------------------------------

alpha_ = st.floats(1e-7, 1e-2)
beta_ = st.floats(1e-12, 1e-7)
sizes_ = st.lists(st.integers(0, 28).map(lambda k: 2**k), min_size=2, max_size=12, unique=True)


@given(alpha_, beta_, sizes_)
def test_fit_reproduces_points_that_lie_on_a_line(
    alpha: float, beta: float, sizes: list[int]
) -> None:
    seconds = [alpha + size * beta for size in sizes]
    fitted_alpha, fitted_beta = fit_alpha_beta(sizes, seconds)
    assert [fitted_alpha + size * fitted_beta for size in sizes] == pytest.approx(seconds, 1e-6)
    assert fitted_alpha == pytest.approx(alpha, abs=1e-6 * min(seconds))


def test_fit_example_of_the_docstring() -> None:
    assert fit_alpha_beta([0, 1000, 2000], [5e-6, 6e-6, 7e-6]) == pytest.approx((5e-6, 1e-9))


def test_fit_keeps_the_latency_when_the_largest_message_is_off_the_line() -> None:
    sizes = [0, 10**3, 10**6, 10**8]
    seconds = [10e-6 + size * 1e-9 for size in sizes]
    seconds[-1] *= 1.2  # plain least squares gives α = -57 µs
    assert fit_alpha_beta(sizes, seconds)[0] == pytest.approx(10e-6, rel=0.2)


def test_fit_gives_a_positive_beta_when_larger_messages_were_faster() -> None:
    alpha, beta = fit_alpha_beta([4, 4096], [3e-5, 2e-5])
    assert 0 < beta < 1e-300
    assert 2e-5 < alpha < 3e-5


def test_fit_gives_no_negative_alpha_when_small_messages_were_faster_than_their_bytes() -> None:
    assert fit_alpha_beta([1000, 2000], [1e-6, 3e-6]) == pytest.approx((0.0, 15 / 13 * 1e-9))


times_ = st.floats(1e-6, 1e-2)


@pytest.fixture(scope="module")
def nnls() -> Callable[..., Any]:
    """SciPy's, loaded here and not at the top: every rank of the tests above would load it too."""
    from scipy.optimize import nnls

    return nnls


@given(st.dictionaries(st.integers(0, 2**20), times_, min_size=2, max_size=8))
def test_fit_is_the_best_of_all_lines_without_a_negative_coefficient(
    nnls: Callable[..., Any], measured: dict[int, float]
) -> None:
    sizes, seconds = list(measured), list(measured.values())
    alpha, beta = fit_alpha_beta(sizes, seconds)
    assert alpha >= 0
    assert beta > 0
    relative = np.array([[1 / t, n / t] for n, t in measured.items()])
    scale = np.linalg.norm(relative, axis=0)
    _, least = nnls(relative / scale, np.ones(len(measured)))
    residual = float(np.linalg.norm(relative @ [alpha, beta] - 1))
    assert residual == pytest.approx(least, abs=1e-6)


def test_fit_is_the_same_bit_for_bit_whenever_it_is_computed() -> None:
    sizes, seconds = [4, 4096, 65536], [31e-6, 34.7e-6, 97.1e-6]
    elsewhere, fits = [], set()
    for size in range(50):  # every rank computes it for itself, with other tensors around
        elsewhere.append(torch.empty(size % 7 + 1))
        fits.add(fit_alpha_beta(sizes, seconds))
    assert len(fits) == 1


# --- measuring -----------------------------------------------------------------------------------

SIZES_BYTES = (4, 65536)


def sleeps_on_one_rank(x: Tensor, group: Group) -> None:
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        time.sleep(0.02)


def measures(group: Group = None) -> AllReduceTimes:
    num_runs = itertools.count()

    def slow_when_first_or_unlucky(x: Tensor, group: Group) -> None:
        time.sleep(0.12 if next(num_runs) % 4 in (0, 2) else 0.0)  # one untimed, one of three

    strategies = {
        **ALL_REDUCES,
        "waits": sleeps_on_one_rank,
        "jitters": slow_when_first_or_unlucky,
    }
    return measure_all_reduce(strategies, SIZES_BYTES, repeats=3, group=group)


@cache
def measured(world_size: int) -> list[AllReduceTimes]:
    return on_ranks(measures, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_measured_table_is_the_same_on_all_ranks_and_complete(world_size: int) -> None:
    times = measured(world_size)
    assert times == [times[0]] * world_size
    assert times[0].sizes_bytes == SIZES_BYTES
    assert sorted(times[0].seconds) == sorted(["exchange", *ALL_REDUCES, "waits", "jitters"])
    for seconds in times[0].seconds.values():
        assert len(seconds) == len(SIZES_BYTES)
        assert 0 < min(seconds) <= max(seconds) < TIMEOUT_S
    alpha_s, beta_s_per_byte = fit_alpha_beta(SIZES_BYTES, times[0].seconds["exchange"])
    fitted = (times[0].alpha_s, 1 / times[0].bandwidth_bytes_per_s)
    assert fitted == pytest.approx((alpha_s, beta_s_per_byte))


def test_measured_time_is_that_of_the_slowest_rank() -> None:
    assert min(measured(3)[0].seconds["waits"]) >= 0.02


def test_measured_time_is_the_median_and_leaves_out_the_first_run() -> None:
    assert max(measured(3)[0].seconds["jitters"]) < 0.03


def test_measuring_stays_inside_the_group() -> None:
    times = on_members(measures)
    assert times == [times[0]] * len(times)


def test_table_has_a_row_for_each_size_and_a_column_for_each_strategy() -> None:
    times = AllReduceTimes(
        (4, 65536), {"exchange": (1e-5, 2e-5), "naive": (3e-5, 1.25e-3)}, 1.5e-5, 2.5e9
    )
    head, *rows, last = str(times).splitlines()
    assert head.split() == ["bytes", "exchange", "naive"]
    assert [row.split() for row in rows] == [
        ["4", "10.0", "µs", "30.0", "µs"],
        ["65536", "20.0", "µs", "1250.0", "µs"],
    ]
    assert last == "one message: α = 15.0 µs, 1/β = 2.500 GB/s"
    assert last == times.fit
    assert len({len(line) for line in (head, *rows)}) == 1


@pytest.mark.parametrize(
    ("alpha_s", "bandwidth", "says"),
    [
        (0.0, 2.5e9, "α not measurable: small messages took no longer than their bytes, 1/β = 2."),
        (1e-5, 1e300, "α = 10.0 µs, 1/β not measurable: larger messages took no longer"),
    ],
)
def test_what_the_noise_hides_is_said(alpha_s: float, bandwidth: float, says: str) -> None:
    assert says in AllReduceTimes((4, 8), {"exchange": (1e-5, 1e-5)}, alpha_s, bandwidth).fit


def refusals(sizes_bytes: list[int], repeats: int, name: str) -> str:
    strategies = {name: ALL_REDUCES["naive"]}
    return refusal(lambda: measure_all_reduce(strategies, sizes_bytes, repeats=repeats))


@pytest.mark.parametrize(
    ("world_size", "sizes_bytes", "repeats", "name"),
    [
        (1, [4, 8], 1, "naive"),
        (2, [], 1, "naive"),
        (2, [4, 4], 1, "naive"),
        (2, [4, 6], 1, "naive"),
        (2, [4, 8], 0, "naive"),
        (2, [4, 8], 1, "exchange"),
    ],
)
def test_what_cannot_be_measured_is_refused_on_every_rank(
    world_size: int, sizes_bytes: list[int], repeats: int, name: str
) -> None:
    says = f"got {world_size} ranks, sizes {sizes_bytes}, {repeats} repeats, strategies ['{name}']"
    for text in on_ranks(refusals, world_size, sizes_bytes, repeats, name):
        assert text.endswith(says)
