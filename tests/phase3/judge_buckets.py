"""Judges task 3.10: gradients in buckets."""

from collections import Counter
from collections.abc import Sequence
from random import Random

from distlab.grade import Grade, check, task
from judging.checks import ON_CPU, short
from phase3 import buckets as b
from phase3.buckets import Case, Param

DTYPES = ("float32", "int32", "float16", "bfloat16", "float64")  # some have the same size
DEVICES = ("cpu", *b.PRETENDED)
Buckets = Sequence[Sequence[int]]


@task("3.10")
def test_buckets_are_filled_from_the_last_parameter(grade: Grade) -> None:
    ten, large = tuple(Param(250) for _ in range(10)), grade.random.randint(2001, 3000)
    cases = [
        *(Case(params, 9, 0) for params in ((), (Param(1),), (Param(0),))),
        Case(ten, 4000, 2000),
        Case(tuple(Param(n) for n in (1000, 750, 1500, 250, 250)), 8000, 2000),
        Case((Param(10), Param(large), Param(10)), 8000, 1000),
        Case((Param(10), Param(10), Param(large)), 8000, 1000),
        Case((Param(large), Param(large), Param(1)), 8000, 8),
        Case((Param(2000), Param(2000), Param(2)), 8000, 8),  # 2,000 elements fill a bucket exactly
        Case((Param(1), Param(large), Param(0), Param(0)), 8000, 0),
        *(_drawn(grade.random, ("float32",), ("cpu",)) for _ in range(20)),
    ]
    _check_cases(grade, cases)


@task("3.10")
def test_dtypes_and_devices_are_kept_apart(grade: Grade) -> None:
    mixed = (Param(100), Param(100, "bfloat16"), Param(100), Param(100, "bfloat16"))
    waits = (Param(5, "bfloat16"), *(Param(100) for _ in range(8)), Param(5, "bfloat16"))
    placed = (Param(9), Param(9, device="xpu:0"), Param(9), Param(9, device="xpu:1"))
    cases = [
        Case(mixed, 1000, 1000),
        Case(waits, 1000, 500),
        Case(placed, 1000, 40),
        *(_drawn(grade.random, DTYPES, ("cpu",)) for _ in range(20)),
        *(_drawn(grade.random, ("float32",), DEVICES) for _ in range(20)),
        *(_drawn(grade.random, DTYPES, DEVICES) for _ in range(20)),
    ]
    _check_cases(grade, cases)


@task("3.10")
def test_views_and_repeated_parameters_count_by_themselves(grade: Grade) -> None:
    views = Case((Param(40, is_view=True), Param(60), Param(70, is_view=True)), 480, 280)
    twice = Case((Param(10), Param(10, is_same=True), Param(10)), 60, 80)
    drawn = [_drawn(grade.random, DTYPES, ("cpu",)) for _ in range(20)]
    _check_cases(grade, [views, twice, *(_shared(grade.random, case) for case in drawn)])


def _shared(random: Random, case: Case) -> Case:
    """Turn some parameters into views of larger memory, and some into repeats of the one before."""
    params: list[Param] = []
    for param in case.params:
        if params and random.random() < 0.3:
            params.append(params[-1]._replace(is_same=True))
        else:
            params.append(param._replace(is_view=random.random() < 0.5))
    return case._replace(params=tuple(params))


def _drawn(random: Random, dtypes: tuple[str, ...], devices: tuple[str, ...]) -> Case:
    params = tuple(
        Param(random.randint(1, 60), random.choice(dtypes), random.choice(devices))
        for _ in range(random.randint(1, 14))
    )
    bucket_bytes = random.randint(150, 600)
    # Either limit may be the larger one.
    return Case(params, bucket_bytes, random.randint(8, 2 * bucket_bytes))


def _check_cases(grade: Grade, cases: Sequence[Case]) -> None:
    for case, result in zip(
        cases, grade.run(b.assigned, 1, cases, options=ON_CPU).results[0], strict=True
    ):
        _check(case, result)


def _check(case: Case, result: b.Found) -> None:
    (buckets, is_kept), expected = result, buckets_of(case)
    here = (
        f"assign_buckets of {_described(case.params)} with bucket_bytes={case.bucket_bytes} and "
        f"first_bucket_bytes={case.first_bucket_bytes}"
    )
    check(
        [*buckets] == expected,
        f"{here} should return {short(expected)}; it returned {short(buckets)}. "
        f"{_why(case, buckets, expected)}",
    )
    check(
        is_kept,
        f"{here} should only read params, to whose order its indices refer; afterwards, the list "
        "was in another order. Iterate over reversed(range(len(params))) instead of reversing it.",
    )


def _described(params: Sequence[Param]) -> str:
    kinds = {param.kind for param in params}
    devices = {param.device for param in params}
    texts = [
        f"{param.num_bytes}"
        + (" (a view)" if param.is_view else " (the same again)" if param.is_same else "")
        + (f" {param.dtype}" if len(kinds) > 1 else "")
        + (f" {param.device}" if len(devices) > 1 else "")
        for param in params
    ]
    return f"parameters of {', '.join(texts)} bytes" if texts else "no parameters"


def _why(case: Case, buckets: Buckets, expected: Buckets) -> str:
    """Return the first rule that the buckets break."""
    params = case.params
    times = Counter(index for bucket in buckets for index in bucket)
    if times != Counter(range(len(params))):
        return (
            "Every index should be in one bucket, once; also those of a parameter that stands in "
            "params twice, which buckets by tensor or by id would miss."
        )
    if not all(buckets):
        return "A bucket is empty."
    if any(len({params[index].kind for index in bucket}) > 1 for bucket in buckets):
        return (
            "A bucket holds one dtype on one device: it is sent as one tensor. float16 and "
            "bfloat16 are two dtypes of one size, and xpu:0 and xpu:1 two devices of one type."
        )
    if any(list(bucket) != sorted(bucket, reverse=True) for bucket in buckets):
        return (
            "Begin with the last parameter, inside of a bucket too: its gradient is computed first."
        )
    if {tuple(bucket) for bucket in buckets} == {tuple(bucket) for bucket in expected}:
        return (
            "The buckets are right, but in another order: the one whose smallest index is largest "
            "becomes complete first."
        )
    return (
        "Each parameter goes into the bucket of the one before it (of its dtype and device) if it "
        "fits there, up to the last byte, and otherwise into a new one, which only a single "
        "parameter may overfill. Only the first bucket of each dtype and device has "
        "first_bucket_bytes, whether that is less or more. A view counts with its own bytes "
        "(nbytes), not with those of the storage that it shares."
    )


def buckets_of(case: Case) -> list[list[int]]:
    """Return the right buckets, filled one parameter after another."""
    buckets: list[list[int]] = []
    newest: dict[tuple[str, str], list[int]] = {}  # dtype and device -> bucket
    limits: dict[tuple[str, str], int] = {}
    for index in reversed(range(len(case.params))):
        param = case.params[index]
        bucket = newest.get(param.kind)
        held = sum(case.params[other].num_bytes for other in bucket or ())
        if bucket is None or held + param.num_bytes > limits[param.kind]:
            limits[param.kind] = case.first_bucket_bytes if bucket is None else case.bucket_bytes
            newest[param.kind] = []
            buckets.append(newest[param.kind])
        newest[param.kind].append(index)
    return sorted(buckets, key=lambda bucket: -bucket[-1])
