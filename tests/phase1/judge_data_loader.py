"""Judges tasks 1.1 and 1.2: what is asserted about what tests/phase1/data_loader.py returns."""

from math import ceil
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from phase1 import data_loader as d
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import (
    of_members,
    short,
)

# 1.1 shard_indices

SHARDED = [(n, ranks) for n in (10, 7, 16, 101, 2, 1) for ranks in (4, 3, 1, 2, 5, 8)]


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
    (cut,) = grade.call(d.shards, [(7, 3, {"shuffle": False, "drop_last": True})])
    expected = [[0, 3], [1, 4], [2, 5]]
    check(
        cut == expected,
        f"7 samples on 3 ranks with drop_last, not shuffled, should be {expected}; they are "
        f"{short(cut)}. Ranks take turns here too.",
    )


@task("1.1")
@pytest.mark.parametrize("drop_last", [False, True])
def test_shards_together_are_the_order_of_one_process(grade: Grade, drop_last: bool) -> None:
    options = {"seed": 4, "drop_last": drop_last}
    samples = 14 if drop_last else 12
    (alone,), shared = grade.call(d.shards, [(samples, 1, options), (samples, 4, options)])
    lengths = [len(shard) for shard in shared]
    check(lengths == [3] * 4, f"{samples} samples on 4 ranks: shards should hold 3, not {lengths}.")
    turns = [index for step in zip(*shared, strict=True) for index in step]
    check(
        turns == alone[:12],
        f"the shards of 4 ranks with drop_last={drop_last}, read step by step, should be the order "
        f"of one process, {alone[:12]}; they are {turns}. Do ranks take turns, not blocks, and "
        "does the order depend on the number of ranks?",
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
    _check_steps(by_rank, samples, batch)
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


def _check_steps(by_rank: list[Any], samples: int, batch: int) -> None:
    n = len(by_rank)
    for rank, epochs in enumerate(by_rank):
        for number, epoch in enumerate(epochs):
            sizes = [len(step) for step in epoch["steps"]]
            check(
                sizes == [batch // n] * (samples // batch),
                f"rank {rank} of {n}: a global batch of {batch} from {samples} samples is "
                f"{samples // batch} steps of {batch // n}; iteration {number} loads "
                f"{short(sizes)}. Each rank loads 1/N, and the incomplete last batch is left out.",
            )
            check(
                epoch["len"] == len(sizes),
                f"rank {rank} of {n}: len(loader) is {epoch['len']}, the loader yields "
                f"{len(sizes)} batches. Whoever draws a progress bar or a schedule relies on it.",
            )


@task("1.2")
def test_the_number_of_ranks_does_not_change_the_global_batches(grade: Grade) -> None:
    alone, shared = (grade.run(d.load_epochs, n, 50, 12, [2], {"seed": 3}).results for n in (1, 4))
    _check_steps(alone, 50, 12)
    _check_steps(shared, 50, 12)
    steps = alone[0][0]["steps"]
    parts = zip(*(epochs[0]["steps"] for epochs in shared), strict=True)
    together = [sorted(index for part in step for index in part) for step in parts]
    check(
        together == [sorted(step) for step in steps],
        f"step 0 of one process holds {sorted(steps[0])}, of 4 ranks together {together[0]}. "
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


@task("1.2", real=True)
def test_loader_processes_are_seeded_too(grade: Grade) -> None:
    results = grade.run(d.load_by_processes, 2, 24, 6, [0, 1, 0]).results
    for rank, workers in enumerate(result["workers"] for result in results):
        check(
            workers == 2,
            f"rank {rank} of 2: num_loader_workers=2 should give 2 processes, not {workers}.",
        )
    _check_loaded([result["epochs"] for result in results], 24, 6)
    for rank, result in enumerate(results):
        first, second, again = (epoch["noise"] for epoch in result["epochs"])
        check(
            first == again != second,
            f"rank {rank} of 2: with 2 loader processes, augmentation should differ by epoch, and "
            "repeat where an epoch is repeated. Give the DataLoader the generator that set_epoch "
            "seeds: its processes are seeded from it.",
        )


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
def test_loading_takes_no_numbers_from_the_training(grade: Grade) -> None:
    run = grade.run(d.load_epochs, 2, 24, 6, [0, 1], {"seed": 1})
    for rank, epochs in enumerate(run.results):
        moved = sorted({name for epoch in epochs for name in epoch["moved"]})
        check(
            not moved,
            f"rank {rank} of 2: building, set_epoch or loading moved or seeded the global "
            f"generator of {' and '.join(moved)}, from which dropout draws. Augmentation takes no "
            "numbers from the training: put the generators back after each batch.",
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
