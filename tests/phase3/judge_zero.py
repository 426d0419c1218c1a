"""Judges tasks 3.18 and 3.19, and what 3.20 shares with them: values, memory, bytes, overlap."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import GPU, Cluster
from judging.checks import MEASURED, UNIFORM, distance, of_members, short, short_beside, uneven
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import zero as b
from phase3.zero import FULLY, GRADIENTS, STATE, Case, Numbers

SIZES, REAL_SIZES, SIZE_OF_ALL_CASES = (1, 2, 3, 5, 8), (2,), 3
TOLERANCE, TOLERANCE_OF_NARROW = 1e-8, 1e-4
NUM_PARAMS = b.LAYERS * b.WIDTH**2
BUCKET = 3 * 2 * b.WIDTH**2  # bytes of three layers
BUFFERS = {"shift": [0.5] * 3}
STUCK = "All ranks must call the same collectives in the same order."
FLOPS_PER_S, BYTES_PER_S = 1e12, 16e9
LAYER_BYTES = 256 * 256 * 4
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

LIFE_CAUSE = (
    "Each zero_grad sets the gradients to 0 where backward passes add to them, also after "
    "module.zero_grad(). With a gradient of 0, step still applies momentum and weight decay, and a "
    "bucket that a backward pass has not filled leaves when the pass ends, and is waited for."
)
RATE_CAUSE = (
    "What was set in optimizer.param_groups stays set: make the optimizer once, in __init__, and "
    "leave its options alone afterwards."
)


# Values


def check_trained(
    what: str, cls: str, by_rank: Sequence[Sequence[dict[str, Any]]], cases: Sequence[Case]
) -> None:
    """Check the parameters after each step, in each case and on each rank."""
    n = len(by_rank)
    for place, (kind, optimizer) in enumerate(cases):
        expected = b.trained_plainly(kind, optimizer, n)
        for rank, of_rank in enumerate(by_rank):
            result, first = of_rank[place], by_rank[0][place]
            here = f"{what}, rank {rank} of {n}, a {kind} model with {optimizer}, after"
            check(
                result["after"][0] != result["begun"],
                f"{here} a step: no parameter has changed at all. Each param.data should be a view "
                "of its place in flat.data, where the shards are written and gathered.",
            )
            for number, (right, got) in enumerate(zip(expected, result["after"], strict=False)):
                _check_step(here, cls, kind, number, right, got)
            differ = [name for name in first["begun"] if _last(first, name) != _last(result, name)]
            check(
                not differ,
                f"{here} training: {', '.join(differ)} should be bit for bit as on rank 0: each "
                "element is updated on one rank, and the others get it from there.",
            )
            check(
                result["is_same"],
                f"{here} training: the model's parameters should be the tensors that they were; "
                "others have taken their places. Give a parameter other memory by "
                "`param.data = …`.",
            )


def _last(result: dict[str, Any], name: str) -> Any:
    return result["after"][-1][name]


def _check_step(here: str, cls: str, kind: str, number: int, right: Numbers, got: Numbers) -> None:
    step, actions = b.LIFE[number]
    here, cause = f"{here} {step}", CAUSES[kind]
    if cls == FULLY:
        here, right = f"{here}, full_state_dict", right | BUFFERS
    elif "learning rate" in step:
        cause = RATE_CAUSE
    elif kind in b.IN_USE or "module" in actions or "pass" not in actions:
        cause = f"{cause} {LIFE_CAUSE}"
    check_values(here, right, got, cause, TOLERANCE_OF_NARROW if kind == b.TWO else TOLERANCE)


def check_values(
    here: str, expected: Numbers, got: Numbers, cause: str, tolerance: float = TOLERANCE
) -> None:
    """Check parameters, by name, against those of plain training."""
    check(
        sorted(got) == sorted(expected),
        f"{here}: there should be {', '.join(sorted(expected))}; there are "
        f"{', '.join(sorted(got))}.",
    )
    for name, values in expected.items():
        check(
            distance(values, got[name]) <= tolerance,
            f"{here}: {name} should be {short_beside(values, got[name])}, as in plain training "
            "on the batches of all ranks from the parameters of rank 0; it is "
            f"{short_beside(got[name], values)}. {cause}",
        )


def check_trains_as_plain(grade: Grade, cls: str, all_cases: Sequence[Case] = b.CASES) -> None:
    """Check training on few ranks and on many, with links that are late by chance."""
    for n in SIZES if grade.is_simulated else REAL_SIZES:
        is_for_all = n == SIZE_OF_ALL_CASES or not grade.is_simulated
        cases = all_cases if is_for_all else all_cases[:1]
        options = uneven(grade.random, n) if grade.is_simulated else None
        run = grade.run(b.train, n, cls, cases, options=options, if_stuck=STUCK)
        check_trained(cls, cls, run.results, cases)


@task("3.18", real=True)
def test_sharded_state_trains_as_plain(grade: Grade) -> None:
    check_trains_as_plain(grade, STATE)


@task("3.19", real=True)
def test_sharded_gradients_train_as_plain(grade: Grade) -> None:
    check_trains_as_plain(grade, GRADIENTS)


def check_small_updates(grade: Grade, cls: str, n: int, cause: str) -> list[Any]:
    """Check steps that 16 bits cannot hold; return what each rank returned."""
    by_rank = grade.run(b.take_small_steps, n, cls).results
    for rank, result in enumerate(by_rank):
        check(
            result["values"] == [0.46875, 0.46875],
            f"rank {rank} of {n}: 32 steps of SGD with lr=2^-10 and gradients of 1.0, and one with "
            "512.0, should take parameters in bfloat16 from the 1.0 of rank 0 (rank r had r + 1) "
            f"to 0.46875; the least and the greatest are {short(result['values'])}. "
            f"16 bits cannot hold 1 - 2^-10: {cause}",
        )
    return by_rank


KEEP_A_MASTER = (
    "keep this rank's shard in float32, update that, and round it for the parameters. It is a "
    "copy, so make it when the values of rank 0 have come, and write it into the flat tensor "
    "before that is gathered."
)


@task("3.18")
def test_small_updates_are_not_lost(grade: Grade) -> None:
    check_small_updates(grade, STATE, 3, KEEP_A_MASTER)


@task("3.19")
def test_small_updates_are_not_lost_by_sharded_gradients(grade: Grade) -> None:
    check_small_updates(grade, GRADIENTS, 3, KEEP_A_MASTER)


# Memory


def _held(grade: Grade, cls: str, n: int, keywords: dict[str, Any], **more: Any) -> list[Any]:
    body = (b.hold, n, cls, keywords, *more.values())
    return grade.run(*body, options=MEASURED, if_stuck=STUCK).results


def _check_held(by_rank: Sequence[dict[str, int]], cls: str, whole: int, sharded: int) -> None:
    n = len(by_rank)
    most = (whole + sharded / n) * NUM_PARAMS
    for rank, held in enumerate(by_rank):
        for when in ("after a backward pass", "after step"):
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
    _check_held(_held(grade, STATE, n, {}), STATE, 4, 12)


@task("3.19")
@pytest.mark.parametrize("n", [1, 4])
def test_each_rank_holds_its_part_of_the_gradients(grade: Grade, n: int) -> None:
    by_rank = _held(grade, GRADIENTS, n, {"bucket_bytes": BUCKET})
    _check_held(by_rank, GRADIENTS, 2, 14)
    _check_buckets_held(
        *(by_rank, 3, ""),
        "Move each gradient into its bucket as soon as it is made, send a bucket off as soon as it "
        "is full, and wait for it before the next one leaves.",
    )


def _check_buckets_held(by_rank: Sequence[Any], buckets: int, where: str, cause: str) -> None:
    n = len(by_rank)
    most = 1.02 * (2 + 14 / n) * NUM_PARAMS + buckets * BUCKET
    for rank, result in enumerate(by_rank):
        held = result["in the backward pass"]
        check(
            held <= most,
            f"rank {rank} of {n}{where}: during the backward pass, {held:,} bytes are held, and at "
            f"most {most:,.0f} should be: 2Ψ + 14Ψ/N and {buckets} buckets of {BUCKET:,} bytes. "
            f"{cause}",
        )


@task("3.19")
def test_a_full_bucket_does_not_wait_for_one_before_it(grade: Grade) -> None:
    _check_buckets_held(
        _held(grade, GRADIENTS, 4, {"bucket_bytes": BUCKET}, num_frozen=0, has_unused=True),
        *(4, ", where the first bucket has a parameter that is not used"),
        "A full bucket leaves as soon as it is full, whether those before it have left or not.",
    )


# Bytes


def _check_bytes(grade: Grade, cls: str, n: int, keywords: dict[str, Any], rounds: int) -> None:
    """Check what the construction and a step of two backward passes send.

    Args:
        rounds: Reduce-scatters and all-gathers of everything, in a step.
    """
    body = (b.take_mixed_steps, n, cls, keywords)
    made, stepped = (grade.run(*body, steps, cluster=UNIFORM, if_stuck=STUCK) for steps in (0, 1))
    _check_frozen(cls, stepped.results)
    parts = b.PARTS[cls]
    whole = sum((size + -size % n) * width for size, width in parts)
    for rank in range(n):
        here = f"{cls}, rank {rank} of {n}, 36 trained parameters in bfloat16 and 5 in float32"
        _check_construction(here, made, rank, len(parts), whole)
        sent = round(stepped.bytes_sent[rank] - made.bytes_sent[rank])
        wanted = round(rounds * whole * (n - 1) / n)
        check(
            sent == wanted,
            f"{here}, two backward passes: a step should send {wanted} bytes, {rounds} times "
            f"(N-1)/N of {whole} bytes (padding included); it sends {sent}. Gradients need a "
            "reduce-scatter, in which each rank gets the sum of its shard alone, and parameters "
            "one all-gather. An all-reduce of the gradients sends twice as much. Gradients and "
            "parameters travel in their own dtype, not in that of the masters, and a tied one "
            "travels once; a bucket leaves once in each backward pass, also after a pass that has "
            "not filled it.",
        )
        calls = stepped.collectives[rank] - made.collectives[rank]
        check(
            calls == len(parts) * rounds,
            f"{here}, two backward passes: a step should call {len(parts) * rounds} collectives, "
            f"{rounds} for each dtype or bucket; it calls {calls}. Flat memory lets many "
            "parameters travel in one.",
        )


def _check_construction(here: str, made: Run, rank: int, num_parts: int, whole: int) -> None:
    calls, received = made.collectives[rank], made.bytes_received[rank]
    check(
        calls <= num_parts and received <= whole,
        f"{here}: the construction should call at most {num_parts} collectives, a broadcast "
        f"for each dtype or bucket, and receive at most {whole} bytes; it calls {calls} and "
        f"receives {received:.0f}. Broadcast the flat tensors as they are, not each parameter, "
        "not in float32, no tied parameter twice, and no frozen one.",
    )


def _check_frozen(cls: str, by_rank: Sequence[dict[str, Any]]) -> None:
    for rank, result in enumerate(by_rank):
        expected = [rank + 1.0] * len(result["frozen"])
        check(
            result["frozen"] == expected,
            f"{cls}, rank {rank} of {len(by_rank)}: a frozen parameter should keep this rank's "
            f"values, {short(expected)}; it holds {short(result['frozen'])}. Parameters that need "
            "no gradient are left alone: they are neither broadcast nor updated.",
        )
        masters = ["torch.float32"] * len(b.PARTS[cls])
        check(
            result["masters"] == masters,
            f"{cls}, rank {rank} of {len(by_rank)}: the masters should be in {masters}; they are "
            f"in {result['masters']}. 16 bits would lose small updates.",
        )


@task("3.18")
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_step_sends_what_an_all_reduce_does(grade: Grade, n: int) -> None:
    _check_bytes(grade, STATE, n, {}, 2)


@task("3.19")
@pytest.mark.parametrize("n", [2, 3, 5])
def test_each_backward_pass_reduces_each_bucket_once(grade: Grade, n: int) -> None:
    _check_bytes(grade, GRADIENTS, n, {"bucket_bytes": 60}, 3)


# Inside a group


def _works_in_group(grade: Grade, cls: str, keywords: dict[str, Any]) -> None:
    cases, what = b.CASES[:3], f"{cls} inside the group {[*MEMBERS]}"
    body = (b.train_in_group, cls, cases, keywords)
    members = of_members(grade.run(inside_group, OUTER_WORLD_SIZE, *body, if_stuck=STUCK_IN_GROUP))
    check_trained(what, cls, [of_rank["trained"] for of_rank in members], cases)
    _check_frozen(cls, [of_rank["frozen"] for of_rank in members])


@task("3.18")
def test_sharded_state_inside_a_group(grade: Grade) -> None:
    _works_in_group(grade, STATE, {})


@task("3.19")
def test_sharded_gradients_inside_a_group(grade: Grade) -> None:
    _works_in_group(grade, GRADIENTS, {"bucket_bytes": 60})


# What single functions return


def _check_shards(grade: Grade, cls: str) -> None:
    for n in (1, 3):
        mean = [number * n * (n + 1) / 2 for number in range(1, 6)]
        padded = [*mean, *[0.0] * (-5 % n)]
        for rank, result in enumerate(grade.run(b.reduce_once, n, cls).results):
            size = len(padded) // n
            expected = [["torch.bfloat16", padded[rank * size : (rank + 1) * size]]]
            check(
                result == expected,
                f"{cls}, rank {rank} of {n}: for gradients in bfloat16, reduce_gradients should "
                f"return {expected}, dtype and shard of the mean over the ranks; it returned "
                f"{result}. It divides by the number of ranks itself, and casts nothing.",
            )


@task("3.18")
def test_reduced_gradients_are_means_in_their_own_dtype(grade: Grade) -> None:
    _check_shards(grade, STATE)


@task("3.19")
def test_sharded_gradients_are_means_in_their_own_dtype(grade: Grade) -> None:
    _check_shards(grade, GRADIENTS)


@task("3.19")
@pytest.mark.parametrize("n", [1, 3])
def test_one_reduction_is_under_way_at_a_time(grade: Grade, n: int) -> None:
    run = grade.run(b.start_twice, n, cluster=UNIFORM, if_stuck=STUCK)
    expected = [[number * (n + 1) / 2] * 2 for number in (1.0, 2.0)]
    events = run.trace.events if run.trace else []
    for rank, used in enumerate(run.results):
        check(
            used == expected,
            f"rank {rank} of {n}: two reductions were started and finish() called twice, so use "
            f"should be called with {expected}, once for each; it was called with {used}. finish "
            "waits, divides by the number of ranks, and forgets what it has used.",
        )
        calls = [e for e in events if e.rank == rank and e.kind == "collective"]
        names = [e.name for e in sorted(calls, key=lambda e: e.start_s)]
        order = ["barrier" if "barrier" in name else "reduction" for name in names]
        check(
            order == ["reduction", "barrier"] * 2 or n == 1,
            f"rank {rank} of {n}: the second reduction should start when the shard of the first "
            "has been used (use calls a barrier), so reduction, barrier, reduction, barrier; the "
            f"order is {', '.join(order)}. In start, call finish before you start the next one.",
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
    for rank, parts in enumerate(grade.run(b.buckets_of, 2, sizes, bucket_bytes).results):
        check(
            [set(part) for part in parts] == expected,
            f"{GRADIENTS} of parameters of {[4 * size for size in sizes]} bytes, bucket_bytes "
            f"{bucket_bytes}: on rank {rank} its parts hold the parameters {parts}, and should "
            f"hold {[sorted(part, reverse=True) for part in expected]}. The backward pass makes "
            "the gradients of the last parameters first, so cut fills its buckets from the last "
            "parameter on, and the first bucket of the list is full first.",
        )


# Overlap


def check_overlap(
    grade: Grade, cls: str, keywords: dict[str, Any], num_exposed: int, why: str
) -> None:
    """Check that few messages of a forward and a backward pass are not hidden by computing.

    Args:
        num_exposed: Messages of ``LAYER_BYTES`` that may be waited for.
        why: Cause of more.
    """
    n = 4
    plain, sharded, made = (
        grade.run(b.go_back_once, n, cls, keywords, kind, cluster=SLOW, options=MEASURED)
        for kind in ("plain", "sharded", "made")
    )
    message_s = LAYER_BYTES * (n - 1) / n / BYTES_PER_S + 3e-6
    most, got = plain.seconds + num_exposed * message_s, sharded.seconds - made.seconds
    check(
        got <= most,
        f"a forward and a backward pass should take at most {1e6 * most:.0f} µs on {n} ranks: the "
        f"{1e6 * plain.seconds:.0f} µs of computing, and the travel of {num_exposed} layers of 256 "
        f"x 256 that nothing hides; it takes {1e6 * got:.0f} µs. {why}",
    )


@task("3.19")
def test_buckets_are_reduced_while_the_backward_pass_goes_on(grade: Grade) -> None:
    check_overlap(
        *(grade, GRADIENTS, {"bucket_bytes": LAYER_BYTES}, 3),
        "Start the reduce-scatter of a full bucket at once, and do not wait for it before there is "
        "the next one.",
    )
