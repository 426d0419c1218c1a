"""Calls that torch makes internally are named after the function that the program called."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import SimulationError, simulate
from distlab.sim.reporting.torch_calls import advice_for


def report(fn: Callable[[], object], num_ranks: int = 2) -> str:
    with pytest.raises(SimulationError) as caught:
        simulate(fn, num_ranks)
    return str(caught.value)


def gathers_objects() -> None:
    if dist.get_rank() == 0:
        dist.gather_object("a", [None] * 2, dst=0)


def broadcasts_lists() -> None:
    dist.broadcast_object_list([1] * (2 + dist.get_rank()), 0)


def objects_meet_tensors() -> None:
    if dist.get_rank() == 0:
        dist.broadcast_object_list([1], 0)
    else:
        dist.broadcast(torch.zeros(1), 0)


def wraps_alone() -> None:
    if dist.get_rank() == 0:
        DistributedDataParallel(nn.Linear(2, 2))


def trains(*, is_synced: Callable[[], bool], num_steps: int) -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    for _ in range(num_steps):
        if is_synced():
            model(torch.ones(2, 2)).sum().backward()
        else:
            with model.no_sync():
                model(torch.ones(2, 2)).sum().backward()


def leaves_out_gradients() -> None:
    trains(is_synced=lambda: dist.get_rank() == 0, num_steps=1)


def saves_alone() -> None:
    net = nn.Linear(2, 2)
    fully_shard(net)
    if dist.get_rank() == 0:
        get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    net(torch.ones(2, 2)).sum().backward()


def brings_shards_of_other_sizes() -> None:
    mesh = init_device_mesh("cpu", (2,))
    DTensor.from_local(torch.ones(2 + dist.get_rank(), 4), mesh, [Shard(0)]).full_tensor()


def gathers_another_tensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    short, long = (distribute_tensor(torch.ones(n, 4), mesh, [Shard(0)]) for n in (4, 8))
    if dist.get_rank() == 0:
        short.full_tensor()
    long.full_tensor()


def stops_alone() -> None:
    trains(is_synced=lambda: True, num_steps=2 - dist.get_rank())
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("fn", "advice"),
    [
        (saves_alone, "Rank 0 has come to get_model_state_dict, and rank 1 has not."),
        (brings_shards_of_other_sizes, "from_local takes them for equal"),
        (gathers_another_tensor, "DTensor.full_tensor makes this call: all ranks of the mesh"),
        (stops_alone, "Is rank 1 past these steps, with fewer batches"),
    ],
)
def test_advice_fits_what_has_met(fn: Callable[[], object], advice: str) -> None:
    assert advice in report(fn)


def test_shards_of_other_sizes_are_not_suspected_at_other_lines() -> None:
    assert "from_local" not in report(gathers_another_tensor)


def has_a_batch_more_and_saves() -> None:
    net = nn.Linear(2, 2)
    fully_shard(net)
    for _ in range(3 - dist.get_rank()):
        net(torch.ones(2, 2)).sum().backward()
    get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))


def test_unequal_numbers_of_steps_are_told_after_the_question_that_they_answer() -> None:
    says = report(has_a_batch_more_and_saves)
    asked = says.index("Or do they take unequal numbers of steps?")
    assert asked < says.index("times on rank 0 and ")


def validates_alone() -> None:
    trains(is_synced=lambda: True, num_steps=2 if dist.get_rank() == 0 else 1)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (gathers_objects, "gather_object's all_gather (call 1 of ranks 0 and 1), (1,) int64"),
        (broadcasts_lists, "broadcast_object_list's broadcast with size 2 on rank 0, but with"),
        (objects_meet_tensors, "broadcast_object_list's broadcast on rank 0, but broadcast on"),
        (wraps_alone, "DistributedDataParallel's all_gather (call 1"),
        (leaves_out_gradients, "Tensor.backward's all_reduce (call 7"),
        (validates_alone, "DistributedDataParallel.forward's broadcast (call "),
    ],
)
def test_what_has_made_a_call_is_named(fn: Callable[[], object], name: str) -> None:
    assert name in report(fn)


@pytest.mark.parametrize(
    ("maker", "says"),
    [
        ("Tensor.backward", "no_sync()"),
        ("DistributedDataParallel.forward", "call its .module"),
        ("DistributedDataParallel", "wrap the same models"),
        ("FSDPState", "one layer"),
        ("ScheduleGPipe.step", "as many micro-batches"),
        ("Join", "for no others"),
        ("send_object_list", "send_object_list sends sizes first"),
        ("all_reduce_coalesced", "one call for several tensors"),
        ("SomethingNew.step", "by itself in SomethingNew.step"),
    ],
)
def test_what_it_asks_of_the_program(maker: str, says: str) -> None:
    assert says in advice_for({0: maker, 1: maker})


def has_fewer_batches(*, sums: bool) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(3 - min(dist.get_rank(), 1)):
        model(torch.ones(2, 2)).sum().backward()
    if sums:
        dist.all_reduce(torch.ones(1))


def has_fewer_batches_before_a_list_of_objects() -> None:
    has_fewer_batches(sums=False)
    dist.broadcast_object_list([0], 0)


@pytest.mark.parametrize(
    "fn",
    [
        partial(has_fewer_batches, sums=False),
        partial(has_fewer_batches, sums=True),
        has_fewer_batches_before_a_list_of_objects,
    ],
)
def test_ranks_that_take_fewer_steps_are_asked_why(fn: Callable[[], object]) -> None:
    says = report(fn, 3)
    assert "Are ranks 1 and 2 past these steps, with fewer batches (use Join" in says
    assert "decision to stop that each rank makes alone" in says
    assert "find_unused_parameters" not in says


def test_ranks_that_go_back_alike_are_not_asked_for_batches() -> None:
    both = {0: "Tensor.backward", 1: "Tensor.backward"}
    assert "find_unused_parameters" in advice_for(both)
    assert "batches" not in advice_for(both)


def test_a_rank_that_has_returned_before_a_forward_pass_is_asked_why() -> None:
    says = report(validates_alone)
    assert "Is rank 1 past these steps, with fewer batches" in says
    assert "If not: DistributedDataParallel makes this call in forward()" in says


def reduces_on_a_default_device() -> None:
    with torch.device("cpu"):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))


def test_torch_passes_calls_on_where_a_default_device_is_set() -> None:
    says = report(reduces_on_a_default_device)
    assert "all_reduce's" not in says
    assert "by itself" not in says


def gathers_on_one_rank() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        sharded.full_tensor()
    dist.barrier()


def test_a_method_of_dtensor_is_named() -> None:
    says = report(gathers_on_one_rank)
    assert "DTensor.full_tensor's all_gather on rank 0" in says
    assert "all ranks of the mesh" in says


def reduces_functionally() -> None:
    functional.all_reduce(torch.ones(2 + dist.get_rank()), "sum", dist.group.WORLD)


def test_a_functional_collective_is_the_program_s_own() -> None:
    assert "all_reduce with size 2 on rank 0, but with size 3 on rank 1" in report(
        reduces_functionally
    )
