"""The lessons, as they are, on the simulated cluster cost what their docstrings say."""

from collections.abc import Callable
from functools import partial
from math import ceil, floor, log2

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distlab.sim import Cluster, Simulated, simulate
from solutions.phase1_data_parallel import collectives, data_loader, trainer

SIZES = (2, 3, 4, 5, 8, 13, 16, 64, 100, 256)
FEW_SIZES = (2, 3, 5, 8, 256)
ALPHA_S, BETA_S = 7e-6, 1 / 13e9
ELEMENTS = 1000
BYTES = 4 * ELEMENTS
EXACT = 1e-9  # relative

Operation = Callable[[Tensor], None]


def on_uniform(fn: Callable[..., object], num_ranks: int, *args: object) -> Simulated[object]:
    cluster = Cluster(1, num_ranks, latency_s=ALPHA_S, nvlink_bytes_per_s=1 / BETA_S)
    return simulate(fn, num_ranks, *args, cluster=cluster)


def run_on_ranks_number(operation: Operation) -> float:
    """Apply an operation to a tensor of the rank's own number; return what all elements became."""
    x = torch.full((ELEMENTS,), float(dist.get_rank()))
    operation(x)
    assert x.min() == x.max()
    return float(x[0])


def message_s(num_bytes: float = BYTES) -> float:
    return ALPHA_S + num_bytes * BETA_S


def rounds(seconds: float) -> float:
    return seconds / message_s()


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


# Collectives


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_broadcast_takes_log_n_rounds_and_no_rank_sends_more(n: int, where: str) -> None:
    src = {"first": 0, "middle": n // 2, "last": n - 1}[where]
    run = on_uniform(run_on_ranks_number, n, partial(collectives.broadcast, src=src))
    assert run.results == [float(src)] * n
    assert rounds(run.seconds) == pytest.approx(ceil(log2(n)), rel=EXACT)
    assert sum(run.trace.messages) == n - 1
    assert max(run.trace.messages) == run.trace.messages[src] == ceil(log2(n))
    assert run.trace.bytes_sent == [BYTES * count for count in run.trace.messages]


@pytest.mark.parametrize("n", SIZES)
def test_the_naive_all_reduce_waits_for_rank_0(n: int) -> None:
    run = on_uniform(run_on_ranks_number, n, collectives.all_reduce_naive)
    assert run.results == [n * (n - 1) / 2] * n
    assert rounds(run.seconds) == pytest.approx((n - 1) + ceil(log2(n)), rel=EXACT)
    assert run.trace.bytes_received == [BYTES * (n - 1), *[BYTES] * (n - 1)]
    assert sum(run.trace.messages) == 2 * (n - 1)


@pytest.mark.parametrize("n", SIZES)
def test_recursive_doubling_takes_log_n_rounds_and_two_more_for_odd_numbers(n: int) -> None:
    run = on_uniform(run_on_ranks_number, n, collectives.all_reduce_recursive_doubling)
    assert run.results == [n * (n - 1) / 2] * n
    extra = 0 if is_power_of_two(n) else 2
    assert rounds(run.seconds) == pytest.approx(floor(log2(n)) + extra, rel=EXACT)
    if is_power_of_two(n):
        assert run.trace.messages == [log2(n)] * n
        assert run.trace.bytes_sent == [BYTES * log2(n)] * n


@pytest.mark.parametrize("n", SIZES)
def test_an_exchange_costs_one_message_each_way_at_the_same_time(n: int) -> None:
    run = on_uniform(_swap_round_the_ring, n)
    assert run.results == [float((rank - 1) % n) for rank in range(n)]
    assert run.seconds == pytest.approx(message_s(), rel=EXACT)
    assert run.trace.messages == [1] * n


def _swap_round_the_ring() -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.full((ELEMENTS,), float(rank)), torch.empty(ELEMENTS)
    collectives.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
    return float(incoming[0])


def test_the_measurement_finds_the_latency_and_bandwidth_of_the_cluster() -> None:
    (first, *others) = on_uniform(_measure, 4).results
    assert isinstance(first, collectives.AllReduceTimes)
    assert others == [first] * 3
    assert first.alpha_s == pytest.approx(ALPHA_S, rel=1e-6)
    assert first.bandwidth_bytes_per_s == pytest.approx(1 / BETA_S, rel=1e-6)
    for name, rounds_of_four in (("naive", 3 + 2), ("recursive_doubling", 2)):
        expected = [rounds_of_four * message_s(size) for size in first.sizes_bytes]
        assert first.seconds[name] == pytest.approx(expected, rel=1e-6)


def _measure() -> collectives.AllReduceTimes:
    return collectives.measure_all_reduce(collectives.ALL_REDUCES, [40_000, 400_000, 4_000_000])


# Data


@pytest.mark.parametrize("n", FEW_SIZES)
def test_scattering_sends_every_row_once(n: int) -> None:
    rows = 4 * n + 1
    run = on_uniform(_scatter, n, rows)
    assert sum(run.results) == rows  # type: ignore[arg-type]
    parts = [len(part) for part in torch.arange(rows).tensor_split(n)]
    row_bytes = 10 * 4 + 8
    header = run.trace.bytes_sent[0] - row_bytes * sum(parts[1:])
    assert 0 < header <= 1000 * ceil(log2(n))  # shapes, to one rank after the other
    assert run.trace.messages[0] >= 2 * (n - 1)


def _scatter(rows: int) -> int:
    batch = (torch.ones(rows, 10), torch.ones(rows, dtype=torch.long))
    images, labels = data_loader.scatter_batch(batch if dist.get_rank() == 0 else None)
    assert images.shape == (len(labels), 10)
    return len(labels)


# Training


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    layers[0].bias.requires_grad_(False)
    return layers


TRAINABLE = 5  # two weights, one bias, scale and shift
STATE = 6 + 3  # and the frozen bias; mean, variance and count of the normalisation


@pytest.mark.parametrize("n", FEW_SIZES)
def test_a_step_makes_one_all_reduce_per_trainable_parameter_and_one_more(n: int) -> None:
    run = on_uniform(_step, n)
    assert run.trace.collectives == [TRAINABLE + 1] * n
    names = [event.name for event in run.trace.events if event.kind == "collective"]
    assert set(names) == {"all_reduce"}


def _step() -> None:
    network = model()
    batch = (torch.randn(4, 6), torch.randint(3, (4,)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    trainer.train_step(network, optimizer, batch)


@pytest.mark.parametrize("n", FEW_SIZES)
def test_broadcasting_a_model_takes_one_tree_per_parameter_and_buffer(n: int) -> None:
    run = on_uniform(_broadcast_model, n)
    assert sum(run.trace.messages) == STATE * (n - 1)
    assert max(run.trace.messages) == STATE * ceil(log2(n))


def _broadcast_model() -> None:
    trainer.broadcast_parameters(model())


@pytest.mark.parametrize("n", FEW_SIZES)
def test_evaluating_makes_one_all_reduce_of_three_numbers(n: int) -> None:
    run = on_uniform(_evaluate, n)
    assert run.trace.collectives == [1] * n
    assert {event.num_bytes for event in run.trace.events if event.kind == "collective"} == {3 * 8}


def _evaluate() -> None:
    data = TensorDataset(torch.randn(23, 6), torch.randint(3, (23,)))
    trainer.evaluate(model(), data, batch_size=4)
