"""Bodies for task 3.7."""

import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from distlab.sim.messages.group import SimGroup
from judging.calls import typed
from phase3_multi_node.given import LinkCost, Topology

FUNCTION = "discover_topology"
LATE_S = 0.05


def discover(lesson: Any, arguments: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """Discover, and return plain data, beside the name of the host that the rank is told."""
    if group is not None:
        arguments = {**arguments, "group": group}
    found = typed(FUNCTION, lesson.discover_topology(**arguments), Topology)
    return {
        "hosts": [str(host) for host in found.hosts],
        "inside": _cost("inside", found.inside),
        "between": _cost("between", found.between),
        "host": socket.gethostname(),
    }


def _cost(name: str, cost: Any) -> list[float] | None:
    if cost is None:
        return None
    if not isinstance(cost, LinkCost):
        raise WrongResult(f"{name} should be a LinkCost or None; it is {cost!r:.60}")
    values = cost.alpha_s, cost.beta_s_per_byte
    if not all(isinstance(value, float) for value in values):
        raise WrongResult(f"α and β of {name} should be floats; they are {values!r:.60}")
    return [*values]


def discover_with_late_messages(
    lesson: Any, arguments: Mapping[str, Any], late: Mapping[int, list[int]]
) -> dict[str, Any]:
    """Discover while some messages are late.

    Args:
        late: size in bytes -> which messages of this size from one rank to another are late,
            counted from 0.
    """
    is_first = dist.get_rank() == 0
    sent: Counter[tuple[int, int, int]] = Counter()
    send = SimGroup.send

    def send_late(group: SimGroup, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        num_bytes = tensors[0].nbytes
        number = sent[group.rank(), dst, num_bytes]
        sent[group.rank(), dst, num_bytes] += 1
        if number in late.get(num_bytes, ()):
            time.sleep(LATE_S)
        return send(group, tensors, dst, tag)

    with patch.object(SimGroup, "send", send_late if is_first else SimGroup.send):
        dist.barrier()  # all ranks are threads of one process: from here, rank 0's holds for all
        found = discover(lesson, arguments)
        dist.barrier()
    return found
