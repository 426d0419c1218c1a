"""Judges tasks 3.14 to 3.16: steps and replies of servers, who waits for whom, and messages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import (
    BYTE_S,
    LATENCY_S,
    UNIFORM,
    check_no_collective,
    check_waited,
    of_members,
    rounds_of,
    short,
    uneven,
)
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import servers as b
from phase3.server_checks import (
    OF_MESSAGES,
    judge,
    judge_in_group,
    judge_memory,
    late_replies,
    own_pulls,
    schedule,
)
from phase3.servers import ASYNCHRONOUS, BOUNDED, SYNCHRONOUS, Plan

STUCK_WORKERS = (
    "push_pull should start all sends and receives before it waits for any, each with the server "
    "that gradients and shards name, which may be any rank: each worker names the servers in "
    "another order, and each server answers when it has heard from all workers."
)
STUCK_IN_TURN = (
    "Here a server answers a worker before it hears from the next. push_pull should start all "
    "sends and receives before it waits for any: a worker that receives nothing until all its "
    "gradients have been taken keeps a server waiting for which others wait."
)
_EACH = (
    "Each worker pushes num_steps gradients, and waits for a reply to each before it sends the "
    "next: a server receives that many from each worker, and answers every one."
)
STUCK = {
    SYNCHRONOUS: _EACH,
    ASYNCHRONOUS: _EACH,
    BOUNDED: "A reply that is held back is sent as soon as the slowest worker's clock allows it: "
    "look at all of them after every gradient, also at that of the worker whose gradient came, and "
    "at the last step too. Clocks count gradients that were applied, so that the slowest worker "
    "never waits.",
}
NOT_HELD = (
    "A reply may leave as soon as clocks[worker] <= min(clocks.values()) + staleness, with the "
    "gradients counted that have just been applied; so the slowest worker is answered at once."
)
NOT_IN_TURN = (
    "One worker is four times slower, and no other should wait for it: receive from whoever sends "
    "first (receive_from_any), and answer that one at once."
)
PACES_S = 10e-3, 13.1e-3, 41.3e-3, 17.9e-3, 23.3e-3  # no two gradients arrive at the same time
LARGE = 300_000  # elements, of more than 2^20 bytes in 32 bits
DTYPES = "float32", "float64", "bfloat16"


# 3.14 push_pull


@task("3.14", real=True)
@pytest.mark.parametrize(("num_servers", "num_workers"), [(1, 1), (2, 2), (3, 1)])
def test_a_worker_pushes_to_all_servers_and_pulls(
    grade: Grade, num_servers: int, num_workers: int
) -> None:
    _check_push_and_pull(grade, num_servers, num_workers)


@task("3.14")
def test_five_workers_push_to_three_servers_and_pull(grade: Grade) -> None:
    _check_push_and_pull(grade, 3, 5)


def _check_push_and_pull(grade: Grade, num_servers: int, num_workers: int) -> None:
    n = num_servers + num_workers
    servers = grade.random.sample(range(n), num_servers)
    for dtype in ("float32", "bfloat16"):
        run = grade.run(
            *(b.push_and_pull, n, servers, 10, dtype, 3), cluster=UNIFORM, if_stuck=STUCK_WORKERS
        )
        _check_pulled(run.results, servers)
        if grade.is_simulated:
            check_no_collective(run, OF_MESSAGES)
            check_waited(run)
            _check_pushed(run.messages, servers)


def _check_pulled(
    by_rank: Sequence[Any], servers: Sequence[int], where: str = "", *, in_turn: bool = False
) -> None:
    workers = [rank for rank in range(len(by_rank)) if rank not in servers]
    for rank in workers:
        here = f"servers {[*servers]}, workers {workers}, worker {rank}{where}"
        check(
            not by_rank[rank]["is_changed"],
            f"{here}: gradients has changed. Receive into shards, and only send gradients.",
        )
        for step, pull in enumerate(by_rank[rank]["pulls"]):
            total = sum(worker + step for worker in workers)
            answer = float(2 * (rank + step) if in_turn else total)
            for server, span in pull.items():
                check(
                    span == [answer, answer],
                    f"{here}, step {step}: shards[{server}] should hold what server {server} sent, "
                    f"{answer:g} everywhere; it holds {span} (least and greatest). Receive from "
                    "each server into its own tensor of shards, and wait for all of them.",
                )
    for server in servers:
        for step, spans in enumerate(by_rank[server]):
            wanted = [[float(worker + step)] * 2 for worker in workers]
            check(
                spans == wanted,
                f"server {server}, step {step}: gradients of {wanted} should arrive from the "
                f"workers (least and greatest), not {spans}. Send each server its own gradient.",
            )


def _check_pushed(messages: Sequence[int], servers: Sequence[int]) -> None:
    num_workers = len(messages) - len(servers)
    wanted = [
        3 * (num_workers if rank in servers else len(servers)) for rank in range(len(messages))
    ]
    check(
        [*messages] == wanted,
        f"in 3 steps, each worker should send one message per step to each of the servers "
        f"{[*servers]}: messages sent per rank should be {wanted}, not {[*messages]}.",
    )


@task("3.14")
@pytest.mark.parametrize(("num_servers", "num_workers"), [(2, 2), (3, 5)])
def test_servers_may_answer_one_worker_after_the_other(
    grade: Grade, num_servers: int, num_workers: int
) -> None:
    servers = grade.random.sample(range(num_servers + num_workers), num_servers)
    body = (b.push_and_pull, num_servers + num_workers, servers, 10, "float32", 3, True)
    _check_pulled(grade.run(*body, if_stuck=STUCK_IN_TURN).results, servers, in_turn=True)


@task("3.14")
def test_all_servers_work_at_the_same_time(grade: Grade) -> None:
    num_steps, servers = 4, [4, 0, 1, 3]
    run = grade.run(
        *(b.push_and_pull, 5, servers, 10, "float32", num_steps),
        cluster=UNIFORM,
        if_stuck=STUCK_WORKERS,
    )
    _check_pulled(run.results, servers)
    rounds = rounds_of(run, 4 * 10) / num_steps
    check(
        rounds <= 2.5,
        "with 4 servers and short messages, a step should take the latency of 2 messages, to the "
        f"servers and back; it takes that of {rounds:.1f}. Start to send to all servers and to "
        "receive from all of them before you wait for any.",
    )


@task("3.14")
def test_a_worker_inside_a_group(grade: Grade) -> None:
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.push_and_pull, [1], 10, "float64", 2),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_pulled(of_members(run), [1], f", inside the group {list(MEMBERS)}")


# What all servers promise


def _plan(grade: Grade, function: str, num_workers: int, **settings: Any) -> Plan:
    """Draw who serves, and how large the shard is."""
    ranks = [*range(num_workers + 1)]
    server = grade.random.choice(ranks)
    ranks.remove(server)
    num_elements = num_workers + grade.random.randrange(1, 40)
    plan = Plan(function, (server,), tuple(ranks), 4, num_elements, PACES_S[:num_workers])
    return replace(plan, **settings)


def _judge_kinds(grade: Grade, function: str, *arguments: Any) -> None:
    """Judge two servers and two workers, with shards of every dtype."""
    for dtype in DTYPES:
        plan = Plan(function, (2, 0), (3, 1), 4, 11, dtype=dtype, arguments=arguments)
        judge(grade, plan, STUCK[function])


def _judge_late_links(grade: Grade, function: str, num_workers: int, *arguments: Any) -> None:
    pauses_s = (0.0, 1e-3, 2e-3, 5e-3)[:num_workers]
    plan = _plan(grade, function, num_workers, pauses_s=pauses_s, arguments=arguments)
    for options in (uneven(grade.random, num_workers + 1), late_replies(plan)):
        judge(grade, plan, STUCK[function], options=options)


def _judge_memory(grade: Grade, function: str, num_extra: int, cause: str, *args: Any) -> None:
    pauses_s = (1e-3, 2e-3, 3e-3, 5e-3, 5e-3, 9e-3)
    plan = Plan(function, (0,), tuple(range(1, 7)), 3, LARGE, pauses_s, args)
    judge_memory(grade, plan, num_extra, cause)


INTO_THE_SAME = "Receive every gradient into the same memory, and copy nothing for later."


# 3.14 serve_synchronously


@task("3.14")
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7])
def test_a_synchronous_server_steps_with_the_mean(grade: Grade, num_workers: int) -> None:
    judge(grade, _plan(grade, SYNCHRONOUS, num_workers, pauses_s=()), STUCK[SYNCHRONOUS])


@task("3.14", real=True)
def test_synchronous_servers_of_every_kind(grade: Grade) -> None:
    _judge_kinds(grade, SYNCHRONOUS)


@task("3.14")
def test_synchronous_servers_inside_a_group(grade: Grade) -> None:
    judge_in_group(grade, Plan(SYNCHRONOUS, (1,), (2, 0), 3, 7))


@task("3.14")
def test_a_synchronous_server_with_late_links(grade: Grade) -> None:
    _judge_late_links(grade, SYNCHRONOUS, 3)


@task("3.14")
def test_a_synchronous_step_takes_a_message_in_and_one_out_per_worker(grade: Grade) -> None:
    plan = Plan(SYNCHRONOUS, (0,), (1, 2, 3, 4), 3, 400_000)
    run = grade.run(b.serve_and_count, 5, plan, cluster=UNIFORM, if_stuck=STUCK[SYNCHRONOUS])
    rounds = run.seconds / plan.num_steps / (LATENCY_S + plan.num_bytes * BYTE_S)
    check(
        rounds <= 8.1,
        f"with 4 workers, a step should take the time of 8 messages, 4 in and 4 out; yours takes "
        f"that of {rounds:.1f}. Does each tensor travel once, in its own dtype?",
    )


@task("3.14")
def test_a_synchronous_server_needs_three_tensors(grade: Grade) -> None:
    _judge_memory(grade, SYNCHRONOUS, 3, INTO_THE_SAME)


# 3.15 serve_asynchronously


@task("3.15")
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_each_gradient_is_a_step_and_is_answered(grade: Grade, num_workers: int) -> None:
    plan = _plan(grade, ASYNCHRONOUS, num_workers)
    by_rank = judge(grade, plan, STUCK[ASYNCHRONOUS])
    right = schedule(plan)
    for worker, step, server, counts in own_pulls(plan, by_rank):
        at_s = right.pulls_s[worker][step]
        newest = [sum(t <= at_s for t in right.pushes_s[other]) for other in plan.workers]
        check(
            counts == newest,
            f"worker {worker}: the reply of server {server} to its gradient {step} should be the "
            f"newest parameters. {newest} gradients of workers {[*plan.workers]} had come by then; "
            f"{short(counts)} are in it. Take gradients as they come, and answer each of them at "
            "once.",
        )


@task("3.15")
def test_a_straggler_does_not_delay_the_others(grade: Grade) -> None:
    judge(grade, _straggling(grade, ASYNCHRONOUS), STUCK[ASYNCHRONOUS], if_late=NOT_IN_TURN)


def _straggling(grade: Grade, function: str, *arguments: Any) -> Plan:
    """Draw a plan for four workers; one is four times slower."""
    place = grade.random.randrange(4)
    pauses_s = tuple(40e-3 if i == place else 10e-3 for i in range(4))
    return _plan(grade, function, 4, pauses_s=pauses_s, num_steps=8, arguments=arguments)


@task("3.15", real=True)
def test_asynchronous_servers_of_every_kind(grade: Grade) -> None:
    _judge_kinds(grade, ASYNCHRONOUS)


@task("3.15")
def test_asynchronous_servers_inside_a_group(grade: Grade) -> None:
    judge_in_group(grade, Plan(ASYNCHRONOUS, (1,), (2, 0), 3, 7))


@task("3.15")
def test_an_asynchronous_server_with_late_links(grade: Grade) -> None:
    _judge_late_links(grade, ASYNCHRONOUS, 4)


@task("3.15")
def test_an_asynchronous_server_needs_two_tensors(grade: Grade) -> None:
    _judge_memory(grade, ASYNCHRONOUS, 2, INTO_THE_SAME)


# 3.16 serve_with_bounded_staleness


def _judge_bounded(grade: Grade, plan: Plan) -> list[Any]:
    return judge(grade, plan, STUCK[BOUNDED], if_late=NOT_HELD)


@task("3.16")
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 3, 20])
def test_replies_are_held_back_by_the_bound_alone(
    grade: Grade, num_workers: int, staleness: int
) -> None:
    pauses_s = tuple(grade.random.sample([10e-3, 11e-3, 13e-3, 17e-3, 40e-3], num_workers))
    plan = _plan(grade, BOUNDED, num_workers, pauses_s=pauses_s, num_steps=8)
    _judge_bounded(grade, replace(plan, arguments=(staleness,)))


@task("3.16")
@pytest.mark.parametrize("staleness", [0, 2, 8])
def test_how_far_a_straggler_holds_up_the_others(grade: Grade, staleness: int) -> None:
    plan = _straggling(grade, BOUNDED, staleness)
    by_rank = _judge_bounded(grade, plan)
    ends_s = [by_rank[worker]["pulls"][-1]["pulled_s"] for worker in plan.workers]
    most_s = max(0, 8 - staleness) * 40e-3
    check(
        min(ends_s) >= min(most_s, max(ends_s)) - 1e-3 or staleness == 8,
        f"staleness {staleness}, and one worker is four times slower: none should end before "
        f"{1e3 * most_s:g} ms; one did after {1e3 * min(ends_s):.1f} ms. The last reply obeys the "
        "bound, too.",
    )


@task("3.16")
@pytest.mark.parametrize("above", [-1, 0])
def test_a_worker_that_comes_when_the_others_have_ended(grade: Grade, above: int) -> None:
    plan = _plan(grade, BOUNDED, 3, pauses_s=(300e-3, 10e-3, 13e-3), num_steps=8)
    _judge_bounded(grade, replace(plan, arguments=(plan.num_steps + above,)))


@task("3.16", real=True)
@pytest.mark.parametrize("staleness", [0, 1])
def test_bounded_servers_of_every_kind(grade: Grade, staleness: int) -> None:
    _judge_kinds(grade, BOUNDED, staleness)


@task("3.16")
def test_bounded_servers_inside_a_group(grade: Grade) -> None:
    judge_in_group(grade, Plan(BOUNDED, (1,), (2, 0), 6, 7, (10e-3, 40e-3), (1,)))


@task("3.16")
def test_a_bounded_server_with_late_links(grade: Grade) -> None:
    _judge_late_links(grade, BOUNDED, 4, 1)


@task("3.16")
def test_replies_that_are_held_back_take_no_memory(grade: Grade) -> None:
    _judge_memory(
        *(grade, BOUNDED, 2),
        "Note whose reply is held back, and not the parameters: it gets the newest.",
        0,
    )
