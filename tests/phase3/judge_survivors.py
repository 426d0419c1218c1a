"""Judges task 3.17: workers that die, at every moment, and those that are only slow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.sim import Faults, Options
from judging.checks import MEASURED, check_peak, short, uneven
from phase3 import servers as b
from phase3.server_checks import (
    check_bound,
    check_each_gradient_steps,
    check_own_gradient_is_in,
    check_steps_alone,
    check_times,
    late_replies,
    schedule,
    serve,
)
from phase3.servers import BEFORE_PULL, BEFORE_PUSH, CLOSED, SURVIVORS, Plan

TIMEOUT_S = 60e-3
PACES_S = 10e-3, 13e-3, 17e-3, 29e-3
Deaths = Mapping[int, tuple[int, str]]  # place among the workers -> step, and when in it
DEATHS: dict[str, Deaths] = {
    "nobody dies": {},
    "before its first push": {1: (0, BEFORE_PUSH)},
    "between its first push and pull": {3: (0, BEFORE_PULL)},
    "the slowest in the middle": {3: (2, BEFORE_PUSH)},
    "the slowest in the middle, after its push": {3: (3, BEFORE_PULL)},
    "the fastest while its reply is held back": {0: (2, BEFORE_PULL)},
    "at its last step": {1: (5, BEFORE_PUSH)},
    "after its last push": {2: (5, BEFORE_PULL)},
    "two die": {0: (1, BEFORE_PUSH), 3: (1, BEFORE_PULL)},
    "one is left": {0: (4, BEFORE_PULL), 1: (2, BEFORE_PUSH), 3: (0, BEFORE_PUSH)},
    "all die": {i: (i, BEFORE_PUSH) for i in range(4)},
    "all die at once": dict.fromkeys(range(4), (0, BEFORE_PUSH)),
}
IN_PAIRS = "Messages to and from a worker travel in its pair, group=pairs[worker]."
STUCK = (
    "Workers die in this test, and nothing more comes from them. Give every receive and every send "
    "of the server a limit, work.wait(timedelta(seconds=timeout_s)); when it raises a "
    "RuntimeError, take the worker's clock out of the count and wake those that wait for it "
    f"(notify_all). {IN_PAIRS}"
)
STUCK_ALIVE = (
    "Nobody dies here. Whoever waits for the clocks has to be woken after every gradient "
    f"(notify_all), and a thread that ends by an error is taken for a dead worker. {IN_PAIRS}"
)
LATE = (
    "A worker that is dead or slow should hold up no other, but for the bound: give each worker a "
    "thread of its own, hold the lock only to step and to copy, never while you receive or send, "
    "and let a dead worker's clock count no more as soon as it is known to be dead."
)

CLOSES_LATE = (
    "A receive from a worker whose connection closes raises a RuntimeError, Connection closed by "
    "peer, at once: that is a death too, like a limit that passes."
)


def _plan(deaths: Deaths, staleness: int, **settings: Any) -> Plan:
    plan = Plan(
        *(SURVIVORS, (2,), (4, 0, 3, 1), 6, 13, PACES_S),
        arguments=(staleness, TIMEOUT_S),
        deaths={(4, 0, 3, 1)[place]: death for place, death in deaths.items()},
    )
    return replace(plan, **settings)


@task("3.17")
@pytest.mark.parametrize("deaths", DEATHS)
def test_the_others_go_on_without_the_dead(grade: Grade, deaths: str) -> None:
    staleness = grade.random.randrange(2)
    plan = _plan(DEATHS[deaths], staleness)
    by_rank = serve(
        *(grade, plan, STUCK if plan.deaths else STUCK_ALIVE), waits_for_all=not plan.deaths
    )
    _check(plan, by_rank)
    check_times(plan, by_rank, schedule(plan, staleness, TIMEOUT_S), LATE)


def _check(plan: Plan, by_rank: Sequence[Any]) -> None:
    applied = schedule(plan, *plan.arguments).applied
    alive = [worker for worker in plan.workers if worker not in plan.deaths]
    for server in plan.servers:
        found = by_rank[server]
        returned = found["returned"]
        check(
            returned == alive,
            f"server {server} of workers {[*plan.workers]}, {_fates(plan)}: it should return the "
            f"workers that have ended all steps, in this order: {alive}, not {returned}. A worker "
            f"is alive unless nothing comes from it for {plan.arguments[1]:g} s, or its connection "
            "closes.",
        )
        check(
            found["pairs"] == [*plan.workers],
            f"server {server} of workers {[*plan.workers]}: only read pairs, the caller's. "
            f"Afterwards it names {found['pairs']}.",
        )
        check_each_gradient_steps(plan, server, found, applied)
    check_bound(plan, by_rank, plan.arguments[0])
    check_own_gradient_is_in(plan, by_rank)


def _fates(plan: Plan) -> str:
    fates = [f"{w} dies in step {step} {when}" for w, (step, when) in plan.deaths.items()]
    return " and ".join(fates) or "of which none dies"


@task("3.17")
def test_a_slow_optimizer_is_not_entered_twice(grade: Grade) -> None:
    plan = _plan({}, 6, pauses_s=(5e-3,) * 4, step_s=1e-3)
    by_rank = serve(grade, plan, STUCK_ALIVE)
    _check(plan, by_rank)


@task("3.17")
def test_parameters_do_not_change_while_they_are_sent(grade: Grade) -> None:
    plan = _plan({}, 6, pauses_s=(0.0, 1e-3, 2e-3, 3e-3))
    for options in (uneven(grade.random, 5), late_replies(plan)):
        _check(plan, serve(grade, plan, STUCK_ALIVE, options=options))


@task("3.17")
def test_parameters_do_not_change_while_they_are_copied(grade: Grade) -> None:
    plan = _plan({}, 6, pauses_s=(3e-3,) * 4, step_s=1e-3, copy_s=2.5e-3)
    _check(plan, serve(grade, plan, STUCK_ALIVE))


@task("3.17")
@pytest.mark.parametrize("num_workers", [1, 2, 15])
def test_every_worker_is_served_from_the_start(grade: Grade, num_workers: int) -> None:
    workers = tuple(range(1, num_workers + 1))
    plan = Plan(
        *(SURVIVORS, (0,), workers, 2, num_workers + 5),
        pauses_s=(5e-3,) * num_workers,
        arguments=(0, TIMEOUT_S),
    )
    by_rank = serve(grade, plan, f"{STUCK_ALIVE} {num_workers} workers need as many threads.")
    _check(plan, by_rank)


@task("3.17")
def test_a_connection_that_closes_is_noticed_at_once(grade: Grade) -> None:
    long_s = 10.0
    for deaths in ({3: (2, CLOSED)}, {0: (0, CLOSED), 2: (5, CLOSED)}):
        plan = _plan(deaths, 1, arguments=(1, long_s))
        by_rank = serve(grade, plan, STUCK, waits_for_all=False)
        _check(plan, by_rank)
        check_times(plan, by_rank, schedule(plan, 1, long_s), CLOSES_LATE)


@task("3.17")
def test_a_slow_worker_is_not_dead(grade: Grade) -> None:
    for staleness in (0, 6):
        plan = _plan({}, staleness, pauses_s=(5e-3, 5e-3, 5e-3, 50e-3))
        by_rank = serve(grade, plan, STUCK_ALIVE)
        _check(plan, by_rank)
        check_times(plan, by_rank, schedule(plan, staleness, TIMEOUT_S), LATE)


@task("3.17")
def test_a_process_is_killed(grade: Grade) -> None:
    plan = _plan({}, 1)
    options = Options(faults=Faults(kill_ranks={3: 45e-3}))
    run = grade.run(b.serve_and_count, 5, plan, options=options, if_stuck=STUCK)
    found = run.results[2]
    check_steps_alone(plan, run.results)
    returned = found["returned"]
    check(
        returned == [4, 0, 1],
        f"server 2 of workers {[*plan.workers]}, of which 3 is killed: it should return "
        f"[4, 0, 1], not {returned}.",
    )
    applied = {4: 6, 0: 6, 3: 2, 1: 6}
    check_each_gradient_steps(plan, 2, found, applied)


def _long_s(grade: Grade) -> float:
    """More than any worker is silent for; of processes, on a busy machine."""
    return 1.0 if grade.is_simulated else 60.0


@task("3.17", real=True)
def test_a_connection_closes(grade: Grade) -> None:
    for step, when in ((0, BEFORE_PUSH), (2, BEFORE_PUSH), (2, BEFORE_PULL)):
        plan = Plan(
            *(SURVIVORS, (1,), (3, 0, 2), 5, 11),
            arguments=(1, _long_s(grade)),
            deaths={0: (step, when)},
        )
        run = grade.run(b.serve_some_who_leave, 4, plan, if_stuck=STUCK)
        _check(plan, run.results)


@task("3.17", real=True)
def test_a_silent_worker_takes_no_other_with_it(grade: Grade) -> None:
    for timeout_s in (0.5, 4.0, 32.0):
        plan = Plan(
            *(SURVIVORS, (1,), (3, 0, 2), 5, 11),
            arguments=(1, timeout_s),
            deaths={0: (2, BEFORE_PUSH)},
        )
        by_rank = grade.run(b.serve_some_who_stay, 4, plan, if_stuck=STUCK).results
        if max(found["stalled_s"] for found in by_rank) < timeout_s / 4:
            break  # else a worker that lives may have been late: the machine is busy
    _check(plan, by_rank)


@task("3.17", real=True)
def test_nobody_dies(grade: Grade) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        plan = Plan(SURVIVORS, (2, 0), (3, 1), 4, 11, dtype=dtype, arguments=(1, _long_s(grade)))
        _check(plan, serve(grade, plan, STUCK_ALIVE))


@task("3.17")
def test_workers_are_named_by_their_rank_in_the_world(grade: Grade) -> None:
    plan = Plan(
        *(SURVIVORS, (1,), (4, 2), 5, 7, (10e-3, 17e-3)),
        arguments=(1, TIMEOUT_S),
        deaths={2: (2, BEFORE_PUSH)},
    )
    _check(plan, serve(grade, plan, STUCK, world_size=6, waits_for_all=False))


@task("3.17")
def test_every_server_survives_by_itself(grade: Grade) -> None:
    plan = Plan(
        *(SURVIVORS, (0, 3), (1, 2, 4), 5, 11, (10e-3, 17e-3, 13e-3)),
        arguments=(1, TIMEOUT_S),
        deaths={2: (2, BEFORE_PUSH)},
    )
    by_rank = serve(grade, plan, STUCK, waits_for_all=False)
    _check(plan, by_rank)
    check_times(plan, by_rank, schedule(plan, 1, TIMEOUT_S), LATE)


@task("3.17")
def test_survivors_need_three_tensors_each(grade: Grade) -> None:
    plan = Plan(
        *(SURVIVORS, (0,), (1, 2, 3), 4, 50_000, (1e-3, 2e-3, 3e-3)), arguments=(1, TIMEOUT_S)
    )
    run = grade.run(b.serve_and_count, 4, plan, options=MEASURED, if_stuck=STUCK_ALIVE)
    size = plan.num_bytes
    check_peak(
        *(run, [(1 + 3 * 3) * size + 4096, *[3 * size + 4096] * 3]),
        f"Beside the shard of {size} bytes, a server needs at most three more for each of its 3 "
        f"workers. {short(plan.num_steps)} steps need no more than one: use the memory again.",
    )
