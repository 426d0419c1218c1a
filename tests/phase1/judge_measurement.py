"""Judges task 1.8: the table of times, and the line through it."""

from distlab.grade import Grade, check, task
from phase1 import collectives as c
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import (
    BYTE_S,
    LATENCY_S,
    UNIFORM,
    of_members,
    short,
)

# 1.8 measure_all_reduce, fit_alpha_beta


@task("1.8")
def test_the_fit_finds_the_link(grade: Grade) -> None:
    times = grade.run(c.measure, 4, c.SIZES_BYTES, cluster=UNIFORM).results[0]
    for name, got, real in (
        ("α", times["alpha_s"], LATENCY_S),
        ("1/β", times["bandwidth"], 1 / BYTE_S),
    ):
        check(
            abs(got / real - 1) <= 0.05,
            f"{name} should be {real:.4g} within 5 %, as the link is; it is {got:.4g}. Fit the "
            "times of column exchange, in seconds and bytes.",
        )
    for name, messages in (("exchange", 1), ("naive", 5), ("recursive_doubling", 2)):
        expected = [messages * (LATENCY_S + size * BYTE_S) for size in c.SIZES_BYTES]
        got = times["seconds"].get(name, [])
        check(
            len(got) == 4
            and all(abs(a / b - 1) < 0.05 for a, b in zip(got, expected, strict=True)),
            f"{name} on 4 ranks takes {messages} messages, {short(expected)} s; "
            f"measured were {short(got)}.",
        )


@task("1.8", real=True)
def test_all_ranks_have_the_same_table(grade: Grade) -> None:
    if grade.is_simulated:
        run = grade.run(inside_group, OUTER_WORLD_SIZE, c.measure, (4, 4000))
        tables = of_members(run)
    else:
        tables = grade.run(c.measure, 2, (4, 4000)).results
    for rank, table in enumerate(tables):
        check(
            table == tables[0],
            f"rank {rank} has another table than rank 0: {short(table['seconds'])}, "
            f"{short(tables[0]['seconds'])}. Share the times before you take the slowest.",
        )
    names = sorted(tables[0]["seconds"])
    check(
        names == ["exchange", "naive", "recursive_doubling"] and tables[0]["sizes"] == [4, 4000],
        f"the table should have exchange and both strategies at 4 and 4000 bytes; it has {names} "
        f"at {tables[0]['sizes']}.",
    )


@task("1.8")
def test_the_slowest_rank_counts_in_the_median_run(grade: Grade) -> None:
    for rank, table in enumerate(grade.run(c.measure_sleepers, 3, cluster=UNIFORM).results):
        for name, seconds, cause in (
            ("last_rank_2s", 2.0, "Only rank 2 sleeps: the slowest rank counts."),
            ("median_3s", 3.0, "Take the median of the timed runs; the first is not timed."),
            (
                *("turns_2s", 2.0),
                "Another rank sleeps in each run: take the slowest rank of every run first, and "
                "then the median of the runs.",
            ),
            ("chain_2s", 2.0, "All ranks must start each run together."),
        ):
            got = table["seconds"].get(name, [])
            check(
                len(got) == 2 and all(abs(time / seconds - 1) < 0.01 for time in got),
                f"rank {rank} of 3: {name} takes {seconds} s at both sizes, measured were "
                f"{short(got)}. {cause}",
            )


@task("1.8")
def test_measurements_that_cannot_be_fitted_are_refused(grade: Grade) -> None:
    for rank, accepted in enumerate(grade.run(c.measure_nonsense, 2).results):
        check(not accepted, f"rank {rank}: {short(accepted)} should be a ValueError; none came.")
    alone = grade.run(c.measure_nonsense, 1).results[0]
    check(not alone, f"with one rank there is no message to measure, accepted were {alone}.")


@task("1.8")
def test_the_line_through_points(grade: Grade) -> None:
    noisy = ([0, 10**3, 10**6, 10**8], [10e-6, 11e-6, 1.01e-3, 0.12])
    points = [([0, 1000, 2000], [5e-6, 6e-6, 7e-6]), ([1000, 2000], [1e-6, 3e-6]), noisy]
    points.append(([4, 4096], [3e-5, 2e-5]))
    line, no_alpha, large_off, no_beta = grade.call(c.fit, points)
    check(
        abs(line[1] / 1e-9 - 1) < 1e-6,
        f"[0, 1000, 2000] bytes in [5, 6, 7] µs: α should be 5e-06 and β 1e-09; got {line}.",
    )
    check(
        abs(line[0] / 5e-6 - 1) < 1e-6 and no_alpha[0] == 0.0,
        f"α is 5e-06 on the line, and 0 where noise asks for less; got {line[0]}, {no_alpha[0]}.",
    )
    check(
        abs(no_alpha[1] / (15 / 13 * 1e-9) - 1) < 1e-6,
        f"[1000, 2000] bytes in [1, 3] µs: with α = 0, β is 15/13 ns; got {no_alpha}.",
    )
    check(
        abs(large_off[0] / 10e-6 - 1) < 0.2,
        f"α is 10 µs though the largest message is 20 % off its line; got {large_off[0]:.3g} s. "
        "Weigh each point by 1 / seconds².",
    )
    check(
        0 < no_beta[1] < 1e-300 and 2e-5 < no_beta[0] < 3e-5,
        f"larger messages were faster: β should be the smallest positive number and α the mean; "
        f"got {no_beta}.",
    )
