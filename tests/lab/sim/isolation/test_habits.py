"""Program habits that a simulated world has to cope with."""

import time
import timeit
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import me
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils import benchmark

from distlab import launch
from distlab.sim import Mismatch, Options, RankError, simulate

STRICT = Options(is_strict=True)


# Choosing an address


def joins_at_a_port_of_its_own() -> None:
    rank = me()
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"tcp://localhost:{29500 + rank}", rank=rank, world_size=2)


def test_ranks_that_choose_different_ports_never_meet() -> None:
    line = r"\(test_habits\.py:\d+ in joins_at_a_port_of_its_own\)"
    told = rf"rank 1 would meet .* at port 29501 {line}, but rank 0 does at port 29500 {line}: both"
    with pytest.raises(RankError, match=told):
        simulate(joins_at_a_port_of_its_own, 2)


# Starting from meta


def shards_before_it_has_memory() -> list[int]:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    return [parameter.to_local().numel() for parameter in model.parameters()]


def test_sharded_parameters_move_from_meta() -> None:
    simulated = simulate(shards_before_it_has_memory, 2, cluster="dgx-h100")
    assert simulated.results == [[8, 2], [8, 2]]


# Shards of unequal sizes


def gathers_uneven_shards(device: str) -> bool:
    mesh, whole = init_device_mesh(device, (2, 2)), torch.arange(15.0).view(5, 3)
    sharded = distribute_tensor(whole.to(device), mesh, [Shard(0), Shard(0)])
    return torch.equal(sharded.full_tensor().cpu(), whole)


@pytest.mark.parametrize(("device", "semantics"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_ranks_gather_shards_of_unequal_sizes(device: str, semantics: Any) -> None:
    options = Options(semantics=semantics)
    ran = simulate(gathers_uneven_shards, 4, device, cluster="dgx-h100", options=options)
    assert all(ran.results)


# Waiting for time to pass


def waits_busily(seconds: float) -> float:
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        pass
    return time.perf_counter() - start


def test_a_rank_that_waits_busily_sees_time_pass() -> None:
    for seconds in (1e-6, 1e-3, 0.5):
        (waited,) = simulate(waits_busily, 1, seconds).results
        assert seconds <= waited < 3 * seconds + 0.01


def measures_a_sleep() -> list[float]:
    start_s = timeit.default_timer()
    time.sleep(1)
    return [
        timeit.default_timer() - start_s,
        timeit.timeit(lambda: time.sleep(1), number=2),
        min(timeit.repeat("time.sleep(2)", "import time", number=1, repeat=3)),
        timeit.Timer(lambda: time.sleep(3)).timeit(1),
        benchmark.Timer("time.sleep(2)", "import time").timeit(2).mean,
    ]


def test_timeit_and_torchs_benchmarks_measure_virtual_time() -> None:
    before = timeit.default_timer, timeit.Timer.__init__.__defaults__  # type: ignore[misc]
    (measured,) = simulate(measures_a_sleep, 1).results
    assert measured == pytest.approx([1, 2, 2, 3, 2])
    assert before == (timeit.default_timer, timeit.Timer.__init__.__defaults__)  # type: ignore[misc]


# Catching everything


def catches_everything_forever() -> None:
    if me() == 0:
        time.sleep(1)
        raise ValueError("boom")
    while True:
        try:
            dist.recv(torch.zeros(1), 0)
            break
        except BaseException:
            pass


def test_a_rank_that_catches_everything_forever_does_not_hide_the_first_error() -> None:
    with pytest.raises(RankError, match="rank 0 of 3 raised ValueError: boom"):
        simulate(catches_everything_forever, 3)
    assert simulate(me, 3).results == [0, 1, 2]


# One world after another


def leaves_a_message_and_joins_again() -> float:
    x = torch.full((1,), 7.0)
    if me() == 0:
        dist.isend(x, 1)
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    x = torch.full((1,), 8.0 if me() == 0 else 0.0)
    if me() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return float(x)


def test_a_message_of_a_world_that_was_left_does_not_arrive_in_the_next() -> None:
    assert simulate(leaves_a_message_and_joins_again, 2).results == [8.0, 8.0]


# Operations without a wait


def posts_and_forgets() -> None:
    if me() == 0:
        dist.isend(torch.ones(3), 1)
    dist.barrier()


def starts_a_collective_alone() -> None:
    if me() == 1:
        dist.all_reduce(torch.ones(2), async_op=True)


@pytest.mark.parametrize(
    ("program", "says"),
    [(posts_and_forgets, "send to rank 1"), (starts_a_collective_alone, "all_reduce")],
)
def test_operations_that_never_meet_are_listed_and_strictly_an_error(program, says: str) -> None:  # type: ignore[no-untyped-def]
    (line,) = simulate(program, 2).trace.leftovers
    assert says in line
    assert "test_habits.py:" in line
    with pytest.raises(Mismatch, match=f"never met: an operation was posted(.|\n)*{says}"):
        simulate(program, 2, options=STRICT)


# Ranks of a script are as isolated as processes, where that is possible


def test_arguments_and_globals_of_a_lambda_are_each_ranks_own() -> None:
    seen: list[int] = []

    def note(shared: list[int]) -> tuple[list[int], list[int]]:
        seen.append(me())
        shared.append(me())
        dist.barrier()
        return seen, shared

    assert launch.run(note, 3, [], backend="sim") == [([0], [0]), ([1], [1]), ([2], [2])]
