"""Bodies (functions that ranks run) for tasks 2.7 and 2.8, and a model to cut into stages."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab.grade import WrongResult
from judging.calls import case_told, cause_told, returned, typed
from judging.models import DOUBLE
from judging.tensors import given_group
from phase2_advanced.given import group_device

NUM_BLOCKS, VOCABULARY, NUM_CLASSES, LR = 9, 11, 5, 0.1
WIDTHS = (4, 6, 5, 6, 4, 6, 5, 6)  # output widths of all blocks but the last


class Plan(NamedTuple):
    """A training run: its frozen blocks and its steps."""

    frozen: tuple[int, ...] = ()  # numbers of blocks
    input_requires_grad: bool = False
    num_steps: int = 6
    evaluations: tuple[int, ...] = (2,)  # steps without a backward pass
    updates: tuple[int, ...] = (1, 4)  # steps that end with an update; until then, gradients add up


ALL_TRAINED = Plan(input_requires_grad=True)
SOME_FROZEN = Plan(frozen=(0, 1, 2, 5, 8))


class First(nn.Module):
    """Turns tokens into the five tensors that go through all blocks; three require gradients.

    The first of these three is transposed in memory, the second is in float32, and the third is in
    bfloat16 and does not affect the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTHS[0], **DOUBLE)
        self.side = nn.Embedding(VOCABULARY, 3)
        self.unused = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor, mask: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        x = _laid_across(self.embedding(tokens) * scale)
        return x, tokens, mask, self.side(tokens[:, 0]), self.unused * 2


class Middle(nn.Module):
    """Changes the first and the fourth tensor, which share part of their graph."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer, **DOUBLE)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, side: Tensor, unused: Tensor) -> Any:
        hidden = torch.tanh(self.linear(x))
        side = (side + hidden.mean(dim=1)[:, :3].float()) * 0.5
        return _laid_across(hidden * mask[..., None]), tokens, mask, side, unused


class Last(nn.Module):
    """Returns logits and a second term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTHS[-1], NUM_CLASSES, **DOUBLE)
        self.side = nn.Linear(3, NUM_CLASSES, **DOUBLE)
        self.bias = nn.Embedding(VOCABULARY, NUM_CLASSES, **DOUBLE)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, side: Tensor, unused: Tensor) -> Any:
        x = (x * mask[..., None]).sum(dim=1)
        logits = self.head(x) + self.side(side.double()) + self.bias(tokens).sum(dim=1)
        return logits, x.square().mean()


def _laid_across(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class Chain(nn.Module):
    """Blocks that run one after another."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            tensors = block(*tensors)
        return tensors


def blocks_of(plan: Plan) -> nn.ModuleList:
    """Make the blocks, identical on every rank."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        middle = [Middle(*WIDTHS[i : i + 2]) for i in range(NUM_BLOCKS - 2)]
        blocks = nn.ModuleList([First(), *middle, Last()])
    for i in plan.frozen:
        blocks[i].requires_grad_(False)
    return blocks


def batch_of(plan: Plan, step: int) -> list[Tensor]:
    """Make tokens, mask, scale and targets; the numbers of rows and tokens vary by step."""
    generator = torch.Generator().manual_seed(step)
    rows, length = 2 + step % 4, 3 + step % 3
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) > 0.3
    scale = torch.rand(rows, 1, 1, generator=generator, **DOUBLE)
    targets = torch.randint(NUM_CLASSES, (rows,), generator=generator)
    return [tokens, mask, scale.requires_grad_(plan.input_requires_grad), targets]


def loss_of(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, term = output
    return cross_entropy(logits, targets) + term


def update(module: nn.Module) -> None:
    """Take a step of plain gradient descent, and clear the gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
            parameter.grad = None


def state_of(blocks: nn.ModuleList, numbers: Iterable[int]) -> dict[str, Any]:
    """Return the values and gradients of some blocks' parameters, with zeros for missing gradients.

    Parameters that are not trained have None as their gradient.
    """
    state = {}
    for i in numbers:
        for name, parameter in blocks[i].named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            state[f"{i}.{name}"] = parameter.tolist()
            state[f"{i}.{name}.grad"] = gradient.tolist() if parameter.requires_grad else None
    return state


class Alone(NamedTuple):
    """Results of training in one process."""

    outputs: list[Any]  # one for each step
    has_graph: list[list[bool]]  # by step: whether each output requires a gradient
    losses: list[float]
    input_gradients: list[Any]
    state: dict[str, Any]
    # By step and block: the bytes and requires_grad of each tensor that is passed on.
    passed: list[list[list[tuple[int, bool]]]]


@cache
def train_alone(plan: Plan) -> Alone:
    """Train all blocks in this process."""
    blocks = blocks_of(plan)
    alone = Alone([], [], [], [], {}, [])
    for step in range(plan.num_steps):
        *tensors, targets = batch_of(plan, step)
        scale, passed = tensors[2], []
        with torch.set_grad_enabled(step not in plan.evaluations):
            for block in blocks:
                tensors = block(*tensors)
                passed.append([(x.nbytes, x.requires_grad) for x in tensors])
            loss = loss_of((tensors[0], tensors[1]), targets)
        if step not in plan.evaluations:
            loss.backward()
        if step in plan.updates:
            update(blocks)
        alone.outputs.append([x.tolist() for x in tensors])
        alone.has_graph.append([x.requires_grad for x in tensors])
        alone.losses.append(loss.item())
        alone.input_gradients.append(None if scale.grad is None else scale.grad.tolist())
        alone.passed.append(passed)
    alone.state.update(state_of(blocks, range(NUM_BLOCKS)))
    return alone


# Task 2.7: cuts into stages

Cut = list[list[int]]  # start and stop of each stage


def cuts_of(lesson: Any, cases: Sequence[tuple[list[float], int]]) -> list[dict[str, Any]]:
    """Cut each model into stages; return the cut, and the costs as they are after the call.

    Costs are passed alternately as a list and as a tuple.
    """
    found = []
    for kind, (costs, p) in zip(cycle((list, tuple)), cases, strict=False):
        given = kind(costs)
        found.append({"cut": _cut(lesson.partition_layers(given, p)), "costs": [*given]})
    return found


def _cut(found: Any) -> Cut:
    stages = typed("partition_layers", found, list)
    for stage in stages:
        if not isinstance(stage, range) or stage.step != 1:
            raise WrongResult(
                "partition_layers should return a list of ranges, like range(0, 3); it contains "
                f"{stage!r}"
            )
    return [[stage.start, stage.stop] for stage in stages]


class Tallied(float):
    """A cost that counts the additions, subtractions and comparisons of all such costs."""

    count = 0


def _tallied(operation: Callable[[float, float], Any]) -> Callable[[float, float], Any]:
    def noted(a: float, b: float) -> Any:
        Tallied.count += 1
        result = operation(a, b)
        return Tallied(result) if isinstance(result, float) else result

    return noted


for _name in ("add", "radd", "sub", "rsub", "lt", "le", "gt", "ge"):
    setattr(Tallied, f"__{_name}__", _tallied(getattr(float, f"__{_name}__")))


def tallied_cut(lesson: Any, costs: Sequence[float], num_stages: int) -> dict[str, Any]:
    """Return a cut, and how many additions, subtractions and comparisons of costs it took."""
    Tallied.count = 0
    cut = _cut(lesson.partition_layers([*map(Tallied, costs)], num_stages))
    return {"cut": cut, "count": Tallied.count}


# Task 2.8: messages


def tensors_of(rank: int) -> list[Tensor]:
    """Make tensors of many shapes, dtypes and layouts, with and without a gradient."""
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
            torch.randint(-99, 99, (3,), dtype=torch.int16),
            torch.randn(2, 2, dtype=torch.complex64),
        ]


def lists_of(rank: int) -> list[list[Tensor]]:
    """Return the lists to send, in order.

    The lists hold each tensor on its own, then the first three tensors, no tensor, four more
    tensors, all of them, and finally 18 tensors with many dimensions.
    """
    tensors = tensors_of(rank)
    # Many dimensions need a long header.
    many = [torch.full((1,) * (3 * i) + (2,), rank + i) for i in range(18)]
    return [*([tensor] for tensor in tensors), tensors[:3], [], tensors[9:13], tensors, many]


def pass_around(lesson: Any, group: Any = None) -> dict[str, list[Any]]:
    """Send each list to the right neighbour, and receive one from the left neighbour.

    Every rank sends before it receives, and deletes the tensors it sent as soon as the contract
    allows. On NCCL, which runs messages one after another, odd ranks receive first.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    receive = partial(lesson.recv_tensors, (rank - 1) % size, **given_group(group))
    is_first = group_device(group).type == "cuda" and rank % 2
    arrived, kept = [], []
    for tensors in lists_of(rank):
        found = receive() if is_first else None
        sent = [tensor.to(group_device(group)) for tensor in tensors]
        before = [_description_of(x) for x in sent]
        works = lesson.send_tensors(sent, (rank + 1) % size, **given_group(group))
        kept.append([_description_of(x) for x in sent] == before)
        del tensors, sent
        found = found if is_first else receive()
        for work in returned("send_tensors", works):
            work.wait()
        arrived.append([_description_of(x) for x in returned("recv_tensors", found)])
    return {"arrived": arrived, "unchanged": kept}


def descriptions_from(rank: int) -> list[list[dict[str, Any]]]:
    """Return descriptions of the lists that should arrive from ``rank``."""
    return [[_description_of(x) | {"leaf": True} for x in tensors] for tensors in lists_of(rank)]


def _description_of(x: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "requires_grad": x.requires_grad,
        "values": (torch.view_as_real(x) if x.is_complex() else x).detach().flatten().tolist(),
        "leaf": x.is_leaf,
    }


# Task 2.8: stages

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
    lesson: Any, plans: Sequence[Plan], cuts: Sequence[int], group: Any = None
) -> list[dict[str, Any]]:
    with case_told(FIVE, call="StageRunner,"):
        return [_train(lesson, plan, cuts, group) for plan in plans]


def _train(lesson: Any, plan: Plan, cuts: Sequence[int], group: Any) -> dict[str, Any]:
    """Train with one stage per rank, made of blocks ``cuts[rank]`` to ``cuts[rank + 1] - 1``."""
    rank = dist.get_rank(group)
    blocks = blocks_of(plan).to(group_device(group))
    runner = lesson.StageRunner(Chain(blocks[cuts[rank] : cuts[rank + 1]]), **given_group(group))
    steps = [_step(runner, plan, step, group) for step in range(plan.num_steps)]
    return {"steps": steps, "state": state_of(blocks, range(cuts[rank], cuts[rank + 1]))}


def _step(runner: Any, plan: Plan, step: int, group: Any) -> dict[str, Any]:
    rank, is_evaluation = dist.get_rank(group), step in plan.evaluations
    is_last = rank == dist.get_world_size(group) - 1
    *inputs, targets = [_leaf_on(group_device(group), x) for x in batch_of(plan, step)]
    with torch.set_grad_enabled(not is_evaluation):
        output = runner.forward(*inputs) if rank == 0 else runner.forward()
        loss = loss_of(_pair(output), targets) if is_last else None
    if not is_evaluation:
        with cause_told(BACKWARD_CAUSES):
            runner.backward() if loss is None else runner.backward(loss)
    if step in plan.updates:
        update(runner.stage)
    gradient = inputs[2].grad if rank == 0 else None
    return {
        "output": [x.tolist() for x in output] if is_last else kind_of(output),
        "has_graph": [x.requires_grad for x in output] if is_last else [],
        "loss": None if loss is None else loss.item(),
        "input_gradient": None if gradient is None else gradient.tolist(),
    }


def kind_of(output: Any) -> str:
    """Describe the result of a forward pass in words, such as ``a tuple`` or ``None``."""
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
    """Returns a tensor in odd calls, and a one-element tuple in even ones."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = super().forward(x)
        return y if self.calls % 2 else (y,)


def train_long(lesson: Any, num_steps: int) -> list[str]:
    """Train stages of one layer whose activations take much more memory than its weights.

    Returns:
        The kind of result that ``forward`` returned in each step, as ``kind_of`` describes it.
    """
    stage = Boxed(nn.Linear(8, 8), nn.Tanh(), nn.Tanh())
    for parameter in stage.parameters():
        # Allocate all gradients now, so that memory does not grow later.
        parameter.grad = torch.zeros_like(parameter)
    runner, rank = lesson.StageRunner(stage), dist.get_rank()
    kinds = []
    for _ in range(num_steps):
        output = runner.forward(torch.ones(4_000, 8)) if rank == 0 else runner.forward()
        kinds.append(kind_of(output))
        y = output[0] if isinstance(output, tuple) else output
        runner.backward(None if y is None else y.sum())
        del output, y
    return kinds
