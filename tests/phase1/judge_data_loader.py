"""Judges task 1.2: batches of a step, loader processes, and the random numbers of augmentation."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import check_silent, short
from judging.expect import expect, results_in_group
from phase1 import data_loader as d

NUMBER_OF_RANKS = r"rank \d of 3\b|\b3 (ranks|processes|workers)|% 3\b"
NO_ADVICE = r"\b0 (or|and) 3\b|\b3 (or|and) 0\b"
ADVICE = {64: ("63", "66"), 65: ("63", "66"), 10: ("9", "12"), 2: ("3",), 1: ("3",)}
Loaded = Sequence[Mapping[str, Any]]  # by rank: what d.load returns for one case


@task("1.2")
@pytest.mark.parametrize("n", [1, 4])
def test_batches_of_a_step_are_one_global_batch(grade: Grade, n: int) -> None:
    samples, seed = grade.random.randint(49, 59), grade.random.randrange(10**6)
    cases: list[d.Case] = [(samples, 12, [-1, -1, 1, -1, 0], {"seed": seed}), (24, 12, [0, 1], {})]
    run = grade.run(d.load, n, cases)
    _check_all(run.results, cases)
    check_silent(run, "a loader")


def _check_all(by_rank: Sequence[Any], cases: Sequence[d.Case]) -> None:
    for number, case in enumerate(cases):
        loaded = [results[number] for results in by_rank]
        _check_steps(loaded, case)
        for place in range(len(case[2])):
            _check_samples(loaded, place, case)
        for rank, of_rank in enumerate(loaded):
            here = f"rank {rank} of {len(loaded)}, {case[3] or 'defaults'}"
            _check_processes(of_rank, case[3].get("num_loader_workers", 0), here)
            _check_left_alone(of_rank, here)


def _check_steps(by_rank: Loaded, case: d.Case) -> None:
    n, (samples, batch, *_) = len(by_rank), case
    for rank, loaded in enumerate(by_rank):
        here = f"rank {rank} of {n}, a global batch of {batch} from {samples} samples"
        check(
            not loaded["type"],
            f"{here}: build_loader should return a ShardLoader; it returned a {loaded['type']}.",
        )
        for number, epoch in enumerate(loaded["epochs"]):
            expect(
                f"{here}: in iteration {number}, the samples loaded in each step",
                [len(step) for step in epoch["steps"]],
                [batch // n] * (samples // batch),
                "Each rank loads 1/N of a global batch, and the incomplete last batch is left out.",
            )
        expect(f"{here}: len(loader)", loaded["len"], samples // batch)


def _check_samples(by_rank: Loaded, number: int, case: d.Case) -> None:
    """Check that a rank loads its shard in order, each sample once, and fetches no others."""
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
        check(
            not loaded["epochs"][number]["is_own"] or sorted(fetched) == sorted(drawn[rank]),
            f"{here}: rank {rank} of {n} yields {len(drawn[rank])} samples, but fetched "
            f"{len(fetched)} from the data set: {short(fetched)}. Fetch only the samples that are "
            "yielded, each once.",
        )


def _check_processes(loaded: Mapping[str, Any], workers: int, here: str) -> None:
    for epoch in loaded["epochs"]:
        expect(
            f"{here}: the number of other processes that load samples, and whether the rank does,",
            [epoch["others"], epoch["is_own"]],
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
    cases: list[d.Case] = [(24, 12, epochs, {"num_loader_workers": workers}) for workers in (0, 2)]
    by_rank = grade.run(d.load, 2, cases).results
    _check_all(by_rank, cases)
    _check_augmentation([results[1] for results in by_rank], epochs, "with 2 loader processes")


@task("1.2")
def test_augmentation_differs_by_rank_and_epoch_and_can_be_repeated(grade: Grade) -> None:
    epochs = [-1, 0, 1, 2, 0]
    case: d.Case = (24, 12, epochs, {"seed": grade.random.randrange(10**6)})
    first, again = zip(*grade.run(d.load, 3, [case, case]).results, strict=True)
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
    """Check that only the same rank draws the same numbers, and only in the same epoch."""
    drawn: dict[tuple[str, float], tuple[int, int]] = {}
    for rank, loaded in enumerate(by_rank):
        noise = [epoch["noise"] for epoch in loaded["epochs"]]
        check(
            noise[-1] == noise[epochs.index(0)],
            f"rank {rank}, {how}: epoch 0 is augmented differently when it is loaded again. Give "
            "the DataLoader the generator that set_epoch seeds.",
        )
        for epoch, by_source in zip(d.last_set(epochs), noise, strict=True):
            for source, number in [(name, x) for name in d.SOURCES for x in by_source[name]]:
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
    cases: list[d.Case] = [(24, 12, epochs, {"seed": seed, "shuffle": False}) for seed in seeds]
    by_rank = grade.run(d.load, 2, cases).results
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
    cases: list[d.Case] = [(*size, [1], {"seed": 1}) for size in sizes]
    _check_all(grade.run(d.load, 3, cases).results, cases)
    _check_all(grade.run(d.load, 1, [(1, 1, [0], {})]).results, [(1, 1, [0], {})])


@task("1.2")
def test_the_loader_asks_its_group(grade: Grade) -> None:
    seed = grade.random.randrange(10**6)
    cases: list[d.Case] = [(50, 12, [0, 1], {"seed": seed}), (50, 12, [2], {"shuffle": False})]
    cases += [(24, 12, [0], {"num_loader_workers": 1})]
    _check_all(results_in_group(grade, d.load, cases), cases)


@task("1.2")
@pytest.mark.parametrize("n", [3, 1])
def test_a_batch_that_cannot_be_shared_is_refused(grade: Grade, n: int) -> None:
    cases = [(100, batch) for batch in ADVICE if n > 1]
    cases += [(100, 0), (100, -3), (5, 6), (0, 3), (11, 12)]
    for rank, refusals in enumerate(grade.run(d.loads_refused, n, cases).results):
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
