"""Bodies for the lesson zero, tasks 3.18 to 3.20: models, training, and what is held meanwhile."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.sim.device.hooks import this_tracker

FEATURES = 5
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}
# kind of model, optimizer, backward passes of a step
CASES = (
    ("plain", "AdamW", 1),
    ("plain", "SGD with momentum", 3),
    ("tied", "SGD with momentum", 1),
    ("frozen", "AdamW", 1),
    ("unused", "Adam", 2),
    ("two dtypes", "Adam", 1),
)
STEPS = 3


class Net(nn.Module):
    """Layers whose sizes few numbers of ranks divide; a part in no list is the model's own."""

    def __init__(self, kind: str, is_used: bool = True) -> None:
        super().__init__()
        self.kind = kind
        layers = [nn.Linear(FEATURES, FEATURES) for _ in range(3)]
        self.blocks = nn.ModuleList([nn.Sequential(layer, nn.Tanh()) for layer in layers])
        self.scale = nn.Parameter(torch.rand(3))
        self.head = nn.Linear(FEATURES, 3, bias=False)
        self.register_buffer("shift", torch.full((3,), 0.5))
        if kind == "tied":
            layers[2].weight = layers[0].weight
        if kind == "frozen":
            layers[1].requires_grad_(False)
            layers[2].bias.requires_grad_(False)
            self.head.requires_grad_(False)
        if kind == "unused":
            self.blocks.append(nn.Linear(FEATURES, 2))
        self.double()
        if kind == "two dtypes":
            layers[1].float()

    def forward(self, x: Tensor) -> Tensor:
        """Compute with all blocks, but for one that is too many."""
        for block in self.blocks[:3]:
            weight = next(iter(block.parameters()), x)
            is_narrow = self.kind == "two dtypes" and block is self.blocks[1]
            y = block(x.float() if is_narrow and weight.dtype == torch.float32 else x)
            x = x + y.to(x.dtype)
        return self.head(x) * self.scale + self.shift


def net(kind: str, seed: int) -> Net:
    """Return a model of small random numbers, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(kind)


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    """Compute the loss of a rank's batch of a number."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x, y = (
        torch.randn(4, width, generator=generator, dtype=torch.float64) for width in (FEATURES, 3)
    )
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def expected_after(kind: str, optimizer: str, passes: int, n: int) -> dict[str, list[float]]:
    """Return the parameters after plain training on the batches of all ranks, by name."""
    model = net(kind, 0)
    cls, options = OPTIMIZERS[optimizer]
    trained = [param for param in model.parameters() if param.requires_grad]
    plain = cls(trained, **options)
    for step in range(STEPS):
        plain.zero_grad()
        for number in range(step * passes, (step + 1) * passes):
            for rank in range(n):
                (loss_of(model, rank, number) / n).backward()
        plain.step()
    return listed(dict(model.named_parameters(remove_duplicate=False)))


def listed(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return the numbers of tensors, by name."""
    return {name: value.flatten().tolist() for name, value in tensors.items()}


def train_with(
    lesson: Any, cls: str, cases: tuple[tuple[str, str, int], ...], group: Any = None
) -> list[dict[str, Any]]:
    """Train a model in each case, with a sharded optimizer; the ranks begin with other numbers."""
    rank, found = dist.get_rank(group), []
    for kind, optimizer, passes in cases:
        model = net(kind, rank)
        for mine, first in zip(model.parameters(), net(kind, 0).parameters(), strict=True):
            if not mine.requires_grad:  # nobody promises to make these equal
                mine.data.copy_(first)
        before = dict(model.named_parameters(remove_duplicate=False))
        optimizer_cls, options = OPTIMIZERS[optimizer]
        options = options | ({"group": group} if group else {})
        if cls == "ShardedGradientOptimizer":
            options["bucket_bytes"] = 300
        sharded = getattr(lesson, cls)(model.parameters(), optimizer_cls, **options)
        for step in range(STEPS):
            sharded.zero_grad()
            for number in range(step * passes, (step + 1) * passes):
                loss_of(model, rank, number).backward()
            sharded.step()
        after = dict(model.named_parameters(remove_duplicate=False))
        same = all(after[name] is before[name] for name in before)
        found.append({"params": listed(after), "same": same})
    return found


def take_small_steps(lesson: Any, cls: str) -> list[float]:
    """Take 32 steps down from 1.0, each too small for 16 bits; return the parameters' extremes."""
    weight = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
    sharded = getattr(lesson, cls)([weight], torch.optim.SGD, lr=2.0**-10)
    for _ in range(32):
        sharded.zero_grad()
        weight.sum().backward()
        sharded.step()
    return [float(weight.min()), float(weight.max())]


# Memory, bytes and times

WIDTH, LAYERS = 64, 16


def chain(layers: int = LAYERS, width: int = WIDTH) -> nn.Sequential:
    """Layers of width * width parameters each, in 16 bits."""
    return nn.Sequential(
        *(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))
    )


def live() -> int:
    """Bytes that this rank holds, in a world with ``Options(has_devices=True)``."""
    tracker = this_tracker()
    return tracker.live_bytes if tracker else 0


def watched(model: nn.Sequential, x: Tensor, seen: list[int]) -> Tensor:
    """Compute, and note what is held whenever the backward pass goes from layer to layer."""
    for layer in model:
        x = layer(x)
        x.register_hook(lambda _: seen.append(live()))
    return x


def hold_state(lesson: Any, cls: str, keywords: dict[str, Any]) -> dict[str, int]:
    """Take two steps with Adam in 16 bits; return bytes held between the calls, and at most."""
    model, found = chain(), {}
    sharded = getattr(lesson, cls)(model.parameters(), torch.optim.Adam, **keywords)
    x, seen = torch.ones(1, WIDTH, dtype=torch.bfloat16), []
    for _ in range(2):
        sharded.zero_grad()
        watched(model, x, seen).sum().backward()
        found["after the backward pass"] = live()
        sharded.step()
        found["after step"] = live()
    return found | {"in the backward pass": max(seen[LAYERS:])}


def take_steps(
    lesson: Any, cls: str, shapes: list[tuple[int, ...]], passes: int, steps: int, keywords: Any
) -> None:
    """Take steps, each with several backward passes, for parameters of given shapes."""
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    sharded = getattr(lesson, cls)(params, torch.optim.SGD, lr=0.1, **keywords)
    for _ in range(steps):
        sharded.zero_grad()
        for _ in range(passes):
            torch.stack([param.sum() for param in params]).sum().backward()
        sharded.step()


def go_back_once(lesson: Any, keywords: dict[str, Any], kind: str) -> None:
    """Go forward and back once through layers whose gradients take as long to send as to make.

    Args:
        kind: "plain", "sharded", or only "made", without a pass.
    """
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    if kind != "plain":
        cls = lesson.ShardedGradientOptimizer
        held = cls(model.parameters(), torch.optim.SGD, lr=0.1, **keywords)
        held.zero_grad()
    if kind != "made":
        model(torch.ones(64, 256)).sum().backward()
