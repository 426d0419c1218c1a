"""Judges task 1.2: loader processes, and where augmentation gets its random numbers."""

from collections.abc import Mapping
from typing import Any

from distlab.grade import Grade, check, task
from phase1 import data_loader as d
from phase1.judge_data_loader import Loaded, check_loaded, of_case


@task("1.2", real=True)
def test_loader_processes_are_as_many_as_asked_for(grade: Grade) -> None:
    of_none, of_two = ({"num_loader_workers": workers} for workers in (0, 2))
    cases: list[d.Case] = [(24, 12, [0, 1], of_none), (24, 12, [0, 1, 0], of_two)]
    by_rank = grade.run(d.load, 2, cases).results
    for number, (case, workers) in enumerate(zip(cases, (0, 2), strict=True)):
        check_loaded(of_case(by_rank, number), case)
        for rank, loaded in enumerate(of_case(by_rank, number)):
            for epoch in loaded["epochs"]:
                _check_processes(epoch, workers, f"rank {rank} of 2")
            _check_left_alone(loaded, f"rank {rank} of 2, num_loader_workers={workers}")
    _check_augmentation(of_case(by_rank, 1), [0, 1, 0], "with 2 loader processes")


def _check_processes(epoch: Mapping[str, Any], workers: int, here: str) -> None:
    expected = f"{workers} processes of its own" if workers else "the rank itself"
    count = epoch["others"]
    others = [f"{count} other process{'es' * (count > 1)}"] if count else []
    found = " and ".join([*others, *["the rank itself"] * epoch["is_own"]])
    check(
        (epoch["others"], epoch["is_own"]) == (workers, not workers),
        f"{here}: with num_loader_workers={workers}, {expected} should load the samples; they were "
        f"loaded by {found}.",
    )


@task("1.2")
def test_augmentation_differs_by_rank_and_epoch_and_can_be_repeated(grade: Grade) -> None:
    epochs = [-1, 0, 1, 2, 0]
    case: d.Case = (24, 12, epochs, {"seed": grade.random.randrange(10**6)})
    first, again = zip(*grade.run(d.load, 3, [case, case]).results, strict=True)
    for rank, (one, two) in enumerate(zip(first, again, strict=True)):
        check(
            [epoch["noise"] for epoch in one["epochs"]]
            == [epoch["noise"] for epoch in two["epochs"]],
            f"rank {rank} of 3: two loaders with the same arguments augment the samples "
            "differently. On a rank, seed and epoch alone should determine the random numbers, "
            "whatever the training has drawn before.",
        )
        untouched, asked = (epoch["noise"] for epoch in one["epochs"][:2])
        check(
            untouched == asked,
            f"rank {rank}: epoch 0 was augmented differently before and after set_epoch(0). A new "
            "loader must already be in epoch 0: call set_epoch before you return it.",
        )
    _check_augmentation(first, epochs, "without loader processes")


def _check_augmentation(by_rank: Loaded, epochs: list[int], how: str) -> None:
    """Check that only the same rank draws the same numbers, and only in the same epoch."""
    drawn: dict[tuple[str, float], tuple[int, int]] = {}
    for rank, loaded in enumerate(by_rank):
        again = loaded["epochs"][-1]["noise"], loaded["epochs"][epochs.index(0)]["noise"]
        check(
            again[0] == again[1],
            f"rank {rank}, {how}: epoch 0 is augmented differently when it is loaded again. Give "
            "the DataLoader the generator that set_epoch seeds.",
        )
        for epoch, found in zip(epochs, loaded["epochs"], strict=True):
            where = rank, max(epoch, 0)
            for source in d.SOURCES:
                for number in found["noise"][source]:
                    other = drawn.setdefault((source, number), where)
                    check(
                        other == where,
                        f"{how}, rank {rank} in epoch {where[1]} and rank {other[0]} in epoch "
                        f"{other[1]} draw the same augmentation from {source}. The seed should "
                        "depend on both rank and epoch, as in ShardLoader's set_epoch.",
                    )


@task("1.2")
def test_augmentation_is_drawn_anew_where_nothing_is_shuffled(grade: Grade) -> None:
    epochs, seeds = [0, 1, 0], grade.random.sample(range(10**6), 2)
    cases: list[d.Case] = [(24, 12, epochs, {"seed": seed, "shuffle": False}) for seed in seeds]
    by_rank = grade.run(d.load, 2, cases).results
    for number, case in enumerate(cases):
        check_loaded(of_case(by_rank, number), case)
        _check_augmentation(of_case(by_rank, number), epochs, "with shuffle=False")
    for rank, (one, other) in enumerate(by_rank):
        check(
            one["epochs"][0]["noise"] != other["epochs"][0]["noise"],
            f"rank {rank} of 2: with shuffle=False, seeds {seeds[0]} and {seeds[1]} give the same "
            "augmentation. The seed also determines the augmentation: pass it on whatever shuffle "
            "is.",
        )


@task("1.2")
def test_loading_takes_no_numbers_from_the_training(grade: Grade) -> None:
    case: d.Case = (24, 6, [-1, 1], {"seed": 1})
    for rank, [loaded] in enumerate(grade.run(d.load, 2, [case]).results):
        _check_left_alone(loaded, f"rank {rank} of 2")


def _check_left_alone(loaded: Mapping[str, Any], here: str) -> None:
    moved = [("building the loader", loaded["building"], "")]
    for epoch in loaded["epochs"]:
        moved += [("set_epoch", epoch["set_epoch"], "")]
        moved += [("loading", epoch["loading"], " Restore their states after each batch.")]
    for what, names, advice in moved:
        check(
            not names,
            f"{here}: {what} drew from or seeded the global generator of {' and '.join(names)}. "
            f"The training draws from it too, so loading must leave it as it is.{advice}",
        )
