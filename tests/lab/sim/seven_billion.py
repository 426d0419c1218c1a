"""One training step, in three ways, of a GPT as wide as a 7B model on simulated DGX H100s.

    all_reduce  a copy on each rank; gradients are summed once all of them are ready
    DDP         the same, by DistributedDataParallel
    FSDP2       parameters, gradients and optimizer state in shards, one block gathered at a time

DDP forms its final buckets only after the first step. In that step, which is the one measured
here, a single bucket holds all gradients, so nothing overlaps, just as on a real cluster.

The copies are in bfloat16 throughout and take 2 + 2 + 4 bytes per parameter. FSDP2 stores float32
and computes in bfloat16; its 16 bytes per parameter are divided among all ranks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from distlab.models.gpt import GPT, Block
from distlab.sim import simulate
from distlab.sim.device.memory import this_tracker

WIDTH, HEADS, VOCABULARY, TOKENS = 4096, 32, 50_304, 2048  # tokens: one sequence per rank
LAYERS = 32
CLUSTER = "dgx-h100"

Bytes = dict[str, int]
Result = tuple[int, float, Bytes]  # parameters, seconds of a step, memory held after it
Built = TypeVar("Built", bound=nn.Module)


@dataclass(frozen=True)
class Step:
    """Time, work and memory of one step on the slowest rank."""

    parameters: int
    seconds: float
    flops: int
    held: Bytes  # memory after the step
    peak_by_category: Bytes
    peak_flops: float  # FLOP/s from the data sheet

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation (MFU): the achieved fraction of the data sheet's FLOP/s."""
        return self.flops / self.seconds / self.peak_flops


def gpt(layers: int) -> GPT:
    return GPT(VOCABULARY, TOKENS, width=WIDTH, layers=layers, heads=HEADS)


def on_meta(build: Callable[[], Built]) -> Built:
    with torch.device("meta"):
        return build()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, then: Callable[[], None]) -> Result:
    """Train on one sequence, calling ``then`` before the optimizer step."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    dist.barrier()
    start_s = time.perf_counter()
    cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
    then()
    optimizer.step()
    tracker = this_tracker()
    assert tracker is not None
    return count(model), time.perf_counter() - start_s, tracker.live_by_category


def with_all_reduce(layers: int) -> Result:
    model = on_meta(lambda: gpt(layers)).bfloat16()

    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return learn(model, AdamW(model.parameters(), foreach=True), average)


def with_ddp(layers: int) -> Result:
    model = on_meta(lambda: gpt(layers)).bfloat16()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return learn(parallel, AdamW(model.parameters(), foreach=True), lambda: None)


def with_fsdp(layers: int) -> Result:
    mesh = init_device_mesh("meta", (dist.get_world_size(),))
    in_bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = on_meta(lambda: gpt(0))
    for _ in range(layers):  # shard each block before making the next; no rank can hold them all
        block = on_meta(lambda: Block(WIDTH, HEADS))
        model.blocks.append(fully_shard(block, mesh=mesh, mp_policy=in_bfloat16))
    fully_shard(model, mesh=mesh, mp_policy=in_bfloat16)
    # torch's time for a list of n DTensors grows as n^2: one group takes 6 s, these take 0.2 s.
    own = [model.embedding.token, model.embedding.position, model.norm]
    groups: list[Any] = [{"params": list(part.parameters())} for part in (*model.blocks, *own)]
    return learn(model, AdamW(groups, foreach=True), lambda: None)


WAYS = {"all_reduce": with_all_reduce, "DDP": with_ddp, "FSDP2": with_fsdp}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def measure(way: str, num_ranks: int, layers: int = LAYERS) -> Step:
    """Simulate one step; return its measurements on the slowest rank."""
    run = simulate(WAYS[way], num_ranks, layers, cluster=CLUSTER)
    assert run.cluster.gpu is not None
    slowest = max(range(num_ranks), key=lambda rank: run.results[rank][1])
    parameters, seconds, held = run.results[slowest]
    return Step(
        parameters,
        seconds,
        run.flops[slowest],
        held,
        run.trace.peak_by_category[slowest],
        run.cluster.gpu.peak_flops["bfloat16"],
    )


def expected_flops(parameters: int, layers: int) -> int:
    """Return 6 FLOPs per parameter and token; causal attention adds half of 12 L E per token pair.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return TOKENS * (6 * parameters + 12 * layers * WIDTH * TOKENS // 2)
