"""Random numbers of sharded tensors on GPUs: each shard gets its part of the whole tensor's."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsdp2_training
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor import _random as sharded_random
from torch.distributed.tensor import rand as sharded_rand
from torch.distributed.tensor import randn as sharded_randn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import dropout

from distlab.sim import Options, simulate

NCCL = Options(semantics="nccl")
ROWS, COLUMNS = 8, 5  # rows may be cut twice, and columns into parts of 3 and 2
LAYOUTS: list[list[Placement]] = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
]


def run(main: Callable[[], Any], num_ranks: int, options: Options = NCCL) -> Any:
    def on_gpu() -> Any:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.manual_seed(7)
        return main()

    ran = simulate(on_gpu, num_ranks, cluster="dgx-h100", options=options)
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
    return ran


def grid() -> DeviceMesh:
    return init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "parts"))


def zeros() -> Tensor:
    return torch.zeros(ROWS, COLUMNS)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(-1, 1),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli": lambda x: (x + 0.4).bernoulli(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 10),
    "dropout": lambda x: dropout(x + 1, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x + 1, 0.3, True)[0],
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_sharded_tensor_gets_the_values_of_the_whole_one(name: str) -> None:
    draw = DRAWS[name]

    def main() -> bool:
        mesh = grid()
        for layout in LAYOUTS:
            torch.manual_seed(3)
            expected, next_one = draw(zeros()), torch.rand(1)
            torch.manual_seed(3)
            drawn = draw(distribute_tensor(zeros().cuda(), mesh, layout))
            assert drawn.placements == tuple(layout)
            assert drawn.full_tensor().is_cuda
            assert torch.equal(drawn.full_tensor().cpu(), expected), layout
            assert torch.equal(torch.rand(1), next_one), layout
        return True

    assert all(run(main, 4).results)


def test_tensors_are_made_sharded_with_the_values_of_whole_ones() -> None:
    def main() -> bool:
        mesh = grid()
        for make, plain in ((sharded_rand, torch.rand), (sharded_randn, torch.randn)):
            for layout in LAYOUTS:
                torch.manual_seed(3)
                expected = plain(ROWS, COLUMNS)
                torch.manual_seed(3)
                made = make(ROWS, COLUMNS, device_mesh=mesh, placements=layout)
                assert torch.equal(made.full_tensor().cpu(), expected)
        return True

    assert all(run(main, 4).results)


def test_shards_differ_and_copies_are_equal() -> None:
    def main() -> tuple[Tensor, Tensor]:
        x = sharded_rand(8, 4, device_mesh=grid(), placements=[Shard(0), Replicate()])
        y = sharded_rand(8, 4, device_mesh=grid(), placements=[Replicate(), Replicate()])
        return x.to_local().cpu(), y.to_local().cpu()

    (one, copied), (same, _), (other, _), (_, copied_too) = run(main, 4).results
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(copied, copied_too)


def test_ranks_with_other_seeds_draw_from_the_first_ones() -> None:
    def main() -> Tensor:
        torch.manual_seed(int(os.environ["RANK"]))
        mesh = init_device_mesh("cuda", (2,))
        x = sharded_rand(4, device_mesh=mesh, placements=[Replicate()])
        return x.to_local().cpu()

    one, other = run(main, 2).results
    torch.manual_seed(0)
    assert torch.equal(one, other)
    assert torch.equal(one, torch.rand(4))


def test_stages_with_seeds_of_their_own_send_each_other_none() -> None:
    def main() -> Tensor:
        mesh = grid()["parts"]
        sharded_random.manual_seed(10 + int(os.environ["RANK"]) // 2, mesh)
        if int(os.environ["RANK"]) < 2:  # the other ranks would wait for a state
            return zeros()
        x = sharded_rand(4, device_mesh=mesh, placements=[Shard(0)])
        return x.full_tensor().cpu()

    *_, x, y = run(main, 4).results
    torch.manual_seed(11)
    assert torch.equal(x, y)
    assert torch.equal(x, torch.rand(4))


def test_a_generator_of_the_program_is_the_one_that_goes_on() -> None:
    def main() -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(5)
        x = distribute_tensor(zeros().cuda(), grid(), [Shard(0), Shard(1)])
        for _ in range(2):
            x.uniform_(generator=generator)
        return x.full_tensor().cpu(), torch.rand(1, generator=generator), torch.rand(1)

    for drawn, next_one, default in run(main, 4).results:
        generator = torch.Generator().manual_seed(5)
        assert torch.equal([zeros().uniform_(generator=generator) for _ in range(2)][1], drawn)
        assert torch.equal(torch.rand(1, generator=generator), next_one)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(1), default)


def test_fsdp_over_tensor_parallel_shards() -> None:
    def main() -> dict[str, Tensor]:
        mesh = grid()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        parallelize_module(model, mesh["parts"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        model.to_empty(device="cuda")
        layer: Any = model[0]
        layer.reset_parameters()
        return {name: value.full_tensor().detach().cpu() for name, value in of(model)}

    def of(model: nn.Module) -> list[tuple[str, DTensor]]:
        return [(n, p) for n, p in model.named_parameters() if isinstance(p, DTensor)]

    torch.manual_seed(7)
    expected = dict(nn.Sequential(nn.Linear(6, 8)).named_parameters())
    for values in run(main, 4).results:
        assert values.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_a_gpu_takes_time_and_memory_for_its_shard_alone() -> None:
    def main(num_parts: int) -> tuple[float, int]:
        mesh = init_device_mesh("cuda", (2,))
        rows = 4096 // num_parts
        x = DTensor.from_local(torch.empty(rows, 2048, device="cuda"), mesh, [Shard(0)])
        x.normal_()
        make: Any = torch.cuda.Event
        start, end = (make(enable_timing=True) for _ in range(2))
        start.record()
        x.normal_()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), torch.cuda.max_memory_allocated()

    (slow, large), (fast, small) = (run(partial(main, n), 2).results[0] for n in (1, 2))
    assert fast == pytest.approx(slow / 2, rel=0.01)
    assert small == pytest.approx(large / 2, rel=0.01)


@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_the_public_example_of_fsdp2_trains_saves_and_loads(
    tmp_path: Path, probability: float
) -> None:
    ran = {n: run(partial(fsdp2_training.main, tmp_path / str(n), probability), n) for n in (1, 2)}
    starts = [start for n in (1, 2) for start, _, _ in ran[n].results]
    for start in starts[1:]:
        assert all(torch.equal(value, starts[0][name]) for name, value in start.items())
    (_, one, losses), (_, two, halves) = ran[1].results[0], ran[2].results[0]
    assert losses[-1] < losses[0]
    if not probability:  # the masks of two ranks are others than those of one
        assert halves == pytest.approx(losses, rel=2e-2)
        assert all(torch.allclose(one[name], two[name], atol=0.03) for name in one)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sharded_states_of_fsdp1_say_that_torch_has_moved_them_to_the_host() -> None:
    """Loading them asks for the device of torch's older sharded tensors."""

    def program() -> list[str]:
        model = FullyShardedDataParallel(nn.Linear(4, 4).cuda(), use_orig_params=True)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        kind = StateDictType.SHARDED_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, kind):
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        return [str(value.device) for value in states["weight"].values() if value.dim()]

    assert run(program, 2).results == [["cpu"] * 2] * 2
