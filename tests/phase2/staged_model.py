"""A model of nine blocks with what breaks careless stages, and its training in one process."""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUM_BLOCKS, VOCABULARY, CLASSES, LR = 9, 11, 5, 0.1
WIDTHS = (4, 6, 5, 6, 4, 6, 5, 6)  # of what the blocks but the last return
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class Plan(NamedTuple):
    """What is trained."""

    frozen: tuple[int, ...] = ()  # blocks
    input_requires_grad: bool = False
    num_steps: int = 6
    evaluations: tuple[int, ...] = (2,)  # steps without backward
    updates: tuple[int, ...] = (1, 4)  # steps that end with an update: gradients add up until then


ALL_TRAINED = Plan(input_requires_grad=True)
SOME_FROZEN = Plan(frozen=(0, 1, 2, 5, 8))


class First(nn.Module):
    """Makes of tokens what goes through all blocks: five tensors, of which three are trained.

    One is laid out across, one is in float32, and on one nothing depends in the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTHS[0], **DOUBLE)
        self.side = nn.Embedding(VOCABULARY, 3)
        self.unused = nn.Parameter(torch.randn(7, **DOUBLE))

    def forward(self, tokens: Tensor, mask: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        x = _laid_across(self.embedding(tokens) * scale)
        return x, tokens, mask, self.side(tokens[:, 0]), self.unused * 2


class Middle(nn.Module):
    """Changes the first and the fourth tensor, which share a part of their graph."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer, **DOUBLE)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, side: Tensor, unused: Tensor) -> Any:
        hidden = torch.tanh(self.linear(x))
        side = (side + hidden.mean(dim=1)[:, :3].float()) * 0.5
        return _laid_across(hidden * mask[..., None]), tokens, mask, side, unused


class Last(nn.Module):
    """Returns logits, and a second term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTHS[-1], CLASSES, **DOUBLE)
        self.side = nn.Linear(3, CLASSES, **DOUBLE)
        self.bias = nn.Embedding(VOCABULARY, CLASSES, **DOUBLE)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, side: Tensor, unused: Tensor) -> Any:
        x = (x * mask[..., None]).sum(dim=1)
        logits = self.head(x) + self.side(side.double()) + self.bias(tokens).sum(dim=1)
        return logits, x.square().mean()


def _laid_across(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class Chain(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            tensors = block(*tensors)
        return tensors


def blocks_of(plan: Plan) -> nn.ModuleList:
    """Make the blocks, the same ones on every rank."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        middle = [Middle(*WIDTHS[i : i + 2]) for i in range(NUM_BLOCKS - 2)]
        blocks = nn.ModuleList([First(), *middle, Last()])
    for i in plan.frozen:
        blocks[i].requires_grad_(False)
    return blocks


def batch_of(plan: Plan, step: int) -> list[Tensor]:
    """Tokens, mask, scale and targets: another number of rows and of tokens in each step."""
    generator = torch.Generator().manual_seed(step)
    rows, length = 2 + step % 4, 3 + step % 3
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) > 0.3
    scale = torch.rand(rows, 1, 1, generator=generator, **DOUBLE)
    targets = torch.randint(CLASSES, (rows,), generator=generator)
    return [tokens, mask, scale.requires_grad_(plan.input_requires_grad), targets]


def loss_of(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, term = output
    return cross_entropy(logits, targets) + term


def update(module: nn.Module) -> None:
    """Do a step of plain gradient descent, and clear the gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
            parameter.grad = None


def state_of(blocks: nn.ModuleList, numbers: Iterable[int]) -> dict[str, Any]:
    """Values and gradients of the parameters of these blocks; no gradient counts as zero."""
    state = {}
    for i in numbers:
        for name, parameter in blocks[i].named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            state[f"{i}.{name}"] = parameter.tolist()
            state[f"{i}.{name}.grad"] = gradient.tolist() if parameter.requires_grad else None
    return state


class Alone(NamedTuple):
    """What one process finds."""

    outputs: list[Any]  # by step
    has_graph: list[list[bool]]  # by step, of each output: whether it requires a gradient
    losses: list[float]
    input_gradients: list[Any]
    state: dict[str, Any]
    passed: list[
        list[list[tuple[int, bool]]]
    ]  # by step and block: bytes, whether it has a gradient


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
