"""The grading suite of Phase 1: data-parallel training.

The bodies, in tests/phase1, run on every rank with the learner's lesson as first argument and
return values. What is asserted about these, and about the bytes, messages and times of the run, is
asserted here.
"""

import sys
from math import ceil, floor, log2
from typing import Any

import pytest
from phase1 import collectives as c
from phase1 import data_loader as d
from phase1 import trainer as t
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import (
    BYTE_S,
    LATENCY_S,
    UNIFORM,
    check_ranks,
    is_close,
    of_members,
    rounds_of,
    short,
)

from distlab.grade import Grade, Run, check, task
from distlab.grade.plugin import main

BYTES = 4 * c.NUM_ELEMENTS

# 1.1 shard_indices

SHARDED = [(n, ranks) for n in (1, 2, 7, 10, 16, 101) for ranks in (1, 2, 3, 4, 5, 8)]


@task("1.1")
def test_shards_cover_the_data_set_and_do_not_overlap(grade: Grade) -> None:
    found = grade.call(d.shards, [(n, ranks, {"epoch": 3}) for n, ranks in SHARDED])
    for (n, ranks), shards in zip(SHARDED, found, strict=True):
        here = f"{n} samples on {ranks} ranks"
        lengths, places = [len(shard) for shard in shards], ceil(n / ranks) * ranks
        check(
            lengths == [ceil(n / ranks)] * ranks,
            f"{here}: every shard should hold {ceil(n / ranks)}, they hold {lengths}. "
            "Shards of unequal length leave ranks waiting in an all-reduce.",
        )
        drawn = sorted(index for shard in shards for index in shard)
        missing = sorted(set(range(n)) - set(drawn))
        check(not missing, f"{here}: nobody sees the samples {short(missing)}.")
        counts = [drawn.count(index) for index in range(n)]
        check(
            max(counts) <= ceil(places / n) and len(drawn) == sum(counts),
            f"{here}: sample {counts.index(max(counts))} comes {max(counts)} times, where "
            f"{ceil(places / n)} would do. Does every rank compute the same order?",
        )


@task("1.1")
def test_shards_that_are_cut_count_nothing_twice(grade: Grade) -> None:
    found = grade.call(d.shards, [(n, ranks, {"drop_last": True}) for n, ranks in SHARDED])
    for (n, ranks), shards in zip(SHARDED, found, strict=True):
        lengths = [len(shard) for shard in shards]
        check(
            lengths == [n // ranks] * ranks,
            f"{n} samples on {ranks} ranks with drop_last: every shard should hold {n // ranks}, "
            f"they hold {lengths}.",
        )
        drawn = [index for shard in shards for index in shard]
        check(
            len(set(drawn)) == len(drawn) and set(drawn) <= set(range(n)),
            f"{n} samples on {ranks} ranks with drop_last: a sample comes twice, {short(shards)}.",
        )


@task("1.1")
def test_ranks_take_turns(grade: Grade) -> None:
    plain = grade.call(d.shards, [(7, 3, {"shuffle": False})])[0]
    expected = [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    check(
        plain == expected,
        f"7 samples on 3 ranks, not shuffled, should be {expected}; they are {short(plain)}. "
        "Ranks take turns like players who are dealt cards, and the order is wrapped round.",
    )
    alone, shared = grade.call(d.shards, [(12, 1, {"seed": 4}), (12, 4, {"seed": 4})])
    turns = [index for step in zip(*shared, strict=True) for index in step]
    check(
        turns == alone[0],
        f"the shards of 4 ranks, read step by step, should be the order of one process, "
        f"{alone[0]}; they are {turns}. Does the order depend on the number of ranks?",
    )


@task("1.1")
def test_the_order_is_fixed_by_seed_and_epoch_alone(grade: Grade) -> None:
    keys = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    cases = [(50, 1, {"seed": seed, "epoch": epoch}) for seed, epoch in keys]
    orders = [shards[0] for shards in grade.call(d.shards, cases)]
    again, *others = orders[1:]
    check(orders[0] == again, "the same seed and epoch gave two orders. Use your own generator.")
    check(again != list(range(50)), "shuffle=True should permute the samples; they are in order.")
    for key, order in zip(keys[2:], others, strict=True):
        same = [other for other, o in zip(keys[1:], orders[1:], strict=True) if o == order]
        check(
            same == [key],
            f"(seed, epoch) {same[0]} and {same[-1]} have the same order. It must depend on both, "
            "and not on their sum.",
        )


@task("1.1")
def test_global_generators_are_left_alone(grade: Grade) -> None:
    moved = grade.call(d.generators_moved)
    check(
        not moved,
        f"shard_indices moved the global generator of {' and '.join(moved)}. Dropout and "
        "augmentation draw from it too: make a generator of your own.",
    )


@task("1.1")
def test_impossible_shards_are_refused(grade: Grade) -> None:
    cases = [(10, 4, 4), (10, -1, 4), (0, 0, 2)]
    refused = grade.call(d.shards_refused, cases)
    for (n, rank, ranks), text in zip(cases, refused, strict=True):
        check(text, f"{n} samples for rank {rank} of {ranks} should be a ValueError; it is none.")


# 1.2 build_loader


@task("1.2")
@pytest.mark.parametrize("n", [1, 3, 4])
def test_batches_of_a_step_are_one_global_batch(grade: Grade, n: int) -> None:
    samples, batch = 50, 12
    run = grade.run(d.load_epochs, n, samples, batch, [0, 1, 2], {"seed": 3})
    _check_loaded(run.results, samples, batch)


def _check_loaded(by_rank: list[Any], samples: int, batch: int) -> None:
    n = len(by_rank)
    for rank, epochs in enumerate(by_rank):
        sizes = [len(step) for step in epochs[0]["steps"]]
        check(
            sizes == [batch // n] * (samples // batch),
            f"rank {rank} of {n}: a global batch of {batch} from {samples} samples is "
            f"{samples // batch} steps of {batch // n}; it loads {short(sizes)}. "
            "Each rank loads 1/N, and the incomplete last batch is left out.",
        )
    orders = []
    for epoch in range(len(by_rank[0])):
        drawn = [sorted(i for step in r[epoch]["steps"] for i in step) for r in by_rank]
        everything = [index for shard in drawn for index in shard]
        check(
            len(everything) == len(set(everything)),
            f"epoch {epoch}: ranks load the same sample twice, {short(drawn)}. Does each rank "
            "give the sampler its own rank inside the group, and the same seed?",
        )
        orders.append([r[epoch]["steps"] for r in by_rank])
    check(orders[0] != orders[1], "epochs 0 and 1 have the same order. It needs set_epoch.")


@task("1.2")
def test_the_number_of_ranks_does_not_change_the_global_batches(grade: Grade) -> None:
    options = {"seed": 3}
    alone = grade.run(d.load_epochs, 1, 50, 12, [2], options).results[0][0]["steps"]
    steps = [r[0]["steps"] for r in grade.run(d.load_epochs, 4, 50, 12, [2], options).results]
    together = [
        sorted(index for part in parts for index in part) for parts in zip(*steps, strict=True)
    ]
    check(
        together == [sorted(step) for step in alone],
        f"step 0 of one process holds {sorted(alone[0])}, of 4 ranks together {together[0]}. "
        "The number of workers must not change the training.",
    )


@task("1.2")
def test_seed_and_shuffle_are_used(grade: Grade) -> None:
    loaded = [
        grade.run(d.load_epochs, 2, 24, 6, [0], options).results[0][0]["steps"]
        for options in ({"seed": 1}, {"seed": 2}, {"shuffle": False})
    ]
    check(loaded[0] != loaded[1], "seeds 1 and 2 give the same order: is the seed passed on?")
    expected = [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18, 20, 22]]
    check(
        loaded[2] == expected,
        f"rank 0 of 2 with shuffle=False should load {expected}; it loads {short(loaded[2])}.",
    )
    workers = grade.call(d.loader_settings)
    check(workers == 2, f"num_loader_workers=2 should give 2 loader processes, not {workers}.")


@task("1.2")
def test_augmentation_differs_by_rank_and_epoch_and_can_be_repeated(grade: Grade) -> None:
    run = grade.run(d.load_epochs, 2, 24, 6, [-1, 0, 1, 0], {"seed": 1})
    for rank, (untouched, first, second, again) in enumerate(run.results):
        check(
            first["noise"] == again["noise"] == untouched["noise"],
            f"rank {rank}: epoch 0 was augmented in two ways. A new loader must be in epoch 0 "
            "already: put it there before you return it.",
        )
        check(first["noise"] != second["noise"], f"rank {rank}: epochs 0 and 1 look the same.")
    first, second = (result[0]["noise"] for result in run.results)
    check(
        first != second,
        "ranks 0 and 1 draw the same augmentation. Each needs a generator seeded for its rank: "
        "set_epoch does it.",
    )


@task("1.2")
def test_a_batch_that_cannot_be_shared_is_refused(grade: Grade) -> None:
    cases = [(100, 64, ("63", "66")), (100, 2, ("3",)), (5, 6, ("5",))]
    run = grade.run(d.loads_refused, 3, [(n, batch) for n, batch, _ in cases])
    for rank, texts in enumerate(run.results):
        for (n, batch, names), text in zip(cases, texts, strict=True):
            check(
                text and all(name in text for name in names),
                f"rank {rank} of 3: a global batch of {batch} from {n} samples should be a "
                f"ValueError that names {' and '.join(names)}; it is {text or 'accepted'}.",
            )
            check("0 or" not in text, f"a batch of 0 is no advice: {text}")


@task("1.2")
def test_the_loader_asks_its_group(grade: Grade) -> None:
    args = (d.load_epochs, 50, 12, [0, 1], {"seed": 3})
    _check_loaded(of_members(grade.run(inside_group, OUTER_WORLD_SIZE, *args)), 50, 12)


# 1.3 scatter_batch


@task("1.3", real=True)
@pytest.mark.parametrize(("n", "rows", "src"), [(4, 10, 0), (3, 7, 2), (5, 3, 1), (1, 4, 0)])
def test_every_rank_gets_its_rows(grade: Grade, n: int, rows: int, src: int) -> None:
    _check_scattered(grade.run(d.scatter, n, rows, src).results, rows)


def _check_scattered(by_rank: list[Any], rows: int) -> None:
    n, start = len(by_rank), 0
    for rank, part in enumerate(by_rank):
        mine = list(range(start, start + rows // n + (rank < rows % n)))
        start += len(mine)
        check(
            part["images"] == mine and part["labels"] == [10 * row for row in mine],
            f"rank {rank} of {n} should get rows {mine} of {rows}; it has images "
            f"{part['images']} and labels {part['labels']}. 10 rows on 4 ranks are 3, 3, 2, 2.",
        )
        check(
            part["shape"] == [len(mine), 2, 250] and part["dtypes"][0] == "torch.float32",
            f"rank {rank} of {n}: its images should be float32 of {[len(mine), 2, 250]}; they are "
            f"{part['dtypes'][0]} of {part['shape']}. Only the header can tell it.",
        )


@task("1.3")
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_labels_keep_their_dtype(grade: Grade, dtype: str) -> None:
    for rank, part in enumerate(grade.run(d.scatter, 3, 6, 0, dtype).results):
        check(
            part["dtypes"][1] == f"torch.{dtype}",
            f"rank {rank}: labels are {dtype} on the source and {part['dtypes'][1]} here. "
            "Send dtypes in the header too.",
        )


@task("1.3")
def test_only_the_rows_travel(grade: Grade) -> None:
    n, rows = 4, 128
    run = grade.run(d.scatter, n, rows, 0)
    row_bytes = 500 * 4 + 8
    expected = row_bytes * rows * (n - 1) // n
    sent = [int(number) for number in run.bytes_sent]
    check(
        expected <= sent[0] <= expected + 8_000,
        f"the source should send {expected} bytes and a small header, it sends {sent[0]}. "
        "Every row goes to one rank only.",
    )
    check(
        max(sent[1:]) <= 8_000,
        f"only the source has rows to send; the ranks send {sent} bytes. Broadcasting the whole "
        "batch does that.",
    )


@task("1.3")
@pytest.mark.parametrize("what", ["nothing", "6 images and 5 labels"])
def test_every_rank_hears_of_a_wrong_batch(grade: Grade, what: str) -> None:
    for rank, text in enumerate(grade.run(d.scatter_what_is_wrong, 3, what).results):
        check(
            text,
            f"the source has {what}: every rank should raise a ValueError, rank {rank} "
            "raises none. Send the bad news as the header.",
        )


@task("1.3")
def test_scattering_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, d.scatter, 8, 1, "int64")
    _check_scattered(of_members(run), 8)


# 1.4 exchange


@task("1.4", real=True)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_ring_exchanges_without_deadlock(grade: Grade, n: int) -> None:
    for step in (1, -1):
        _check_exchanged(grade.run(c.exchange_round_the_ring, n, step).results, step)


def _check_exchanged(by_rank: list[Any], step: int) -> None:
    n = len(by_rank)
    for rank, incoming in enumerate(by_rank):
        src = (rank - step) % n
        check(
            incoming == [float(src)] * (src + 1),
            f"rank {rank} of {n} receives from rank {src}: incoming should be "
            f"{[float(src)] * (src + 1)}, it is {incoming}. Is dst whom you send to, src whom you "
            "receive from, and is the receive waited for?",
        )


@task("1.4")
def test_both_directions_travel_at_the_same_time(grade: Grade) -> None:
    for n in (2, 5, 8):
        run = grade.run(c.exchange_much, n, cluster=UNIFORM)
        rounds = rounds_of(run, BYTES)
        check(
            rounds <= 1.01,
            f"{n} ranks: an exchange should take the time of 1 message, it takes {rounds}. Post "
            "send and receive before you wait for either.",
        )
        check(
            run.messages == [1] * n and run.collectives == [0] * n,
            f"each rank should send 1 message and call no collective; it sends {run.messages}.",
        )


@task("1.4")
def test_outgoing_may_be_written_afterwards(grade: Grade) -> None:
    results = grade.run(c.exchange_then_write, 3).results
    check(
        results == [2.0, 0.0, 1.0],
        f"the caller wrote outgoing after exchange had returned, and the receivers got {results} "
        "where [2.0, 0.0, 1.0] had been sent. Wait for the send as well.",
    )


@task("1.4")
def test_exchange_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.exchange_round_the_ring, 1)
    _check_exchanged(of_members(run), 1)


# 1.5 broadcast


@task("1.5")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_broadcast_takes_logarithmically_many_rounds(grade: Grade, n: int) -> None:
    src, most = n // 2, ceil(log2(n))
    run = grade.run(c.broadcast_from, n, src, cluster=UNIFORM)
    _check_holds_src(run, src)
    check(
        run.collectives == [0] * n,
        "broadcast should be made of send and recv; yours calls a built-in collective.",
    )
    rounds = rounds_of(run, BYTES)
    check(
        rounds <= most + 0.01 and max(run.messages) <= most,
        f"{n} ranks need {most} rounds and at most {most} messages from one rank; yours takes "
        f"{rounds} rounds, messages by rank are {run.messages}. Whoever has the data passes it on.",
    )
    check(
        sum(run.messages) == n - 1,
        f"{n} ranks need {n - 1} messages, one for each that lacks the data; "
        f"yours sends {run.messages} by rank.",
    )


def _check_holds_src(run: Run, src: int) -> None:
    n = len(run.results)
    for rank, got in enumerate(run.results):
        check(
            got == float(src),
            f"rank {rank} of {n} holds {got}, src = {src} had {src}.0. Place ranks by their "
            "distance from src, round the end.",
        )


@task("1.5", real=True)
def test_broadcast_from_every_rank_of_every_kind(grade: Grade) -> None:
    for n in (3, 4):
        _check_broadcast(grade.run(c.broadcast_all_kinds, n).results)


def _check_broadcast(by_rank: list[Any]) -> None:
    n = len(by_rank)
    for src in range(n):
        expected = c.plain(c.tensors_of(src))
        for rank in range(n):
            for kind, wanted, got in zip(c.KINDS, expected, by_rank[rank][src], strict=True):
                check(
                    got == wanted,
                    f"rank {rank} of {n}, src {src}, {kind[1]} of shape {kind[0]}: should be "
                    f"{short(wanted)}, is {short(got)}. Write into x itself, in its own dtype.",
                )


@task("1.5")
def test_broadcast_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.broadcast_all_kinds)
    _check_broadcast(of_members(run))


# 1.6 all_reduce_naive


@task("1.6")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_naive_sum_passes_through_rank_0(grade: Grade, n: int) -> None:
    run = grade.run(c.reduce_my_rank, n, "all_reduce_naive", cluster=UNIFORM)
    _check_sums_of_powers(run.results)
    _check_no_collective(run)
    received = [int(number) // BYTES for number in run.bytes_received]
    expected = [n - 1] + [1] * (n - 1)
    check(
        received == expected and sum(run.messages) == 2 * (n - 1),
        f"{n} ranks: rank 0 should receive {n - 1} tensors and every other rank 1, the sum; "
        f"received are {received}, sent {run.messages}.",
    )


def _check_sums_of_powers(by_rank: list[Any]) -> None:
    n = len(by_rank)
    total = float(2**n - 1)
    for rank, (least, greatest) in enumerate(by_rank):
        seen = f"{least}" if least == greatest else f"between {least} and {greatest}"
        check(
            least == greatest == total,
            f"rank {rank} of {n}: rank r holds 2^r, so the sum is {total}; x is {seen}. Is every "
            "rank's number added once, and given to all?",
        )


def _check_no_collective(run: Run) -> None:
    check(
        not any(run.collectives),
        "this all-reduce should be made of messages (send, recv, your exchange and broadcast); "
        "yours calls a built-in collective.",
    )


@task("1.6", real=True)
def test_naive_sums_every_kind(grade: Grade) -> None:
    _check_sums(grade.run(c.reduce_all_kinds, 3, "all_reduce_naive").results)


def _check_sums(by_rank: list[Any]) -> None:
    parts = [c.tensors_of(rank) for rank in range(len(by_rank))]
    sums = c.plain([sum(tensors[1:], tensors[0]) for tensors in zip(*parts, strict=True)])
    for rank, tensors in enumerate(by_rank):
        for kind, wanted, got in zip(c.KINDS, sums, tensors, strict=True):
            check(
                got == wanted,
                f"rank {rank} of {len(by_rank)}, {kind[1]} of shape {kind[0]}: the sum should be "
                f"{short(wanted)}, it is {short(got)}. Is x itself the sum on return?",
            )


@task("1.6")
def test_naive_gives_all_ranks_the_same_bits(grade: Grade) -> None:
    _check_same_bits(grade.run(c.reduce_fractions, 5, "all_reduce_naive").results)


def _check_same_bits(by_rank: list[Any]) -> None:
    for rank, got in enumerate(by_rank):
        where = [i for i, (a, b) in enumerate(zip(by_rank[0], got, strict=True)) if a != b]
        check(
            not where,
            f"rank {rank} of {len(by_rank)} differs from rank 0 at {len(where)} of {len(got)} "
            "elements, in the last bits or more. Ranks that add in different orders round "
            "differently, and their models drift apart.",
        )


@task("1.6")
def test_naive_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.reduce_all_kinds, "all_reduce_naive")
    _check_sums(of_members(run))


# 1.7 all_reduce_recursive_doubling

DOUBLING = "all_reduce_recursive_doubling"


@task("1.7")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8])
def test_doubling_takes_logarithmically_many_rounds(grade: Grade, n: int) -> None:
    run = grade.run(c.reduce_my_rank, n, DOUBLING, cluster=UNIFORM)
    _check_sums_of_powers(run.results)
    _check_no_collective(run)
    doublings, rounds = floor(log2(n)), rounds_of(run, BYTES)
    core = 2**doublings
    extra = 0 if core == n else 2
    check(
        rounds <= doublings + extra + 0.01,
        f"{n} ranks should take {doublings + extra} rounds, yours takes {rounds}. Partners are at "
        "distance 1, 2, 4, … and swap at the same time.",
    )
    expected = core * doublings + 2 * (n - core)
    check(
        sum(run.messages) == expected and (extra or run.messages == [doublings] * n),
        f"{n} ranks should send {expected} messages in all; yours sends {run.messages} by rank.",
    )
    check(
        sum(run.bytes_sent) == expected * BYTES,
        f"{n} ranks should send {expected * BYTES} bytes in all, {BYTES} in each message; yours "
        f"sends {short(run.bytes_sent)}.",
    )


@task("1.7", real=True)
def test_doubling_sums_every_kind(grade: Grade) -> None:
    _check_sums(grade.run(c.reduce_all_kinds, 5, DOUBLING).results)


@task("1.7")
@pytest.mark.parametrize("n", [4, 7])
def test_doubling_gives_all_ranks_the_same_bits(grade: Grade, n: int) -> None:
    _check_same_bits(grade.run(c.reduce_fractions, n, DOUBLING).results)


@task("1.7")
def test_doubling_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, c.reduce_all_kinds, DOUBLING)
    _check_sums(of_members(run))


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


# 1.9 broadcast_parameters


@task("1.9", real=True)
@pytest.mark.parametrize(("n", "src"), [(1, 0), (3, 0), (4, 2)])
def test_all_ranks_have_the_model_of_src(grade: Grade, n: int, src: int) -> None:
    _check_models(grade.run(t.broadcast_odd, n, src).results, src)


def _check_models(by_rank: list[Any], src: int) -> None:
    expected = t.odd_state(None, src + 1)
    for rank, model in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}"
        check(
            model["same objects"],
            f"{here}: there are new tensors in place of the old ones, which the optimizer holds. "
            "Write into the tensors that are there.",
        )
        wrong = [name for name, got in model["state"].items() if got != expected.get(name)]
        check(
            not wrong,
            f"{here}: after a broadcast from rank {src}, {', '.join(wrong)} should be those of "
            f"rank {src}. Parameters, frozen ones too, and buffers: all are part of the model.",
        )
        check(model["trainable"].count(False) == 1, f"{here}: requires_grad was changed.")


@task("1.9")
def test_each_tensor_travels_once(grade: Grade) -> None:
    run = grade.run(t.broadcast_odd, 4, 0)
    sent, needed = int(sum(run.bytes_sent)), 3 * t.size_of_odd()
    check(
        sent <= 1.05 * needed,
        f"4 ranks need {needed} bytes, each tensor once to each of 3 ranks; {sent} were sent. "
        "A weight that two layers share counts once.",
    )


@task("1.9")
def test_models_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, t.broadcast_odd, 1)
    _check_models(of_members(run), 1)


# 1.10 average_gradients, average_gradients_flat


@task("1.10", real=True)
@pytest.mark.parametrize("function", ["average_gradients", "average_gradients_flat"])
def test_gradients_become_their_mean(grade: Grade, function: str) -> None:
    for n in (1, 2, 5) if grade.is_simulated else (3,):
        _check_means(grade.run(t.average_odd, n, function).results, function)


def _check_means(by_rank: list[Any], function: str) -> None:
    n = len(by_rank)
    gradients = [t.gradients_of(rank) for rank in range(n)]
    for rank, result in enumerate(by_rank):
        # That which not all ranks have comes last: there, a sum can be a rank's own.
        for name, got in sorted(result["means"].items(), key=lambda item: item[0] == "sometimes"):
            parts = [g[name].flatten().tolist() for g in gradients if g[name] is not None]
            mean = [sum(column) / n for column in zip(*parts, strict=True)] or None
            check(
                is_close(mean, got),
                f"{function}, rank {rank} of {n}: the gradient of {name} should be {short(mean)}, "
                f"it is {short(got)}. {_why_no_mean(n, mean, got, gradients[rank][name])}",
            )


def _why_no_mean(n: int, mean: Any, got: Any, own: Any) -> str:
    if got is None:
        return "A rank that has no gradient takes part with zeros."
    if own is not None and is_close(own.flatten().tolist(), got):
        return "That is this rank's own, as it was before."
    total = [n * number for number in mean or []]
    return "That is the sum: divide by N." if is_close(total, got) else ""


@task("1.10")
def test_the_number_of_all_reduces(grade: Grade) -> None:
    sizes = sorted(p.numel() for p in t.Odd(0).parameters() if p.requires_grad)
    for function, expected in (
        ("average_gradients", sizes),
        ("average_gradients_flat", [sum(sizes)]),
    ):
        for rank, result in enumerate(grade.run(t.average_odd, 3, function).results):
            calls = sorted(result["calls"])
            check(
                calls == expected,
                f"{function}, rank {rank}: the all-reduce it was given should be called with "
                f"{expected} elements, it was with {calls}. Trainable parameters only, shared "
                "ones once; flat means one bucket.",
            )


@task("1.10")
def test_gradients_inside_a_group(grade: Grade) -> None:
    for function in ("average_gradients", "average_gradients_flat"):
        run = grade.run(inside_group, OUTER_WORLD_SIZE, t.average_odd, function)
        _check_means(of_members(run), function)


# 1.11 train_step


@task("1.11", real=True)
@pytest.mark.parametrize("sizes", [[4], [3, 1], [5, 0, 2], [4, 4, 4, 4]], ids=str)
def test_steps_are_those_of_one_process(grade: Grade, sizes: list[int]) -> None:
    _check_steps(grade.run(t.train_steps, len(sizes), sizes, 3).results, sizes)


def _check_steps(by_rank: list[Any], sizes: list[int], length: int = 0) -> None:
    alone = t.steps_alone(sizes, 3, length)
    for rank, result in enumerate(by_rank):
        here = f"batches of {sizes}, rank {rank}"
        check(
            is_close(alone["losses"][:1], result["losses"][:1]),
            f"{here}: the first loss of one process on all of them is {alone['losses'][0]:.6f}, "
            f"train_step returned {result['losses'][0]:.6f}. It is the mean over all targets of "
            "all ranks, before the step.",
        )
        check(
            is_close(alone["state"], result["state"]) and is_close(alone, result),
            f"{here}: after 3 steps the weights differ from those of one process, losses are "
            f"{short(result['losses'])} and should be {short(alone['losses'])}. Does each target "
            "weigh 1/B in the gradient, and is the last step's gradient gone?",
        )


@task("1.11")
def test_sequences_count_every_position(grade: Grade) -> None:
    sizes = [2, 3]
    _check_steps(grade.run(t.train_steps, 2, sizes, 3, 4).results, sizes, 4)


@task("1.11")
def test_a_step_uses_what_it_is_given(grade: Grade) -> None:
    for rank, used in enumerate(grade.run(t.step_with_arguments, 2).results):
        check(
            used["average"] == [True],
            f"rank {rank}: average should be called once, with the all-reduce given; it was "
            f"called {len(used['average'])} times.",
        )
        check(
            used["all_reduce"] == 1,
            f"rank {rank}: loss and number of targets should go through the all-reduce given in "
            f"one call; it was called {used['all_reduce']} times.",
        )


@task("1.11")
def test_a_step_without_any_target_is_refused_on_every_rank(grade: Grade) -> None:
    for rank, text in enumerate(grade.run(t.step_without_data, 3).results):
        check(text, f"no rank has a target: rank {rank} should raise a ValueError, it does not.")


@task("1.11")
def test_steps_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, t.train_steps, [3, 1, 2], 3, 0)
    _check_steps(of_members(run), [3, 1, 2])


# 1.12 evaluate


@task("1.12", real=True)
@pytest.mark.parametrize(("n", "size"), [(1, 7), (3, 10), (4, 3)])
def test_evaluation_is_that_of_one_process(grade: Grade, n: int, size: int) -> None:
    _check_evaluated(grade.run(t.evaluate, n, size, 2).results, size)


def _check_evaluated(by_rank: list[Any], size: int, length: int = 0) -> None:
    n, alone = len(by_rank), t.evaluate_alone(size, length)
    fetched = sorted(index for result in by_rank for index in result["fetched"])
    check(
        fetched == list(range(size)),
        f"{size} samples on {n} ranks: each should be fetched once by one rank, fetched were "
        f"{short(fetched)}. No padding, and no rank evaluates the share of another.",
    )
    check_ranks(
        [alone] * n,
        [result["found"] for result in by_rank],
        "(loss, accuracy, targets)",
        "Add up sums over samples and ranks, and divide once at the end.",
    )


@task("1.12")
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_the_batch_size_does_not_change_the_result(grade: Grade, batch_size: int) -> None:
    _check_evaluated(grade.run(t.evaluate, 2, 13, batch_size).results, 13)


@task("1.12")
def test_evaluation_counts_positions_of_sequences(grade: Grade) -> None:
    _check_evaluated(grade.run(t.evaluate, 2, 5, 2, 3).results, 5, 3)


@task("1.12")
def test_modes_are_restored(grade: Grade) -> None:
    for rank, result in enumerate(grade.run(t.evaluate, 2, 6, 2).results):
        check(
            not result["noted"],
            f"rank {rank}: the model was called {' and '.join(result['noted'])}. Evaluation needs "
            "model.eval() and no_grad.",
        )
        check(
            result["restored"],
            f"rank {rank}: afterwards every module should be in the mode it was in before, also a "
            "part that was frozen in evaluation mode.",
        )


@task("1.12")
def test_evaluating_takes_one_small_all_reduce(grade: Grade) -> None:
    run = grade.run(t.evaluate, 4, 13, 2)
    check(
        run.collectives == [1] * 4,
        f"one all-reduce of the sums is enough; collectives by rank are {run.collectives}.",
    )
    for rank, text in enumerate(grade.run(t.evaluate_nothing, 2).results):
        check(text, f"rank {rank}: an empty data set should be a ValueError; it is none.")


@task("1.12")
def test_evaluation_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, t.evaluate, 10, 2, 0)
    _check_evaluated(of_members(run), 10)


# 1.13 Trainer.fit

EPOCHS = 3


@task("1.13", real=True)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_training_is_that_of_one_process(grade: Grade, n: int) -> None:
    _check_fitted(grade.run(t.fit, n, EPOCHS).results)


def _check_fitted(by_rank: list[Any]) -> None:
    n = len(by_rank)
    orders = _global_batches(by_rank)
    alone = t.fit_alone(orders, EPOCHS)
    epochs = [orders[e * t.STEPS : (e + 1) * t.STEPS] for e in range(EPOCHS)]
    check(
        epochs[0] != epochs[1],
        "epochs 1 and 2 see the samples in the same order. Call set_epoch before each.",
    )
    for rank, result in enumerate(by_rank):
        check(
            len(result["history"]) == EPOCHS
            and [entry["epoch"] for entry in result["history"]] == [1, 2, 3],
            f"rank {rank} of {n}: the history should have epochs 1, 2, 3; it is "
            f"{short(result['history'])}.",
        )
        for wanted, got in zip(alone["history"], result["history"], strict=True):
            check(
                is_close(wanted, got),
                f"rank {rank} of {n}: epoch {wanted['epoch']} of one process from rank 0's "
                f"weights has losses {short(wanted['step_losses'])} and test {wanted['test']}; "
                f"here {short(got['step_losses'])} and {got['test']}.",
            )
        check(
            is_close(alone["state"], result["state"]),
            f"rank {rank} of {n}: the final weights are not those of one process.",
        )


def _global_batches(by_rank: list[Any]) -> list[list[int]]:
    """What the ranks have fetched together, step by step."""
    n, share = len(by_rank), t.GLOBAL_BATCH // len(by_rank)
    wanted = EPOCHS * t.STEPS * share
    for rank, result in enumerate(by_rank):
        check(
            len(result["fetched"]) == wanted,
            f"rank {rank} of {n}: {EPOCHS} epochs of {t.STEPS} steps of {share} samples are "
            f"{wanted}; it fetched {len(result['fetched'])}.",
        )
    return [
        [i for result in by_rank for i in result["fetched"][step : step + share]]
        for step in range(0, wanted, share)
    ]


@task("1.13", real=True)
def test_rank_0_alone_prints_a_line_an_epoch(grade: Grade) -> None:
    first, *others = (result["printed"] for result in grade.run(t.fit, 2, EPOCHS).results)
    lines = first.splitlines()
    check(
        len(lines) == EPOCHS and all("loss" in line for line in lines),
        f"rank 0 should print one line an epoch, with the loss; it printed {short(first)}.",
    )
    for rank, text in enumerate(others, start=1):
        check(not text, f"rank {rank} should print nothing; it printed {short(text)}.")


@task("1.13")
def test_batch_norm_is_judged_with_the_same_statistics(grade: Grade) -> None:
    results = grade.run(t.fit_normalised, 2, EPOCHS).results
    for rank, result in enumerate(results):
        check(
            result["history"] == results[0]["history"] and result["state"] == results[0]["state"],
            f"rank {rank}: history or state differs from rank 0's. Running statistics follow each "
            "rank's shard: give rank 0's buffers to all before the evaluation.",
        )
        (counted,) = result["state"]["1.num_batches_tracked"]
        check(
            counted == EPOCHS * t.STEPS,
            f"rank {rank}: BatchNorm has seen {counted:.0f} batches of {EPOCHS * t.STEPS}. The "
            "model came in evaluation mode: switch to training at the start of each epoch.",
        )


@task("1.13")
def test_the_speed_is_that_of_all_ranks(grade: Grade) -> None:
    run = grade.run(t.fit, 4, EPOCHS, cluster=UNIFORM)
    images = t.STEPS * t.GLOBAL_BATCH
    for rank, result in enumerate(run.results):
        speeds = result["images_per_s"]
        spent = sum(images / speed for speed in speeds if speed > 0)
        check(
            0 < spent <= 1.001 * run.seconds,
            f"rank {rank}: {short(speeds)} images/s would have taken {spent:.3f} s, the run took "
            f"{run.seconds:.3f} s. Count the images of all ranks.",
        )
        parameters = 4  # of the classifier
        check(
            result["all_reduces"] == EPOCHS * t.STEPS * (parameters + 1),
            f"rank {rank}: the trainer's all_reduce should be called "
            f"{EPOCHS * t.STEPS * (parameters + 1)} times, {parameters + 1} a step; it was "
            f"{result['all_reduces']} times.",
        )


@task("1.13")
def test_a_batch_that_cannot_be_shared_stops_the_training(grade: Grade) -> None:
    for rank, text in enumerate(grade.run(t.fit_what_cannot_be_shared, 2).results):
        check(text, f"rank {rank}: a global batch of 7 on 2 ranks should be build_loader's error.")


@task("1.13")
def test_training_inside_a_group(grade: Grade) -> None:
    _check_fitted(grade.run(t.fit_in_group, 4, EPOCHS).results[1:3])


if __name__ == "__main__":
    sys.exit(main(__file__))
