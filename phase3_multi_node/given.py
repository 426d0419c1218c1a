"""What phase 3 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks


class AllReduce(Protocol):
    """Sums a tensor over the group, in place."""

    def __call__(self, x: Tensor, /, group: Group = None) -> None: ...


def all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over the ranks of ``group``, in place: torch's own, as lessons take it."""
    dist.all_reduce(x, group=group)


def start_exchange(
    outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None
) -> Sequence[dist.Work]:
    """Start to send ``outgoing`` to ``dst`` and to receive ``incoming`` from ``src``.

    The two start together, so that ranks cannot deadlock, not even on NCCL. Until both are done,
    ``outgoing`` must not be written, and ``incoming`` neither read nor written.

    Args:
        outgoing: contiguous.
        dst: the rank inside ``group`` that receives ``outgoing``; not this rank.
        incoming: contiguous, with the shape and dtype of what ``src`` sends.
        src: the rank inside ``group`` that sends ``incoming``; not this rank.
        group: the ranks that take part; all by default.

    Returns:
        The works, to ``wait`` for.
    """
    both = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=src),
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(both)
    return works


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``, as in task 1.4."""
    for work in start_exchange(outgoing, dst, incoming, src, group):
        work.wait()


def group_device(group: Group = None) -> torch.device:
    """Return where tensors must be to travel in ``group``: this rank's GPU with NCCL, else CPU."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


# Planning a layout: what is planned, and what a machine needs for one operation


Checkpointing = Literal["none", "selective", "full"]  # selective: attention between its products
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)


class Transformer(NamedTuple):
    """A GPT. Formulas write l, h, a, s and V for these."""

    layers: int
    width: int
    heads: int
    length: int  # of a sequence, in tokens
    vocabulary: int


class Layout(NamedTuple):
    """How a model is trained: on data · tensor · pipeline GPUs. Formulas write d, t, p, v and b.

    Ranks are counted along tensor first, then data, then pipeline: the ranks of a tensor group are
    neighbours, and those of a pipeline lie d · t ranks apart.
    """

    data: int = 1  # copies of the model
    tensor: int = 1  # ranks that share each layer
    pipeline: int = 1  # stages
    chunks: int = 1  # of the layers of each stage: 1 is 1F1B, more is interleaved 1F1B
    micro_batch: int = 1  # sequences
    zero_stage: int = 0  # 1: optimizer state, 2: gradients too, 3: parameters too are sharded
    checkpointing: Checkpointing = "none"  # selective: attention's scores are recomputed
    sequence_parallel: bool = False

    def micro_batches(self, batch_size: int) -> int:
        """Return how many micro-batches of ``batch_size`` sequences each copy gets."""
        return batch_size // (self.data * self.micro_batch)


class Machine(NamedTuple):
    """GPUs and links, each number of one GPU and in one direction."""

    nodes: int
    gpus_per_node: int
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: float  # per second, of matrix products
    node_bytes_per_s: float  # to the other GPUs of the node
    node_latency_s: float
    network_bytes_per_s: float  # to other nodes
    network_latency_s: float
    matmul_efficiency: float = 1.0  # share of the peak that very large products reach
    matmul_padding: float = 0.0  # rows and columns by which a product seems larger than it is

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Memory(NamedTuple):
    """What the fullest GPU holds at once, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # kept for the backward pass
    recomputed: float  # of the one layer that is being recomputed
    logits: float

    @property
    def total(self) -> float:
        return sum(self)


class StepTime(NamedTuple):
    """What a step of the slowest stage is made of, in seconds."""

    compute: float
    tensor: float  # messages that wait for each other, inside layers
    pipeline: float  # messages between stages
    bubble: float
    data: float  # messages between copies of the model, as far as computation does not hide them

    @property
    def total(self) -> float:
        return sum(self)


class Plan(NamedTuple):
    """A layout, and what it needs."""

    layout: Layout
    memory: Memory
    time: StepTime


def matmul_seconds(
    machine: Machine, rows: float, inner: float, columns: float, count: float = 1
) -> float:
    """Return the seconds of ``count`` products of (rows, inner) and (inner, columns) matrices.

    Products of small matrices use a GPU badly: tiles are half full, and starting takes as long as
    computing. It is as if each side were ``matmul_padding`` longer: with 100, a product of 100 rows
    takes as long as one of 200 without it.

    Source: the form is ours; docs/plan_fidelity.md shows how well it fits.
    """
    sides = [side + machine.matmul_padding for side in (rows, inner, columns)]
    return 2 * count * prod(sides) / (machine.peak_flops * machine.matmul_efficiency)


def ring_seconds(machine: Machine, num_bytes: float, ranks: int, span: int) -> float:
    """Return the seconds of an all-gather or reduce-scatter; an all-reduce takes twice as long.

    Args:
        num_bytes: of the whole tensor, of which each rank holds 1 / ranks before or after.
        ranks: that take part.
        span: how many consecutive GPUs they lie within; in a span larger than a node, every step
            waits for a link between two nodes.
    """
    bytes_per_s, latency_s = link(machine, span)
    return (ranks - 1) * (latency_s + num_bytes / ranks / bytes_per_s)


def send_seconds(machine: Machine, num_bytes: float, span: int) -> float:
    """Return the seconds of a message between two of ``span`` consecutive GPUs."""
    bytes_per_s, latency_s = link(machine, span)
    return latency_s + num_bytes / bytes_per_s


def link(machine: Machine, span: int) -> tuple[float, float]:
    """Return bytes/s and latency of the slowest link inside ``span`` consecutive GPUs."""
    if span <= machine.gpus_per_node:
        return machine.node_bytes_per_s, machine.node_latency_s
    return machine.network_bytes_per_s, machine.network_latency_s


def divisors(number: int) -> list[int]:
    """Return the numbers that divide ``number``, in ascending order: 1, 2, 3 and 6 for 6."""
    return [one for one in range(1, number + 1) if number % one == 0]
