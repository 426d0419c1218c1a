"""Judges task 1.8: the table of times, and the line through it."""

from collections import Counter
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import Cluster
from judging.checks import check_refused, edges_with, of_members, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import measurement as m
from phase1.line import are_close, best_line, in_us

DEFAULT_REPEATS = 5
NO_COMMON_CALLS = (
    "Do all ranks take the same branches, whatever they measure? All ranks must call the same "
    "strategies and all-reduces, each the same number of times."
)

# The measurement


@task("1.8")
@pytest.mark.parametrize("n", [2, 4])
def test_the_table_and_the_line_are_those_of_the_link(grade: Grade, n: int) -> None:
    alpha_s, bandwidth = grade.random.uniform(5e-6, 5e-5), grade.random.uniform(5e9, 5e10)
    sizes = [4 * grade.random.randrange(10**k, 2 * 10**k) for k in (2, 3, 4, 5)]
    grade.random.shuffle(sizes)
    names = [f"{name}_{grade.random.randrange(1000)}" for name in ("a", "b")]
    functions = dict(zip(names, ("all_reduce_naive", "all_reduce_recursive_doubling"), strict=True))
    link = Cluster(1, 8, latency_s=alpha_s, nvlink_bytes_per_s=bandwidth)
    run = grade.run(
        *(m.measure, n, functions, sizes, {"repeats": 3}), cluster=link, if_stuck=NO_COMMON_CALLS
    )
    for rank, table in enumerate(run.results):
        _check_names(table, [*names, "exchange"], sizes, rank)
        for name, messages in zip(["exchange", *names], (1, *_messages(n)), strict=True):
            expected = [messages * (alpha_s + size / bandwidth) for size in sizes]
            _check_column(table["seconds"][name], expected, sizes, f"{name}, rank {rank} of {n}")
        _check_line_of_exchange(table)


def _messages(n: int) -> tuple[int, int]:
    """How many messages, one after the other, the two all-reduces take on n ranks."""
    return {2: (2, 1), 4: (5, 2)}[n]


def _check_names(table: dict[str, Any], names: list[str], sizes: list[int], rank: int) -> None:
    found = sorted(table["seconds"])
    check(
        found == sorted(names) and table["sizes"] == sizes,
        f"rank {rank}: the table should have the columns {sorted(names)}, and the sizes {sizes} in "
        f"this order; it has the columns {found}, and the sizes {table['sizes']}.",
    )


def _check_column(got: list[float], expected: list[float], sizes: list[int], where: str) -> None:
    check(
        len(got) == len(expected) and are_close(got, expected, 0.01),
        f"{where}: at {sizes} bytes it takes {in_us(expected)}, but you measured {in_us(got)}. Is "
        "each run timed by itself, from a common start, in seconds, with time.perf_counter? Does "
        "the tensor have bytes / 4 elements?",
    )


def _check_line_of_exchange(table: dict[str, Any]) -> None:
    alpha_s, beta = best_line(table["sizes"], table["seconds"]["exchange"])
    for name, got, wanted in (
        ("α", table["alpha_s"], alpha_s),
        ("1/β", table["bandwidth"], 1 / beta),
    ):
        check(
            abs(got / wanted - 1) < 1e-3,
            f"the line through the column exchange, {in_us(table['seconds']['exchange'])} at "
            f"{table['sizes']} bytes, has {name} = {wanted:.4g}; yours is {got:.4g}. Pass the "
            "sizes in bytes and the times of this column in seconds to fit_alpha_beta.",
        )


@task("1.8", real=True)
def test_all_ranks_have_the_same_table(grade: Grade) -> None:
    functions = {"naive": "all_reduce_naive"}
    if grade.is_simulated:
        run = grade.run(
            *(inside_group, OUTER_WORLD_SIZE, m.measure, functions, (4000, 4), {}),
            if_stuck=STUCK_IN_GROUP,
        )
        tables = of_members(run)
    else:
        tables = grade.run(m.measure, 2, functions, (4000, 4), {}, if_stuck=NO_COMMON_CALLS).results
    for rank, table in enumerate(tables):
        _check_names(table, ["exchange", "naive"], [4000, 4], rank)
        check(
            table == tables[0],
            f"rank {rank} has a different table from rank 0: {short(table['seconds'])} instead of "
            f"{short(tables[0]['seconds'])}. Share the times of all ranks before you take the "
            "slowest.",
        )


# Runs and arguments


@task("1.8")
def test_every_cell_runs_once_more_than_it_is_timed(grade: Grade) -> None:
    sizes = [4 * size for size in grade.random.sample(range(30_000, 60_000), 2)]
    sizes.insert(1, 4 * grade.random.randrange(270_000, 300_000))  # more than 2^20 bytes
    sizes += [sizes[0], 0]
    for repeats in (None, grade.random.choice([1, 3, 7])):
        arguments = {} if repeats is None else {"repeats": repeats}
        run = grade.run(m.measure_counting, 3, ["a", "b"], sizes, arguments)
        _check_calls(run.results, sizes, repeats, "cpu", 3)
        _check_exchanges(run, sizes, repeats)


def _check_calls(
    by_rank: list[Any], sizes: list[int], repeats: int | None, device: str, num_ranks: int
) -> None:
    how = f"repeats={DEFAULT_REPEATS} by default" if repeats is None else f"repeats={repeats}"
    runs = 1 + (DEFAULT_REPEATS if repeats is None else repeats)
    for rank, calls in enumerate(by_rank):
        for name, found in calls.items():
            got = Counter(size for size, *_ in found)
            wanted = {size: runs * sizes.count(size) for size in sizes}
            check(
                dict(got) == wanted,
                f"rank {rank}: with {how}, strategy {name} should run {runs} times for each entry "
                f"of sizes_bytes = {sizes}, the first time untimed; runs per size in bytes: "
                f"{dict(got)}.",
            )
            for _, *given in found:
                check(
                    given == ["float32", device, num_ranks],
                    f"rank {rank}: a strategy should get a float32 tensor on {device}, and a group "
                    f"of {num_ranks} ranks; it got {given}. Pass on device= and group.",
                )


def _check_exchanges(run: Run, sizes: list[int], repeats: int | None) -> None:
    n, runs = len(run.results), 1 + (DEFAULT_REPEATS if repeats is None else repeats)
    for size in {*sizes} - {0}:
        wanted = runs * sizes.count(size)
        got = edges_with(run, size)
        ring = {(rank, (rank + 1) % n): wanted for rank in range(n)}
        check(
            got == ring,
            f"for the column exchange, each rank should send {wanted} messages of {size} bytes to "
            f"its right neighbour: {runs} for each time that sizes_bytes lists this size, the "
            f"first of them untimed. Messages sent, by (from, to): {got}.",
        )


@task("1.8")
def test_the_group_alone_is_measured(grade: Grade) -> None:
    sizes = [4 * size for size in grade.random.sample(range(1, 2000), 3)]
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, m.measure_counting, ["a"], sizes, {"repeats": 2}),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_calls(of_members(run), sizes, 2, "cpu", len(MEMBERS))


@task("1.8")
def test_the_tensors_are_on_the_device(grade: Grade) -> None:
    sizes = [4 * size for size in grade.random.sample(range(1, 2000), 2)]
    for rank, found in enumerate(grade.run(m.measure_elsewhere, 2, sizes).results):
        device = found["device"]
        _check_calls([{"a": found["calls"]}], sizes, 2, device, 2)
        check(
            found["sent"] == [device],
            f"rank {rank}: with device={device} every tensor that is sent should be on that "
            f"device, as NCCL only sends tensors on GPUs; tensors were sent from {found['sent']}.",
        )


@task("1.8")
def test_a_run_ends_when_the_device_has_finished(grade: Grade) -> None:
    seconds = round(grade.random.uniform(1, 9), 2)
    for rank, got in enumerate(grade.run(m.measure_unfinished, 2, seconds).results):
        check(
            are_close(got, [seconds] * 2, 0.001),
            f"rank {rank} of 2: the strategy returns at once, but the GPU works for {seconds} s "
            f"more; you measured {short(got)} s. Call finish before you read the clock again.",
        )


@task("1.8")
def test_measurements_that_cannot_be_fitted_are_refused(grade: Grade) -> None:
    worlds = [(m.measure_nonsense, 2), (m.measure_nonsense, 1), (m.measure_alone, 2)]
    for body, n in worlds:
        by_rank = grade.run(body, n, if_stuck=NO_COMMON_CALLS).results
        for what in by_rank[0]:
            check_refused([found[what] for found in by_rank], what)
