"""Judges tasks 3.12 and 3.13; task 3.14 shares the checks of values and overlap."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distlab.grade import Grade, check, check_cost, task
from distlab.sim import GPU, Cluster
from judging.checks import MEASURED, UNIFORM, uneven
from judging.expect import expect, expect_cost, over, results_in_group
from judging.groups import MEMBERS
from phase3 import zero as b
from phase3.zero import FULLY, GRADIENTS, STATE, Case

SIZES, REAL_SIZES, SIZE_OF_ALL_CASES = (1, 2, 3, 5), (2,), 3
TOLERANCE, TOLERANCE_OF_NARROW = 1e-8, 1e-4
NUM_PARAMS = b.LAYERS * b.WIDTH**2
BUCKET = 3 * 2 * b.WIDTH**2  # three layers, in bytes
LIMITS = {2: 44, 3: 71, 5: 60}  # ranks -> bucket size in bytes; all lead to the same PARTS
BUFFERS = {"shift": [0.5] * 3}
STUCK = "All ranks must call the same collectives in the same order."
FLOPS_PER_S, BYTES_PER_S = 1e12, 16e9
LAYER_BYTES = 256 * 256 * 4
SLOW = Cluster(  # computing a layer's gradients takes as long as summing them
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
AS_PLAIN = (
    ", as in plain training on the batches of all ranks from the parameters of rank 0 (None: no "
    "such parameter),"
)
REDUCE_SCATTER = (
    "Gradients need a reduce-scatter, in which each rank gets the sum of its shard alone, and "
    "parameters one all-gather. An all-reduce of the gradients sends twice as much. Gradients and "
    "parameters travel in their own dtype, not in that of the masters, and a tied one travels "
    "once; a bucket leaves once in each backward pass, also after a pass that has not filled it."
)
KEEP_A_MASTER = (
    "keep this rank's shard in float32, update that, and round it for the parameters. It is a "
    "copy, so make it when the values of rank 0 have come, and write it into the flat tensor "
    "before that is gathered."
)


def check_each(
    here: str,
    what: str,
    expected: Mapping[str, Any],
    got: Mapping[str, Any],
    cause: str = "",
    tolerance: float = 0.0,
) -> None:
    """Check values by name; in the message, ``what`` follows the name."""
    for name in {**expected, **got}:
        expect(f"{here}: {name}{what}", got.get(name), expected.get(name), cause, tolerance)


# Values


def check_trained(
    what: str, cls: str, by_rank: Sequence[Sequence[dict[str, Any]]], cases: Sequence[Case]
) -> None:
    """Check the parameters after each step, for each case and rank."""
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
            check_each(
                *(f"{here} training", ", bit for bit as on rank 0,"),
                *(first["after"][-1], result["after"][-1]),
                "Each element is updated on one rank, and the others get it from there.",
            )
            cause = "Give a parameter other memory by `param.data = …`."
            expect(f"{here} training: the replaced parameters", result["replaced"], [], cause)


def _check_step(here: str, cls: str, kind: str, number: int, right: Any, got: Any) -> None:
    step, actions = b.LIFE[number]
    here, cause = f"{here} {step}", CAUSES[kind]
    if cls == FULLY:
        here, right = f"{here}, full_state_dict", right | BUFFERS
    elif "learning rate" in step:
        cause = RATE_CAUSE
    elif kind in b.IN_USE or "module" in actions or "pass" not in actions:
        cause = f"{cause} {LIFE_CAUSE}"
    tolerance = TOLERANCE_OF_NARROW if kind == b.TWO else TOLERANCE
    check_each(here, AS_PLAIN, right, got, cause, tolerance)


def check_trains_as_plain(grade: Grade, cls: str, all_cases: Sequence[Case] = b.CASES) -> None:
    """Check training results for several numbers of ranks, with random delays on the links."""
    for n in SIZES if grade.is_simulated else REAL_SIZES:
        is_for_all = n == SIZE_OF_ALL_CASES or not grade.is_simulated
        cases = all_cases if is_for_all else all_cases[:1]
        options = uneven(grade.random, n) if grade.is_simulated else None
        run = grade.run(b.train, n, cls, cases, options=options, if_stuck=STUCK)
        check_trained(cls, cls, run.results, cases)


def check_trains_in_group(grade: Grade, cls: str) -> None:
    """Check training inside a group whose ranks differ from those in the world."""
    cases = b.CASES[:4]
    by_rank = results_in_group(grade, b.train, cls, cases)
    check_trained(f"{cls} inside the group {[*MEMBERS]}", cls, by_rank, cases)


def check_small_updates(grade: Grade, cls: str, n: int, cause: str) -> list[Any]:
    """Check that steps too small for 16 bits are not lost; return the results by rank."""
    by_rank = grade.run(b.take_small_steps, n, cls).results
    for rank, result in enumerate(by_rank):
        expect(
            f"rank {rank} of {n}, after 32 steps of SGD with lr=2^-10 and gradients of 1.0, and "
            "one with 512.0: the least and the greatest parameter in bfloat16, which were the 1.0 "
            "of rank 0 (rank r had r + 1),",
            *(result["values"], [0.46875, 0.46875]),
            f"16 bits cannot hold 1 - 2^-10: {cause}",
        )
    return by_rank


# Promises that both optimizers make


def _check_held(grade: Grade, cls: str, n: int, whole: int, sharded: int, **buckets: int) -> None:
    """Check that a rank holds at most ``whole`` bytes per parameter, plus its part of ``sharded``.

    ``sharded`` is the number of bytes per parameter that all ranks share.
    """
    for has_unused in (False, True) if buckets else (False,):
        most_buckets = {"after a backward pass": 0, "after step": 0}
        if buckets:  # a first bucket that never fills is held until the pass ends
            most_buckets["in the backward pass"] = 3 + has_unused
        body = (b.hold, n, cls, buckets, 0, has_unused)
        for rank, held in enumerate(grade.run(*body, options=MEASURED, if_stuck=STUCK).results):
            for when, num_buckets in most_buckets.items():
                most = 1.02 * (whole + sharded / n) * NUM_PARAMS + num_buckets * BUCKET
                check_cost(
                    held[when] <= most,
                    f"{cls}, rank {rank} of {n}, {when}: {NUM_PARAMS:,} parameters in 16 bits with "
                    f"Adam should take {whole}Ψ + {sharded}Ψ/N (2 % more are allowed) and "
                    f"{num_buckets} buckets of {BUCKET:,} bytes, {most:,.0f} bytes in all; "
                    f"{held[when]:,} are held. {_WHY_HELD[num_buckets > 0]}",
                )


_WHY_HELD = (
    "What is sharded is held once by all ranks together; what a call needed for a moment should be "
    "freed when it returns.",
    "Move each gradient into its bucket as soon as it is made, send a bucket off as soon as it is "
    "full, whether those before it have left or not, and wait for it before the next one leaves.",
)


def _check_bytes(grade: Grade, cls: str, n: int, rounds: int, **buckets: int) -> None:
    """Check the traffic of the construction and of a step with two backward passes.

    Args:
        rounds: The number of reduce-scatters and all-gathers of all parameters in the step.
    """
    body = (b.take_mixed_steps, n, cls, buckets)
    made, stepped = (grade.run(*body, steps, cluster=UNIFORM, if_stuck=STUCK) for steps in (0, 1))
    parts = b.PARTS[cls]
    whole = sum((size + -size % n) * width for size, width in parts)
    for rank, result in enumerate(stepped.results):
        here = f"{cls}, rank {rank} of {n}, 36 trained parameters in bfloat16 and 5 in float32"
        expect(
            f"{here}: the values of a frozen parameter, which stay this rank's,",
            *(result["frozen"], [rank + 1.0] * len(result["frozen"])),
            "Parameters that need no gradient are left alone: neither broadcast nor updated.",
        )
        sizes = [size for size, _ in parts]
        check(
            cls != GRADIENTS or result["parts"] == sizes,
            f"{here}: the elements of each part should be {sizes}; they are {result['parts']}. The "
            "backward pass makes the gradients of the last parameters first, so cut fills its "
            "buckets from the last parameter on, and the first bucket of the list is full first.",
        )
        calls, received = made.collectives[rank], made.bytes_received[rank]
        check_cost(
            calls <= len(parts) and received <= whole,
            f"{here}: the construction should call at most {len(parts)} collectives, a broadcast "
            f"for each dtype or bucket, and receive at most {whole} bytes; it calls {calls} and "
            f"receives {received:.0f}. Broadcast the flat tensors as they are, not each parameter, "
            "not in float32, no tied parameter twice, and no frozen one.",
        )
        expect_cost(
            f"{here}, a step of two backward passes: the number of bytes sent",
            round(stepped.bytes_sent[rank] - made.bytes_sent[rank]),
            round(rounds * whole * (n - 1) / n),
            f"That is {rounds} times (N-1)/N of {whole} bytes (padding included). {REDUCE_SCATTER}",
        )
        expect_cost(
            f"{here}, a step of two backward passes: the number of collectives",
            *(stepped.collectives[rank] - calls, len(parts) * rounds),
            f"That is {rounds} for each dtype or bucket: flat memory lets many parameters travel "
            "in one.",
        )
        masters = ["torch.float32"] * len(parts)
        cause = "16 bits would lose small updates."
        expect(f"{here}: the dtypes of the masters", result["masters"], masters, cause)


def _check_small_updates(grade: Grade, cls: str) -> None:
    by_rank = check_small_updates(grade, cls, 3, KEEP_A_MASTER)
    for rank, result in enumerate(by_rank):
        expect(
            f"{cls}, rank {rank} of 3, gradients in bfloat16 of r + 1 on rank r: dtype and shard "
            "of the mean over the ranks, which reduce_gradients returns,",
            result["reduced"],
            [["torch.bfloat16", [2.0] * 3 if rank < 2 else [2.0, 0.0, 0.0]]],
            "It divides by the number of ranks itself, and casts nothing.",
        )


def _tests_of(
    number: str, name: str, cls: str, held: tuple[int, int], rounds: int, has_buckets: bool
) -> dict[str, Callable[..., None]]:
    """Return tests of the promises that both optimizers make.

    Args:
        number: The number of the class's task.
        name: A word for the data that the class shards, for the test names.
        cls: The name of the class.
        held: The bytes per parameter that each rank holds in full, and those that ranks share.
        rounds: The number of reduce-scatters and all-gathers of all parameters in a step with two
            backward passes.
        has_buckets: Whether the class has a limit on the size of buckets.
    """

    def limited_to(num_bytes: int) -> dict[str, int]:
        return {"bucket_bytes": num_bytes} if has_buckets else {}

    def train_as_plain(grade: Grade) -> None:
        check_trains_as_plain(grade, cls)

    def train_inside_a_group(grade: Grade) -> None:
        check_trains_in_group(grade, cls)

    def lose_no_small_updates(grade: Grade) -> None:
        _check_small_updates(grade, cls)

    tests = {
        "train_as_plain": train_as_plain,
        "train_inside_a_group": train_inside_a_group,
        "lose_no_small_updates": lose_no_small_updates,
        "are_held_in_parts": over(
            (1, 4), lambda grade, n: _check_held(grade, cls, n, *held, **limited_to(BUCKET))
        ),
        "send_what_an_all_reduce_does": over(
            LIMITS, lambda grade, n: _check_bytes(grade, cls, n, rounds, **limited_to(LIMITS[n]))
        ),
    }
    return {
        f"test_sharded_{name}_{key}": task(number, real=key == "train_as_plain")(test)
        for key, test in tests.items()
    }


# Task 3.12: ShardedOptimizer

globals().update(_tests_of("3.12", "states", STATE, (4, 12), 2, has_buckets=False))


# Task 3.13: Reduction and ShardedGradientOptimizer

globals().update(_tests_of("3.13", "gradients", GRADIENTS, (2, 14), 3, has_buckets=True))


@task("3.13")
def test_one_reduction_is_under_way_at_a_time(grade: Grade) -> None:
    run = grade.run(b.start_twice, 3, cluster=UNIFORM, if_stuck=STUCK)
    events = run.trace.events if run.trace else []
    for rank, used in enumerate(run.results):
        here = f"rank {rank} of 3, two reductions started and finish() called twice"
        what = f"{here}: the shards that use is called with, once each,"
        cause = "finish waits, divides by the number of ranks, and forgets what it has used."
        expect(what, used, [[2.0] * 2, [4.0] * 2], cause)
        calls = [e for e in events if e.rank == rank and e.kind == "collective"]
        names = [e.name for e in sorted(calls, key=lambda e: e.start_s)]
        expect(
            f"{here}: the order of reductions and of barriers, which use calls,",
            ["barrier" if "barrier" in name else "reduction" for name in names],
            ["reduction", "barrier"] * 2,
            "The second reduction starts when the shard of the first has been used: in start, call "
            "finish before you start the next one.",
        )


# Overlap


def check_overlap(
    grade: Grade, cls: str, keywords: dict[str, Any], num_exposed: int, why: str
) -> None:
    """Check that in a forward and a backward pass, computation hides all but a few messages.

    Args:
        num_exposed: The number of messages of ``LAYER_BYTES`` that need not be hidden.
        why: The likely cause if more are not hidden.
    """
    n = 4
    plain, sharded, made = (
        grade.run(b.go_back_once, n, cls, keywords, kind, cluster=SLOW, options=MEASURED)
        for kind in ("plain", "sharded", "made")
    )
    message_s = LAYER_BYTES * (n - 1) / n / BYTES_PER_S + 3e-6
    most, got = plain.seconds + num_exposed * message_s, sharded.seconds - made.seconds
    check_cost(
        got <= most,
        f"a forward and a backward pass should take at most {1e6 * most:.0f} µs on {n} ranks: the "
        f"{1e6 * plain.seconds:.0f} µs of computing, and the travel of {num_exposed} times "
        f"{LAYER_BYTES // 2**10} KiB that nothing hides; it takes {1e6 * got:.0f} µs. {why}",
    )


@task("3.13")
def test_buckets_are_reduced_while_the_backward_pass_goes_on(grade: Grade) -> None:
    check_overlap(
        *(grade, GRADIENTS, {"bucket_bytes": LAYER_BYTES}, 3),
        "Start the reduce-scatter of a full bucket at once, and do not wait for it before there is "
        "the next one.",
    )
