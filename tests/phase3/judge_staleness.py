"""Judges task 3.16: the bound in every reply, and that none is held back longer than it asks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import MEASURED, check_peak, of_members, uneven
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import servers as b
from phase3.server_checks import (
    check_bound,
    check_each_gradient_steps,
    check_own_gradient_is_in,
    check_times,
    late_replies,
    schedule,
    serve,
)
from phase3.servers import Plan

BOUNDED = "serve_with_bounded_staleness"
STUCK = (
    "A reply that is held back is sent as soon as the slowest worker's clock allows it: look at "
    "all of them after every gradient, also at that of the worker whose gradient came, and at "
    "the last step too. Clocks count gradients that were applied, so that the slowest worker "
    "never waits."
)
NOT_HELD = (
    "A reply may leave as soon as clocks[worker] <= min(clocks.values()) + staleness, with the "
    "gradients counted that have just been applied; so the slowest worker is answered at once."
)
STALENESSES = [0, 1, 3, 20]


def _plan(grade: Grade, num_workers: int, staleness: int, **settings: Any) -> Plan:
    ranks = [*range(num_workers + 1)]
    server = grade.random.choice(ranks)
    ranks.remove(server)
    num_elements = num_workers + grade.random.randrange(1, 40)
    return Plan(
        *(BOUNDED, (server,), tuple(ranks), 8, num_elements), arguments=(staleness,), **settings
    )


def _check(plan: Plan, by_rank: Sequence[Any]) -> None:
    applied = dict.fromkeys(plan.workers, plan.num_steps)
    check_bound(plan, by_rank, plan.arguments[0])
    for server in plan.servers:
        check_each_gradient_steps(plan, server, by_rank[server], applied)
    check_own_gradient_is_in(plan, by_rank)


@task("3.16")
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("staleness", STALENESSES)
def test_replies_are_held_back_by_the_bound_alone(
    grade: Grade, num_workers: int, staleness: int
) -> None:
    pauses_ms = grade.random.sample([10, 11, 13, 17, 40], num_workers)
    pauses_s = tuple(pause / 1e3 for pause in pauses_ms)
    plan = _plan(grade, num_workers, staleness, pauses_s=pauses_s)
    by_rank = serve(grade, plan, STUCK)
    _check(plan, by_rank)
    check_times(plan, by_rank, schedule(plan, staleness), NOT_HELD)


@task("3.16")
@pytest.mark.parametrize("staleness", [0, 2, 8])
def test_how_far_a_straggler_holds_up_the_others(grade: Grade, staleness: int) -> None:
    place = grade.random.randrange(4)
    pauses_s = tuple(40e-3 if i == place else 10e-3 for i in range(4))
    plan = _plan(grade, 4, staleness, pauses_s=pauses_s)
    by_rank = serve(grade, plan, STUCK)
    _check(plan, by_rank)
    check_times(plan, by_rank, schedule(plan, staleness), NOT_HELD)
    ends_s = [by_rank[worker]["pulls"][-1]["pulled_s"] for worker in plan.workers]
    most_s = max(0, 8 - staleness) * 40e-3
    check(
        min(ends_s) >= min(most_s, max(ends_s)) - 1e-3 or staleness == 8,
        f"staleness {staleness}, and worker {plan.workers[place]} is four times slower: nobody "
        f"should end before {1e3 * most_s:g} ms; one did after {1e3 * min(ends_s):.1f} ms. The "
        "last reply obeys the bound, too.",
    )


@task("3.16")
@pytest.mark.parametrize("above", [-1, 0])
def test_a_worker_that_comes_when_the_others_have_ended(grade: Grade, above: int) -> None:
    plan = _plan(grade, 3, 0, pauses_s=(300e-3, 10e-3, 13e-3))
    staleness = plan.num_steps + above
    plan = replace(plan, arguments=(staleness,))
    by_rank = serve(grade, plan, STUCK)
    _check(plan, by_rank)
    check_times(plan, by_rank, schedule(plan, staleness), NOT_HELD)


@task("3.16", real=True)
@pytest.mark.parametrize("staleness", [0, 1])
def test_bounded_servers_of_every_kind(grade: Grade, staleness: int) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        plan = Plan(BOUNDED, (2, 0), (3, 1), 6, 11, dtype=dtype, arguments=(staleness,))
        _check(plan, serve(grade, plan, STUCK))


@task("3.16", real=True)
def test_a_bounded_server_of_three_workers(grade: Grade) -> None:
    plan = _plan(grade, 3, 1)
    _check(plan, serve(grade, plan, STUCK))


@task("3.16")
def test_bounded_servers_inside_a_group(grade: Grade) -> None:
    plan = Plan(BOUNDED, (1,), (2, 0), 6, 7, pauses_s=(10e-3, 40e-3), arguments=(1,))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.serve_and_count, plan), if_stuck=STUCK_IN_GROUP
    )
    _check(plan, of_members(run))


@task("3.16")
def test_a_bounded_server_with_late_links(grade: Grade) -> None:
    plan = _plan(grade, 4, 1, pauses_s=(0.0, 1e-3, 2e-3, 5e-3))
    for options in (uneven(grade.random, 5), late_replies(plan)):
        _check(plan, serve(grade, plan, STUCK, options=options))


@task("3.16")
def test_replies_that_are_held_back_take_no_memory(grade: Grade) -> None:
    plan = Plan(BOUNDED, (0,), tuple(range(1, 7)), 3, 50_000, arguments=(0,))
    plan = replace(plan, pauses_s=(1e-3, 2e-3, 3e-3, 5e-3, 5e-3, 9e-3))
    run = grade.run(b.serve_and_count, 7, plan, options=MEASURED, if_stuck=STUCK)
    size = plan.num_bytes
    check_peak(
        *(run, [3 * size + 4096] * 7),
        f"Beside the shard of {size} bytes, a server of 6 workers needs at most 2 more. Note whose "
        "reply is held back, and not the parameters: it gets the newest.",
    )
