"""Bodies for tasks 2.8 and 2.9."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.calls import case_told, cause_told, refusal_of, returned
from phase2 import staged_model as m
from phase2_advanced.given import group_device

# 2.8

Cut = list[list[int]]  # start and stop of each stage


def cuts_of(lesson: Any, cases: Sequence[tuple[Sequence[float], int]]) -> list[Cut]:
    """The cuts of several models, whose costs are given in lists and tuples in turn."""
    kinds = cycle((list, tuple))
    return [
        _cut(lesson.partition_layers(kind(costs), p))
        for kind, (costs, p) in zip(kinds, cases, strict=False)
    ]


def _cut(found: Any) -> Cut:
    if not isinstance(returned("partition_layers", found), list):
        raise WrongResult(f"partition_layers should return a list of ranges; it returned {found!r}")
    for stage in found:
        if not isinstance(stage, range) or stage.step != 1:
            raise WrongResult(
                "partition_layers should return a list of ranges, like range(0, 3); it contains "
                f"{stage!r}"
            )
    return [[stage.start, stage.stop] for stage in found]


def costs_after(lesson: Any, costs: list[float], num_stages: int) -> list[float]:
    lesson.partition_layers(costs, num_stages)
    return costs


def refusal_of_cut(lesson: Any, num_layers: int, num_stages: int) -> dict[str, str]:
    return refusal_of(lambda: lesson.partition_layers([1.0] * num_layers, num_stages))


# 2.9: messages


def tensors_of(rank: int) -> list[Tensor]:
    """Tensors of many shapes, dtypes and layouts, with and without a gradient."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(rank)
        grid = torch.randn(4, 6, dtype=torch.float64)
        return [
            grid,
            grid.float().requires_grad_(),
            grid.t(),
            (grid[1:3, ::2].clone().requires_grad_() * 2).t(),
            torch.randn(3, 1).expand(3, 5).requires_grad_(),
            torch.randn(2, 3, 1, 2, 1, 4).bfloat16().requires_grad_(),
            torch.randn(7).half(),
            torch.randn(()).requires_grad_(),
            torch.randn(0, 3).requires_grad_(),
            torch.randint(2**50, 2**60, (5,)),
            torch.randint(-99, 99, (2, 2), dtype=torch.int32),
            torch.randint(256, (9,), dtype=torch.uint8),
            torch.rand(6) > 0.5,
        ]


def lists_of(rank: int) -> list[list[Tensor]]:
    """What is sent, one list after another: each tensor by itself, several, none, all, many."""
    tensors = tensors_of(rank)
    many = [torch.full((1,) * (3 * i) + (2,), rank + i) for i in range(18)]  # a long header
    return [*([tensor] for tensor in tensors), tensors[:3], [], tensors[9:13], tensors, many]


def pass_around(lesson: Any, group: Any = None) -> dict[str, list[Any]]:
    """Send to the right, receive from the left; every rank sends before it receives.

    The tensors and works are dropped as soon as the contract allows it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    arrived, kept = [], []
    for tensors in lists_of(rank):
        sent = [tensor.to(group_device(group)) for tensor in tensors]
        before = [_told(x) for x in sent]
        works = lesson.send_tensors(sent, (rank + 1) % size, **_given(group))
        kept.append([_told(x) for x in sent] == before)
        del tensors, sent
        found = lesson.recv_tensors((rank - 1) % size, **_given(group))
        for work in returned("send_tensors", works):
            work.wait()
        arrived.append([{**_told(x), "leaf": x.is_leaf} for x in _list_of(found)])
    return {"arrived": arrived, "unchanged": kept}


def _list_of(found: Any) -> list[Tensor]:
    if not isinstance(returned("recv_tensors", found), list | tuple):
        raise WrongResult(
            f"recv_tensors should return a list of tensors; it returned {found!r:.70}"
        )
    return [*found]


def told_of(rank: int) -> list[list[dict[str, Any]]]:
    """What should arrive from ``rank``."""
    return [[_told(x) | {"leaf": True} for x in tensors] for tensors in lists_of(rank)]


def _told(x: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "requires_grad": x.requires_grad,
        "values": x.detach().cpu().flatten().tolist(),
    }


def send_one_way(lesson: Any) -> None:
    """Send all lists from rank 0 to rank 1."""
    for tensors in lists_of(0):
        if dist.get_rank() == 1:
            lesson.recv_tensors(0)
        else:
            for work in lesson.send_tensors(tensors, 1):
                work.wait()


def _given(group: Any) -> dict[str, Any]:
    """``group=``, left out where all ranks are meant."""
    return {} if group is None else {"group": group}


# 2.9: stages

FIVE = (
    "whose stages pass on five tensors. Two of them, tokens and a mask, require no gradient, and "
    "the loss does not depend on the last"
)
ALL_BACK = (
    "Every tensor that requires a gradient on its way forward should get one back, zeros if the "
    "loss does not depend on it"
)

BACKWARD_CAUSES = {
    "gradients": ALL_BACK,
    "retain_graph": "The outputs of a stage share a graph: go backward through all of them in one "
    "call of torch.autograd.backward",
}


def train_all(
    lesson: Any, plans: Sequence[m.Plan], cuts: Sequence[int], group: Any = None
) -> list[dict[str, Any]]:
    with case_told(FIVE, call="StageRunner,"):
        return [_train(lesson, plan, cuts, group) for plan in plans]


def _train(lesson: Any, plan: m.Plan, cuts: Sequence[int], group: Any) -> dict[str, Any]:
    """Train with one stage on each rank: blocks ``cuts[rank]`` to ``cuts[rank + 1]``."""
    rank = dist.get_rank(group)
    blocks = m.blocks_of(plan).to(group_device(group))
    runner = lesson.StageRunner(m.Chain(blocks[cuts[rank] : cuts[rank + 1]]), **_given(group))
    steps = [_step(runner, plan, step, group) for step in range(plan.num_steps)]
    return {"steps": steps, "state": m.state_of(blocks, range(cuts[rank], cuts[rank + 1]))}


def _step(runner: Any, plan: m.Plan, step: int, group: Any) -> dict[str, Any]:
    rank, is_evaluation = dist.get_rank(group), step in plan.evaluations
    is_last = rank == dist.get_world_size(group) - 1
    *inputs, targets = [_leaf_on(group_device(group), x) for x in m.batch_of(plan, step)]
    with torch.set_grad_enabled(not is_evaluation):
        output = runner.forward(*inputs) if rank == 0 else runner.forward()
        loss = m.loss_of(_pair(output), targets) if is_last else None
    if not is_evaluation:
        with cause_told(BACKWARD_CAUSES):
            runner.backward() if loss is None else runner.backward(loss)
    if step in plan.updates:
        m.update(runner.stage)
    gradient = inputs[2].grad if rank == 0 else None
    return {
        "output": [x.tolist() for x in output] if is_last else kind_of(output),
        "has_graph": [x.requires_grad for x in output] if is_last else [],
        "loss": None if loss is None else loss.item(),
        "input_gradient": None if gradient is None else gradient.tolist(),
    }


def kind_of(output: Any) -> str:
    """What a forward returned, in words: ``a tuple``, ``None``."""
    return "None" if output is None else f"a {type(output).__name__}"


def _leaf_on(device: torch.device, x: Tensor) -> Tensor:
    return x.detach().to(device).requires_grad_(x.requires_grad)


def _pair(output: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(output, tuple) or len(output) != 2:
        raise WrongResult(
            "on the last rank, forward should return what its stage returns, here a tuple of two "
            f"tensors; it returned {output!r:.70}"
        )
    return output


class Boxed(nn.Sequential):
    """Returns a tensor and a tuple that holds only one in turn."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = super().forward(x)
        return y if self.calls % 2 else (y,)


def train_long(lesson: Any, num_steps: int) -> list[str]:
    """Train stages of one layer whose activations take much more memory than its weights.

    Returns what ``forward`` has returned, step by step, in the words of ``kind_of``.
    """
    stage = Boxed(nn.Linear(8, 8), nn.Tanh(), nn.Tanh())
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)  # already there in the first step
    runner, rank = lesson.StageRunner(stage), dist.get_rank()
    kinds = []
    for _ in range(num_steps):
        output = runner.forward(torch.ones(4_000, 8)) if rank == 0 else runner.forward()
        kinds.append(kind_of(output))
        y = output[0] if isinstance(output, tuple) else output
        runner.backward(None if y is None else y.sum())
        del output, y
    return kinds
