"""Judges task 4.18: which steps are recorded, and what of a trace is exposed communication."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import check_silent, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import profiles as b
from phase4.profiles import Event

DEFAULTS = {"wait": 1, "warmup": 1, "active": 3}
STUCK = "profile_steps calls no collective of its own: each rank profiles its own steps."
STEP, CPU, OP, KERNEL = "ProfilerStep#", "user_annotation", "cpu_op", "kernel"
MAIN, OTHER = 100, 101  # threads
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "ampere_sgemm_128x64_nn"
START_US = 4_740_384_000_000  # traces begin anywhere


# Profiling


def _check_profiles(by_rank: Sequence[Any], counts: dict[str, int], is_real: bool) -> None:
    off, active = counts["wait"] + counts["warmup"], counts["active"]
    files = sorted(f"rank-{rank:05}.json" for rank in range(len(by_rank)))
    for rank, found in enumerate(by_rank):
        where = f"rank {rank} of {len(by_rank)}, with {counts},"
        check(
            found["calls"] == [*range(off + active)],
            f"{where} should call step with {[*range(off + active)]}; it calls it with "
            f"{found['calls']}.",
        )
        expected = [False] * off + [True] * active
        check(
            found["is_on"] == expected and not found["after"],
            f"{where} should have the profiler on in the last {active} steps, {expected}; it is on "
            f"in {found['is_on']}, and {'on' if found['after'] else 'off'} after the last one.",
        )
        check(
            found["path"] == files[rank] and found["files"] == files,
            f"{where} should write folder/{files[rank]} and return this path; it returns "
            f"{found['path']}, and the folder then has {found['files']}. The number is the rank's "
            "in the group, with leading zeros.",
        )
        check(
            found["steps"] == active,
            f"the trace of {where} should have {active} events {STEP}…, one for each active step; "
            f"it has {found['steps']}.",
        )
        check(
            found["products"] == (2 if is_real else 1) * active
            and found["collectives"] == is_real * active,
            f"the trace of {where} should hold what this rank does in {active} active steps alone; "
            f"it holds {found['products']} matrix products and {found['collectives']} all-reduces.",
        )


@task("4.18", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_writes_a_trace(grade: Grade, num_ranks: int) -> None:
    run = grade.run(b.profile, num_ranks, {}, if_stuck=STUCK)
    _check_profiles(run.results, DEFAULTS, not grade.is_simulated)


@task("4.18")
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_rank_waits_for_no_other(grade: Grade, num_ranks: int) -> None:
    late = (
        "The other ranks are so late that they never call profile_steps, and rank 0 should not "
        "wait for them: it profiles its own steps, without a collective or a barrier, which would "
        "change what is measured."
    )
    run = grade.run(b.profile_alone, num_ranks, if_stuck=late)
    check(
        run.results[0] == [*range(5)],
        f"rank 0 should call step with {[*range(5)]}; it calls it with {run.results[0]}. {late}",
    )
    check_silent(run, "profile_steps")


@task("4.18")
@pytest.mark.parametrize(
    "counts",
    [
        {"wait": 0, "warmup": 1, "active": 1},
        {"wait": 2, "warmup": 1, "active": 2},
        {"wait": 1, "warmup": 2, "active": 4},
    ],
    ids=str,
)
def test_which_steps_are_recorded(grade: Grade, counts: dict[str, int]) -> None:
    run = grade.run(b.profile, 1, counts, if_stuck=STUCK)
    _check_profiles(run.results, counts, False)


@task("4.18")
def test_profiling_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.profile, {}, if_stuck=STUCK_IN_GROUP)
    _check_profiles([run.results[member] for member in MEMBERS], DEFAULTS, False)


@task("4.18", real=True)
def test_a_real_trace_can_be_read(grade: Grade) -> None:
    run = grade.run(b.profile_and_read, 2, if_stuck=STUCK)
    for rank, (step_s, communication_s, exposed_s) in enumerate(run.results):
        told = f"step_s={step_s}, communication_s={communication_s}, exposed_s={exposed_s}"
        is_simulated = grade.is_simulated  # nothing is communicated there
        check(
            0 <= exposed_s <= communication_s < step_s
            and (communication_s == 0 if is_simulated else communication_s > 0),
            f"in the trace of rank {rank}, exposed_s is at most communication_s, which is below "
            f"step_s, and above 0 if the step communicates; read was {told}.",
        )


# Traces that were made up


def _event(name: str, cat: str, begin: float, end: float, tid: int = MAIN, **more: Any) -> Event:
    """Make an event of the trace; times in µs from its start."""
    times = {"ts": START_US + begin, "dur": end - begin}
    return {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": tid, **times, **more}


def _step(number: int, begin: float, end: float) -> Event:
    return _event(f"{STEP}{number}", CPU, begin, end)


def _check_measured(
    grade: Grade, events: Sequence[Event], expected_us: Sequence[float], cause: str
) -> None:
    """Check what is read from a trace; expected are the three values in µs for one step."""
    shuffled = [*events]
    grade.random.shuffle(shuffled)
    found = grade.call(b.measure, shuffled)
    names = ("step_s", "communication_s", "exposed_s")
    for name, value, right_us in zip(names, found, expected_us, strict=True):
        check(
            abs(value - right_us / 1e6) < 1e-8,
            f"{name} should be {right_us / 1e6:.6g} s; it is {value:.6g}. {cause} The events: "
            f"{_told(events)} µs.",
        )


def _told(events: Sequence[Event]) -> str:
    """List a few events."""
    texts = [
        f"{e['name'][:24]} {e['ts'] - START_US:g} to {e['ts'] - START_US + e['dur']:g}"
        for e in events
        if "dur" in e
    ]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")


@task("4.18")
def test_the_example_of_the_docstring(grade: Grade) -> None:
    for ms in (1_000, 1_000_000):  # in µs, and a step of 10 s
        events = [
            _step(3, 0, 10 * ms),
            _event(GEMM, KERNEL, 0, 4 * ms, 7),
            _event(GEMM, KERNEL, 8 * ms, 10 * ms, 7),
            _event(NCCL, KERNEL, 2 * ms, 5 * ms, 20),
            _event(NCCL, KERNEL, 4 * ms, 7 * ms, 24),
        ]
        cause = "Times in a trace are µs; where two collectives overlap, the time counts once."
        _check_measured(grade, events, (10 * ms, 5 * ms, 3 * ms), cause)


def _random_intervals(grade: Grade, count: int, end: int) -> list[tuple[int, int]]:
    begins = [grade.random.randrange(-20, end) for _ in range(count)]
    return [(begin, begin + grade.random.choice((1, 3, 10, 40))) for begin in begins]


@task("4.18")
@pytest.mark.parametrize("is_gpu", [True, False], ids=["kernels", "gloo"])
def test_random_traces(grade: Grade, is_gpu: bool) -> None:
    steps = [(0, 100), (100, 150), (160, 300)]
    end = steps[-1][1] + 20
    for count in (1, 4, 12):
        communication = _random_intervals(grade, count, end)
        compute = _random_intervals(grade, count, end)
        events = [_step(index, *span) for index, span in enumerate(steps)]
        if is_gpu:
            events += [
                _event(NCCL, KERNEL, *each, 20 + i % 3) for i, each in enumerate(communication)
            ]
            events += [_event(GEMM, KERNEL, *each, 7 + i % 2) for i, each in enumerate(compute)]
        else:
            events += [_event("gloo:all_reduce", CPU, *each, OTHER) for each in communication]
            events += [_event("aten::mm", OP, *each) for each in compute]
        _check_measured(
            grade,
            events,
            _by_counting(steps, communication, compute),
            "Each µs of a step counts once: it is communication if any collective goes on, and "
            "exposed if nothing is computed then. What is outside of the steps doesn't count.",
        )


def _by_counting(
    steps: Sequence[tuple[int, int]],
    communication: Sequence[tuple[int, int]],
    compute: Sequence[tuple[int, int]],
) -> list[float]:
    """Count µs by µs, as slow and as simple as can be."""
    inside, sent, computed = (
        {us for begin, end in spans for us in range(begin, end)}
        for spans in (steps, communication, compute)
    )
    sets = (inside, sent & inside, (sent & inside) - computed)
    return [len(each) / len(steps) for each in sets]


@task("4.18")
def test_what_is_outside_of_the_steps(grade: Grade) -> None:
    events = [
        _step(2, 100, 200),
        _step(3, 210, 300),
        _event(NCCL, KERNEL, 0, 50, 20),
        _event(NCCL, KERNEL, 80, 120, 20),
        _event(NCCL, KERNEL, 190, 240, 20),
        _event(NCCL, KERNEL, 290, 320, 20),
        _event(GEMM, KERNEL, 110, 130, 7),
        _event(GEMM, KERNEL, 195, 215, 7),
        _event(GEMM, KERNEL, 300, 320, 7),
    ]
    cause = (
        "What is before, between or after the steps doesn't count; of an event that is partly "
        "outside, the part inside does."
    )
    _check_measured(grade, events, (95, 35, 25), cause)


@task("4.18")
def test_nested_operations_count_once(grade: Grade) -> None:
    events = [
        _step(2, 0, 100),
        _event("aten::linear", OP, 10, 40),
        _event("aten::addmm", OP, 15, 35),
        _event("gloo:all_reduce", CPU, 30, 90, OTHER),
        _event("gloo:all_reduce", CPU, 40, 60, OTHER + 1),
    ]
    cause = "An operation within another one, and a collective beside one, count once."
    _check_measured(grade, events, (100, 60, 50), cause)


@task("4.18")
def test_what_of_a_gpu_trace_counts(grade: Grade) -> None:
    events = [
        _step(2, 0, 100),
        _event(NCCL, KERNEL, 20, 80, 20),
        _event(GEMM, KERNEL, 20, 30, 7),
        _event("void at::native::nccl_like_kernel", KERNEL, 30, 40, 7),
        _event("aten::mm", OP, 40, 50),  # launches a kernel
        _event("Memcpy HtoD", "gpu_memcpy", 50, 60, 7),
        _event("cudaStreamSynchronize", "cuda_runtime", 60, 70),
        _event("nccl:all_reduce", CPU, 0, 10),
        _event("nccl:all_reduce", "gpu_user_annotation", 15, 90, 20),
        _event(f"{STEP}2", "gpu_user_annotation", 30, 140, 7),
    ]
    cause = (
        "With kernels in a trace, communication is those whose names begin with nccl, computation "
        "the others; operations on the CPU only launch them, and annotations are no kernels."
    )
    _check_measured(grade, events, (100, 60, 40), cause)


@task("4.18")
def test_what_of_a_cpu_trace_counts(grade: Grade) -> None:
    events = [
        _step(2, 0, 100),
        _event("gloo:all_reduce", CPU, 10, 90, OTHER),
        _event("aten::mm", OP, 10, 20),
        _event("c10d::allreduce_", OP, 20, 30),
        _event("_c10d_functional::wait_tensor", OP, 30, 90),
        _event("aten::add_", OP, 40, 50, OTHER),  # gloo's own sum
        _event("aten::add_", OP, 50, 60, MAIN, pid=8),
        _event("Optimizer.step#SGD.step", CPU, 60, 70),
        _event("train.py(7): step", "python_function", 0, 100),
    ]
    cause = (
        "Computation is the operations aten::… on the thread of the steps: launching a collective "
        "and waiting for one are none, and other threads are those of gloo."
    )
    _check_measured(grade, events, (100, 80, 70), cause)


@task("4.18")
def test_other_events_of_a_trace(grade: Grade) -> None:
    events = [
        _step(5, 50, 150),
        _event(NCCL, KERNEL, 60, 80, 20),
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 9, "ts": START_US},
        _event("nccl:late", KERNEL, 90, 95, 20, ph="b"),
        {"ph": "i", "s": "g", "name": f"{STEP}6", "cat": CPU, "pid": 7, "tid": 9, "ts": START_US},
        _event("PyTorch Profiler (0)", "Trace", 0, 200, 1, pid="Spans"),
    ]
    _check_measured(grade, events, (100, 20, 20), "Only events with ph X count.")


@task("4.18")
@pytest.mark.parametrize("is_silent", [True, False], ids=["nothing sent", "nothing computed"])
def test_steps_without_one_of_both(grade: Grade, is_silent: bool) -> None:
    name, expected = (GEMM, (80, 0, 0)) if is_silent else (NCCL, (80, 35, 35))
    events = [
        _step(2, 0, 60),
        _step(3, 60, 160),
        _event(name, KERNEL, 30, 70, 7),
        _event(name, KERNEL, 70, 100, 7),
    ]
    _check_measured(grade, events, expected, "Each time is divided by the number of steps, 2.")


@task("4.18")
def test_a_trace_without_steps_is_refused(grade: Grade) -> None:
    text = grade.call(b.refuse, [_event("aten::mm", OP, 0, 10)])
    check(
        b.NAME in text,
        f"a trace without {STEP}… should be a ValueError that names the file; raised was "
        f"{short(text) if text else 'nothing'}.",
    )
