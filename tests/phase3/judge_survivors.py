"""Judges task 3.17: workers that die, at every moment, and those that are only slow."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, task
from judging.checks import uneven
from phase3 import servers as b
from phase3.server_checks import (
    check_served,
    judge,
    judge_memory,
    late_replies,
)
from phase3.servers import BEFORE_PULL, BEFORE_PUSH, CLOSED, SURVIVORS, Plan

TIMEOUT_S = 60e-3
PACES_S = 10e-3, 13e-3, 17e-3, 29e-3
Deaths = Mapping[int, tuple[int, str]]  # place among the workers -> step, moment in it
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


def _judge(grade: Grade, plan: Plan, **settings: Any) -> None:
    judge(grade, plan, STUCK if plan.deaths else STUCK_ALIVE, **settings)


@task("3.17")
@pytest.mark.parametrize("deaths", DEATHS)
def test_the_others_go_on_without_the_dead(grade: Grade, deaths: str) -> None:
    _judge(grade, _plan(DEATHS[deaths], grade.random.randrange(2)), if_late=LATE)


@task("3.17")
def test_a_slow_optimizer_is_not_entered_twice(grade: Grade) -> None:
    _judge(grade, _plan({}, 6, pauses_s=(5e-3,) * 4, step_s=1e-3))


@task("3.17")
def test_parameters_do_not_change_while_they_are_sent(grade: Grade) -> None:
    plan = _plan({}, 6, pauses_s=(0.0, 1e-3, 2e-3, 3e-3))
    for options in (uneven(grade.random, 5), late_replies(plan)):
        _judge(grade, plan, options=options)


@task("3.17")
def test_parameters_do_not_change_while_they_are_copied(grade: Grade) -> None:
    _judge(grade, _plan({}, 6, pauses_s=(3e-3,) * 4, step_s=1e-3, copy_s=2.5e-3))


@task("3.17")
@pytest.mark.parametrize("num_workers", [1, 2, 15])
def test_every_worker_is_served_from_the_start(grade: Grade, num_workers: int) -> None:
    workers = tuple(range(1, num_workers + 1))
    plan = Plan(
        *(SURVIVORS, (0,), workers, 2, num_workers + 5),
        pauses_s=(5e-3,) * num_workers,
        arguments=(0, TIMEOUT_S),
    )
    judge(grade, plan, f"{STUCK_ALIVE} {num_workers} workers need as many threads.")


@task("3.17")
def test_a_connection_that_closes_is_noticed_at_once(grade: Grade) -> None:
    for deaths in ({3: (2, CLOSED)}, {0: (0, CLOSED), 2: (5, CLOSED)}):
        _judge(grade, _plan(deaths, 1, arguments=(1, 10.0)), if_late=CLOSES_LATE)


@task("3.17")
def test_a_slow_worker_is_not_dead(grade: Grade) -> None:
    for staleness in (0, 6):
        _judge(grade, _plan({}, staleness, pauses_s=(5e-3, 5e-3, 5e-3, 50e-3)), if_late=LATE)


def _long_s(grade: Grade) -> float:
    """Return more than any worker is silent for; on processes, on a busy machine."""
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
        check_served(plan, run.results)


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
            break  # otherwise a living worker may have been late: the machine is busy
    check_served(plan, by_rank)


@task("3.17", real=True)
def test_nobody_dies(grade: Grade) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        _judge(
            grade,
            Plan(SURVIVORS, (2, 0), (3, 1), 4, 11, dtype=dtype, arguments=(1, _long_s(grade))),
        )


@task("3.17")
def test_every_server_survives_by_itself(grade: Grade) -> None:
    """Workers are named by their ranks in the world; rank 2 is neither server nor worker."""
    plan = Plan(
        *(SURVIVORS, (0, 3), (1, 5, 4), 5, 11, (10e-3, 17e-3, 13e-3)),
        arguments=(1, TIMEOUT_S),
        deaths={5: (2, BEFORE_PUSH)},
    )
    _judge(grade, plan, if_late=LATE, world_size=6)


@task("3.17")
def test_survivors_need_three_tensors_each(grade: Grade) -> None:
    plan = Plan(
        *(SURVIVORS, (0,), (1, 2, 3), 4, 300_000, (1e-3, 2e-3, 3e-3)), arguments=(1, TIMEOUT_S)
    )
    judge_memory(grade, plan, 3 * 3, "Those are 3 for each worker: use the memory again.")
