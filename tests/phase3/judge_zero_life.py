"""Judges tasks 3.18 and 3.19: gradients set to 0, dtypes that travel, and what is left alone."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import MEASURED, UNIFORM, of_members, short, uneven
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import zero as b
from phase3 import zero_life as life
from phase3.judge_zero_optimizers import (
    BUCKET,
    GRADIENTS,
    NUM_PARAMS,
    STATE,
    STUCK,
    check_trained,
    check_values,
)

ONE_BUCKET: dict[str, Any] = {"bucket_bytes": 2**20}
LIFE_CAUSE = (
    "Each zero_grad sets the gradients to 0 where backward passes add to them, also after "
    "module.zero_grad(). With a gradient of 0, step still applies momentum and weight decay, and a "
    "bucket that a backward pass has not filled leaves when the pass ends, and is waited for."
)

RATE_CAUSE = (
    "What was set in optimizer.param_groups stays set: make the optimizer once, in __init__, and "
    "leave its options alone afterwards."
)


def check_life(cls: str, by_rank: list[dict[str, list[dict[str, Any]]]]) -> None:
    """Check the parameters after each step of a life, with each kind of model."""
    n = len(by_rank)
    for kind in by_rank[0]:
        expected = life.plain_life(kind, n)
        for rank, found in enumerate(by_rank):
            for (what, _), values, got in zip(life.LIFE, expected, found[kind], strict=True):
                here = f"{cls}, rank {rank} of {n}, a {kind} model, after {what}"
                cause = RATE_CAUSE if "learning rate" in what else LIFE_CAUSE
                check_values(here, values, got, cause)


def _lives(grade: Grade, cls: str, keywords: dict[str, Any]) -> None:
    for n in (1, 3):
        options = uneven(grade.random, n)
        body = (life.live_through, n, cls, ("tied", "unused"), keywords)
        check_life(cls, grade.run(*body, options=options, if_stuck=STUCK).results)


@task("3.18")
def test_sharded_state_with_gradients_of_zero(grade: Grade) -> None:
    _lives(grade, STATE, {})


@task("3.19")
def test_sharded_gradients_with_gradients_of_zero(grade: Grade) -> None:
    _lives(grade, GRADIENTS, ONE_BUCKET)


# What travels


def _check_travels(grade: Grade, cls: str, keywords: dict[str, Any], n: int, rounds: int) -> None:
    body = (life.take_mixed_steps, n, cls, keywords)
    runs = [grade.run(*body, steps, cluster=UNIFORM, if_stuck=STUCK) for steps in (0, 1)]
    made, stepped = runs
    _check_frozen(cls, stepped.results)
    whole = life.elements_bytes(n)
    parts = "27 trained parameters in bfloat16 and 5 in float32"
    for rank in range(n):
        here = f"{cls}, rank {rank} of {n}, {parts}"
        check(
            made.collectives[rank] <= 2 and made.bytes_received[rank] <= whole,
            f"{here}: the construction should call at most 2 collectives, a broadcast for each "
            f"dtype, and receive at most {whole} bytes; it calls {made.collectives[rank]} and "
            f"receives {made.bytes_received[rank]:.0f}. Broadcast the flat tensors as they are, "
            "not each parameter, not in float32, no tied parameter twice, and no frozen one.",
        )
        sent = round(stepped.bytes_sent[rank] - made.bytes_sent[rank])
        wanted = round(rounds * whole * (n - 1) / n)
        check(
            sent == wanted,
            f"{here}: a step of two backward passes should send {wanted} bytes, {rounds} times "
            f"(N-1)/N of {whole} bytes; it sends {sent}. Gradients and parameters travel in their "
            "own dtype, not in that of the masters, and a tied one travels once; a bucket leaves "
            "once in each backward pass, also after a pass that has not filled it.",
        )
        calls = stepped.collectives[rank] - made.collectives[rank]
        check(
            calls == 2 * rounds,
            f"{here}: a step of two backward passes should call {2 * rounds} collectives, "
            f"{rounds} for each dtype; it calls {calls}.",
        )


def _check_frozen(cls: str, by_rank: list[list[float]]) -> None:
    for rank, found in enumerate(by_rank):
        expected = [rank + 1.0] * len(found)
        check(
            found == expected,
            f"{cls}, rank {rank} of {len(by_rank)}: a frozen parameter should keep this rank's "
            f"values, {short(expected)}; it holds {short(found)}. Parameters that need no gradient "
            "are left alone: they are neither broadcast nor updated.",
        )


@task("3.18")
@pytest.mark.parametrize("n", [2, 3])
def test_sharded_state_travels_in_its_own_dtype(grade: Grade, n: int) -> None:
    _check_travels(grade, STATE, {}, n, 2)


@task("3.19")
@pytest.mark.parametrize("n", [2, 3])
def test_sharded_gradients_travel_in_their_own_dtype(grade: Grade, n: int) -> None:
    _check_travels(grade, GRADIENTS, ONE_BUCKET, n, 3)


# Inside a group


def _works_in_group(grade: Grade, cls: str, keywords: dict[str, Any]) -> None:
    cases, what = b.CASES[:3], f"{cls} inside the group {[*MEMBERS]}"
    body = (life.do_all_in_group, cls, cases, keywords)
    found = of_members(grade.run(inside_group, OUTER_WORLD_SIZE, *body, if_stuck=STUCK_IN_GROUP))
    check_trained(what, [of_rank["trained"] for of_rank in found], cases)
    check_life(what, [of_rank["life"] for of_rank in found])
    _check_frozen(what, [of_rank["frozen"] for of_rank in found])


@task("3.18")
def test_sharded_state_inside_a_group(grade: Grade) -> None:
    _works_in_group(grade, STATE, {})


@task("3.19")
def test_sharded_gradients_inside_a_group(grade: Grade) -> None:
    _works_in_group(grade, GRADIENTS, ONE_BUCKET)


# What single functions return


def _check_shards(grade: Grade, cls: str) -> None:
    for n in (1, 3):
        mean = [number * n * (n + 1) / 2 for number in range(1, 6)]
        padded = [*mean, *[0.0] * (-5 % n)]
        for rank, found in enumerate(grade.run(life.reduce_once, n, cls).results):
            size = len(padded) // n
            expected = [["torch.bfloat16", padded[rank * size : (rank + 1) * size]]]
            check(
                found == expected,
                f"{cls}, rank {rank} of {n}: for gradients in bfloat16, reduce_gradients should "
                f"return {expected}, dtype and shard of the mean over the ranks; it returned "
                f"{found}. It divides by the number of ranks itself, and casts nothing.",
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
    run = grade.run(life.start_twice, n, cluster=UNIFORM, if_stuck=STUCK)
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
def test_a_full_bucket_does_not_wait_for_one_before_it(grade: Grade) -> None:
    n = 4
    keywords = {"bucket_bytes": BUCKET}
    body = (b.hold_state, n, GRADIENTS, keywords, True)
    most = 1.02 * (2 + 14 / n) * NUM_PARAMS + 4 * BUCKET
    for rank, found in enumerate(grade.run(*body, options=MEASURED).results):
        held = found["in the backward pass"]
        check(
            held <= most,
            f"rank {rank} of {n}, where the first bucket has a parameter that is not used: during "
            f"the backward pass, at most {most:,.0f} bytes should be held, this bucket and three "
            f"more besides 2Ψ + 14Ψ/N; {held:,} are. A full bucket leaves as soon as it is full, "
            "whether those before it have left or not.",
        )
