"""Judges tasks 3.14 and 3.15: what the optimizer steps with, who waits for whom, and messages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import (
    BYTE_S,
    LATENCY_S,
    MEASURED,
    UNIFORM,
    check_no_collective,
    check_peak,
    check_waited,
    of_members,
    rounds_of,
    short,
    uneven,
)
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase3 import server_training as t
from phase3 import servers as b
from phase3.server_checks import (
    OF_MESSAGES,
    check_each_gradient_steps,
    check_own_gradient_is_in,
    check_times,
    is_about,
    late_replies,
    own_pulls,
    schedule,
    serve,
)
from phase3.servers import Plan

SYNCHRONOUS, ASYNCHRONOUS = "serve_synchronously", "serve_asynchronously"
STUCK = (
    "Each worker pushes num_steps gradients, and waits for a reply to each before it sends the "
    "next: a server receives that many from each worker, and answers every one."
)
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
SLACK_BYTES = 4096


def _plan(grade: Grade, function: str, num_workers: int, **settings: Any) -> Plan:
    """Draw who serves, how many steps there are, and how large the shard is."""
    ranks = [*range(num_workers + 1)]
    server = grade.random.choice(ranks)
    ranks.remove(server)
    num_elements = num_workers + grade.random.randrange(1, 40)
    return Plan(function, (server,), tuple(ranks), 4, num_elements, **settings)


def _for_group(function: str) -> Plan:
    """Rank 1 of the group serves ranks 2 and 0."""
    return Plan(function, (1,), (2, 0), 3, 7)


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
            *(b.push_and_pull, n, servers, 10, dtype, 3),
            cluster=UNIFORM,
            if_stuck=STUCK_WORKERS,
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
    _check_arrived(by_rank, servers, workers)


def _check_arrived(by_rank: Sequence[Any], servers: Sequence[int], workers: Sequence[int]) -> None:
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
    run = grade.run(
        *(b.push_and_pull, num_servers + num_workers, servers, 10, "float32", 3, True),
        if_stuck=STUCK_IN_TURN,
    )
    _check_pulled(run.results, servers, in_turn=True)


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


# 3.14 serve_synchronously


@task("3.14")
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7])
def test_a_synchronous_server_steps_with_the_mean(grade: Grade, num_workers: int) -> None:
    plan = _plan(grade, SYNCHRONOUS, num_workers)
    _check_means(plan, serve(grade, plan, STUCK))


def _check_means(plan: Plan, by_rank: Sequence[Any], where: str = "") -> None:
    num_workers = len(plan.workers)
    mean = [1 / num_workers] * num_workers
    for server in plan.servers:
        here = f"server {server} with {counted(num_workers, 'worker')}{where}"
        steps = by_rank[server]["weights"]
        check(
            len(steps) == plan.num_steps,
            f"{here}: the optimizer should step {plan.num_steps} times, once for all workers "
            f"together; it stepped {counted(len(steps), 'time')}.",
        )
        for step, weights in enumerate(steps):
            check(
                weights is not None and is_about(weights, mean),
                f"{here}, step {step}: shard.grad should be the mean of the workers' gradients, "
                f"{short(mean)} of each; it is {_share_text(weights)}. {_why_no_mean(weights)}",
            )
        wanted = [plan.num_steps / num_workers] * num_workers
        check(
            is_about(by_rank[server]["shard"], wanted),
            f"{here}: afterwards, the parameters should hold {short(wanted)} of the workers' "
            f"gradients; the memory that was given holds {short(by_rank[server]['shard'])}. Only "
            "the optimizer writes into shard, and it does so in place.",
        )
    for worker, step, server, counts in own_pulls(plan, by_rank):
        wanted = [(step + 1) / num_workers] * num_workers
        check(
            counts is not None and is_about(counts, wanted),
            f"worker {worker}{where}: the reply of server {server} in step {step} should be the "
            f"parameters after {counted(step + 1, 'step')}, which hold {short(wanted)} of the "
            f"workers' gradients; they hold {short(counts)}. Step when all gradients are there, "
            "and then send the parameters.",
        )


def _share_text(weights: Sequence[float] | None) -> str:
    return "missing, or no sum of gradients" if weights is None else short(weights)


def _why_no_mean(weights: Sequence[float] | None) -> str:
    if weights is None:
        return "Set shard.grad before optimizer.step, to the mean alone: nothing is added to it."
    if min(weights) == max(weights) == 1:
        return "That is the sum: divide it by the number of workers."
    if 0 in weights:
        return "Gradients of some workers are missing: receive one from each, and add them up."
    return (
        "Does the sum begin at zero in every step, also in the first, before which shard.grad "
        "holds an old gradient, and is it divided once?"
    )


@task("3.14", real=True)
def test_synchronous_servers_of_every_kind(grade: Grade) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        plan = Plan(SYNCHRONOUS, (2, 0), (3, 1), 3, 11, dtype=dtype)
        _check_means(plan, serve(grade, plan, STUCK), f", {dtype}")


@task("3.14", real=True)
def test_training_with_servers_equals_one_process(grade: Grade) -> None:
    all_settings = [{"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}]
    alone = grade.call(t.train_alone, all_settings, 2)
    for settings, right in zip(all_settings, alone, strict=True):
        run = grade.run(t.train, 4, settings, options=uneven(grade.random, 4), if_stuck=STUCK)
        for worker, found in enumerate(run.results[2:]):
            for step, (wanted, got) in enumerate(zip(right, found, strict=True)):
                check(
                    is_about(got, wanted),
                    f"2 servers and 2 workers, SGD with {settings}: after step {step}, the "
                    f"parameters of worker {worker} should be {short(wanted)}, as in one process "
                    f"with the batches of both; they are {short(got)}. Does each server step once, "
                    "with the mean, in shard.grad, by optimizer.step?",
                )


@task("3.14")
def test_synchronous_servers_inside_a_group(grade: Grade) -> None:
    _check_means(*_inside_group(grade, SYNCHRONOUS), f", inside the group {list(MEMBERS)}")


def _inside_group(grade: Grade, function: str) -> tuple[Plan, list[Any]]:
    plan = _for_group(function)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.serve_and_count, plan), if_stuck=STUCK_IN_GROUP
    )
    return plan, of_members(run)


@task("3.14")
def test_a_synchronous_server_with_late_links(grade: Grade) -> None:
    plan = _plan(grade, SYNCHRONOUS, 3, pauses_s=(0.0, 2e-3, 5e-3))
    for options in (uneven(grade.random, 4), late_replies(plan)):
        _check_means(plan, serve(grade, plan, STUCK, options=options))


@task("3.14")
def test_a_synchronous_step_takes_a_message_in_and_one_out_per_worker(grade: Grade) -> None:
    plan = Plan(SYNCHRONOUS, (0,), (1, 2, 3, 4), 3, 400_000)
    run = grade.run(b.serve_and_count, 5, plan, cluster=UNIFORM, if_stuck=STUCK)
    rounds = run.seconds / plan.num_steps / (LATENCY_S + plan.num_bytes * BYTE_S)
    check(
        rounds <= 8.1,
        f"with 4 workers, a step should take the time of 8 messages, 4 in and 4 out; yours takes "
        f"that of {rounds:.1f}. Does each tensor travel once, in its own dtype?",
    )


@task("3.14")
def test_a_synchronous_server_needs_three_tensors(grade: Grade) -> None:
    _check_memory(grade, SYNCHRONOUS, 3)


def _check_memory(grade: Grade, function: str, num_extra: int, *arguments: Any) -> None:
    plan = Plan(function, (0,), tuple(range(1, 7)), 3, 50_000, arguments=arguments)
    plan = replace(plan, pauses_s=(1e-3, 2e-3, 3e-3, 5e-3, 5e-3, 9e-3))
    run = grade.run(b.serve_and_count, 7, plan, options=MEASURED, if_stuck=STUCK)
    size = plan.num_bytes
    workers = [3 * size + SLACK_BYTES] * 6
    check_peak(
        *(run, [(1 + num_extra) * size + SLACK_BYTES, *workers]),
        f"Beside the shard of {size} bytes, a server of 6 workers needs at most {num_extra} more. "
        "Receive every gradient into the same memory, and copy nothing for later.",
    )


# 3.15 serve_asynchronously


PACES_MS = 10.0, 13.1, 41.3, 17.9, 23.3  # no two gradients arrive at the same time


@task("3.15")
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_each_gradient_is_a_step_and_is_answered(grade: Grade, num_workers: int) -> None:
    plan = _plan(grade, ASYNCHRONOUS, num_workers, pauses_s=_paces(num_workers))
    by_rank = serve(grade, plan, STUCK)
    _check_each(plan, by_rank)
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


def _paces(num_workers: int) -> tuple[float, ...]:
    return tuple(pace / 1e3 for pace in PACES_MS[:num_workers])


def _check_each(plan: Plan, by_rank: Sequence[Any]) -> None:
    applied = dict.fromkeys(plan.workers, plan.num_steps)
    for server in plan.servers:
        check_each_gradient_steps(plan, server, by_rank[server], applied)
    check_own_gradient_is_in(plan, by_rank)


@task("3.15")
def test_a_straggler_does_not_delay_the_others(grade: Grade) -> None:
    place = grade.random.randrange(4)
    pauses_s = tuple(40e-3 if i == place else 10e-3 for i in range(4))
    plan = replace(_plan(grade, ASYNCHRONOUS, 4, pauses_s=pauses_s), num_steps=8)
    by_rank = serve(grade, plan, STUCK)
    _check_each(plan, by_rank)
    check_times(
        *(plan, by_rank, schedule(plan)),
        f"Worker {plan.workers[place]} is four times slower, and no other should wait for it: "
        "receive from whoever sends first (receive_from_any), and answer that one at once.",
    )


@task("3.15", real=True)
def test_asynchronous_servers_of_every_kind(grade: Grade) -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        _check_each(
            plan := Plan(ASYNCHRONOUS, (2, 0), (3, 1), 3, 11, dtype=dtype),
            serve(grade, plan, STUCK),
        )


@task("3.15", real=True)
def test_an_asynchronous_server_of_three_workers(grade: Grade) -> None:
    plan = _plan(grade, ASYNCHRONOUS, 3)
    _check_each(plan, serve(grade, plan, STUCK))


@task("3.15")
def test_asynchronous_servers_inside_a_group(grade: Grade) -> None:
    _check_each(*_inside_group(grade, ASYNCHRONOUS))


@task("3.15")
def test_an_asynchronous_server_with_late_links(grade: Grade) -> None:
    plan = _plan(grade, ASYNCHRONOUS, 4, pauses_s=(0.0, 1e-3, 2e-3, 5e-3))
    for options in (uneven(grade.random, 5), late_replies(plan)):
        _check_each(plan, serve(grade, plan, STUCK, options=options))


@task("3.15")
def test_an_asynchronous_server_needs_two_tensors(grade: Grade) -> None:
    _check_memory(grade, ASYNCHRONOUS, 2)
