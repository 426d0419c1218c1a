"""torch's profiler: a process has only one, so only one rank at a time can use it.

Starting it in two threads crashes the process (SIGSEGV).
"""

from collections.abc import Callable
from typing import Any

import torch.autograd.profiler

from distlab.sim.isolation.rank_states import RankStates, Replace


def install(replace: Replace, rank_states: RankStates) -> None:
    """Refuse the profiler to a rank while another one uses it.

    Raises, in the rank:
        RuntimeError: another rank uses it; the text names that rank, and says what to do instead.
    """
    profiler: Any = torch.autograd.profiler
    owner: list[int] = []  # rank that uses it; empty if none does

    def take(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begin_alone(*args: Any, **kwargs: Any) -> Any:
            me = rank_states.current
            if owner and owner[0] != me:
                raise RuntimeError(
                    f"rank {me} cannot start a profiler while rank {owner[0]} has one: simulated "
                    "ranks share a process, and so its profiler. Profile on one rank, or look at "
                    "the trace of the simulation (distlab sim --trace)"
                )
            owner[:] = [me]
            return begin(*args, **kwargs)

        return begin_alone

    end = profiler._disable_profiler

    def give_back(*args: Any, **kwargs: Any) -> Any:
        owner.clear()
        return end(*args, **kwargs)

    replace(profiler, "_prepare_profiler", take(profiler._prepare_profiler))
    replace(profiler, "_enable_profiler", take(profiler._enable_profiler))
    replace(profiler, "_disable_profiler", give_back)
