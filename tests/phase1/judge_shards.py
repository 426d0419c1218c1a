"""Judges task 1.1: shards, and the order of samples that they are cut from."""

from collections import Counter
from itertools import pairwise, product
from math import ceil
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import check_silent, short
from judging.expect import expect
from phase1 import shards as s

SIZES = [(12, 4), (14, 4), (3, 8), (50, 3), (20, 7), (2, 3), (1, 2), (101, 5), (7, 1)]
IMPOSSIBLE = [(10, 4, 4), (10, -1, 4), (10, 5, 4), (10, 0, 0), (0, 0, 1), (0, 1, 2), (-3, 0, 2)]
ORDERS_OF_4, DRAWS = 24, 600  # a fair draw misses one of them once in 10^9 runs
BYTES_PER_SAMPLE = 400  # a few lists of Python ints, which take 36 bytes each
SLOW = "a shard of 200,000 samples should take less than a second: is the time O(num_samples)?"


@task("1.1")
def test_ranks_take_turns(grade: Grade) -> None:
    plain, cut = ({"shuffle": False, "drop_last": drop_last} for drop_last in (False, True))
    cases = [(7, 3, plain), (7, 3, cut), (10, 4, plain), (10, 4, cut)]
    for (n, ranks, options), shards in zip(cases, grade.call(s.shards, cases), strict=True):
        expect(
            f"{_here(n, ranks)}, not shuffled, drop_last={options['drop_last']}: the shards",
            shards,
            _turns([*range(n)], ranks, options["drop_last"]),
            "Ranks take turns, and without drop_last the order wraps around.",
        )


def _here(n: int, ranks: int) -> str:
    return f"{counted(n, 'sample')} on {counted(ranks, 'rank')}"


def _turns(order: list[int], ranks: int, drop_last: bool) -> s.Shards:
    n = len(order)
    places = n // ranks * ranks if drop_last else ceil(n / ranks) * ranks
    return [[order[place % n] for place in range(rank, places, ranks)] for rank in range(ranks)]


@task("1.1")
@pytest.mark.parametrize("drop_last", [False, True], ids=["padded", "dropped"])
def test_shards_together_are_the_order_of_one_process(grade: Grade, drop_last: bool) -> None:
    given = {"seed": grade.random.randrange(10**6), "epoch": grade.random.randrange(1000)}
    cases: list[tuple[int, int, dict[str, Any]]] = []
    sizes = [*SIZES, (grade.random.randint(200, 400), grade.random.randint(6, 16))]
    for samples, ranks in sizes:
        cases += [(samples, 1, given), (samples, ranks, {**given, "drop_last": drop_last})]
    found = grade.call(s.shards, cases)
    for (samples, ranks), (order,), shards in zip(sizes, found[::2], found[1::2], strict=True):
        expect(f"{_here(samples, 1)}: the indices, sorted,", sorted(order), [*range(samples)])
        _check_shards(f"{_here(samples, ranks)}, drop_last={drop_last}", order, shards, drop_last)


def _check_shards(here: str, order: list[int], shards: s.Shards, drop_last: bool) -> None:
    expected = _turns(order, len(shards), drop_last)
    lengths, length = [len(shard) for shard in shards], len(expected[0])
    check(
        lengths == [length] * len(shards),
        f"{here}: every shard should hold {counted(length, 'sample')}; the shards hold "
        f"{short(lengths)}. {_why_not_lengths(lengths, len(order))}",
    )
    turns, wanted = (
        [index for step in zip(*each, strict=True) for index in step] for each in (shards, expected)
    )
    num_drawn = min(len(order), len(wanted))
    expect(
        f"{here}: read step by step, the shards, which give the order of a single process,",
        turns[:num_drawn],
        wanted[:num_drawn],
        "Ranks should take turns, not blocks, and every rank should compute the same order, "
        "whatever the number of ranks and drop_last.",
    )
    expect(
        f"{here}: the padding, which comes from the beginning of the epoch's order,",
        turns[num_drawn:],
        wanted[num_drawn:],
    )


def _why_not_lengths(lengths: list[int], n: int) -> str:
    if len(set(lengths)) > 1:
        return "Shards of unequal length leave ranks waiting in an all-reduce."
    if sum(lengths) < n:
        return "Without drop_last, pad from the beginning of the order."
    return "Pad with no more samples than it takes to make all shards equally long."


@task("1.1")
def test_the_order_is_fixed_by_seed_and_epoch_alone(grade: Grade) -> None:
    seed, epoch = grade.random.randint(1001, 9999), grade.random.randint(1001, 9999)
    keys = [(seed, epoch), (epoch, seed), (seed + 1, epoch - 1), (2 * seed, epoch)]
    keys += [(seed - 1, epoch + apart) for apart in (0, 2, 10, 100, 1000)]
    keys += [(seed, 2 * epoch), (seed + 2**16, epoch), (0, epoch), (seed, 0)]
    keys = [*dict.fromkeys([*keys, (0, 0), (0, 1), (1, 0)])]
    cases = [(50, 1, {"seed": seed, "epoch": epoch}) for seed, epoch in [*keys, keys[0]]]
    *orders, again = (shards[0] for shards in grade.call(s.shards, cases))
    check(
        orders[0] == again,
        "the same seed and epoch gave two different orders. Use your own generator, seeded with "
        "both.",
    )
    for key, order in zip(keys, orders, strict=True):
        check(order != [*range(50)], "shuffle=True should permute the samples; they are in order.")
        same = [other for other, found in zip(keys, orders, strict=True) if found == order]
        check(
            same == [key],
            f"(seed, epoch) {same[0]} and {same[-1]} have the same order. The order must depend on "
            "both, not only on their sum or product.",
        )


@task("1.1")
def test_processes_agree_on_the_order(grade: Grade) -> None:
    here, there = grade.call(s.shard_by_process, {"seed": grade.random.randrange(10**6)})
    check(
        here == there,
        "two processes compute different orders for the same seed and epoch. hash() of a string "
        "differs from process to process: seed with numbers.",
    )


@task("1.1")
def test_every_order_is_equally_likely(grade: Grade) -> None:
    seed = grade.random.randrange(10**6)
    by_epoch = [(4, 1, {"seed": seed, "epoch": epoch}) for epoch in range(DRAWS)]
    by_seed = [(4, 1, {"seed": seed + k, "epoch": 1}) for k in range(DRAWS)]
    found = [tuple(shard) for (shard,) in grade.call(s.shards, by_epoch + by_seed)]
    for what, orders in ("epochs", found[:DRAWS]), ("seeds", found[DRAWS:]):
        counts = Counter(orders)
        [(most, count)] = counts.most_common(1)
        check(
            len(counts) == ORDERS_OF_4 and count <= 3 * DRAWS // ORDERS_OF_4,
            f"4 samples have {ORDERS_OF_4} orders, and {DRAWS} {what} should give each order about "
            f"{DRAWS // ORDERS_OF_4} times; they give {len(counts)} of them, and the order {most} "
            f"{count} times. Is it a random permutation, and a different one for each of the "
            f"{what}?",
        )


@task("1.1")
def test_a_large_data_set_is_mixed_as_a_whole(grade: Grade) -> None:
    n = grade.random.randint(2000, 4000)
    [[order]] = grade.call(s.shards, [(n, 1, {"seed": grade.random.randrange(10**6)})])
    moved = sum(abs(place - index) for place, index in enumerate(order)) / n
    steps = len({(after - before) % n for before, after in pairwise(order)})
    check(
        0.28 * n <= moved <= 0.39 * n and steps >= n // 2,
        f"in a random order of {n} samples, a sample is on average {n // 3} places away from where "
        f"it was, and there are about {0.63 * n:.0f} different distances from one sample to the "
        f"next; in your order they are {moved:.0f} places and {steps} distances. A rotation is not "
        "a random order, and neither is a shuffle inside blocks or of blocks.",
    )


@task("1.1")
def test_shards_have_defaults_for_what_is_left_out(grade: Grade) -> None:
    defaults = {"epoch": 0, "seed": 0, "shuffle": True, "drop_last": False}
    others = {"epoch": 2, "seed": 3, "drop_last": True}
    given = [{k: others[k] for k in others if k != name} for name in defaults]
    passed = [{**some, name: defaults[name]} for some, name in zip(given, defaults, strict=True)]
    found = grade.call(s.shards, [(11, 3, options) for options in given + passed])
    for name, got, expected in zip(defaults, found[:4], found[4:], strict=True):
        expect(f"without {name}, the shards, as with {defaults[name]},", got, expected)


@task("1.1")
def test_global_generators_are_left_alone(grade: Grade) -> None:
    flags = product((False, True), repeat=2)
    cases = [{"epoch": 3, "seed": 5, "shuffle": a, "drop_last": b} for a, b in flags]
    for options, moved in zip(cases, grade.call(s.generators_moved, cases), strict=True):
        check(
            not moved,
            f"with {options}, shard_indices drew from or seeded the global generator of "
            f"{' and '.join(moved)}. Dropout and augmentation draw from it too, so make a "
            "generator of your own.",
        )


@task("1.1")
def test_impossible_shards_are_refused(grade: Grade) -> None:
    options = [{}, {"drop_last": True}, {"shuffle": False}]
    cases = [(*case, given) for case in IMPOSSIBLE for given in options]
    for case, found in zip(cases, grade.call(s.shards_refused, cases), strict=True):
        n, rank, ranks, given = case
        what = f"{n} samples for rank {rank} of {ranks}, {given or 'nothing else given'}:"
        expect(f"{what} what shard_indices raises", found["type"], "ValueError")


@task("1.1")
def test_every_rank_computes_its_shard_alone(grade: Grade) -> None:
    options = {"epoch": 1, "seed": grade.random.randrange(10**6)}
    run = grade.run(s.own_shard, 3, 20, options)
    check_silent(run, "a shard")
    [shards] = grade.call(s.shards, [(20, 3, options)])
    expect(
        "3 ranks that call shard_indices once each: the shards, as one process gets them,",
        run.results,
        shards,
        "The rank is an argument: do not ask torch.distributed for it.",
    )


@task("1.1")
def test_the_cost_grows_with_the_data_set_alone(grade: Grade) -> None:
    samples, ranks = grade.random.randint(20_000, 25_000), grade.random.randint(500, 600)
    [peak] = grade.run(s.peak_of_shard, 1, samples, ranks - 1, ranks, if_slow=SLOW).results
    check(
        peak <= BYTES_PER_SAMPLE * samples,
        f"shard_indices took {peak:,} bytes of memory for one rank of {ranks} and {samples:,} "
        f"samples, which is {peak / samples:.0f} bytes per sample; a few lists of all samples take "
        f"less than {BYTES_PER_SAMPLE} bytes per sample. Does it build something for every rank?",
    )
    grade.run(s.shards, 1, [(200_000, 2, {})], if_slow=SLOW)
