"""Judges task 4.18: recorded steps, and the exposed communication in a trace."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import ON_CPU, check_silent, short
from judging.expect import expect, results_in_group
from phase4 import profiles as b
from phase4.profiles import Event

STUCK = "profile_steps calls no collective of its own: each rank profiles its own steps."


# Profiling


def _check_profiles(by_rank: Sequence[Any], is_real: bool, **counts: int) -> None:
    wait, warmup, active = ({"wait": 1, "warmup": 1, "active": 3} | counts).values()
    off = wait + warmup
    files = sorted(f"rank-{rank:05}.json" for rank in range(len(by_rank)))
    for rank, facts in enumerate(by_rank):
        where = f"rank {rank} of {len(by_rank)}, with {counts or 'the defaults'}:"
        expect(f"{where} the arguments of step", facts["calls"], [*range(off + active)])
        expect(
            f"{where} whether the profiler is on, in each step and after the last,",
            *(facts["is_on"], [False] * off + [True] * active + [False]),
            "It is on in the last steps, the active ones.",
        )
        expect(
            f"{where} the path that profile_steps returns, and the files in the end",
            *([facts["path"], facts["files"]], [files[rank], files]),
            "The number is the rank's in the group, with leading zeros.",
        )
        names = ("steps", "matrix products", "all-reduces")
        right = [active, (2 if is_real else 1) * active, is_real * active]
        expect(
            f"{where} the numbers of {names} in the trace",
            *([facts[name] for name in names], right),
            "A trace holds what this rank does in the active steps alone, with an event "
            "ProfilerStep#… for each of them.",
        )


@task("4.18", real=True)
def test_each_rank_writes_a_trace(grade: Grade) -> None:
    run = grade.run(b.profile, 2, {}, options=ON_CPU, if_stuck=STUCK)
    _check_profiles(run.results, not run.is_simulated)


@task("4.18")
@pytest.mark.parametrize("counts", [(0, 1, 1), (2, 2, 4)])
def test_which_steps_are_recorded(grade: Grade, counts: tuple[int, ...]) -> None:
    names = dict(zip(("wait", "warmup", "active"), counts, strict=True))
    _check_profiles(
        grade.run(b.profile, 1, names, options=ON_CPU, if_stuck=STUCK).results, False, **names
    )


@task("4.18")
def test_profiling_inside_a_group(grade: Grade) -> None:
    _check_profiles(results_in_group(grade, b.profile, {}, options=ON_CPU), False)


@task("4.18")
def test_a_rank_waits_for_no_other(grade: Grade) -> None:
    late = (
        "The other ranks are so late that they never call profile_steps, and rank 0 should not "
        "wait for them: it profiles its own steps, without a collective or a barrier, which would "
        "change what is measured."
    )
    run = grade.run(b.profile_alone, 3, options=ON_CPU, if_stuck=late)
    expect("the steps that rank 0 profiles alone", run.results[0], [*range(5)], late)
    check_silent(run, "profile_steps")


@task("4.18", real=True)
def test_a_real_trace_can_be_read(grade: Grade) -> None:
    run = grade.run(b.profile_and_read, 2, options=ON_CPU, if_stuck=STUCK)
    for rank, (step_s, communication_s, exposed_s) in enumerate(run.results):
        has_some = communication_s > 0  # a simulated step does not communicate
        check(
            0 <= exposed_s <= communication_s < step_s and has_some != run.is_simulated,
            f"in the trace of rank {rank}, exposed_s is at most communication_s, which is below "
            f"step_s, and above 0 if the step communicates; read was step_s={step_s}, "
            f"communication_s={communication_s}, exposed_s={exposed_s}.",
        )


# Made-up traces, written as "step 0-100, nccl 20-80", with times in µs

STEP, CPU, OP, KERNEL = "ProfilerStep#2", "user_annotation", "cpu_op", "kernel"
MAIN, OTHER = 100, 101  # thread ids
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
KINDS: dict[str, tuple[str, str, int]] = {  # name, category and thread (or stream) of an event
    "step": (STEP, CPU, MAIN),
    "nccl": (NCCL, KERNEL, 20),
    "nccl2": (NCCL, KERNEL, 24),
    "gemm": ("ampere_sgemm_128x64_nn", KERNEL, 7),
    "like_nccl": ("void at::native::nccl_like_kernel", KERNEL, 7),
    "memcpy": ("Memcpy HtoD", "gpu_memcpy", 7),
    "sync": ("cudaStreamSynchronize", "cuda_runtime", MAIN),
    "nccl_cpu": ("nccl:all_reduce", CPU, MAIN),
    "nccl_gpu": ("nccl:all_reduce", "gpu_user_annotation", 20),
    "step_gpu": (STEP, "gpu_user_annotation", 7),
    "gloo": ("gloo:all_reduce", CPU, OTHER),
    "gloo2": ("gloo:all_reduce", CPU, OTHER + 1),
    "mm": ("aten::mm", OP, MAIN),
    "add": ("aten::add_", OP, OTHER),  # computed by gloo, on another thread
    "c10d": ("c10d::allreduce_", OP, MAIN),
    "wait": ("_c10d_functional::wait_tensor", OP, MAIN),
    "sgd": ("Optimizer.step#SGD.step", CPU, MAIN),
    "python": ("train.py(7): step", "python_function", MAIN),
}
START_US = 4_740_384_000_000  # traces start at arbitrary times
ODD: list[Event] = [
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
    {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 9, "ts": START_US},
    {"ph": "i", "s": "g", "name": STEP, "cat": CPU, "pid": 7, "tid": 9, "ts": START_US},
    {"ph": "b", "name": NCCL, "cat": KERNEL, "pid": 7, "tid": 20, "ts": START_US + 90, "dur": 5},
    {"ph": "X", "name": "PyTorch Profiler (0)", "cat": "Trace", "pid": "Spans", "tid": 1,
     "ts": START_US, "dur": 200},
]  # fmt: skip
OTHER_PROCESS: list[Event] = [
    {"ph": "X", "name": "aten::add_", "cat": OP, "pid": 8, "tid": MAIN, "ts": START_US + 50,
     "dur": 10},
]  # fmt: skip
Trace = tuple[str, list[Event], Sequence[float], str]  # text, more events, three times, cause
TRACES: dict[str, Trace] = {
    "a trace of a GPU": (
        "step 0-100, nccl 20-80, gemm 20-30, like_nccl 30-40, mm 40-50, memcpy 50-60, sync 60-70, "
        "nccl_cpu 0-10, nccl_gpu 15-90, step_gpu 30-140",
        *([], (100, 60, 40)),
        "With kernels in a trace, communication is those whose names begin with nccl, computation "
        "the others; operations on the CPU only launch them, and annotations are no kernels.",
    ),
    "a trace of a CPU": (
        "step 0-100, gloo 10-90, mm 10-20, c10d 20-30, wait 30-90, add 40-50, sgd 60-70, "
        "python 0-100",
        *(OTHER_PROCESS, (100, 80, 70)),
        "Computation is the operations aten::… on the thread of the steps: launching a collective "
        "and waiting for one are none, and other threads are those of gloo.",
    ),
    "other events": ("step 50-150, nccl 60-80", ODD, (100, 20, 20), "Only events with ph X count."),
}


def _events(text: str) -> list[Event]:
    return [_event(*re.split("[ -]", part)) for part in text.split(", ")]


def _event(kind: str, begin: str, end: str) -> Event:
    name, category, thread = KINDS[kind]
    times = {"ts": START_US + int(begin), "dur": int(end) - int(begin)}
    return {"ph": "X", "name": name, "cat": category, "pid": 7, "tid": thread, **times}


def _check_measured(grade: Grade, traces: Sequence[Trace]) -> None:
    made_up = [[*_events(text), *more] for text, more, *_ in traces]
    for events in made_up:
        grade.random.shuffle(events)
    names = ("step_s", "communication_s", "exposed_s")
    measured = grade.call(b.measure_all, made_up)
    for (text, more, right_us, cause), times_s in zip(traces, measured, strict=True):
        for name, value, wanted_us in zip(names, times_s, right_us, strict=True):
            what = f"in a trace with {short(text)} and {len(more)} other events, {name}"
            expect(what, value, wanted_us / 1e6, cause, 1e-8)


@task("4.18")
def test_what_counts_in_a_trace(grade: Grade) -> None:
    _check_measured(grade, [*TRACES.values()])


@task("4.18")
@pytest.mark.parametrize(("sends", "computes"), [("nccl", "gemm"), ("gloo", "mm")])
def test_random_traces(grade: Grade, sends: str, computes: str) -> None:
    _check_measured(grade, [_draw(grade, sends, computes, count) for count in (0, 1, 4, 12)])


def _draw(grade: Grade, sends: str, computes: str, count: int) -> Trace:
    """Draw a trace, and compute its times by counting microseconds one by one."""
    spans = {"step": [(0, 100), (100, 150), (160, 300)]}
    for kind in (sends, computes):
        begins = [grade.random.randrange(0, 320) for _ in range(count)]
        spans[kind] = [(begin, begin + grade.random.choice((1, 3, 10, 40))) for begin in begins]
    text = ", ".join(f"{kind} {a}-{z}" for kind, pairs in spans.items() for a, z in pairs)
    inside, sent, computed = (
        {us for begin, end in pairs for us in range(begin, end)} for pairs in spans.values()
    )
    right = [len(us) / 3 for us in (inside, sent & inside, (sent & inside) - computed)]
    cause = (
        "Times in a trace are µs. Each µs of a step counts once: it is communication if any "
        "collective is running, and exposed if nothing is computed then. What is before, between "
        "or after the steps doesn't count; each time is divided by the number of steps."
    )
    return text, [], right, cause


@task("4.18")
def test_a_trace_without_steps_is_refused(grade: Grade) -> None:
    text = grade.call(b.refuse, _events("mm 0-10"))
    check(
        b.NAME in text,
        "a trace without ProfilerStep#… should be a ValueError that names the file; raised was "
        f"{short(text) if text else 'nothing'}.",
    )
