"""Judges tasks 3.16 to 3.19: servers' steps and replies, waiting, and dead workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, check, check_cost, task
from judging.checks import (
    ON_CPU,
    UNIFORM,
    check_no_collective,
    check_waited,
    rounds_of,
    short,
    uneven,
)
from judging.expect import expect, expect_cost, results_in_group
from judging.groups import MEMBERS
from phase3 import servers as b
from phase3.server_checks import (
    OF_MESSAGES,
    check_served,
    judge,
    judge_memory,
    late_replies,
    own_pulls,
    schedule,
)
from phase3.servers import (
    ASYNCHRONOUS,
    BEFORE_PULL,
    BEFORE_PUSH,
    BOUNDED,
    CLOSED,
    SURVIVORS,
    SYNCHRONOUS,
    Plan,
)

STUCK_WORKERS = (
    "push_pull should start all sends and receives before it waits for any. The keys of gradients "
    "and shards are the servers, each of which may be any rank, and their order differs from "
    "worker to worker. Here a server answers {}. A worker that receives nothing until all its "
    "gradients have been taken blocks a server that other workers need."
)
_EACH = (
    "Each worker pushes num_steps gradients, and waits for a reply to each before it sends the "
    "next: a server receives that many from each worker, and answers every one."
)
IN_PAIRS = "Messages to and from a worker travel in its pair, group=pairs[worker]."
STUCK = {
    SYNCHRONOUS: _EACH,
    ASYNCHRONOUS: _EACH,
    BOUNDED: "As soon as the slowest worker's clock allows it, send the replies that are held "
    "back: look at all of them after every gradient, including the reply to that gradient, and at "
    "the last step too. Clocks count gradients that were applied, so the slowest worker never "
    "waits.",
    SURVIVORS: "No worker dies here. A thread that waits for the clocks has to be woken after "
    "every gradient (notify_all), a thread that ends with an error counts as a dead worker, and "
    f"there are as many threads as workers. {IN_PAIRS}",
}
STUCK_BY_DEATH = (
    "Workers die here, and then send nothing more. Give every receive and send of the server a "
    "limit, work.wait(timedelta(seconds=timeout_s)); when it raises a RuntimeError, stop counting "
    "the worker's clock and wake those that wait for it (notify_all). "
    f"{IN_PAIRS}"
)
NOT_IN_TURN = (
    "No worker should wait for a slower one: receive from whichever worker sends first "
    "(receive_from_any), and answer it at once."
)
NOT_HELD = (
    "A reply may leave as soon as clocks[worker] <= min(clocks.values()) + staleness. The clocks "
    "include the gradients that have just been applied, so the slowest worker is answered at once."
)
LATE = (
    "A dead or slow worker should hold up no other worker, except through the bound: give each "
    "worker a thread of its own, hold the lock only to step and to copy, never while you receive "
    "or send, and stop counting a dead worker's clock as soon as the worker is known to be dead. A "
    "receive from a worker whose connection closes raises a RuntimeError at once."
)
INTO_THE_SAME = "Receive every gradient into the same memory, and copy nothing for later."
PACES_S = 10e-3, 13.1e-3, 41.3e-3, 17.9e-3, 23.3e-3  # no two gradients arrive simultaneously
LARGE = 300_000  # elements; more than 2^20 bytes in 32 bits


# Task 3.16: push_pull

NUM_STEPS, NUM_ELEMENTS = 3, 10


@task("3.16", real=True)
@pytest.mark.parametrize(("num_servers", "num_workers"), [(1, 1), (4, 1), (3, 5), (2, 2)])
def test_a_worker_pushes_to_all_servers_and_pulls(
    grade: Grade, num_servers: int, num_workers: int
) -> None:
    n = num_servers + num_workers
    servers = grade.random.sample(range(n), num_servers)
    when = "once it has received from all workers", "each worker before it receives from the next"
    for dtype, in_turn in (("float32", False), ("bfloat16", False), ("float32", True)):
        run = grade.run(
            *(b.push_and_pull, n, servers, NUM_ELEMENTS, dtype, NUM_STEPS, in_turn),
            cluster=UNIFORM,
            if_stuck=STUCK_WORKERS.format(when[in_turn]),
        )
        _check_pulled(run.results, servers, in_turn=in_turn)
        if grade.is_simulated:
            check_no_collective(run, OF_MESSAGES)
            check_waited(run)
            _check_pushed(run.messages, servers)
            rounds = rounds_of(run, 4 * NUM_ELEMENTS) / NUM_STEPS
            check_cost(
                num_workers > 1 or rounds <= 2.5,
                f"with {num_servers} servers, a worker and short messages, a step should take the "
                f"latency of 2 messages, to the servers and back; it takes that of {rounds:.1f}. "
                "Start all sends to the servers and all receives from them before you wait for "
                "any.",
            )


def _check_pulled(
    by_rank: Sequence[Any], servers: Sequence[int], where: str = "", *, in_turn: bool = False
) -> None:
    workers = [rank for rank in range(len(by_rank)) if rank not in servers]
    here = f"servers {[*servers]}, workers {workers}{where}"
    for rank in workers:
        check(
            not by_rank[rank]["is_changed"],
            f"{here}, worker {rank}: gradients has changed. Receive into shards, and only send "
            "gradients.",
        )
        for step, pull in enumerate(by_rank[rank]["pulls"]):
            total = sum(worker + step for worker in workers)
            answer = float(2 * (rank + step) if in_turn else total)
            for server, span in pull.items():
                expect(
                    f"{here}, worker {rank}, step {step}: the smallest and the largest number in "
                    f"shards[{server}], as sent,",
                    *(span, [answer, answer]),
                    "Receive from each server into its own tensor of shards, and wait for all.",
                )
    for server in servers:
        for step, spans in enumerate(by_rank[server]):
            what = f"{here}, server {server}, step {step}: smallest and largest of each gradient"
            right = [[float(worker + step)] * 2 for worker in workers]
            expect(what, spans, right, "Send each server its own gradient.")


def _check_pushed(messages: Sequence[int], servers: Sequence[int]) -> None:
    ranks, num_servers = range(len(messages)), len(servers)
    counts = [len(messages) - num_servers if rank in servers else num_servers for rank in ranks]
    expect_cost(
        f"servers {[*servers]}, {NUM_STEPS} steps: the number of messages sent per rank",
        *([*messages], [NUM_STEPS * count for count in counts]),
        "Each worker sends one message per step to each of the servers.",
    )


@task("3.16")
def test_a_worker_inside_a_group(grade: Grade) -> None:
    by_rank = results_in_group(grade, b.push_and_pull, [1], 10, "float64", 2, options=ON_CPU)
    _check_pulled(by_rank, [1], f", inside the group {list(MEMBERS)}")


# Promises of all servers


def _plan(grade: Grade, function: str, num_workers: int, **settings: Any) -> Plan:
    """Make a plan for one server; draw its rank and the size of its shard."""
    ranks = [*range(num_workers + 1)]
    server = grade.random.choice(ranks)
    ranks.remove(server)
    num_elements = num_workers + grade.random.randrange(1, 40)
    plan = Plan(function, (server,), tuple(ranks), 4, num_elements, PACES_S[:num_workers])
    return replace(plan, **settings)


def _judge_kinds(grade: Grade, function: str, *arguments: Any) -> None:
    """Judge a function with two servers and two workers, and with shards of several dtypes."""
    for dtype in ("float32", "float64", "bfloat16"):
        plan = Plan(function, (2, 0), (3, 1), 4, 11, dtype=dtype, arguments=arguments)
        judge(grade, plan, STUCK[function])


def _tests_of(
    number: str, name: str, function: str, num_extra: int, cause: str, *arguments: Any
) -> dict[str, Callable[..., None]]:
    """Return tests of the promises shared by all functions that use a single group.

    Args:
        number: The number of the function's task.
        name: The beginning of each test's name, after ``test_``.
        function: The name of the function.
        num_extra: The number of tensors that a server may hold besides its shard.
        cause: The likely cause if a server holds more.
        arguments: The function's arguments after ``num_steps``.
    """

    def kinds(grade: Grade) -> None:
        _judge_kinds(grade, function, *arguments)

    def group(grade: Grade) -> None:
        plan = Plan(function, (1,), (2, 0), 6, 7, (10e-3, 40e-3), arguments)
        check_served(
            *(plan, results_in_group(grade, b.serve_and_count, plan, options=ON_CPU)),
            f", inside the group {list(MEMBERS)}",
        )

    def links(grade: Grade) -> None:
        pauses_s = (0.0, 1e-3, 2e-3, 5e-3)
        plan = _plan(grade, function, 4, pauses_s=pauses_s, arguments=arguments)
        for options in (uneven(grade.random, 5), late_replies(plan)):
            judge(grade, plan, STUCK[function], options=options)

    def memory(grade: Grade) -> None:
        pauses_s = (1e-3, 2e-3, 3e-3, 5e-3, 5e-3, 9e-3)
        plan = Plan(function, (0,), tuple(range(1, 7)), 3, LARGE, pauses_s, arguments)
        judge_memory(grade, plan, num_extra, cause)

    return {
        f"test_{name}_servers_of_every_kind": task(number, real=True)(kinds),
        f"test_{name}_servers_inside_a_group": task(number)(group),
        f"test_{name}_servers_with_late_links": task(number)(links),
        f"test_{name}_servers_need_little_memory": task(number)(memory),
    }


# Task 3.16: serve_synchronously

globals().update(_tests_of("3.16", "synchronous", SYNCHRONOUS, 3, INTO_THE_SAME))


@task("3.16")
@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_a_synchronous_server_steps_with_the_mean(grade: Grade, num_workers: int) -> None:
    judge(grade, _plan(grade, SYNCHRONOUS, num_workers, pauses_s=()), STUCK[SYNCHRONOUS])


@task("3.16")
def test_a_synchronous_step_takes_a_message_in_and_one_out_per_worker(grade: Grade) -> None:
    plan = Plan(SYNCHRONOUS, (0,), (1, 2, 3, 4), 3, LARGE)
    run = grade.run(b.serve_and_count, 5, plan, cluster=UNIFORM, if_stuck=STUCK[SYNCHRONOUS])
    rounds = rounds_of(run, plan.num_bytes) / plan.num_steps
    check_cost(
        rounds <= 8.1,
        f"with 4 workers, a step should take the time of 8 messages, 4 in and 4 out; yours takes "
        f"that of {rounds:.1f}. Does each tensor travel once, in its own dtype?",
    )


# Task 3.17: serve_asynchronously

globals().update(_tests_of("3.17", "asynchronous", ASYNCHRONOUS, 2, INTO_THE_SAME))


@task("3.17")
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_each_gradient_is_a_step_and_is_answered(grade: Grade, num_workers: int) -> None:
    plan = _plan(grade, ASYNCHRONOUS, num_workers, num_steps=6)
    by_rank = judge(grade, plan, STUCK[ASYNCHRONOUS], if_late=NOT_IN_TURN)
    right = schedule(plan)
    for worker, step, server, counts in own_pulls(plan, by_rank):
        at_s = right.pulls_s[worker][step]
        newest = [sum(t <= at_s for t in right.pushes_s[other]) for other in plan.workers]
        check(
            counts == newest,
            f"worker {worker}: the reply of server {server} to its gradient {step} should be the "
            f"newest parameters. By then, {newest} gradients of workers {[*plan.workers]} had "
            f"come; the reply has {short(counts)} of them. Take gradients as they come, and answer "
            "each of them at once.",
        )


# Task 3.18: serve_with_bounded_staleness

NOTED = "Remember only which workers wait for a reply, not the parameters: they get the newest."
globals().update(_tests_of("3.18", "bounded", BOUNDED, 2, NOTED, 1))


@task("3.18")
@pytest.mark.parametrize(
    ("staleness", "pauses_ms"),
    [
        (0, (10, 13, 17, 40)),
        (1, (10, 13, 11)),
        (2, (10, 40, 10, 10)),
        (0, (10,)),
        (7, (300, 10, 13)),  # the first gradient of the slowest arrives after the others end
        (8, (300, 10, 13)),
    ],
)
def test_replies_are_held_back_by_the_bound_alone(
    grade: Grade, staleness: int, pauses_ms: tuple[int, ...]
) -> None:
    pauses_s = tuple(pause_ms / 1e3 for pause_ms in pauses_ms)
    settings = {"pauses_s": pauses_s, "num_steps": 8, "arguments": (staleness,)}
    plan = _plan(grade, BOUNDED, len(pauses_ms), **settings)
    judge(grade, plan, STUCK[BOUNDED], if_late=NOT_HELD)


# Task 3.19: serve_survivors

TIMEOUT_S = 60e-3
LONG_S = 10.0
Deaths = Mapping[int, tuple[int, str]]  # index among the workers -> step, and moment in it
DEATHS: dict[str, Deaths] = {
    "before its first push": {1: (0, BEFORE_PUSH)},
    "between its first push and pull": {3: (0, BEFORE_PULL)},
    "the slowest in the middle": {3: (2, BEFORE_PUSH)},
    "the fastest while its reply is held back": {0: (2, BEFORE_PULL)},
    "at its last step": {1: (5, BEFORE_PUSH)},
    "after its last push": {2: (5, BEFORE_PULL)},
    "two die": {0: (1, BEFORE_PUSH), 3: (1, BEFORE_PULL)},
    "all die at once": dict.fromkeys(range(4), (0, BEFORE_PUSH)),
    "two close their connections": {0: (0, CLOSED), 2: (5, CLOSED)},
}


def _survivors(deaths: Deaths, staleness: int, **settings: Any) -> Plan:
    plan = Plan(
        *(SURVIVORS, (2,), (4, 0, 3, 1), 6, 13, (10e-3, 13e-3, 17e-3, 29e-3)),
        arguments=(staleness, TIMEOUT_S),
        deaths={(4, 0, 3, 1)[place]: death for place, death in deaths.items()},
    )
    return replace(plan, **settings)


def _judge_survivors(grade: Grade, plan: Plan, **settings: Any) -> None:
    judge(grade, plan, STUCK_BY_DEATH if plan.deaths else STUCK[SURVIVORS], **settings)


@task("3.19")
@pytest.mark.parametrize("deaths", DEATHS)
def test_the_others_go_on_without_the_dead(grade: Grade, deaths: str) -> None:
    plan = _survivors(DEATHS[deaths], grade.random.randrange(2))
    # A closed connection is noticed immediately, not only after the time limit.
    if "close" in deaths:
        plan = replace(plan, arguments=(1, LONG_S))
    _judge_survivors(grade, plan, if_late=LATE)


@task("3.19")
def test_parameters_do_not_change_while_they_are_sent(grade: Grade) -> None:
    plan = _survivors({}, 6, pauses_s=(0.0, 1e-3, 2e-3, 3e-3))
    for options in (uneven(grade.random, 5), late_replies(plan)):
        _judge_survivors(grade, plan, options=options)


@task("3.19")
def test_parameters_do_not_change_while_they_are_copied(grade: Grade) -> None:
    _judge_survivors(grade, _survivors({}, 6, pauses_s=(3e-3,) * 4, step_s=1e-3, copy_s=2.5e-3))


@task("3.19")
def test_every_worker_is_served_from_the_start(grade: Grade) -> None:
    plan = Plan(SURVIVORS, (0,), tuple(range(1, 16)), 2, 20, (5e-3,) * 15, (0, TIMEOUT_S))
    _judge_survivors(grade, plan)


@task("3.19")
@pytest.mark.parametrize("staleness", [0, 6])
def test_a_slow_worker_is_not_dead(grade: Grade, staleness: int) -> None:
    plan = _survivors({}, staleness, pauses_s=(5e-3, 5e-3, 5e-3, 50e-3))
    _judge_survivors(grade, plan, if_late=LATE)


@task("3.19", real=True)
def test_a_connection_closes(grade: Grade) -> None:
    for step, when in ((0, BEFORE_PUSH), (2, BEFORE_PUSH), (2, BEFORE_PULL)):
        plan = Plan(
            *(SURVIVORS, (1,), (3, 0, 2), 5, 11),
            arguments=(1, _long_s(grade)),
            deaths={0: (step, when)},
        )
        run = grade.run(*(b.serve_some_who_leave, 4, plan), options=ON_CPU, if_stuck=STUCK_BY_DEATH)
        check_served(plan, run.results)


def _long_s(grade: Grade) -> float:
    """Return a time limit longer than a live worker's silence, even on a busy machine."""
    return 1.0 if grade.is_simulated else 60.0


@task("3.19", real=True)
def test_nobody_dies(grade: Grade) -> None:
    _judge_kinds(grade, SURVIVORS, 1, _long_s(grade))


@task("3.19")
def test_every_server_survives_by_itself(grade: Grade) -> None:
    """Workers are named by their ranks in the world; rank 2 is neither server nor worker."""
    plan = Plan(
        *(SURVIVORS, (0, 3), (1, 5, 4), 5, 11, (10e-3, 17e-3, 13e-3)),
        arguments=(1, TIMEOUT_S),
        deaths={5: (2, BEFORE_PUSH)},
    )
    _judge_survivors(grade, plan, if_late=LATE, world_size=6)


@task("3.19")
def test_survivors_need_three_tensors_each(grade: Grade) -> None:
    plan = Plan(*(SURVIVORS, (0,), (1, 2, 3), 4, LARGE), (1e-3, 2e-3, 3e-3), (1, TIMEOUT_S))
    judge_memory(grade, plan, 3 * 3, "Those are 3 for each worker: use the memory again.")
