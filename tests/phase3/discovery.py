"""Bodies for task 3.7: topologies of groups, on links that are late and on GPUs."""

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from distlab.sim.messages.group import SimGroup
from judging.calls import typed
from judging.pretend_device import PretendDevice, device_of
from phase3_multi_node.given import LinkCost, Topology

FUNCTION = "discover_topology"
DOMAIN = "gpu."  # the same beginning, up to a dot, of all names of hosts
LATE_S = 0.05
WORK_S = 0.001


def discover(lesson: Any, arguments: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """Discover; return plain data, with the name of this rank's host."""
    if group is not None:
        arguments = {**arguments, "group": group}
    topology = typed(FUNCTION, lesson.discover_topology(**arguments), Topology)
    return {
        "hosts": [str(host) for host in topology.hosts],
        "inside": _cost("inside", topology.inside),
        "between": _cost("between", topology.between),
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
    return [float(value) for value in values]


def discover_in_groups(
    lesson: Any, groups: Sequence[Sequence[int]], arguments: Mapping[str, Any]
) -> list[dict[str, Any] | None]:
    """Discover in each group in turn, while hosts are called ``gpu.node0`` and so on.

    Returns:
        The topology of each group, None on ranks that are not in it.
    """
    made = [dist.new_group([*ranks]) for ranks in groups]
    name = socket.gethostname
    with _patched({(socket, "gethostname"): lambda: f"{DOMAIN}{name()}"}):
        return [
            discover(lesson, arguments, group) if dist.get_rank() in ranks else None
            for ranks, group in zip(groups, made, strict=True)
        ]


@contextmanager
def _patched(patches: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Patch until the last rank is done: all ranks are threads of one process."""
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            for (owner, name), value in patches.items():
                stack.enter_context(patch.object(owner, name, value))
        dist.barrier()
        yield
        dist.barrier()


def discover_with_delays(
    lesson: Any, arguments: Mapping[str, Any], delays_s: Mapping[int, Sequence[float]]
) -> dict[str, Any]:
    """Discover while messages are late.

    Args:
        delays_s: size in bytes -> delays of the messages of this size from one rank to another, in
            their order.
    """
    sent: Counter[tuple[int, int, int]] = Counter()
    send = SimGroup.send

    def send_late(group: SimGroup, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        num_bytes = tensors[0].nbytes
        number = sent[group.rank(), dst, num_bytes]
        sent[group.rank(), dst, num_bytes] += 1
        if delay_s := dict(enumerate(delays_s.get(num_bytes, ()))).get(number):
            time.sleep(delay_s)
        return send(group, tensors, dst, tag)

    with _patched({(SimGroup, "send"): send_late}):
        return discover(lesson, arguments)


def discover_on_gpus(lesson: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Discover on pretended GPUs that work for ``WORK_S`` after each message has arrived.

    Returns:
        The topology, and the devices of the messages that were sent.
    """
    sent: list[str] = []
    work_s: defaultdict[int, float] = defaultdict(float)  # rank -> work left to its GPU
    send, recv = SimGroup.send, SimGroup.recv

    def noting_send(group: SimGroup, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        sent.append(str(device_of(tensors[0])))
        return send(group, tensors, dst, tag)

    def working_recv(group: SimGroup, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        work_s[dist.get_rank()] += WORK_S
        return recv(group, tensors, src, tag)

    patches = {
        (SimGroup, "send"): noting_send,
        (SimGroup, "recv"): working_recv,
        (dist, "get_backend"): lambda group=None: "nccl",
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "synchronize"): lambda device=None: time.sleep(work_s.pop(dist.get_rank(), 0)),
    }
    with _patched(patches), PretendDevice("cuda:0"):
        result = discover(lesson, arguments)
    return {**result, "sent": sent}
