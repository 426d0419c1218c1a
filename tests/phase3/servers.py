"""Bodies (functions that ranks run) for tasks 3.16 to 3.19: parameter servers and their workers.

The gradients of worker i of W are -1 at every W-th element from i on, and 0 elsewhere. After SGD
with a learning rate of 1, the parameters show how many gradients of each worker have been applied.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import cause_told, int_list
from phase3_multi_node.given import Group, pair_groups, start_exchange

BEFORE_PUSH, BEFORE_PULL = "before its push", "between push and pull"
CLOSED = "before its push, and closes its connections"
SILENT = -1, ""
SYNCHRONOUS, ASYNCHRONOUS = "serve_synchronously", "serve_asynchronously"
BOUNDED, SURVIVORS = "serve_with_bounded_staleness", "serve_survivors"
LONG = 1000  # elements; in longer tensors, gradients are not counted


@dataclass(frozen=True)
class Plan:
    """Roles and behaviour of servers and workers.

    Attributes:
        function: The name of the lesson's function that serves.
        servers: The servers' ranks in the group, or in the world if each pair has its own group.
        workers: The workers' ranks, likewise.
        num_steps: The number of steps that each worker takes.
        num_elements: The number of elements in each server's shard.
        pauses_s: For each worker, the seconds that it computes in a step.
        arguments: The function's arguments after ``num_steps``: staleness, and limit in seconds.
        deaths: For each worker that dies, the step and the moment of its death.
        step_s: The seconds that an optimizer step takes.
        copy_s: The seconds that it takes to copy the shard.
    """

    function: str
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    num_steps: int
    num_elements: int
    pauses_s: tuple[float, ...] = ()
    arguments: tuple[Any, ...] = ()
    dtype: str = "float32"
    deaths: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    step_s: float = 0.0
    copy_s: float = 0.0

    @property
    def world_size(self) -> int:
        """The number of servers and workers together."""
        return len(self.servers) + len(self.workers)

    @property
    def num_bytes(self) -> int:
        """The size of a shard in bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.num_elements * dtype.itemsize

    def pause_s(self, worker: int) -> float:
        """Return the seconds that a worker computes in a step."""
        return dict(zip(self.workers, self.pauses_s, strict=False)).get(worker, 0.0)

    @property
    def staleness(self) -> float:
        """The number of steps by which a worker may be ahead of the slowest one."""
        return self.arguments[0] if self.arguments else inf

    @property
    def timeout_s(self) -> float:
        """The seconds of silence after which a server considers a worker dead."""
        return self.arguments[1] if len(self.arguments) > 1 else inf

    @property
    def alive(self) -> list[int]:
        """The workers that do not die."""
        return [worker for worker in self.workers if worker not in self.deaths]


class SlowlyCopied(Tensor):
    """A tensor that takes time to copy, as a large one does, and whose second half is read last."""

    copy_s = 0.0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Behave like any tensor, but take time to copy."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func.__name__ in ("clone", "copy_") and isinstance(args[-1], cls):
                time.sleep(args[-1].copy_s)
                half = len(result) // 2
                result[half:] = args[-1].detach()[half:]
        return result


class CountingSGD(torch.optim.SGD):
    """SGD that records whose gradients each step uses, and how many threads step simultaneously."""

    def __init__(self, shard: Tensor, plan: Plan) -> None:
        super().__init__([shard], lr=1.0)
        self.shard, self.plan = shard, plan
        self.weights: list[Any] = []
        self.under_way = self.most_at_once = 0

    def step(self, closure: Any = None) -> Any:
        """Wait for ``plan.step_s`` virtual seconds, then step."""
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        if self.plan.step_s:
            time.sleep(self.plan.step_s)
        gradient = self.shard.grad
        self.weights.append(None if gradient is None else _counts(gradient, self.plan, sign=-1))
        result = super().step(closure)
        state = self.state[self.shard]
        state["steps"] = state.get("steps", 0) + 1  # state that must be kept, like momentum
        self.under_way -= 1
        return result


def serve_and_count(lesson: Any, plan: Plan, group: Any = None) -> dict[str, Any] | None:
    """Act as a server or a worker, as the plan says; return this rank's results."""
    if plan.function == SURVIVORS:
        return _count(lesson, plan, pair_groups(plan.servers, plan.workers))
    return _count(lesson, plan, dict.fromkeys([*plan.servers, *plan.workers], group), group)


def _count(
    lesson: Any, plan: Plan, groups: Mapping[int, Group], group: Group = None
) -> dict[str, Any] | None:
    """Act as a server or a worker, as the plan says; return this rank's results.

    Args:
        groups: For each other rank, the group for all messages with it.
        group: The group whose ranks the plan uses.
    """
    rank = dist.get_rank(group)
    if rank in plan.servers:
        return _serve(getattr(lesson, plan.function), plan, groups, group)
    with cause_told(CAUSES):
        return {"pulls": _work(plan, rank, groups)} if rank in plan.workers else None


def _serve(
    function: Callable[..., Any], plan: Plan, groups: Mapping[int, Group], group: Group
) -> dict[str, Any]:
    shard = torch.zeros(plan.num_elements, dtype=getattr(torch, plan.dtype))
    memory = shard.view(-1)
    if plan.copy_s:
        shard = shard.as_subclass(SlowlyCopied)
        shard.copy_s = plan.copy_s
    if plan.num_elements <= LONG:
        shard.grad = torch.full_like(memory, 5)  # left over from an earlier training run
    optimizer = CountingSGD(shard, plan)
    is_of_survivors = plan.function == SURVIVORS
    workers = {worker: groups[worker] for worker in plan.workers}
    with cause_told(SERVER_CAUSES), cause_told(WRONG_RANKS, ValueError):
        returned = function(
            *(shard, optimizer, workers if is_of_survivors else [*workers]),
            *(plan.num_steps, *plan.arguments),
            **({} if is_of_survivors else {"group": group}),
        )
    return {
        "shard": _counts(memory, plan),
        "weights": optimizer.weights,
        "steps in state": optimizer.state[shard].get("steps", 0),
        "most_at_once": optimizer.most_at_once,
        "returned": int_list(SURVIVORS, returned) if is_of_survivors else [],
        "pairs": [*workers],
    }


CAUSES = {
    "Timed out": "That says that a worker is dead: catch it, and go on with the others.",
    "shape": "A gradient and a shard have the same shape: receive into torch.empty_like(shard).",
    "had waited long enough": "The server has taken this worker for dead, but it only computes: "
    "the limit is timeout_s, counted from the last reply.",
}
SERVER_CAUSES = CAUSES | {
    "had waited long enough": "That says that a worker is dead, as its connection has closed: "
    "catch it, and go on with the others.",
}
WRONG_RANKS = {
    "rank": "In serve_survivors a worker is named by its rank in the world: src and dst take that "
    "one, while group_src and group_dst take the rank in the pair, which is 0 or 1."
}


def _counts(shard: Tensor, plan: Plan, sign: int = 1) -> list[float] | None:
    """Return how many gradients of each worker are in a tensor, or None if its parts disagree.

    For a long tensor, the result is also None, because counting would take memory.
    """
    if len(shard) > LONG:
        return None
    num_workers = len(plan.workers)
    shard = sign * shard.detach()
    counts = shard[:num_workers]
    times = -(-len(shard) // num_workers)
    is_whole = torch.equal(counts.repeat(times)[: len(shard)], shard)
    return counts.tolist() if is_whole else None


def _work(plan: Plan, rank: int, groups: Mapping[int, Group]) -> list[dict[str, Any]]:
    """Work for ``num_steps`` steps, or until death; return what was pulled in each step.

    In a step, a worker pushes its gradient to all servers and pulls from all of them.
    """
    dtype = getattr(torch, plan.dtype)
    gradient = torch.zeros(plan.num_elements, dtype=dtype)
    gradient[plan.workers.index(rank) :: len(plan.workers)] = -1
    shards = {server: torch.full_like(gradient, -7) for server in plan.servers}
    links = [(server, *_link(plan, server, groups)) for server in plan.servers]
    pulls = []
    for step in range(plan.num_steps):
        if plan.pause_s(rank):
            time.sleep(plan.pause_s(rank))
        last_step, when = plan.deaths.get(rank, SILENT)
        if step == last_step:
            for _, at, group in links:
                _fall_silent(when, gradient, at, group)
            return pulls
        started = [start_exchange(gradient, at, shards[s], at, group) for s, at, group in links]
        for work in chain.from_iterable(started):
            work.wait()
        counts = [_counts(shards[server], plan) for server in plan.servers]
        pulls.append({"counts": counts, "pulled_s": time.perf_counter()})
    return pulls


def _link(plan: Plan, server: int, groups: Mapping[int, Group]) -> tuple[int, Group]:
    """Return a server's rank in the group that connects it to a worker, and that group."""
    group = groups[server]
    if plan.function != SURVIVORS or group is None:
        return server, group
    return dist.get_group_rank(group, server), group


def _fall_silent(when: str, gradient: Tensor, server: int, group: Group) -> None:
    """Die as ``when`` says: before or after the push, and with connections left open or closed."""
    if when == BEFORE_PULL:
        dist.send(gradient, group=group, group_dst=server)
    elif when == CLOSED:
        # A wait that times out closes the rank's connections.
        reply = dist.irecv(torch.empty_like(gradient), group=group, group_src=server)
        with contextlib.suppress(RuntimeError):
            reply.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]


def serve_some_who_leave(lesson: Any, plan: Plan) -> dict[str, Any] | None:
    """Do as ``serve_and_count`` does, except that a worker closes its connections when it dies."""
    pairs = pair_groups(plan.servers, plan.workers)
    dist.barrier()  # no connection may close before all are open
    seen = _count(lesson, plan, pairs)
    if dist.get_rank() in plan.deaths:
        for pair in pairs.values():
            dist.destroy_process_group(pair)
    return seen


# Task 3.16: push_pull


def push_and_pull(
    lesson: Any,
    servers: Sequence[int],
    num_elements: int,
    dtype: str,
    num_steps: int,
    in_turn: bool = False,
    group: Any = None,
) -> Any:
    """Push from workers to the grader's servers, which each worker lists in a different order.

    Args:
        in_turn: True if a server answers each worker before it receives from the next one,
            beginning with a different worker on each server. False if it receives from all workers
            before it answers.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    workers = [other for other in range(world_size) if other not in servers]
    sizes = {server: num_elements + 3 * place for place, server in enumerate(servers)}
    zeros = {at: torch.zeros(size, dtype=getattr(torch, dtype)) for at, size in sizes.items()}
    if rank in servers:
        first = servers.index(rank) % len(workers)
        ordered = workers[first:] + workers[:first]
        parts = {worker: zeros[rank].clone() for worker in ordered}
        return [_answer(parts, in_turn, group) for _ in range(num_steps)]
    first = rank % len(servers)
    order = [*servers[first:], *servers[:first]]
    shards = {server: zeros[server] for server in reversed(order)}
    return _push_and_pull(lesson.push_pull, shards, rank, num_steps, group)


def _push_and_pull(
    push_pull: Callable[..., Any], shards: dict[int, Tensor], rank: int, num_steps: int, group: Any
) -> dict[str, Any]:
    order = [*reversed(shards)]
    memory = {server: shard.view(-1) for server, shard in shards.items()}
    pulls, is_changed = [], False
    for step in range(num_steps):
        gradients = {server: torch.full_like(memory[server], rank + step) for server in order}
        push_pull(gradients, shards, group)
        pulls.append({server: _span(memory[server]) for server in sorted(memory)})
        is_changed |= [*gradients] != order or [*shards] != order[::-1]
        is_changed |= any(_span(gradients[s]) != [rank + step] * 2 for s in gradients)
    return {"pulls": pulls, "is_changed": is_changed}


def _span(tensor: Tensor) -> list[float]:
    return [tensor.min().item(), tensor.max().item()]


def _answer(parts: Mapping[int, Tensor], in_turn: bool, group: Any) -> list[list[float]]:
    """Receive a gradient from each worker, and answer it; return the range of each gradient.

    If ``in_turn``, a gradient is answered immediately, with twice its values. Otherwise, the answer
    to each gradient is the sum of all, sent after the last gradient has arrived.
    """
    for worker, part in parts.items():
        dist.recv(part, group=group, group_src=worker)
        if in_turn:
            dist.send(2 * part, group=group, group_dst=worker)
    for worker in () if in_turn else parts:
        dist.send(torch.stack([*parts.values()]).sum(0), group=group, group_dst=worker)
    return [_span(parts[worker]) for worker in sorted(parts)]
