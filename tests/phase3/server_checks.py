"""Checks of parameter servers: their steps, replies, staleness, messages and times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import product
from typing import Any, NamedTuple

from distlab.grade import Grade, Run, check, check_cost
from distlab.sim import Faults, Options
from distlab.util.text import counted
from judging.checks import (
    BYTE_S,
    LATENCY_S,
    MEASURED,
    UNIFORM,
    check_no_collective,
    check_peak,
    check_waited,
    short,
    sizes_of,
)
from judging.expect import expect, expect_cost
from phase3 import servers as b
from phase3.servers import BEFORE_PULL, BEFORE_PUSH, CLOSED, SILENT, SURVIVORS, SYNCHRONOUS, Plan

OF_MESSAGES = "servers and workers should exchange messages (send, recv)"
SLACK_BYTES = 4096
ROUNDING = 1e-5  # tolerance for float32 sums
CLOCK_S = 1e-5  # for reading the simulated clock, and rounding
POLL_S = 1e-3  # allowed per step, because a server may poll for replies that it can send


def judge(
    grade: Grade,
    plan: Plan,
    if_stuck: str,
    *,
    if_late: str = "",
    world_size: int = 0,
    **settings: Any,
) -> list[Any]:
    """Run the servers and workers of a plan, and check all promises of the plan's function.

    Args:
        if_late: The likely cause of late replies. If empty, times are not checked.
        world_size: The number of ranks. If 0, there are as many as in the plan.
        settings: More keyword arguments for ``Grade.run``.

    Returns:
        The results of each rank.
    """
    settings = {"cluster": UNIFORM, **settings}
    size = world_size or plan.world_size
    run = grade.run(b.serve_and_count, size, plan, if_stuck=if_stuck, **settings)
    if grade.is_simulated:
        check_no_collective(run, OF_MESSAGES)
        if not plan.deaths:
            check_waited(run)
            check_messages(plan, run)
    check_served(plan, run.results)
    if if_late:
        check_times(plan, run.results, schedule(plan), if_late)
    return run.results


def check_served(plan: Plan, by_rank: Sequence[Any], where: str = "") -> None:
    """Check the gradients of each optimizer step, and the parameters in the replies."""
    for server in plan.servers:
        here = f"server {server}, {counted(len(plan.workers), 'worker')}{where}"
        _check_steps_alone(here, by_rank[server])
        if plan.function == SYNCHRONOUS:
            _check_means(here, plan, by_rank[server])
        else:
            _check_each_gradient_steps(here, plan, by_rank[server])
        if plan.function == SURVIVORS:
            _check_returned(here, plan, by_rank[server])
    _check_bound(plan, by_rank)
    _check_replies(plan, by_rank, where)


def judge_memory(grade: Grade, plan: Plan, num_extra: int, cause: str) -> None:
    """Check a server's peak memory, and that a large shard is sent like a small one.

    The shard is in 32 bits first, and then in 16.

    Args:
        num_extra: The number of shard-sized tensors allowed besides the shard.
        cause: The likely cause of a higher peak.
    """
    for dtype in ("float32", "bfloat16"):
        same = replace(plan, dtype=dtype)
        run = grade.run(b.serve_and_count, plan.world_size, same, options=MEASURED)
        check_no_collective(run, OF_MESSAGES)
        check_messages(same, run)
        size, num_workers = same.num_bytes, len(plan.workers)
        most = [(1 + num_extra) * size + SLACK_BYTES, *[3 * size + SLACK_BYTES] * num_workers]
        check_peak(
            *(run, most),
            f"Beside the shard of {size} bytes in {dtype}, a server of {num_workers} workers needs "
            f"at most {num_extra} more. {cause}",
        )


def late_replies(plan: Plan) -> Options:
    """Return options that delay replies only, so a step happens while a reply is being sent."""
    pairs = product(plan.servers, plan.workers)
    return Options(faults=Faults(delays_s=dict.fromkeys(pairs, 20e-3)))


def check_messages(plan: Plan, run: Run) -> None:
    """Check that gradients and parameters are each sent once, in one message."""
    num_workers, num_servers = len(plan.workers), len(plan.servers)
    expect_cost(
        f"{counted(num_workers, 'worker')} and {counted(num_servers, 'server')} in "
        f"{counted(plan.num_steps, 'step')}: the number of messages by their bytes",
        dict(sorted(sizes_of(run).items())),
        {plan.num_bytes: 2 * num_servers * num_workers * plan.num_steps},
        "Each gradient is answered by the parameters, once: send tensors as they are, and nothing "
        "besides them.",
    )


def _check_steps_alone(here: str, result: Mapping[str, Any]) -> None:
    """Check that only one thread stepped at a time, and that the optimizer kept its state."""
    expect(
        f"{here}: the number of steps that the optimizer's state knows of",
        *(result["steps in state"], len(result["weights"])),
        "Momentum lives in optimizer.state: leave it alone between steps, and step with the "
        "optimizer that was given.",
    )
    expect(
        f"{here}: the largest number of threads inside optimizer.step at once",
        *(result["most_at_once"], 1 if result["weights"] else 0),
        "They share the shard, its grad and the optimizer's state: set the gradient and step while "
        "you hold the lock.",
    )


def _check_means(here: str, plan: Plan, result: Mapping[str, Any]) -> None:
    """Check that each step of the optimizer used the mean gradient."""
    num_workers, steps = len(plan.workers), result["weights"]
    what = f"{here}: the number of steps of the optimizer, one for all workers together,"
    expect(what, len(steps), plan.num_steps)
    for step, weights in enumerate(steps):
        what = f"{here}, step {step}: shard.grad, in gradients of the workers,"
        right = [1 / num_workers] * num_workers
        expect(what, weights, right, _why_not_the_mean(weights), ROUNDING)
    _check_shard(here, result, [plan.num_steps / num_workers] * num_workers)


NO_SUM = "None: shard.grad was None, or is made of parts of several gradients."


def _why_not_the_mean(weights: Sequence[float] | None) -> str:
    if weights is None:
        return f"{NO_SUM} Set shard.grad before optimizer.step, to the mean alone."
    if min(weights) == max(weights) == 1:
        return "That is the sum: divide it by the number of workers."
    if 0 in weights:
        return "Gradients of some workers are missing: receive one from each, and add them up."
    return (
        "Does the sum begin at zero in every step, also in the first, before which shard.grad "
        "holds an old gradient, and is it divided once?"
    )


def _check_each_gradient_steps(here: str, plan: Plan, result: Mapping[str, Any]) -> None:
    """Check that each step of the optimizer used the gradient of a single worker."""
    applied = schedule(plan).applied
    steps: list[list[float] | None] = result["weights"]
    for number, weights in enumerate(steps):
        expect(
            f"{here}, step {number} of the optimizer: shard.grad, sorted by workers' shares, the "
            "gradient of one worker, as it came,",
            *(weights and sorted(weights), [*[0] * (len(plan.workers) - 1), 1]),
            _why_not_one(weights),
        )
    pushed = [float(applied[worker]) for worker in plan.workers]
    expect(
        f"{here}: the number of steps with gradients of workers {[*plan.workers]}",
        [sum(weights[i] for weights in steps if weights) for i in range(len(plan.workers))],
        *(pushed, "Is optimizer.step called once for every gradient that arrives?"),
    )
    _check_shard(here, result, pushed)


def _check_shard(here: str, result: Mapping[str, Any], right: Sequence[float]) -> None:
    what = f"{here}: the workers' gradients in the parameters, in the memory that was given,"
    cause = "Only the optimizer writes into shard, and it does so in place."
    expect(what, result["shard"], right, cause, ROUNDING)


def _why_not_one(weights: Sequence[float] | None) -> str:
    if weights is None:
        return (
            f"{NO_SUM} Set shard.grad to what has arrived, whatever it held before, and receive "
            "nothing into it before the step."
        )
    if sum(weight != 0 for weight in weights) > 1:
        return "Do not collect gradients: step as soon as one has arrived."
    return (
        "Apply it whole: it is not divided by the number of workers, and not added to the last or "
        "to what shard.grad held before the call."
    )


def own_pulls(plan: Plan, by_rank: Sequence[Any]) -> list[tuple[int, int, int, Any]]:
    """Return every pull, as a tuple of worker, step, server and counts.

    The counts say how many gradients of each worker are in the parameters.
    """
    return [
        (worker, step, server, counts)
        for worker in plan.workers
        for step, pull in enumerate(by_rank[worker]["pulls"])
        for server, counts in zip(plan.servers, pull["counts"], strict=True)
    ]


def _check_replies(plan: Plan, by_rank: Sequence[Any], where: str) -> None:
    """Check that the parameters in a reply are consistent, and include the worker's gradients."""
    num_workers = len(plan.workers)
    for worker, step, server, counts in own_pulls(plan, by_rank):
        here = f"worker {worker}{where}, reply of server {server} to its gradient {step}"
        check(
            counts is not None,
            f"{here}: parts of the parameters are of different steps. Did another gradient change "
            "the shard while it was being sent? Then send a copy, made while you hold the lock.",
        )
        if plan.function == SYNCHRONOUS:
            right, cause = [(step + 1) / num_workers] * num_workers, "Step when all gradients are"
            what = f"{here}: gradients of each worker in the parameters"
            expect(what, counts, right, f"{cause} there, and then send the parameters.", ROUNDING)
            continue
        expect(
            f"{here}: the number of its own gradients in the parameters",
            *(counts[plan.workers.index(worker)], step + 1),
            "Reply after the optimizer's step, with the parameters, to the worker whose gradient "
            "came.",
        )


class Schedule(NamedTuple):
    """The times of replies, the numbers of gradients pushed, and the times of pushes, by worker."""

    pulls_s: dict[int, list[float]]
    applied: dict[int, int]
    pushes_s: dict[int, list[float]]


def schedule(plan: Plan) -> Schedule:
    """Return when gradients and replies should arrive, if messages take no time."""
    staleness, timeout_s = plan.staleness, plan.timeout_s
    clocks, held = dict.fromkeys(plan.workers, 0), set[int]()
    pulls: dict[int, list[float]] = {worker: [] for worker in plan.workers}
    pushes: dict[int, list[float]] = {worker: [] for worker in plan.workers}
    events: list[tuple[float, int, bool]] = []  # time, worker, True if its death is noticed

    def proceed(worker: int, now_s: float) -> None:
        step = len(pushes[worker])
        last_step, when = plan.deaths.get(worker, SILENT)
        if step == last_step and when in (BEFORE_PUSH, CLOSED):
            heard_s = plan.pause_s(worker) if when == CLOSED else timeout_s
            heappush(events, (now_s + heard_s, worker, True))
        elif step < plan.num_steps:
            heappush(events, (now_s + plan.pause_s(worker), worker, False))

    def reply(worker: int, now_s: float) -> None:
        if plan.deaths.get(worker) == (len(pushes[worker]) - 1, BEFORE_PULL):
            heappush(events, (now_s + timeout_s, worker, True))
        else:
            pulls[worker].append(now_s)
            proceed(worker, now_s)

    for worker in plan.workers:
        proceed(worker, 0.0)
    while events:
        now_s, worker, is_dead = heappop(events)
        if is_dead:
            del clocks[worker]
        else:
            pushes[worker].append(now_s)
            clocks[worker] += 1
            held.add(worker)
        latest = min(clocks.values(), default=0) + staleness
        for ready in sorted(waiting for waiting in held if clocks.get(waiting, 0) <= latest):
            held.remove(ready)
            reply(ready, now_s)
    applied = {worker: len(times) for worker, times in pushes.items()}
    return Schedule(pulls, applied, pushes)


def tolerance_s(plan: Plan) -> float:
    """Return the seconds that all messages take one after another, plus those for polling."""
    num_messages = 2 * len(plan.workers) * plan.num_steps * len(plan.servers)
    return num_messages * (LATENCY_S + plan.num_bytes * BYTE_S + CLOCK_S) + plan.num_steps * POLL_S


def check_times(plan: Plan, by_rank: Sequence[Any], right: Schedule, if_late: str) -> None:
    """Check that each reply comes as soon as possible, by the simulated clock."""
    paces = ", ".join(f"{1e3 * plan.pause_s(worker):g}" for worker in plan.workers)
    for worker, right_s in right.pulls_s.items():
        pulls_s = [pull["pulled_s"] for pull in by_rank[worker]["pulls"]]
        expect(f"worker {worker}: the number of its replies", len(pulls_s), len(right_s))
        for step, (pulled_s, best_s) in enumerate(zip(pulls_s, right_s, strict=True)):
            check_cost(
                pulled_s - best_s <= tolerance_s(plan),
                f"worker {worker} of {[*plan.workers]}, which compute {paces} ms a step, gets the "
                f"reply to its gradient {step} after {1e3 * pulled_s:.1f} ms; {1e3 * best_s:.1f} "
                "ms would do, and messages and waking take "
                f"{1e3 * tolerance_s(plan):.1f} ms at most, all together. {if_late}",
            )


def _check_bound(plan: Plan, by_rank: Sequence[Any]) -> None:
    """Check that no worker gets a reply while it is too far ahead of a live worker."""
    alive = [i for i, worker in enumerate(plan.workers) if worker in plan.alive]
    for worker, step, server, counts in own_pulls(plan, by_rank):
        if worker in plan.deaths or counts is None:
            continue
        lowest = min(counts[i] for i in alive)
        check(
            step + 1 - lowest <= plan.staleness,
            f"worker {worker} got the reply of server {server} to its gradient {step} while its "
            f"clock was {step + 1} and the lowest {lowest:g}, as the parameters in it show (clocks "
            f"{short(counts)}): {step + 1 - lowest:g} ahead, and the staleness is "
            f"{plan.staleness}. Hold the reply back until clocks[worker] <= min(clocks.values()) + "
            "staleness, with this gradient counted, and then send the parameters of that moment.",
        )


def _check_returned(here: str, plan: Plan, result: Mapping[str, Any]) -> None:
    fates = [f"{w} dies in step {step} {when}" for w, (step, when) in plan.deaths.items()]
    here = f"{here} {[*plan.workers]}, {' and '.join(fates) or 'of which none dies'}"
    expect(
        f"{here}: the workers that have ended all steps, as returned,",
        *(result["returned"], plan.alive),
        "They come in the order of pairs. A worker is alive unless nothing comes from it for "
        f"{plan.timeout_s:g} s, or its connection closes.",
    )
    expect(f"{here}: pairs after the call", result["pairs"], [*plan.workers], "Only read it.")
