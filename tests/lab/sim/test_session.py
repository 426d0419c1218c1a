"""A world that lives on between runs: what is kept, and that the next run works after any error."""

import contextlib
import gc
import io
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from processes import wait_until
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from distlab.sim import Faults, Lap, Options, Session
from distlab.sim.engine import scheduler
from distlab.sim.engine.scheduler import Worker

SIZE = 4
KEPT: list[dict[str, Any]] = []  # variables of each rank


Begin = Callable[..., Session]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """A function that begins sessions, which end with the test."""
    KEPT[:] = [{} for _ in range(SIZE)]
    with contextlib.ExitStack() as begun:

        def begin(**options: Any) -> Session:
            session = Session(SIZE, "dgx-h100", Options(**options))
            begun.callback(session.close)
            return session

        yield begin


@pytest.fixture(params=["gloo", "nccl"])
def session(request: pytest.FixtureRequest, begin: Begin) -> Session:
    return begin(semantics=request.param)


def mine() -> dict[str, Any]:
    return KEPT[dist.get_rank()]


def on_device(*numbers: float) -> Tensor:
    device = f"cuda:{dist.get_rank()}" if torch.cuda.is_available() else "cpu"
    return torch.tensor(numbers, device=device)


def total(_: int) -> float:
    x = on_device(float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def assert_it_works(session: Session) -> None:
    lap = session.run(total)
    assert lap.error is None
    assert lap.results == dict.fromkeys(range(SIZE), 6.0)


# What is kept


def test_time_goes_on_and_each_run_is_measured(session: Session) -> None:
    first, second = session.run(total), session.run(total)
    assert first.error is second.error is None
    assert second.start_s == pytest.approx(first.start_s + first.seconds)
    assert second.num_messages == first.num_messages > 0
    assert second.num_bytes == first.num_bytes > 0
    assert {event.name for event in second.events if event.kind == "collective"} == {"all_reduce"}
    assert min(event.start_s for event in second.events) >= second.start_s


def test_a_rank_that_did_nothing_has_not_computed(session: Session) -> None:
    session.run(lambda _: on_device(1.0).sum(), [1])
    lap = session.run(total)
    assert lap.start_s > 0
    assert min(event.start_s for event in lap.events) >= lap.start_s


def test_each_rank_keeps_its_generators_and_settings(session: Session) -> None:
    def begin(rank: int) -> None:
        torch.manual_seed(rank)
        torch.set_grad_enabled(rank == 0)
        os.environ["MINE"] = str(rank)

    def look(_: int) -> tuple[float, bool, str]:
        return torch.rand(()).item(), torch.is_grad_enabled(), os.environ["MINE"]

    session.run(begin)
    results = session.run(look).results
    for rank, (number, has_gradients, name) in results.items():
        assert number == torch.rand((), generator=torch.Generator().manual_seed(rank)).item()
        assert (has_gradients, name) == (rank == 0, str(rank))
    assert torch.is_grad_enabled()
    assert "MINE" not in os.environ


def test_a_message_may_be_received_in_the_next_run(session: Session) -> None:
    def send(rank: int) -> None:
        if rank == 0:
            mine()["work"] = dist.isend(on_device(7.0), 1)

    def receive(rank: int) -> float:
        x = on_device(0.0)
        if rank == 1:
            dist.recv(x, 0)
        return x.item()

    assert session.run(send, [0]).error is None
    assert session.run(receive, [1]).results == {1: 7.0}


def test_groups_and_wrapped_models_live_on(session: Session) -> None:
    def make(rank: int) -> None:
        mine()["pair"] = dist.new_group([0, 1])
        torch.manual_seed(0)
        mine()["model"] = DistributedDataParallel(nn.Linear(2, 1).to(on_device().device))

    def use(rank: int) -> float:
        mine()["model"](on_device(1.0, float(rank))).sum().backward()
        x = on_device(1.0)
        if rank < 2:
            dist.all_reduce(x, group=mine()["pair"])
        return x.item() + mine()["model"].module.weight.grad[0, 1].item()

    assert session.run(make).error is None
    assert session.run(use).results == {0: 3.5, 1: 3.5, 2: 2.5, 3: 2.5}


def test_no_thread_is_left(session: Session) -> None:
    before = threading.active_count()
    session.run(total)
    session.close()
    assert threading.active_count() == before - SIZE


def test_each_rank_keeps_its_folder(session: Session, tmp_path: Path) -> None:
    before = os.getcwd()
    session.run(lambda _: os.chdir(tmp_path), [0])
    found = session.run(lambda _: os.getcwd()).results
    assert found == {0: str(tmp_path), **dict.fromkeys(range(1, SIZE), before)}
    assert os.getcwd() == before


def test_slow_links_are_slow(begin: Begin) -> None:
    faults = Faults(), Faults(slow_links={"*": 10.0})
    usual, slow = (
        begin(faults=f).run(lambda _: dist.all_reduce(torch.ones(100_000))) for f in faults
    )
    assert slow.seconds > 2 * usual.seconds


@pytest.mark.parametrize("ranks", [[], [SIZE], [-1, 0]])
def test_unknown_ranks_are_refused(session: Session, ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="ranks are 0 to 3"):
        session.run(total, ranks)
    assert session.run(lambda rank: rank, [1, 1]).results == {1: 1}
    assert_it_works(session)


def test_a_closed_session_is_refused(session: Session) -> None:
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run(total)


def test_ranks_print_where_the_process_does(session: Session) -> None:
    for number in range(2):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            session.run(lambda rank: print(rank, number), [1])  # noqa: B023
        assert stream.getvalue() == f"1 {number}\n"
        stream.close()


# Errors


def fails(rank: int) -> None:
    if rank == 2:
        raise ValueError("no")
    total(rank)


def leaves_one_out(rank: int) -> None:
    if rank != 3:
        total(rank)


def all_receive(rank: int) -> None:
    x = on_device(0.0)
    dist.recv(x, (rank - 1) % SIZE)
    x.item()


def differs(rank: int) -> None:
    dist.all_reduce(on_device(0.0), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    total(rank)


def queues_more_on_some(rank: int) -> None:
    for _ in range(rank):
        dist.all_reduce(on_device(0.0), async_op=True)
    raise ValueError(f"no, {rank}")


def ends_the_process(rank: int) -> None:
    if rank == 1:
        os._exit(1)
    total(rank)


def kills_itself(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    total(rank)


def exits(rank: int) -> None:
    if rank == 1:
        raise SystemExit(3)
    total(rank)


def never_ends_cleaning_up(rank: int) -> None:
    while rank == 0:
        try:
            total(rank)
        except BaseException:
            continue
    raise ValueError("no")


def makes_a_group_alone(rank: int) -> None:
    if rank == 0:
        dist.new_group([0, 2])
    raise ValueError("no")


def catches(rank: int) -> None:
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(on_device(*range(1 + rank)))
    total(rank)


@pytest.mark.parametrize(
    "program",
    [
        *(fails, leaves_one_out, all_receive, differs, queues_more_on_some, ends_the_process),
        *(kills_itself, exits, never_ends_cleaning_up, makes_a_group_alone, catches),
    ],
    ids=lambda program: program.__name__,
)
def test_an_error_ends_the_run_and_not_the_world(
    session: Session, program: Callable[[int], None]
) -> None:
    session.run(lambda rank: mine().update(x=rank))
    for _ in range(2):
        assert session.run(program).error is not None
        assert_it_works(session)
    assert session.run(lambda rank: mine()["x"]).results == {n: n for n in range(SIZE)}
    assert session.run(lambda rank: dist.new_group([0, 1]) and None).error is None


def fails_first(rank: int) -> None:
    if rank == 0:
        raise ValueError("no")


def fails_late(rank: int) -> None:
    time.sleep(1)
    fails_first(rank)


@pytest.mark.parametrize("ends", [fails_first, fails_late])
def test_the_others_get_as_far_as_their_time_allows_before_an_error_is_reported(
    ends: Callable[[int], None],
) -> None:
    def program(rank: int) -> None:
        ends(rank)
        if rank == 3:
            raise TypeError("no")
        if rank == 2:
            time.sleep(2)
        dist.barrier()

    (error,) = reports(program)
    assert error.startswith("rank 0 of 4")
    assert re.search(r"rank 1 +barrier", error)
    assert re.search(r"rank 2 +running", error)
    assert re.search(r"rank 3 +raised TypeError +test_session.py", error)


def test_an_interrupt_shows_the_error_that_waited_for_an_endless_rank(session: Session) -> None:
    def fails_beside_an_endless_rank(rank: int) -> None:
        fails_first(rank)
        computes(rank)

    lap = interrupted(session, fails_beside_an_endless_rank)
    assert re.search(
        r"rank 0 of 4 raised ValueError(.|\n)*rank 2 was interrupted at", str(lap.error)
    )
    assert_it_works(session)


def test_waits_that_an_error_cuts_short_count_as_waits(session: Session) -> None:
    def receives_in_vain(rank: int) -> None:
        if rank == 1:
            time.sleep(1)
        else:
            x = on_device(0.0)
            dist.recv(x, 1)
            x.item()

    lap = session.run(receives_in_vain)
    assert lap.cut_short == dict.fromkeys((0, 2, 3), "recv from rank 1")
    assert [round(s, 3) for s in lap.exposed_s] == [1, 0, 1, 1]
    assert session.run(total).cut_short == {}


def test_an_aborted_operation_says_so(session: Session) -> None:
    def begin(rank: int) -> None:
        if rank == 0:
            mine()["work"] = dist.irecv(on_device(0.0), 1)
            raise ValueError("no")

    def wait(rank: int) -> None:
        if rank == 0:
            mine()["work"].wait()

    session.run(begin)
    error = session.run(wait).error
    is_on_gpu = session.options.semantics == "nccl"  # where wait() holds nothing but a stream
    assert error is None if is_on_gpu else "aborted: an earlier run failed before" in str(error)
    assert_it_works(session)


def test_a_thread_for_which_an_earlier_run_waited_ends_no_later_wait(begin: Begin) -> None:
    def fails(rank: int) -> None:
        pause = threading.Thread(target=time.sleep, args=(1e-6,))
        pause.start()
        if rank == 2:
            raise ValueError
        pause.join()

    def waits(rank: int) -> float:
        y = torch.ones(1)
        dist.all_reduce(y)
        return y.item()

    session = begin()
    for _ in range(2):
        assert "rank 2 of 4 raised ValueError" in str(session.run(fails).error)
        assert session.run(waits).results == dict.fromkeys(range(SIZE), SIZE)


# Reports, which are about one run


def sends(rank: int) -> None:
    dist.send(torch.ones(1), 1)


def receives_from_any(rank: int) -> None:
    dist.recv(torch.ones(1))


def sends_an_object(rank: int) -> None:
    dist.send_object_list([rank], 1)


def sends_behind_another(rank: int) -> None:
    dist.isend(torch.ones(1), 1)
    dist.recv(torch.ones(1), 1)


@pytest.mark.parametrize(
    ("program", "advice"),
    [
        (sends, "1 receive in the same run, or call isend, and wait .* in which rank 1 receives"),
        (receives_from_any, "Let one of ranks 1-3 send in the same run, or call irecv"),
        (sends_an_object, r"Let rank 1 do its part in the same run\.$"),
        (sends_behind_another, "Let rank 1 receive in the same run, or call isend"),
        (total, "Run it on ranks 1-3 as well"),
    ],
)
def test_what_to_do_about_ranks_that_are_not_in_the_run(
    program: Callable[[int], object], advice: str, begin: Begin
) -> None:
    session = begin(p2p_order="pair")
    assert re.search(advice, str(session.run(program, [0]).error))


def reports(*programs: Callable[[int], object]) -> list[str]:
    """Return the error of each run in a session of its own."""
    KEPT[:] = [{} for _ in range(SIZE)]
    with contextlib.closing(Session(SIZE)) as session:
        return [str(session.run(program).error) for program in programs]


def zero_reduces(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(2))


def calls_more_on_some(rank: int) -> None:
    for _ in range(3 if rank else 2):
        dist.all_reduce(torch.zeros(1))


def one_leaves_out_a_barrier(rank: int) -> None:
    if rank != 2:
        dist.barrier()


def send_round(rank: int, to: int = 1) -> None:
    work = dist.isend(torch.ones(1), (rank + to) % SIZE)
    dist.recv(torch.zeros(1), (rank - 1) % SIZE)
    work.wait()


def one_receives(rank: int) -> None:
    if rank == 1:
        dist.recv(torch.zeros(1), 0)


def test_an_error_that_ended_a_run_causes_no_later_deadlock() -> None:
    def calls_a_wrong_root(rank: int) -> None:
        if rank == 1:
            dist.broadcast(torch.zeros(2), src=9)

    errors = reports(calls_a_wrong_root, zero_reduces)
    assert "has no rank 9" in errors[0]
    assert "rank 9" not in errors[1]


def test_a_call_on_the_wrong_group_is_not_blamed_for_a_later_error() -> None:
    def calls_on_a_group_of_others(rank: int) -> None:
        pair = dist.new_group([0, 1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce(torch.zeros(1), group=pair)

    errors = reports(calls_on_a_group_of_others, fails)
    assert "that it is not in" not in errors[1]


def test_calls_of_a_run_that_failed_explain_no_later_deadlock() -> None:
    errors = reports(calls_more_on_some, one_leaves_out_a_barrier)
    assert "was made 3 times on ranks 1-3 and 2 times on rank 0" in errors[0]
    assert "times" not in errors[1]


def test_calls_that_some_rank_has_yet_to_join_explain_a_later_error() -> None:
    def begins_more_on_some(rank: int) -> None:
        for _ in range(3 if rank else 2):
            mine()["work"] = dist.all_reduce(torch.zeros(1), async_op=True)

    errors = reports(begins_more_on_some, lambda _: dist.barrier())
    assert "was made 3 times on ranks 1-3 and 2 times on rank 0" in errors[1]


def test_messages_of_an_earlier_run_do_not_make_a_peer_right() -> None:
    errors = reports(send_round, partial(send_round, to=-1))
    assert errors[1].endswith("is one of the peers wrong?")


def test_a_recv_of_an_earlier_run_has_not_taken_a_message_too_many() -> None:
    def one_receives_from_any(rank: int) -> None:
        if rank == 0:
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.zeros(1))

    errors = reports(one_receives_from_any, one_receives)
    assert "has taken a message" not in errors[1]


def test_a_send_that_a_later_run_received_is_no_longer_unwaited() -> None:
    def one_sends(rank: int) -> None:
        if rank == 0:
            mine()["work"] = dist.isend(torch.ones(1), 1)

    def one_receives_twice(rank: int) -> None:
        one_receives(rank)
        one_receives(rank)

    for later in ([one_receives, one_receives], [one_receives_twice]):
        assert "without waiting" not in reports(one_sends, *later)[-1]


def test_a_thread_that_failed_in_an_earlier_run_causes_no_later_deadlock() -> None:
    def submits_a_task_that_fails(rank: int) -> None:
        mine()["pool"] = ThreadPoolExecutor(1)
        mine()["future"] = mine()["pool"].submit(int, "no")

    errors = reports(submits_a_task_that_fails, zero_reduces)
    assert "ValueError" not in errors[1]


def test_calls_are_counted_in_each_run() -> None:
    errors = reports(send_round, calls_more_on_some, one_leaves_out_a_barrier)
    assert "returned after 2 calls in this run, the last: all_reduce (call 2" in errors[1]
    assert re.search(r"rank 2 +returned without communicating", errors[2])


def test_a_race_is_told_once(session: Session) -> None:
    def races(_: int) -> None:
        if torch.cuda.is_available():
            x = mine()["x"] = torch.ones(4, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                x.add_(1)

    lines = session.run(races).wrong
    assert len(lines) == (session.options.semantics == "nccl")
    assert session.run(total).wrong == []


# Interrupts


def computes(rank: int) -> None:
    while rank == 2:
        pass
    total(rank)


def communicates(rank: int) -> None:
    while True:
        total(rank)


def sums_single(rank: int) -> None:
    while True:
        dist.all_reduce(on_device(float(rank)).float())


def multiplies(_: int) -> None:
    while True:
        torch.ones(100, 100) @ torch.ones(100, 100)


def goes_on(rank: int) -> None:
    for _ in range(30):
        with contextlib.suppress(BaseException):
            computes(2)


def interrupted(session: Session, program: Callable[[int], None], times: int = 1) -> Lap[None]:
    """Run a program until SIGINT comes, as from Ctrl-C or a notebook's button."""

    def interrupt() -> None:
        for number in range(times):
            time.sleep(0.05 if number else 0.2)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return session.run(program)
    finally:
        thread.join()


@pytest.mark.parametrize("program", [computes, communicates, multiplies])
def test_an_endless_run_can_be_interrupted(
    session: Session, program: Callable[[int], None]
) -> None:
    error = interrupted(session, program).error
    assert isinstance(error, KeyboardInterrupt)
    assert "was interrupted at test_session.py:" in str(error)
    assert_it_works(session)


@pytest.mark.parametrize(
    ("endless", "others"),
    [
        (0, "ranks 1-3  not begun"),
        (2, r"ranks 0 and 1  \w+ing  test_session.py:\d+ in total\n  rank 3 +not begun"),
    ],
)
def test_an_interrupt_shows_where_the_other_ranks_are(
    session: Session, endless: int, others: str
) -> None:
    def loops(rank: int) -> None:
        if rank == endless:
            session.interrupt()
        while rank == endless:
            pass
        total(rank)

    text = rf"rank {endless} was .+ in loops\n\nThe other ranks:\n  {others}"
    assert re.fullmatch(text, str(session.run(loops).error))
    assert_it_works(session)


def test_an_interrupt_says_nothing_of_ranks_that_have_only_threads_left(session: Session) -> None:
    def loops(rank: int) -> None:
        if rank == 0:
            threading.Thread(target=time.sleep, args=(1e9,), daemon=True).start()
        if rank == 2:
            time.sleep(1)  # the others have returned by then
            session.interrupt()
        while rank == 2:
            pass

    assert re.fullmatch("rank 2 was interrupted at .+ in loops", str(session.run(loops).error))


def test_an_interrupt_at_the_start_waits_until_all_ranks_run(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        begin = Worker.begin

        def interrupt_and_begin(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            begin(*args)

        patched.setattr(Worker, "begin", interrupt_and_begin)
        assert isinstance(session.run(communicates).error, KeyboardInterrupt)
    assert_it_works(session)


def test_a_rank_that_cannot_be_interrupted_ends_the_session(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_INTERRUPTS", 5)

    def waits_outside(_: int) -> None:
        select.select([], [], [], 0.6)  # in C, like a library's own waiting

    assert isinstance(interrupted(session, waits_outside).error, KeyboardInterrupt)
    message = "cannot go on: rank 0 was interrupted at test_session.*Begin new ones"
    with pytest.raises(RuntimeError, match=message):
        session.run(total)
    wait_until(lambda: not scheduler.STUCK)  # the thread has come back
    assert "RANK" not in os.environ


def test_a_rank_that_cannot_be_interrupted_is_named_though_another_has_failed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_INTERRUPTS", 5)
    session = begin()

    def waits_outside(rank: int) -> None:
        if rank == 1:
            raise ValueError("not here")
        try:
            dist.barrier()
        finally:
            if rank == 0:
                session.interrupt()
                select.select([], [], [], 0.6)

    session.run(waits_outside)
    with pytest.raises(RuntimeError, match="cannot go on: rank 0 was interrupted at"):
        session.run(total)
    wait_until(lambda: not scheduler.STUCK)


def test_a_second_interrupt_leaves_the_world_in_order(session: Session) -> None:
    error = interrupted(session, goes_on, times=2).error
    assert isinstance(error, KeyboardInterrupt)
    assert_it_works(session)


def test_an_interrupt_waits_for_library_code_of_the_simulator(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two ranks, the simulator calls torch; an exception there would lose the baton."""
    source = (
        "def set_dtype(dtype):\n    t = now() + 0.02\n    while now() < t: pass\n    old(dtype)"
    )
    library: dict[str, Any] = {"now": time.perf_counter, "old": torch.set_default_dtype}
    exec(compile(source, torch.__file__, "exec"), library)
    monkeypatch.setattr(torch, "set_default_dtype", library["set_dtype"])

    def begin(rank: int) -> None:
        library["old"](torch.float64 if rank % 2 else torch.float32)

    def look(_: int) -> torch.dtype:
        return torch.get_default_dtype()

    session.run(begin)
    kept = session.run(look).results
    assert isinstance(interrupted(session, sums_single).error, KeyboardInterrupt)
    assert session.run(look).results == kept


# Faults


def dying(at_s: float) -> Faults:
    return Faults(kill_ranks={3: at_s})


def sleeps_and_counts(rank: int) -> int:
    time.sleep(2.0)
    mine()["count"] = mine().get("count", 0) + 1
    return int(mine()["count"])


def test_a_rank_dies_in_the_run_in_which_its_time_comes(begin: Begin) -> None:
    session = begin(faults=dying(5.0))
    for number in (1, 2):
        lap = session.run(sleeps_and_counts)
        assert (lap.error, lap.seconds) == (None, pytest.approx(2.0))
        assert lap.results == dict.fromkeys(range(SIZE), number)
    lap = session.run(sleeps_and_counts)
    assert lap.results == dict.fromkeys(range(3), 3)
    assert re.search(r"^rank 3 is dead(.|\n)*fault at 5.*test_session.py", str(lap.error))


def test_a_fault_in_a_later_run_waits_when_a_run_fails(begin: Begin) -> None:
    session = begin(faults=dying(5.0))
    assert "no" in str(session.run(fails).error)
    assert session.now_s < 1.0
    assert_it_works(session)


@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
def test_later_runs_say_that_a_rank_is_dead_and_others_go_on(begin: Begin, semantics: str) -> None:
    session = begin(faults=dying(1.0), semantics=semantics)
    session.run(sleeps_and_counts)
    for _ in range(2):
        lap = session.run(lambda rank: rank)
        assert lap.results == {0: 0, 1: 1, 2: 2}
        assert "rank 3 is dead" in str(lap.error)
    assert session.run(lambda rank: rank, [0, 2]).error is None
    lap = session.run(lambda rank: rank, [3])
    assert (lap.results, "rank 3 is dead" in str(lap.error)) == ({}, True)
    assert "killed by a fault at 1" in str(session.run(total).error)
    assert session.run(lambda rank: rank, [0]).results == {0: 0}


def test_a_fault_that_is_due_between_two_runs_kills_at_the_start_of_the_next(begin: Begin) -> None:
    session = begin(faults=dying(1.0))
    session.run(sleeps_and_counts, [0])
    lap = session.run(lambda rank: rank)
    assert lap.results == {0: 0, 1: 1, 2: 2}
    assert "killed by a fault at 1" in str(lap.error)


# Threads of the program


def test_a_pool_works_over_several_runs_and_after_errors(session: Session) -> None:
    def submit(rank: int) -> int:
        pool = mine().setdefault("pool", ThreadPoolExecutor(1))
        return int(pool.submit(lambda: rank * 10).result())

    expected = {rank: rank * 10 for rank in range(SIZE)}
    for program in (total, fails, all_receive, leaves_one_out, communicates):
        if program is communicates:
            interrupted(session, program)
        else:
            session.run(program)
        assert session.run(submit).results == expected
    session.run(lambda rank: mine()["pool"].shutdown())


def test_a_thread_goes_on_in_later_runs(session: Session) -> None:
    def begin(rank: int) -> None:
        def beat() -> None:
            while True:
                time.sleep(1.0)
                mine()["beats"] += 1

        mine()["beats"] = 0
        threading.Thread(target=beat).start()

    def look(_: int) -> int:
        time.sleep(10.5)
        return int(mine()["beats"])

    lap = session.run(begin, [0, 1])
    assert (lap.error, lap.seconds) == (None, pytest.approx(0.0, abs=1e-3))
    assert session.run(look, [0]).results[0] in (9, 10, 11)
    assert isinstance(interrupted(session, computes).error, KeyboardInterrupt)
    session.run(fails)
    assert session.run(look, [1]).results[1] in (19, 20, 21, 22)
    assert_it_works(session)


def test_a_thread_that_has_time_left_ends_in_its_run(session: Session) -> None:
    def begin(rank: int) -> None:
        mine()["thread"] = threading.Thread(target=lambda: mine().update(done=rank))
        mine()["thread"].start()

    session.run(begin)
    assert [kept["done"] for kept in KEPT] == [*range(SIZE)]
    assert session.run(lambda _: mine()["thread"].join()).error is None


def receives_in_a_thread(_: int) -> None:
    def receive() -> None:
        x = on_device(0.0)
        dist.recv(x, 1)
        mine()["x"] = x.item()

    mine()["thread"] = threading.Thread(target=receive)
    mine()["thread"].start()
    time.sleep(1.0)


def test_a_thread_that_communicates_may_be_answered_in_a_later_run(session: Session) -> None:
    session.run(receives_in_a_thread, [0])
    session.run(lambda _: dist.send(on_device(7.0), 0), [1])
    session.run(lambda _: mine()["thread"].join(), [0])
    assert KEPT[0]["x"] == 7.0
    assert_it_works(session)


def test_an_error_ends_a_thread_that_communicates(session: Session) -> None:
    session.run(receives_in_a_thread, [0])
    session.run(fails)
    assert session.run(lambda _: mine()["thread"].is_alive(), [0]).results == {0: False}
    assert_it_works(session)


def test_a_thread_of_an_earlier_run_does_not_hide_that_its_rank_has_returned(
    session: Session,
) -> None:
    session.run(lambda _: threading.Thread(target=threading.Event().wait).start())
    error = session.run(lambda rank: rank and all_receive(rank)).error
    assert re.search(r"rank 0 +returned", str(error))


def test_an_endless_thread_can_be_interrupted(session: Session) -> None:
    lap = interrupted(session, lambda _: threading.Thread(target=computes, args=(2,)).start())
    assert isinstance(lap.error, KeyboardInterrupt)
    assert_it_works(session)


def test_closing_ends_threads_of_the_program(session: Session) -> None:
    before = threading.active_count()

    def begin(rank: int) -> None:
        mine()["pool"] = ThreadPoolExecutor(1)
        mine()["pool"].submit(print, end="")
        threading.Thread(target=time.sleep, args=(1e6,)).start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    session.run(begin)
    assert threading.active_count() == before + 3 * SIZE
    session.close()
    assert threading.active_count() == before - SIZE


def test_a_loaders_processes_load_in_later_runs_and_end_with_the_session(begin: Begin) -> None:
    def make(_: int) -> None:
        loader = DataLoader(range(4), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
        mine()["batches"] = iter(loader)

    def load(_: int) -> int:
        return int(next(mine()["batches"]))

    session = begin()
    session.run(make, [0, 2])
    session.run(fails)
    for number in range(2):
        assert session.run(load, [0, 2]).results == {0: number, 2: number}
    processes = [process for kept in KEPT[::2] for process in kept["batches"]._workers]
    session.close()
    assert [process.is_alive() for process in processes] == [False, False]


def test_a_rank_cannot_spawn_because_the_session_has_started_the_ranks(session: Session) -> None:
    error = session.run(lambda _: torch.multiprocessing.spawn(total, nprocs=2)).error  # type: ignore[no-untyped-call]
    assert "rank 0 cannot start processes by torch.multiprocessing.spawn: this code" in str(error)
    assert_it_works(session)


def test_the_process_ends_without_waiting_for_threads_of_ranks() -> None:
    program = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from distlab.sim import Session
kept = []
def begin(rank):
    kept.append(ThreadPoolExecutor(1))
    kept[-1].submit(print)
    threading.Thread(target=time.sleep, args=(1e6,)).start()
Session(2).run(begin)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


# Other threads of the process


def in_another_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_runs_may_come_from_any_thread(session: Session) -> None:
    for _ in range(2):
        in_another_thread(lambda: assert_it_works(session))
        assert_it_works(session)
        assert in_another_thread(lambda: session.run(fails)).error is not None


@pytest.mark.parametrize("program", [computes, communicates])
def test_a_run_in_another_thread_can_be_interrupted(
    session: Session, program: Callable[[int], None]
) -> None:
    def interrupt_and_go_on(rank: int) -> None:
        session.interrupt()
        program(rank)

    error = in_another_thread(lambda: session.run(interrupt_and_go_on)).error
    assert isinstance(error, KeyboardInterrupt)
    session.interrupt()  # between two runs, it does nothing
    assert_it_works(session)


def test_a_run_inside_a_run_is_refused(session: Session) -> None:
    error = session.run(lambda _: session.run(total)).error
    assert "the ranks run a function already" in str(error)
    assert_it_works(session)


# Clean-up after an interrupt


def test_an_interrupt_lets_a_rank_clean_up(session: Session) -> None:
    def cleans_up(_: int) -> None:
        try:
            session.interrupt()
            computes(2)
        finally:
            for _ in range(2_000_000):  # longer than the pause between two attempts
                pass
            mine()["is_clean"] = True

    assert isinstance(session.run(cleans_up).error, KeyboardInterrupt)
    assert KEPT[0] == {"is_clean": True}
    assert_it_works(session)


def test_an_endless_clean_up_is_interrupted_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_SPARED", 20)

    def never_cleans_up(_: int) -> None:
        try:
            session.interrupt()
            computes(2)
        finally:
            computes(2)

    assert isinstance(session.run(never_cleans_up).error, KeyboardInterrupt)
    assert_it_works(session)


# Memory


def test_nothing_piles_up_over_runs(session: Session) -> None:
    def receives_with_a_limit(rank: int) -> None:
        threading.Event().wait(1e-3)
        total(rank)

    session.run(receives_with_a_limit)
    before = kept_by(session)
    for _ in range(20):
        session.run(receives_with_a_limit)
    assert kept_by(session) == before


def kept_by(session: Session) -> tuple[int, ...]:
    world = session._world
    strands = [*world.scheduler.strands()]
    return len(world.scheduler._timers), len(world.trace._rows), len(strands)


def test_what_an_error_aborts_is_freed(session: Session) -> None:
    def fails_with_much_under_way(rank: int) -> None:
        x = torch.ones(1 << 20, device=on_device().device)
        dist.all_reduce(x, async_op=True) if rank else dist.isend(x, 1)
        raise ValueError("no")

    in_use = []
    for _ in range(2):
        session.run(fails_with_much_under_way)
        gc.collect()
        in_use.append(session.live_bytes())
    assert in_use[0] == in_use[1]


def test_closing_frees_what_ranks_hold(session: Session) -> None:
    tensors: list[weakref.ref[Tensor]] = []

    def hold(rank: int) -> None:
        x = mine()["x"] = on_device(1.0)
        dist.all_reduce(x)
        tensors.append(weakref.ref(x))
        threading.Thread(target=lambda: time.sleep(1e6) or x).start()
        raise ValueError("no")

    session.run(hold)
    session.close()
    KEPT.clear()
    gc.collect()
    assert tensors
    assert all(tensor() is None for tensor in tensors)


# The sanitizer


def make_model(rank: int, *, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine().update(model=model, optimizer=optimizer, data=torch.Generator().manual_seed(rank))


def backward(_: int) -> None:
    mine()["model"](torch.randn(8, 64, generator=mine()["data"])).square().mean().backward()


def average(_: int) -> None:
    for parameter in mine()["model"].parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def step(_: int) -> None:
    mine()["optimizer"].step()
    mine()["optimizer"].zero_grad()


def test_a_right_training_in_several_runs_has_no_findings(begin: Begin) -> None:
    session = begin(is_sanitized=True)
    for part in (make_model, *[backward, average, step] * 3):
        lap = session.run(part)
        assert (lap.error, lap.wrong) == (None, [])


def test_a_mistake_made_over_several_runs_is_told_once(begin: Begin) -> None:
    session = begin(is_sanitized=True)
    laps = [session.run(part) for part in (make_model, *[backward, step] * 3)]
    told = [line for lap in laps for line in lap.wrong]
    assert len(told) == len({*told}) >= 1
