"""Judges tasks 1.1 and 1.2: shards, batches, and the random numbers of augmentation."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import ceil
from typing import Any

import pytest

from distlab.grade import Grade, check, check_cost, task
from distlab.util.text import counted
from judging.checks import ON_CPU, check_silent, short
from judging.expect import expect, results_in_group
from phase1 import data as b

SIZES = [(12, 4), (14, 4), (3, 8), (50, 3), (20, 7), (2, 3), (1, 2), (101, 5), (7, 1)]
IMPOSSIBLE = [(10, 4, 4), (10, -1, 4), (10, 5, 4), (10, 0, 0), (0, 0, 1), (0, 1, 2), (-3, 0, 2)]
ORDERS_OF_4, DRAWS = 24, 600  # 600 fair draws miss an order in one of 10^9 runs
BYTES_PER_SAMPLE = 400  # room for a few lists of Python ints, at 36 bytes per int
SLOW = "a shard of 200,000 samples should take less than a second: is the time O(num_samples)?"


@task("1.1")
def test_ranks_take_turns(grade: Grade) -> None:
    plain, cut = ({"shuffle": False, "drop_last": drop_last} for drop_last in (False, True))
    cases = [(7, 3, plain), (7, 3, cut), (10, 4, plain), (10, 4, cut)]
    for (n, ranks, options), shards in zip(cases, grade.call(b.shards, cases), strict=True):
        expect(
            f"{_here(n, ranks)}, not shuffled, drop_last={options['drop_last']}: the shards",
            shards,
            _turns([*range(n)], ranks, options["drop_last"]),
            "Ranks take turns, and without drop_last the order wraps around.",
        )


def _here(n: int, ranks: int) -> str:
    return f"{counted(n, 'sample')} on {counted(ranks, 'rank')}"


def _turns(order: list[int], ranks: int, drop_last: bool) -> b.Shards:
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
    found = grade.call(b.shards, cases)
    for (samples, ranks), (order,), shards in zip(sizes, found[::2], found[1::2], strict=True):
        expect(f"{_here(samples, 1)}: the indices, sorted,", sorted(order), [*range(samples)])
        _check_shards(f"{_here(samples, ranks)}, drop_last={drop_last}", order, shards, drop_last)


def _check_shards(here: str, order: list[int], shards: b.Shards, drop_last: bool) -> None:
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
    *orders, again = (shards[0] for shards in grade.call(b.shards, cases))
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
    here, there = grade.call(b.shard_by_process, {"seed": grade.random.randrange(10**6)})
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
    found = [tuple(shard) for (shard,) in grade.call(b.shards, by_epoch + by_seed)]
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
    [[order]] = grade.call(b.shards, [(n, 1, {"seed": grade.random.randrange(10**6)})])
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
    got, expected = grade.call(b.shards, [(11, 3, {}), (11, 3, defaults)])
    expect(f"without further arguments, the shards, as with {defaults},", got, expected)


@task("1.1")
def test_global_generators_are_left_alone(grade: Grade) -> None:
    flags = product((False, True), repeat=2)
    cases = [{"epoch": 3, "seed": 5, "shuffle": a, "drop_last": b} for a, b in flags]
    for options, moved in zip(cases, grade.call(b.generators_moved, cases), strict=True):
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
    by_case = grade.call(b.shards_refused, cases)
    for (n, rank, ranks, given), found in zip(cases, by_case, strict=True):
        what = f"{n} samples for rank {rank} of {ranks}, {given or 'nothing else given'}:"
        expect(f"{what} what shard_indices raises", found["type"], "ValueError")


@task("1.1")
def test_every_rank_computes_its_shard_alone(grade: Grade) -> None:
    options = {"epoch": 1, "seed": grade.random.randrange(10**6)}
    run = grade.run(b.own_shard, 3, 20, options)
    check_silent(run, "a shard")
    [shards] = grade.call(b.shards, [(20, 3, options)])
    expect(
        "3 ranks that call shard_indices once each: the shards, as one process gets them,",
        run.results,
        shards,
        "The rank is an argument: do not ask torch.distributed for it.",
    )


@task("1.1")
def test_the_cost_grows_with_the_data_set_alone(grade: Grade) -> None:
    samples, ranks = grade.random.randint(20_000, 25_000), grade.random.randint(500, 600)
    [peak] = grade.run(b.peak_of_shard, 1, samples, ranks - 1, ranks, if_slow=SLOW).results
    check_cost(
        peak <= BYTES_PER_SAMPLE * samples,
        f"shard_indices took {peak:,} bytes of memory for one rank of {ranks} and {samples:,} "
        f"samples, which is {peak / samples:.0f} bytes per sample; a few lists of all samples take "
        f"less than {BYTES_PER_SAMPLE} bytes per sample. Does it build something for every rank?",
    )
    grade.run(b.shards, 1, [(200_000, 2, {})], if_slow=SLOW)


NUMBER_OF_RANKS = r"rank \d of 3\b|\b3 (ranks|processes|workers)|% 3\b"
NO_ADVICE = r"\b0 (or|and) 3\b|\b3 (or|and) 0\b"
ADVICE = {64: ("63", "66"), 65: ("63", "66"), 10: ("9", "12"), 2: ("3",), 1: ("3",)}
Loaded = Sequence[Mapping[str, Any]]  # results of b.load for one case, by rank


@task("1.2")
@pytest.mark.parametrize("n", [1, 4])
def test_batches_of_a_step_are_one_global_batch(grade: Grade, n: int) -> None:
    samples, seed = grade.random.randint(49, 59), grade.random.randrange(10**6)
    cases: list[b.Case] = [(samples, 12, [-1, -1, 1, -1, 0], {"seed": seed}), (24, 12, [0, 1], {})]
    run = grade.run(b.load, n, cases, options=ON_CPU)
    _check_all(run.results, cases)
    check_silent(run, "a loader")


def _check_all(by_rank: Sequence[Any], cases: Sequence[b.Case]) -> None:
    for number, case in enumerate(cases):
        loaded = [results[number] for results in by_rank]
        _check_steps(loaded, case)
        for place in range(len(case[2])):
            _check_samples(loaded, place, case)
        for rank, of_rank in enumerate(loaded):
            here = f"rank {rank} of {len(loaded)}, {case[3] or 'defaults'}"
            _check_processes(of_rank, case[3].get("num_loader_workers", 0), here)
            _check_left_alone(of_rank, here)


def _check_steps(by_rank: Loaded, case: b.Case) -> None:
    n, (samples, batch, *_) = len(by_rank), case
    for rank, loaded in enumerate(by_rank):
        here = f"rank {rank} of {n}, a global batch of {batch} from {samples} samples"
        for number, epoch in enumerate(loaded["epochs"]):
            expect(
                f"{here}: in iteration {number}, the samples loaded in each step",
                [len(step) for step in epoch["steps"]],
                [batch // n] * (samples // batch),
                "Each rank loads 1/N of a global batch, and the incomplete last batch is left out.",
            )
        expect(f"{here}: len(loader)", loaded["len"], samples // batch)


def _check_samples(by_rank: Loaded, number: int, case: b.Case) -> None:
    """Check that each rank loads its shard in order, each sample once, and fetches no others."""
    n, here = len(by_rank), f"{case[0]} samples, epochs {case[2]}, {case[3] or 'defaults'}"
    here += f", iteration {number}"
    drawn = [[i for step in of["epochs"][number]["steps"] for i in step] for of in by_rank]
    everything = [index for shard in drawn for index in shard]
    check(
        len(everything) == len(set(everything)),
        f"{here}: at least one sample is loaded more than once; by rank, the samples are "
        f"{short(drawn)}. Does each rank give the sampler its own rank inside the group, and the "
        "same seed as the others?",
    )
    for rank, loaded in enumerate(by_rank):
        expect(
            f"{here}: rank {rank} of {n}, the samples of its shard in order",
            drawn[rank],
            loaded["shards"][number][: len(drawn[rank])],
            "Are the size of the data set, rank, N, seed and shuffle passed on to the sampler? The "
            "epoch is 0 at first, and stays the same until set_epoch is called.",
        )
        fetched = loaded["epochs"][number]["fetched"]
        judge = check_cost if len(fetched) > len(drawn[rank]) else check
        judge(
            not loaded["epochs"][number]["is_own"] or sorted(fetched) == sorted(drawn[rank]),
            f"{here}: rank {rank} of {n} yields {len(drawn[rank])} samples, but fetched "
            f"{len(fetched)} from the data set: {short(fetched)}. Fetch only the samples that are "
            "yielded, each once.",
        )


def _check_processes(loaded: Mapping[str, Any], workers: int, here: str) -> None:
    for epoch in loaded["epochs"]:
        expect(
            f"{here}: the number of other processes that load samples, and whether the rank does,",
            [len(epoch["others"]), epoch["is_own"]],
            [workers, not workers],
        )


def _check_left_alone(loaded: Mapping[str, Any], here: str) -> None:
    moved = [("building the loader", loaded["building"])]
    for epoch in loaded["epochs"]:
        moved += [("set_epoch", epoch["set_epoch"]), ("loading", epoch["loading"])]
    for what, names in moved:
        check(
            not names,
            f"{here}: {what} drew from or seeded the global generator of {' and '.join(names)}. "
            "The training draws from it too: restore its state after each batch.",
        )


@task("1.2", real=True)
def test_loader_processes_are_as_many_as_asked_for(grade: Grade) -> None:
    epochs = [0, 1, 0]
    cases: list[b.Case] = [(24, 12, epochs, {"num_loader_workers": workers}) for workers in (0, 2)]
    by_rank = grade.run(b.load, 2, cases, options=ON_CPU).results
    _check_all(by_rank, cases)
    _check_augmentation([results[1] for results in by_rank], epochs, "with 2 loader processes")


@task("1.2", real=True)
def test_loader_processes_stay_if_asked_to(grade: Grade) -> None:
    if not grade.run(b.offers, 1, "persistent_workers").results[0]:
        return
    seed, epochs = {"seed": grade.random.randrange(10**6)}, [0, 1, 0]
    new, stay = {**seed, "num_loader_workers": 1}, {**seed, "persistent_workers": True}
    cases: list[b.Case] = [(24, 12, epochs, new), (24, 12, epochs, new | stay)]
    cases += [(24, 12, [1], {**stay, "num_loader_workers": 2}), (24, 12, [1], stay)]
    by_rank = grade.run(b.load, 2, cases, options=ON_CPU).results
    _check_all(by_rank, cases)
    for rank, results in enumerate(by_rank):
        _check_who_stays(f"rank {rank} of 2", *results[:2])
        drawn = [epoch["noise"] for of in results for epoch in of["epochs"]]
        check(
            drawn[1] == drawn[4] == drawn[6] == drawn[7],
            f"rank {rank} of 2: epoch 1 is augmented differently after epoch 0 with new processes, "
            "after epoch 0 with persistent_workers, in a loader that begins with it, or without "
            "loader processes. Leave the seeding to ShardLoader.",
        )


def _check_who_stays(here: str, new: Mapping[str, Any], stay: Mapping[str, Any]) -> None:
    for persistent_workers, loaded, number in ((False, new, 3), (True, stay, 1)):
        expect(
            f"{here}, {persistent_workers=}: the number of processes that load 3 epochs",
            len({process for epoch in loaded["epochs"] for process in epoch["others"]}),
            number,
            "With persistent_workers, the process of num_loader_workers=1 stays; by default, each "
            "epoch has a new one.",
        )


@task("1.2")
def test_batches_are_pinned_if_asked_to_where_there_is_a_gpu(grade: Grade) -> None:
    if not grade.run(b.offers, 1, "pin_memory").results[0]:
        return
    for has_gpu, found in zip(
        (True, False), grade.run(b.pinned, 1, options=ON_CPU).results[0], strict=True
    ):
        expect(
            f"a host {'with' if has_gpu else 'without'} a GPU, where torch.cuda.is_available() is "
            f"{has_gpu}: loader.pin_memory by default, and with pin_memory=True,",
            found,
            [False, has_gpu],
            "Pin only where there is a GPU; without one, torch prints a warning in every epoch.",
        )


@task("1.2")
def test_augmentation_differs_by_rank_and_epoch_and_can_be_repeated(grade: Grade) -> None:
    epochs = [-1, 0, 1, 2, 0]
    case: b.Case = (24, 12, epochs, {"seed": grade.random.randrange(10**6)})
    first, again = zip(*grade.run(b.load, 3, [case, case], options=ON_CPU).results, strict=True)
    for rank, loaded in enumerate(zip(first, again, strict=True)):
        one, two = ([epoch["noise"] for epoch in each["epochs"]] for each in loaded)
        check(
            one == two,
            f"rank {rank} of 3: two loaders with the same arguments augment the samples "
            "differently. On a rank, seed and epoch alone should determine the random numbers, "
            "whatever the training has drawn before.",
        )
        check(
            one[0] == one[1],
            f"rank {rank}: epoch 0 was augmented differently before and after set_epoch(0). A new "
            "loader must already be in epoch 0: call set_epoch before you return it.",
        )
    _check_augmentation(first, epochs, "without loader processes")


def _check_augmentation(by_rank: Loaded, epochs: list[int], how: str) -> None:
    """Check that two draws are equal only if both their ranks and their epochs are equal."""
    drawn: dict[tuple[str, float], tuple[int, int]] = {}
    for rank, loaded in enumerate(by_rank):
        noise = [epoch["noise"] for epoch in loaded["epochs"]]
        check(
            noise[-1] == noise[epochs.index(0)],
            f"rank {rank}, {how}: epoch 0 is augmented differently when it is loaded again. Give "
            "the DataLoader the generator that set_epoch seeds.",
        )
        for epoch, by_source in zip(b.last_set(epochs), noise, strict=True):
            for source, number in [(name, x) for name in b.SOURCES for x in by_source[name]]:
                other = drawn.setdefault((source, number), (rank, epoch))
                check(
                    other == (rank, epoch),
                    f"{how}, rank {rank} in epoch {epoch} and rank {other[0]} in epoch {other[1]} "
                    f"draw the same augmentation from {source}. The seed should depend on both "
                    "rank and epoch, as in ShardLoader's set_epoch.",
                )


@task("1.2")
def test_augmentation_is_drawn_anew_where_nothing_is_shuffled(grade: Grade) -> None:
    epochs, seeds = [0, 1, 0], grade.random.sample(range(10**6), 2)
    cases: list[b.Case] = [(24, 12, epochs, {"seed": seed, "shuffle": False}) for seed in seeds]
    by_rank = grade.run(b.load, 2, cases, options=ON_CPU).results
    _check_all(by_rank, cases)
    for number in range(len(cases)):
        _check_augmentation([results[number] for results in by_rank], epochs, "with shuffle=False")
    for rank, (one, other) in enumerate(by_rank):
        check(
            one["epochs"][0]["noise"] != other["epochs"][0]["noise"],
            f"rank {rank} of 2: with shuffle=False, seeds {seeds[0]} and {seeds[1]} give the same "
            "augmentation. The seed also determines the augmentation: pass it on whatever shuffle "
            "is.",
        )


@task("1.2")
def test_sizes_at_their_limits(grade: Grade) -> None:
    sizes = [(12, 12), (4, 3), (47, 24), (11, 3)]
    cases: list[b.Case] = [(*size, [1], {"seed": 1}) for size in sizes]
    _check_all(grade.run(b.load, 3, cases, options=ON_CPU).results, cases)
    _check_all(grade.run(b.load, 1, [(1, 1, [0], {})], options=ON_CPU).results, [(1, 1, [0], {})])


@task("1.2")
def test_the_loader_asks_its_group(grade: Grade) -> None:
    seed = grade.random.randrange(10**6)
    cases: list[b.Case] = [(50, 12, [0, 1], {"seed": seed}), (50, 12, [2], {"shuffle": False})]
    cases += [(24, 12, [0], {"num_loader_workers": 1})]
    _check_all(results_in_group(grade, b.load, cases, options=ON_CPU), cases)


@task("1.2")
@pytest.mark.parametrize("n", [3, 1])
def test_a_batch_that_cannot_be_shared_is_refused(grade: Grade, n: int) -> None:
    cases = [(100, batch) for batch in ADVICE if n > 1]
    cases += [(100, 0), (100, -3), (5, 6), (0, 3), (11, 12)]
    for rank, refusals in enumerate(grade.run(b.loads_refused, n, cases, options=ON_CPU).results):
        for (samples, batch), refusal in zip(cases, refusals, strict=True):
            here = f"rank {rank} of {n}: a global batch of {batch} from {samples} samples"
            _check_refusal(refusal, here, ADVICE.get(batch, ()))


def _check_refusal(refusal: Mapping[str, str], here: str, names: Sequence[str]) -> None:
    got = f"{refusal['type']}: {refusal['text']}" if refusal["type"] else "none"
    sizes = re.sub(NUMBER_OF_RANKS, "", refusal["text"])
    is_named = all(re.search(rf"\b{name}\b", sizes) for name in names)
    check(
        refusal["type"] == "ValueError" and is_named,
        f"{here} should raise a ValueError{' that names ' if names else ''}"
        f"{' and '.join(names)}; it raised {got}.",
    )
    check(
        len(names) != 1 or not re.search(NO_ADVICE, refusal["text"]),
        f"{here}: the error should suggest only 3: 0 is a multiple too, but not a valid batch "
        f"size. The message is: {refusal['text']}",
    )
