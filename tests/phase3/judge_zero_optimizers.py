"""Judges tasks 3.18 and 3.19: values, memory, bytes, and what leaves during the backward pass."""

from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster
from judging.checks import MEASURED, UNIFORM, distance, short, short_beside, uneven
from phase3 import zero as b

STATE, GRADIENTS = "ShardedOptimizer", "ShardedGradientOptimizer"
SIZES, REAL_SIZES, SIZE_OF_ALL_CASES = (1, 2, 3, 5, 8), (2,), 3
TOLERANCE = 1e-8
NUM_PARAMS = b.LAYERS * b.WIDTH**2
BUCKET = 3 * 2 * b.WIDTH**2  # bytes of three layers
SHAPES = [(7, 2), (13,), (5,)]
STUCK = "All ranks must call the same collectives in the same order."
FLOPS_PER_S, BYTES_PER_S = 1e12, 16e9
SLOW = Cluster(  # a layer's gradients take as long to compute as to be summed
    1,
    4,
    latency_s=1e-6,
    nvlink_bytes_per_s=BYTES_PER_S,
    gpu=GPU("toy", 1e15, 1e30, {"float32": FLOPS_PER_S}, {"float32": FLOPS_PER_S}),
)
CAUSES = {
    "plain": "Is the gradient the mean over the ranks, of all backward passes of the step?",
    "tied": "A tied parameter is one parameter: it is updated once, with all of its gradient.",
    "frozen": "Frozen parameters stay as they are: weight decay would train them.",
    "unused": "The gradient of an unused parameter is 0, in its place in the flat tensor.",
    "two dtypes": "Parameters of different dtypes cannot share a flat tensor.",
}


# Values


def check_trained(
    cls: str, by_rank: list[list[dict[str, Any]]], cases: tuple[tuple[str, str, int], ...] = b.CASES
) -> None:
    """Check the parameters after training, in each case and on each rank."""
    n = len(by_rank)
    for place, case in enumerate(cases):
        expected = b.expected_after(*case, n)
        kind, optimizer, passes = case
        for rank, of_rank in enumerate(by_rank):
            here = (
                f"{cls}, rank {rank} of {n}, a {kind} model after {b.STEPS} steps of {optimizer} "
                f"with {passes} backward pass{'es' * (passes > 1)} each"
            )
            check(
                not of_rank[place]["stayed"],
                f"{here}: no parameter has changed at all. Each param.data should be a view of its "
                "place in flat.data, where the shards are written and gathered.",
            )
            check_values(here, expected, of_rank[place]["params"], CAUSES[kind], kind)
            first = by_rank[0][place]["params"]
            got = of_rank[place]["params"]
            differ = [name for name in first if first[name] != got[name]]
            check(
                not differ,
                f"{here}: {', '.join(differ)} should be bit for bit as on rank 0: each element is "
                "updated on one rank, and the others get it from there.",
            )
            check(
                of_rank[place]["same"],
                f"{here}: the model's parameters should be the tensors that they were; others have "
                "taken their places. Give a parameter other memory by `param.data = …`.",
            )


def check_values(
    here: str, expected: dict[str, Any], got: dict[str, Any], cause: str, kind: str = ""
) -> None:
    """Check parameters, by name, against those of plain training."""
    check(
        sorted(got) == sorted(expected),
        f"{here}: there should be {', '.join(sorted(expected))}; there are "
        f"{', '.join(sorted(got))}.",
    )
    for name, values in expected.items():
        is_narrow = kind == "two dtypes"
        check(
            distance(values, got[name]) <= (1e-4 if is_narrow else TOLERANCE),
            f"{here}: {name} should be {short_beside(values, got[name])}, as in plain training "
            "on the batches of all ranks from the parameters of rank 0; it is "
            f"{short_beside(got[name], values)}. {cause}",
        )


def _trains(grade: Grade, cls: str) -> None:
    for n in SIZES if grade.is_simulated else REAL_SIZES:
        is_for_all = n == SIZE_OF_ALL_CASES or not grade.is_simulated
        cases = b.CASES if is_for_all else b.CASES[:2]
        options = uneven(grade.random, n) if grade.is_simulated else None
        run = grade.run(b.train_with, n, cls, cases, options=options, if_stuck=STUCK)
        check_trained(cls, run.results, cases)


@task("3.18", real=True)
def test_sharded_state_trains_as_plain(grade: Grade) -> None:
    _trains(grade, STATE)


@task("3.19", real=True)
def test_sharded_gradients_train_as_plain(grade: Grade) -> None:
    _trains(grade, GRADIENTS)


@task("3.18")
def test_small_updates_are_not_lost(grade: Grade) -> None:
    n = 3
    for rank, found in enumerate(grade.run(b.take_small_steps, n, STATE).results):
        check(
            found == [0.46875, 0.46875],
            f"rank {rank} of {n}: 32 steps of SGD with lr=2^-10 and gradients of 1.0, and one with "
            "512.0, should take parameters in bfloat16 from the 1.0 of rank 0 (rank r had r + 1) "
            f"to 0.46875; the least and the greatest are {short(found)}. "
            "16 bits cannot hold 1 - 2^-10: keep this "
            "rank's shard in float32, update that, and round it for the parameters. It is a copy, "
            "so make it when the values of rank 0 have come, and write it into the flat tensor "
            "before that is gathered.",
        )


# Memory


def _check_held(found: list[dict[str, int]], n: int, cls: str) -> None:
    sharded, whole = (14, 2) if cls == GRADIENTS else (12, 4)
    most = (whole + sharded / n) * NUM_PARAMS
    for rank, held in enumerate(found):
        for when in ("after the backward pass", "after step"):
            check(
                held[when] <= 1.02 * most,
                f"{cls}, rank {rank} of {n}, {when}: {NUM_PARAMS:,} parameters in 16 bits with "
                f"Adam should take {whole}Ψ + {sharded}Ψ/N = {most:,.0f} bytes (2 % more are "
                f"allowed); {held[when]:,} are held, {held[when] / NUM_PARAMS:.2f}Ψ. What is "
                "sharded is held once by all ranks together; what a call needed for a moment "
                "should be freed when it returns.",
            )


@task("3.18")
@pytest.mark.parametrize("n", [1, 4])
def test_each_rank_holds_its_part_of_the_state(grade: Grade, n: int) -> None:
    run = grade.run(b.hold_state, n, STATE, {}, options=MEASURED)
    _check_held(run.results, n, STATE)


@task("3.19")
@pytest.mark.parametrize("n", [1, 4])
def test_each_rank_holds_its_part_of_the_gradients(grade: Grade, n: int) -> None:
    keywords = {"bucket_bytes": BUCKET}
    run = grade.run(b.hold_state, n, GRADIENTS, keywords, options=MEASURED)
    _check_held(run.results, n, GRADIENTS)
    most = 1.02 * (2 + 14 / n) * NUM_PARAMS + 3 * BUCKET
    for rank, found in enumerate(run.results):
        held = found["in the backward pass"]
        check(
            held <= most,
            f"rank {rank} of {n}: during the backward pass, {held:,} bytes are held, and at most "
            f"{most:,.0f} should be: 2Ψ + 14Ψ/N and three buckets of {BUCKET:,} bytes. Move each "
            "gradient into its bucket as soon as it is made, send a bucket off as soon as it is "
            "full, and wait for it before the next one leaves.",
        )


# Bytes


def _per_step(grade: Grade, n: int, cls: str, passes: int, **keywords: Any) -> tuple[Run, Run]:
    one, two = (
        grade.run(b.take_steps, n, cls, SHAPES, passes, steps, keywords, cluster=UNIFORM)
        for steps in (1, 2)
    )
    return one, two


def _check_bytes(
    runs: tuple[Run, Run], padded: int, rounds: int, calls: int, what: str, cause: str
) -> None:
    one, two = runs
    n = len(one.results)
    wanted = round(rounds * padded * 4 * (n - 1) / n)
    for rank in range(n):
        got = round(two.bytes_sent[rank] - one.bytes_sent[rank])
        check(
            got == wanted,
            f"{what}, rank {rank} of {n}: a step should send {wanted:,} bytes, {rounds} times "
            f"(N-1)/N of {padded:,} elements in float32 (padding included); it sends {got:,}. "
            f"{cause}",
        )
        made = two.collectives[rank] - one.collectives[rank]
        check(
            made == calls,
            f"{what}, rank {rank} of {n}: a step should call {calls} collectives; it calls {made}. "
            "Flat memory lets many parameters travel in one.",
        )


@task("3.18")
def test_a_step_sends_what_an_all_reduce_does(grade: Grade) -> None:
    n = 5
    _check_bytes(
        _per_step(grade, n, STATE, 2),
        *(-(-32 // n) * n, 2, 2, f"{STATE} of 32 parameters, two backward passes"),
        "Gradients need a reduce-scatter, in which each rank gets the sum of its shard alone, and "
        "parameters one all-gather. An all-reduce of the gradients sends twice as much.",
    )


@task("3.19")
def test_each_backward_pass_reduces_each_bucket_once(grade: Grade) -> None:
    n = 5
    padded = sum(-(-size // n) * n for size in (18, 14))  # 5 + 13 elements, and 14
    passes = 3
    _check_bytes(
        _per_step(grade, n, GRADIENTS, passes, bucket_bytes=72),
        *(padded, passes + 1, 2 * (passes + 1)),
        f"{GRADIENTS} of 2 buckets, {passes} backward passes",
        "Each backward pass reduce-scatters each bucket once, and step gathers the parameters.",
    )


@task("3.19")
@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "expected"),
    [((2, 1, 1), 8, [{1, 2}, {0}]), ((1, 1, 2, 1, 1), 12, [{3, 4}, {1, 2}, {0}])],
    ids=["3 parameters", "5 parameters"],
)
def test_the_last_parameters_are_in_the_first_bucket(
    grade: Grade, sizes: tuple[int, ...], bucket_bytes: int, expected: list[set[int]]
) -> None:
    run = grade.run(b.buckets_of, 2, sizes, bucket_bytes)
    for rank, parts in enumerate(run.results):
        check(
            [set(part) for part in parts] == expected,
            f"{GRADIENTS} of parameters of {[4 * size for size in sizes]} bytes, bucket_bytes "
            f"{bucket_bytes}: on rank {rank} its parts hold the parameters {parts}, and should "
            f"hold {[sorted(part, reverse=True) for part in expected]}. The backward pass makes "
            "the gradients of the last parameters first, so cut fills its buckets from the last "
            "parameter on, and the first bucket of the list is full first.",
        )


# Overlap


@task("3.19")
def test_buckets_are_reduced_while_the_backward_pass_goes_on(grade: Grade) -> None:
    n, layer = 4, 256 * 256 * 4
    keywords = {"bucket_bytes": layer}
    plain, sharded, broadcast = (
        grade.run(b.go_back_once, n, keywords, kind, cluster=SLOW, options=MEASURED)
        for kind in ("plain", "sharded", "made")
    )
    whole_s = sharded.seconds - broadcast.seconds
    sum_s = (layer * (n - 1) / n) / BYTES_PER_S + 3e-6
    most = plain.seconds + 3 * sum_s
    check(
        whole_s <= most,
        f"a forward and a backward pass of 12 layers should take at most {1e6 * most:.0f} µs on "
        f"{n} ranks: the {1e6 * plain.seconds:.0f} µs of computing, and the sums of three buckets "
        f"that nothing hides; it takes {1e6 * whole_s:.0f} µs. Start the reduce-scatter of a full "
        "bucket at once, and do not wait for it before there is the next one.",
    )
