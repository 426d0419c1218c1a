"""Ranks that a fault kills: at a time, or as they begin an optimizer step."""

import contextlib
from collections.abc import Iterator
from functools import partial

from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.faults import Faults
from distlab.sim.engine.scheduler import Scheduler
from distlab.sim.isolation.rank_states import RankStates


@contextlib.contextmanager
def due(
    faults: Faults, scheduler: Scheduler, clock: Clock, rank_states: RankStates
) -> Iterator[None]:
    """Let ranks die at the times and steps of the faults."""
    for number, at_s in faults.kill_ranks.items():
        scheduler.at(at_s, partial(scheduler.kill, scheduler.ranks[number]))
    begun = [0] * clock.num_ranks

    def begin_step(*_: object) -> None:
        if not rank_states.is_in_rank():
            return
        rank = clock.current.rank
        begun[rank.number] += 1
        if begun[rank.number] == faults.kill_at_steps.get(rank.number):
            clock.trace.killed_in_step_s[rank.number] = rank.clock_s
            scheduler.kill(rank)
            scheduler.act()

    hook = register_optimizer_step_pre_hook(begin_step)
    try:
        yield
    finally:
        hook.remove()
