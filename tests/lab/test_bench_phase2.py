"""Phase 2 beside torch's own: rows and columns, the same losses and gradients, exact bytes."""

import re
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab import chosen, launch
from distlab.bench import memory, pipeline, rivals, tensor_parallel
from distlab.bench.collectives import Collectives
from distlab.bench.rivals import Contestant, Measured
from distlab.cli import main

SMALL = {
    pipeline: pipeline.Sizes(rows=2, positions=4, width=16, heads=2),
    memory: memory.Sizes(rows=4, positions=16, width=16, heads=2),
    tensor_parallel: tensor_parallel.Sizes(rows=2, positions=4, heads_per_rank=1, head_width=8),
}
FLOAT_BYTES = 4


def distlab(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


def rows(printed: str) -> list[list[str]]:
    """Return the cells of a printed table, row by row."""
    lines = [line for line in printed.splitlines() if line.startswith(("┃", "│"))]
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]


@pytest.mark.parametrize(
    ("module", "option", "title", "headings"),
    [
        (pipeline, "--ranks=2", "2 stages, 4 micro-batches", ["step", "peak memory"]),
        (memory, "--layers=5", "5 layers, 2 segments", ["step", "peak memory"]),
        (
            tensor_parallel,
            "--ranks=2",
            "2 blocks on 2 gloo ranks",
            ["step", "collectives", "bytes"],
        ),
    ],
    ids=["pipeline", "memory", "tensor_parallel"],
)
def test_a_table_gives_ours_as_a_multiple_of_every_rival(
    module: ModuleType,
    option: str,
    title: str,
    headings: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SIZES", SMALL[module])
    name = module.__name__.rpartition(".")[2]
    assert distlab("bench", name, option, "--repeats", "2") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].strip() == f"{title}: median of 2 steps"
    first, *found = rows(printed)
    assert first == ["", *headings]
    names = {name for name, *_ in found}
    assert names == {*module.RIVALS, *module.RIVALS.values()}
    for name, *cells in found:
        for cell in cells:
            assert bool(re.search(r" \(\d+\.\d\d\)$", cell)) == (name in module.RIVALS), cell
    assert rivals.PARENTHESES in printed
    assert "Ours: the solutions; --impl mine takes what you have written.\n" in printed


def measured(module: ModuleType, ranks: int, *more: int) -> dict[str, Measured]:
    """Measure one step of each contestant."""
    arguments = chosen.SOLVED, SMALL[module], *more, 1
    found, *others = launch.run(module.measure_on_rank, ranks, *arguments, backend="gloo")
    assert all(other == found for other in others), "ranks do not agree on what was measured"
    return found


def test_1f1b_keeps_fewer_micro_batches_than_gpipe_in_ours_and_in_torchs() -> None:
    found = {name: one.peak_bytes for name, one in measured(pipeline, 2).items()}
    assert found == {name: one.peak_bytes for name, one in measured(pipeline, 2).items()}
    assert found["1F1B"] < found["GPipe"] <= found["torch's ScheduleGPipe"]
    assert found["1F1B"] <= found["torch's Schedule1F1B"] < found["torch's ScheduleGPipe"]


def test_checkpoints_keep_as_little_as_torchs() -> None:
    found = {name: one.peak_bytes for name, one in measured(memory, 1, 16).items()}
    assert found[memory.OURS] <= found[memory.TORCHS]
    assert 2 * found[memory.OURS] < found[memory.KEPT]


def test_a_block_split_by_ours_needs_four_all_reduces() -> None:
    found = measured(tensor_parallel, 2)
    rows, positions, heads_per_rank, head_width, blocks = SMALL[tensor_parallel]
    activation_bytes = FLOAT_BYTES * rows * positions * 2 * heads_per_rank * head_width
    calls = {name: one.collectives for name, one in found.items()}
    assert calls == {
        tensor_parallel.OURS: 4 * blocks,
        tensor_parallel.TORCHS: 6 * blocks,  # query, key and value sum their gradients each
        tensor_parallel.PREPARED: 4 * blocks,
    }
    for one in found.values():
        assert one.collective_bytes == one.collectives * activation_bytes


# What all three share


def linear(weight: float, *, loss: float | None = None, is_trained: bool = True) -> Contestant:
    """Return a model of one weight w, whose loss is w² unless it is made up."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)

    def step() -> float:
        square: torch.Tensor = model(torch.ones(1)).square().sum()
        if is_trained:
            square.backward()  # type: ignore[no-untyped-call]
        return square.item() if loss is None else loss

    return Contestant(model, step)


def compared(ours: Callable[[], Contestant]) -> None:
    rivals.measure({"ours": ours(), "torch's": linear(1.0)}, {"torch's": "ours"}, repeats=1)


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        (partial(linear, 1.0, loss=2.0), "the losses are 2 and 1"),
        (partial(linear, -1.0), "on rank 0, the gradients of weight have the norms 2 and 2"),
        (
            partial(linear, 1.0, is_trained=False),
            "on rank 0, the gradients of weight have the norms 0 and 2",
        ),
    ],
    ids=["loss", "gradient", "no gradient"],
)
def test_what_computes_something_else_is_not_timed(
    ours: Callable[[], Contestant], problem: str
) -> None:
    with pytest.raises(launch.RankFailed, match=f"ours and torch's do not .*: {problem}"):
        launch.run(compared, 1, ours, backend="gloo")


def count_calls() -> tuple[int, int]:
    rank, x = dist.get_rank(), torch.ones(3)
    with Collectives() as found:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(3), torch.empty(3)], x)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return found.calls, found.num_bytes


def test_collectives_are_counted_and_messages_are_not() -> None:
    gathered = 3 * FLOAT_BYTES * (2 + 1)
    assert launch.run(count_calls, 2, backend="gloo") == [(2, 3 * FLOAT_BYTES + gathered)] * 2
