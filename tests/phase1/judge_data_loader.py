"""Judges task 1.2: what the functions in tests/phase1/data_loader.py should return."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import check_silent, of_members, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, inside_group
from phase1 import data_loader as d

WHAT = {"steps": "its samples are", "noise": "its augmentation is"}
NUMBER_OF_RANKS = r"rank \d of 3\b|\b3 (ranks|processes|workers)|% 3\b"
NO_ADVICE = r"\b0 (or|and) 3\b|\b3 (or|and) 0\b"
Loaded = Sequence[Mapping[str, Any]]  # by rank: what d.load returns for one case


@task("1.2")
@pytest.mark.parametrize("n", [1, 3, 4])
def test_batches_of_a_step_are_one_global_batch(grade: Grade, n: int) -> None:
    samples, seed = grade.random.randint(49, 59), grade.random.randrange(10**6)
    case: d.Case = (samples, 12, [0, 1, 2], {"seed": seed})
    run = grade.run(d.load, n, [case])
    check_loaded(of_case(run.results, 0), case)
    if grade.is_simulated:
        check_silent(run, "a loader")


def of_case(by_rank: Sequence[Any], case: int) -> Loaded:
    return [results[case] for results in by_rank]


def check_loaded(by_rank: Loaded, case: d.Case) -> None:
    _check_steps(by_rank, case)
    for number in range(len(case[2])):
        _check_samples(by_rank, number, case)
    if case[3].get("shuffle", True) and case[2][:2] == [0, 1]:
        first, second = ([of["epochs"][number]["steps"] for of in by_rank] for number in (0, 1))
        check(
            first != second,
            "epochs 0 and 1 have the same order. Does the loader's set_epoch reach its sampler?",
        )


def _check_steps(by_rank: Loaded, case: d.Case) -> None:
    n, (samples, batch, *_) = len(by_rank), case
    for rank, loaded in enumerate(by_rank):
        check(
            loaded["is_shard_loader"],
            f"rank {rank} of {n}: build_loader should return a ShardLoader; it returned a "
            f"{loaded['class']}.",
        )
        for number, epoch in enumerate(loaded["epochs"]):
            sizes = [len(step) for step in epoch["steps"]]
            check(
                sizes == [batch // n] * (samples // batch),
                f"rank {rank} of {n}: a global batch of {batch} from {samples} samples should give "
                f"{samples // batch} steps of {batch // n} samples on each rank; in iteration "
                f"{number}, the steps load {short(sizes)} samples. Each rank loads 1/N of a global "
                "batch, and the incomplete last batch is left out.",
            )
        check(
            loaded["len"] == samples // batch,
            f"rank {rank} of {n}: len(loader) is {loaded['len']}, but the loader yields "
            f"{samples // batch} batches. Progress bars and schedules rely on its length.",
        )


def _check_samples(by_rank: Loaded, number: int, case: d.Case) -> None:
    """Check that a rank loads its shard in order, each sample once, and fetches no others."""
    n, here = len(by_rank), f"{case[0]} samples, epoch {case[2][number]}, {case[3] or 'defaults'}"
    drawn = [[i for step in of["epochs"][number]["steps"] for i in step] for of in by_rank]
    everything = [index for shard in drawn for index in shard]
    check(
        len(everything) == len(set(everything)),
        f"{here}: at least one sample is loaded more than once; by rank, the samples are "
        f"{short(drawn)}. Does each rank give the sampler its own rank inside the group, and the "
        "same seed as the others?",
    )
    for rank, loaded in enumerate(by_rank):
        expected = loaded["shards"][number][: len(drawn[rank])]
        check(
            drawn[rank] == expected,
            f"{here}: rank {rank} of {n} should load its shard in order, {short(expected)}; it "
            f"loads {short(drawn[rank])}. Are the size of the data set, rank, N, seed and shuffle "
            "passed on to the sampler?",
        )
        fetched = loaded["epochs"][number]["fetched"]
        check(
            not loaded["epochs"][number]["is_own"] or sorted(fetched) == sorted(drawn[rank]),
            f"{here}: rank {rank} of {n} yields {len(drawn[rank])} samples, but fetched "
            f"{len(fetched)} from the data set: {short(fetched)}. Fetch only the samples that are "
            "yielded, each once.",
        )


@task("1.2")
def test_the_number_of_ranks_does_not_change_the_global_batches(grade: Grade) -> None:
    case: d.Case = (50, 12, [2], {"seed": grade.random.randrange(10**6)})
    worked: d.Case = (1437, 64, [0], {})
    alone = of_case(grade.run(d.load, 1, [case]).results, 0)
    shared, of_digits = zip(*grade.run(d.load, 4, [case, worked]).results, strict=True)
    _check_steps(alone, case)
    _check_steps(shared, case)
    _check_steps(of_digits, worked)
    steps = alone[0]["epochs"][0]["steps"]
    parts = zip(*(loaded["epochs"][0]["steps"] for loaded in shared), strict=True)
    together = [sorted(index for part in step for index in part) for step in parts]
    check(
        together == [sorted(step) for step in steps],
        f"in step 0, one process loads the samples {sorted(steps[0])}, but 4 ranks together load "
        f"{together[0]}. The number of ranks must not change the training.",
    )


@task("1.2")
def test_sizes_at_their_limits(grade: Grade) -> None:
    sizes = [(12, 12), (13, 12), (3, 3), (4, 3), (47, 24), (48, 24), (11, 3)]
    cases: list[d.Case] = [(*size, [1], {"seed": 1}) for size in sizes]
    by_rank = grade.run(d.load, 3, cases).results
    for number, case in enumerate(cases):
        _check_steps(of_case(by_rank, number), case)
        _check_samples(of_case(by_rank, number), 0, case)
    alone = grade.run(d.load, 1, [(1, 1, [0], {})]).results
    check_loaded(of_case(alone, 0), (1, 1, [0], {}))


@task("1.2")
def test_seed_and_shuffle_are_used(grade: Grade) -> None:
    options: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {"shuffle": False}]
    cases: list[d.Case] = [(24, 6, [0, 1], given) for given in options]
    by_rank = grade.run(d.load, 2, cases).results
    one, two, plain = (of_case(by_rank, number)[0]["epochs"] for number in range(3))
    check(
        one[0]["steps"] != two[0]["steps"],
        "seeds 1 and 2 give the same order: is the seed passed on to the sampler?",
    )
    check(
        one[0]["noise"] != two[0]["noise"],
        "seeds 1 and 2 give the same augmentation: does the augmentation depend on the seed?",
    )
    expected = [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18, 20, 22]]
    for epoch in (0, 1):
        check(
            plain[epoch]["steps"] == expected,
            f"rank 0 of 2 with shuffle=False should load {expected} in every epoch; in epoch "
            f"{epoch} it loads {short(plain[epoch]['steps'])}.",
        )


@task("1.2")
def test_arguments_that_are_left_out_have_their_defaults(grade: Grade) -> None:
    defaults = {"seed": 0, "shuffle": True, "num_loader_workers": 0, "group": None}
    [got] = zip(*grade.run(d.load_by_default, 2, [(12, 4, [0], {})]).results, strict=True)
    case: d.Case = (12, 4, [0], {k: defaults[k] for k in defaults if k != "group"})
    [wanted] = zip(*grade.run(d.load, 2, [case]).results, strict=True)
    for rank, (mine, expected) in enumerate(zip(got, wanted, strict=True)):
        check(
            mine["epochs"][0]["is_own"],
            f"rank {rank} of 2: without num_loader_workers, the rank itself should load the "
            "samples; other processes loaded them.",
        )
        for what in WHAT:
            found, should = (loaded["epochs"][0][what] for loaded in (mine, expected))
            check(
                found == should,
                f"rank {rank} of 2: a loader built without {', '.join(defaults)} should behave as "
                f"with {defaults}, but {WHAT[what]} {short(found)} instead of {short(should)}.",
            )


@task("1.2")
def test_the_order_stays_without_set_epoch(grade: Grade) -> None:
    case: d.Case = (24, 6, [-1, -1, 1, -1, 0], {"seed": grade.random.randrange(10**6)})
    for rank, [loaded] in enumerate(grade.run(d.load, 2, [case]).results):
        fresh, again, first, still, zeroth = (epoch["steps"] for epoch in loaded["epochs"])
        check(
            fresh == again == zeroth and first == still,
            f"rank {rank} of 2: the order should be that of epoch 0 at first, and stay the same "
            "until set_epoch is called; the loader changes epochs by itself, or does not begin "
            "with epoch 0.",
        )


@task("1.2")
@pytest.mark.parametrize("is_in_group", [False, True], ids=["everyone", "group"])
def test_a_batch_that_cannot_be_shared_is_refused(grade: Grade, is_in_group: bool) -> None:
    named = {64: ("63", "66"), 65: ("63", "66"), 10: ("9", "12"), 2: ("3",), 1: ("3",)}
    cases = [(100, batch) for batch in named] + [(100, 0), (100, -3), (5, 6), (0, 3), (11, 12)]
    if is_in_group:
        run = grade.run(inside_group, OUTER_WORLD_SIZE, d.loads_refused, cases)
        by_rank = of_members(run)
    else:
        by_rank = grade.run(d.loads_refused, len(MEMBERS), cases).results
    for rank, found in enumerate(by_rank):
        where = f"rank {rank} of {len(by_rank)}" + " of a group" * is_in_group
        for (n, batch), refusal in zip(cases, found, strict=True):
            names = named.get(batch, ())
            here = f"{where}: a global batch of {batch} from {n} samples"
            _check_refusal(refusal, here, names)
            check(
                len(names) != 1 or not re.search(NO_ADVICE, refusal["text"]),
                f"{where}: for a global batch of {batch}, the error should suggest only 3: 0 is a "
                f"multiple too, but not a valid batch size. The message is: {refusal['text']}",
            )


@task("1.2")
def test_one_rank_refuses_what_no_step_can_be_made_of(grade: Grade) -> None:
    cases = [(5, 6), (0, 1), (10, 0), (10, -2)]
    for (n, batch), refusal in zip(cases, grade.call(d.loads_refused, cases), strict=True):
        _check_refusal(refusal, f"1 rank: a global batch of {batch} from {n} samples", ())


def _check_refusal(refusal: Mapping[str, str], here: str, names: Sequence[str]) -> None:
    got = f"{refusal['type']}: {refusal['text']}" if refusal["type"] else "none"
    what = f"a ValueError{' that names ' if names else ''}{' and '.join(names)}"
    sizes = re.sub(NUMBER_OF_RANKS, "", refusal["text"])
    is_named = all(re.search(rf"\b{name}\b", sizes) for name in names)
    check(
        refusal["type"] == "ValueError" and is_named,
        f"{here} should raise {what}; it raised {got}.",
    )


@task("1.2")
def test_the_loader_asks_its_group(grade: Grade) -> None:
    seed = grade.random.randrange(10**6)
    cases: list[d.Case] = [(50, 12, [0, 1], {"seed": seed}), (50, 12, [2], {"shuffle": False})]
    cases += [(24, 12, [0], {"num_loader_workers": 1})]
    by_rank = of_members(grade.run(inside_group, OUTER_WORLD_SIZE, d.load, cases))
    for number, case in enumerate(cases):
        check_loaded(of_case(by_rank, number), case)
