"""``--sanitize`` names GradScalers that skip a step on one replica, but not on another."""

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import Options, simulate

NUM_STEPS = 4


def findings(program: Callable[[], object], num_ranks: int = 3) -> list[str]:
    return simulate(program, num_ranks, options=Options(is_sanitized=True)).findings


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def data(step: int) -> Tensor:
    """Return samples, which are too large on rank 1 in the third step."""
    samples = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    return samples * (1e30 if (dist.get_rank(), step) == (1, 2) else 1)


def average(net: nn.Module, *_: object) -> None:
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def train(
    net: nn.Module,
    before: Callable[..., object] = lambda *_: None,
    after: Callable[..., object] = lambda *_: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train, and do something before and after the scaler has looked for inf."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        scaler.scale(net(data(step)).square().sum()).backward()
        before(net)
        scaler.unscale_(optimizer)
        after(net, scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()


def averages_too_late() -> None:
    train(model(), after=average)


def averages_too_late_for_a_fused_optimizer() -> None:
    net = model()
    train(net, after=average, optimizer=torch.optim.Adam(net.parameters(), fused=True))


@pytest.mark.parametrize(
    "program",
    [averages_too_late, averages_too_late_for_a_fused_optimizer],
    ids=lambda p: p.__name__,
)
def test_a_step_that_one_replica_skips_is_named(program: Callable[[], None]) -> None:
    (line,) = findings(program)
    assert line.startswith(
        "GradScaler skipped step 3 on rank 1, but not on ranks 0 and 2: each looked for inf or nan "
        "in its own gradients. Average the gradients before unscale_(), or all-reduce found_inf; "
        "test_scalers.py:"
    )


def averages_one_of_two_too_late() -> None:
    late, early = model(), model()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (late, early)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for net, step in ((late, 2), (early, 0)):
        scaler.scale(net(data(step)).square().sum()).backward()
    scaler.unscale_(optimizers[0])  # too early
    scaler.unscale_(optimizers[1])
    average(late)
    for optimizer in optimizers:
        scaler.step(optimizer)


def test_the_line_is_that_of_the_optimizers_own_unscale() -> None:
    lines, first = inspect.getsourcelines(averages_one_of_two_too_late)
    number = next(k for k, line in enumerate(lines, first) if "# too early" in line)
    (found,) = [line for line in findings(averages_one_of_two_too_late) if "GradScaler" in line]
    assert f"test_scalers.py:{number} " in found


def looks_for_inf_in_its_shard() -> None:
    """Each rank keeps a third of the sums, and only one of them overflows."""
    shard = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(shard.sum()).backward()
    sums = torch.zeros(10)
    mine = torch.ones(30).index_fill(0, torch.tensor(12), 2e38)
    dist.reduce_scatter(sums, [*mine.split(10)])
    shard.grad = sums
    scaler.step(optimizer)
    scaler.update()


def test_ranks_that_have_summed_gradients_decide_alike() -> None:
    (line,) = [line for line in findings(looks_for_inf_in_its_shard) if "GradScaler" in line]
    assert line.startswith("GradScaler skipped step 1 on rank 1, but not on ranks 0 and 2: ")


def averages_parameters_now_and_then() -> None:
    """A step overflows on one rank after the ranks have averaged their parameters."""
    net = model()
    for _ in range(2):
        for parameter in net.parameters():
            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
        train(net)


def averages_in_time() -> None:
    train(model(), before=average)


def averages_with_ddp() -> None:
    train(DistributedDataParallel(model()))


def shares_what_it_found() -> None:
    def share(net: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.SGD) -> None:
        average(net)
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found, dist.ReduceOp.MAX)

    train(model(), after=share)


def trains_alone() -> None:
    train(model())
    dist.barrier()


def switches_its_scaler_off() -> None:
    net, scaler = model(), torch.amp.GradScaler("cpu", enabled=False)
    net(torch.ones(1, 4)).sum().backward()
    scaler.step(torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "program",
    [
        averages_in_time,
        averages_with_ddp,
        shares_what_it_found,
        trains_alone,
        averages_parameters_now_and_then,
        switches_its_scaler_off,
    ],
    ids=lambda program: program.__name__,
)
def test_right_programs_get_no_such_finding(program: Callable[[], None]) -> None:
    assert [line for line in findings(program) if "GradScaler" in line] == []
