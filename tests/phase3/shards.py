"""Bodies for task 3.13: tensors on servers that join and leave."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import torch.distributed as dist

from judging.calls import case_told, typed

Assigned = Mapping[str, int]


class Case(NamedTuple):
    """Arguments of ``assign_shards``."""

    sizes: Mapping[str, int]
    servers: tuple[int, ...]
    previous: Assigned | None = None

    def __str__(self) -> str:
        """Write the arguments as the end of a sentence."""
        before = "" if self.previous is None else f", previous={dict(self.previous)!r:.300}"
        return f"for sizes={dict(self.sizes)!r:.300}, servers={[*self.servers]}{before}"


def assign_all(lesson: Any, cases: Sequence[Case], seed: int) -> list[dict[str, Any]]:
    """Assign the tensors of every case, with arguments in another order on every rank.

    Returns:
        For each case, the assignment, and whether the arguments are unchanged.
    """
    random = Random(seed + dist.get_rank())
    results = []
    for case in cases:
        sizes, servers = (
            _shuffled(case.sizes, random),
            random.sample(case.servers, len(case.servers)),
        )
        previous = None if case.previous is None else _shuffled(case.previous, random)
        given = Case(dict(sizes), tuple(servers), previous and dict(previous))
        with case_told(f"{case}"):
            assigned = lesson.assign_shards(sizes, servers, previous)
        after = Case(sizes, tuple(servers), previous)
        named = dict(typed("assign_shards", assigned, dict))
        results.append({"assigned": named, "is_unchanged": after == given})
    return results


def _shuffled(table: Mapping[str, int], random: Random) -> dict[str, int]:
    return {name: table[name] for name in random.sample(sorted(table), len(table))}
