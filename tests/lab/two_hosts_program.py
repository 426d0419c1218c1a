"""What the ranks of two hosts run. The simulator runs ``measure``, too, and so predicts its times.

block     ranks 0 and 1 on one host, 2 and 3 on the other, as torchrun numbers them: a ring in good
          order, which crosses the link once in each direction
cyclic    ranks 0 and 2 on one host, 1 and 3 on the other: every step of a ring crosses it
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase3_multi_node.given import LinkCost, Topology, in_background, node_groups
from solutions.phase3_multi_node.ddp import DistributedDataParallel
from solutions.phase3_multi_node.ring_allreduce import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from solutions.phase3_multi_node.topology import discover_topology, hierarchical_all_reduce
from solutions.phase3_multi_node.tree_allreduce import tree_all_reduce

RING, TREE, HIERARCHICAL, GLOO = "ring", "tree", "hierarchical", "gloo's own"
DDP, FORWARD, BACKWARD = "DDP step", "forward", "backward"
MEASURED = {  # by numbering; the computation is measured beside the step that contains it
    "block": (RING, TREE, HIERARCHICAL, GLOO, DDP, FORWARD, BACKWARD),
    "cyclic": (RING, HIERARCHICAL),
}
REPEATS = 10
NUM_BYTES = 2**20  # that the all-reduces sum
LAYERS, WIDTH, BATCH = 3, 512, 64
BUCKET_BYTES = 4 * WIDTH**2  # a layer's
GRADIENT_BYTES = LAYERS * BUCKET_BYTES
PING_PONG_BYTES = (2**18, 2**19, 2**20)  # each beside one of 8 bytes
CYCLIC = (0, 2, 1, 3)  # rank r of torchrun's is rank CYCLIC[r] there


class Sample(NamedTuple):
    """What one run of something took on the rank on which it took most."""

    seconds: float
    link_bytes: float  # that left the host, with all headers
    waited_s: float  # for a core: of all of a rank's threads together


class Pace(NamedTuple):
    """Seconds that a layer computes, where computing is not real."""

    forward_s: float
    backward_s: float


def measure(
    names: Sequence[str], pace: Pace | None = None, repeats: int = REPEATS
) -> dict[str, list[Sample]]:
    """Run things in turn, several times; what slows the machine down then slows all alike.

    Args:
        names: of what is run, in this order.
        pace: of the layers of a model that sleeps; None: of one that computes.
        repeats: of which there are samples, after one that makes the connections.
    """
    x = torch.ones(NUM_BYTES // 4)
    training = _Training(pace)
    actions: dict[str, Callable[[], None]] = {
        **{name: _applied(action, x) for name, action in all_reduces().items()},
        DDP: training.step,
        FORWARD: training.forward,
        BACKWARD: training.backward,
    }
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for repeat in range(1 + repeats):
        for name in names:
            x.fill_(1.0)
            sample = _sample(actions[name])
            if repeat:
                samples[name].append(sample)
    return samples


def all_reduces() -> dict[str, Callable[[Tensor], None]]:
    """Return what sums a tensor over all ranks; all ranks call this together."""
    hosts = discover_topology(sizes_bytes=(8, 16), repeats=1).hosts
    inside, across = node_groups(hosts)

    def hierarchical(x: Tensor) -> None:
        hierarchical_all_reduce(
            x,
            inside,
            across,
            reduce_scatter=ring_reduce_scatter,
            all_reduce=ring_all_reduce,
            all_gather=ring_all_gather,
        )

    return {
        RING: ring_all_reduce,
        TREE: tree_all_reduce,
        HIERARCHICAL: hierarchical,
        GLOO: dist.all_reduce,
    }


def agree_with_gloo() -> dict[str, bool]:
    """Tell which all-reduces find what gloo finds, on all ranks; sums of integers are exact."""
    torch.manual_seed(dist.get_rank())
    mine = torch.randint(-100, 100, (10_007,)).float()
    sums = {}
    for name, all_reduce in all_reduces().items():
        sums[name] = mine.clone()
        all_reduce(sums[name])
    agree = torch.tensor([torch.equal(each, sums[GLOO]) for each in sums.values()]).int()
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    return dict(zip(sums, map(bool, agree), strict=True))


def fit() -> Topology:
    """Find the hosts, and what messages cost, by ping-pongs of several sizes.

    β is the median of the slopes (Theil and Sen's fit, with the smallest size in each pair), and α
    that of their beginnings.
    """
    found = [discover_topology(sizes_bytes=(8, num_bytes)) for num_bytes in PING_PONG_BYTES]
    return Topology(
        found[0].hosts, _middle([f.inside for f in found]), _middle([f.between for f in found])
    )


def _middle(costs: Sequence[LinkCost | None]) -> LinkCost:
    known = [cost for cost in costs if cost]
    return LinkCost(
        median(cost.alpha_s for cost in known), median(cost.beta_s_per_byte for cost in known)
    )


def _applied(action: Callable[[Tensor], None], x: Tensor) -> Callable[[], None]:
    return lambda: action(x)


class _Training:
    """A step of task 3.12, and its computation alone."""

    def __init__(self, pace: Pace | None) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(
            nn.Sequential(*[_Layer(pace) for _ in range(LAYERS)]),
            bucket_bytes=BUCKET_BYTES,
            first_bucket_bytes=BUCKET_BYTES,
            all_reduce=in_background(ring_all_reduce),
        )
        self.batch = torch.randn(1 if pace else BATCH, WIDTH)
        self.loss = torch.zeros(())

    def step(self) -> None:
        self.ddp(self.batch).sum().backward()
        self.ddp.finish_gradient_synchronization()

    def forward(self) -> None:
        self.loss = self.ddp(self.batch).sum()

    def backward(self) -> None:
        with self.ddp.no_sync():
            self.loss.backward()


class _Layer(nn.Linear):
    def __init__(self, pace: Pace | None) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).relu()
        return _Sleep.apply(x, self.pace) if self.pace else x


class _Sleep(torch.autograd.Function):
    """Pass values and gradients on, each after a time: computation, as the simulator sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        time.sleep(pace.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.pace.backward_s)
        return gradient, None


def _sample(action: Callable[[], None]) -> Sample:
    dist.barrier()
    before = _now()
    action()
    took = torch.tensor(_now()) - torch.tensor(before)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return Sample(*took.tolist())


def _now() -> list[float]:
    """Return the clock, the bytes that have left this host, and the seconds spent runnable."""
    return [time.perf_counter(), _sent_bytes(), _waited_s()]


def _sent_bytes() -> float:
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    cables = [line.split(":") for line in lines if ":" in line]
    return sum(float(numbers.split()[8]) for name, numbers in cables if name.strip() != "lo")


def _waited_s() -> float:
    """Return how long this process' threads could have run while others had the cores."""
    threads = Path("/proc/self/task").glob("*/schedstat")
    return sum(float(thread.read_text(encoding="ascii").split()[1]) for thread in threads) / 1e9


def main(path: Path) -> None:
    """Measure with both numberings, under torchrun as root; write what was found."""
    os.nice(-10)  # ranks compute little, but what else runs here must not delay their messages
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    topology, agree, block = fit(), agree_with_gloo(), measure(MEASURED["block"])
    dist.destroy_process_group()

    again = dist.PrefixStore("cyclic", store)
    dist.init_process_group("gloo", store=again, rank=CYCLIC[rank], world_size=len(CYCLIC))
    agree_cyclic, cyclic = agree_with_gloo(), measure(MEASURED["cyclic"])
    if rank == 0:
        found = {
            "topology": asdict(topology),
            "agree": {"block": agree, "cyclic": agree_cyclic},
            "samples": {"block": block, "cyclic": cyclic},
        }
        path.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
