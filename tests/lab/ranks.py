"""What rank functions of several test files need: a group that is not 0 … k, and a message log."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from distlab import launch

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
TIMEOUT_S = 60.0

# A group inside a world of five, in which no rank but the last has the number it has outside.
OUTER_WORLD_SIZE = 5
MEMBERS = (1, 2, 4)


def on_ranks(
    call: Callable[..., Any], world_size: int, *args: object, **settings: Any
) -> list[Any]:
    """``launch.run`` with an end to waiting."""
    return launch.run(call, world_size, *args, timeout_s=TIMEOUT_S, **settings)


def on_members(call: Callable[..., Any], *args: object) -> list[Any]:
    """What ``call(*args, group=…)`` returned on ``MEMBERS``; the other ranks do nothing."""
    results = on_ranks(_inside_group, OUTER_WORLD_SIZE, call, *args)
    return [results[member] for member in MEMBERS]


def _inside_group(call: Callable[..., Any], *args: object) -> Any:
    group = dist.new_group(list(MEMBERS))
    return call(*args, group=group) if dist.get_rank() in MEMBERS else None


def refusal(call: Callable[[], object]) -> str:
    """The text of the ValueError that ``call`` raises."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no ValueError"


@dataclass(frozen=True)
class Message:
    """One call of the process group, of whatever made it."""

    kind: str  # "send", "recv" or the name of a collective
    peer: int  # rank inside the group; of a collective -1
    num_bytes: int


Step = tuple[Message, ...]  # posted before any of them was waited for

_COLLECTIVES = ("allreduce", "allgather", "broadcast", "reduce", "reduce_scatter", "gather")


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Keep what this rank posts, below every function of ``torch.distributed``."""
    steps: list[Step] = []
    posted: list[Message] = []

    def note(kind: str) -> Callable[..., object]:
        original = getattr(dist.ProcessGroup, kind)

        def call(group: object, tensors: list[Tensor], *rest: Any) -> object:
            peer = rest[0] if kind in ("send", "recv") else -1
            posted.append(Message(kind, peer, sum(tensor.nbytes for tensor in tensors)))
            return original(group, tensors, *rest)

        return call

    def wait(work: dist.Work, *rest: Any) -> bool:
        if posted:
            steps.append(tuple(posted))
            posted.clear()
        return original_wait(work, *rest)

    original_wait = dist.Work.wait
    calls: dict[str, Any] = {kind: note(kind) for kind in ("send", "recv", *_COLLECTIVES)}
    with (
        mock.patch.multiple(dist.ProcessGroup, **calls),
        mock.patch.object(dist.Work, "wait", wait),
    ):
        yield steps
    assert not posted, f"never waited for: {posted}"


def sent(steps: Sequence[Step]) -> list[Message]:
    return [message for step in steps for message in step if message.kind == "send"]


def received(steps: Sequence[Step]) -> list[Message]:
    return [message for step in steps for message in step if message.kind == "recv"]


def num_rounds(steps: Sequence[Sequence[Step]]) -> int:
    """Rounds until the last rank is done, if each step of a rank takes one round.

    Args:
        steps: of every rank. The k-th message from a to b is what b receives k-th from a.
    """
    places = [(rank, step) for rank in range(len(steps)) for step in range(len(steps[rank]))]
    departures = defaultdict(list)  # (from, to) -> the sender's steps
    for rank, step in places:
        for message in sent([steps[rank][step]]):
            departures[rank, message.peer].append(step)
    waits_for = {
        (rank, step): [
            (message.peer, departures[message.peer, rank].pop(0))
            for message in received([steps[rank][step]])
        ]
        for rank, step in places
    }

    @cache
    def end(rank: int, step: int) -> int:
        if step < 0:
            return 0
        begins_with = [(rank, step), *waits_for[rank, step]]
        return 1 + max(end(peer, its_step - 1) for peer, its_step in begins_with)

    return max(end(rank, len(steps[rank]) - 1) for rank in range(len(steps)))
