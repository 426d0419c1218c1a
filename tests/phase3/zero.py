"""Bodies for the lesson zero, tasks 3.18 to 3.20: models, training, and what is held meanwhile."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.sim.device.hooks import this_tracker

FEATURES = 5
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}
# kind of model, optimizer, backward passes of a step; SGD first, since a factor that all gradients
# have in common, as where a sum stands for the mean, changes nothing in what Adam does
CASES = (
    ("plain", "SGD", 1),
    ("plain", "AdamW", 1),
    ("plain", "SGD with momentum", 3),
    ("tied", "SGD with momentum", 1),
    ("frozen", "AdamW", 1),
    ("unused", "Adam", 2),
    ("two dtypes", "Adam", 1),
)
STEPS = 2
WALKED_TWICE = (
    "params is an iterator here, as model.parameters() is, and can be walked only once: if you "
    "need it twice, make a list of it first"
)


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
            self.blocks[0].register_parameter("spare", nn.Parameter(torch.rand(4)))  # comes first
        self.double()
        if kind == "two dtypes":
            layers[1].float()

    def forward(self, x: Tensor) -> Tensor:
        """Compute with all blocks, but for one that is too many."""
        for block in self.blocks[:3]:
            weight = next(iter(block.parameters()), x)
            is_narrow = self.kind == "two dtypes" and block is self.blocks[1]
            y = block(input=x.float() if is_narrow and weight.dtype == torch.float32 else x)
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
    output = model(x=x) if number % 2 else model(x)
    loss: Tensor = (output - y).square().mean()
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
        begun = listed(before)
        optimizer_cls, options = OPTIMIZERS[optimizer]
        options = options | ({"group": group} if group else {})
        if cls == "ShardedGradientOptimizer":
            options["bucket_bytes"] = 300
        params = iter(before.values())  # once, as model.parameters(); a tied one comes twice
        sharded = _sharded_of(lesson, cls, params, optimizer_cls, options)
        for step in range(STEPS):
            sharded.zero_grad()
            for number in range(step * passes, (step + 1) * passes):
                loss_of(model, rank, number).backward()
            sharded.step()
        after = dict(model.named_parameters(remove_duplicate=False))
        same = all(after[name] is before[name] for name in before)
        stayed = listed(after) == begun
        found.append({"params": listed(after), "same": same, "stayed": stayed})
    return found


def _sharded_of(
    lesson: Any, cls: str, params: Iterator[nn.Parameter], optimizer_cls: Any, options: Any
) -> Any:
    """Make a sharded optimizer.

    Raises:
        ValueError: in words that name the likely cause, where torch's optimizer gets nothing.
    """
    try:
        return getattr(lesson, cls)(params, optimizer_cls, **options)
    except ValueError as error:
        if "empty parameter list" in str(error):
            raise ValueError(f"{error}. {WALKED_TWICE}") from error
        raise


def take_small_steps(lesson: Any, cls: str) -> list[float]:
    """Take 32 steps down from 1.0, each too small for 16 bits, and a large one; return extremes.

    Rank r begins with r + 1, and is given the 1.0 of rank 0.
    """
    weight = nn.Parameter(torch.full((7,), dist.get_rank() + 1.0, dtype=torch.bfloat16))
    sharded = getattr(lesson, cls)([weight], torch.optim.SGD, lr=2.0**-10)
    for factor in (*[1] * 32, 512):
        sharded.zero_grad()
        (factor * weight).sum().backward()
        sharded.step()
    return [float(weight.detach().min()), float(weight.detach().max())]


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


def hold_state(
    lesson: Any, cls: str, keywords: dict[str, Any], has_unused: bool = False
) -> dict[str, int]:
    """Take two steps with Adam in 16 bits; return bytes held between the calls, and at most."""
    model, found = chain(), {}
    unused = [nn.Parameter(torch.ones(1, dtype=torch.bfloat16))] if has_unused else []
    params = [*model.parameters(), *unused]
    sharded = getattr(lesson, cls)(params, torch.optim.Adam, **keywords)
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
    twice = [*params, params[0]]  # as a tied one may come
    sharded = getattr(lesson, cls)(twice, torch.optim.SGD, lr=0.1, **keywords)
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


# Stage 3

FULL_LAYERS, SENT_LAYERS = 8, 4
FULL_CASES = tuple(case for case in CASES if case[0] != "two dtypes")


def sharded_net(lesson: Any, kind: str, seed: int, group: Any = None) -> nn.Module:
    """Return a model in shards, which computes in float64."""
    keywords = {"group": group} if group else {}
    model: nn.Module = lesson.FullyShardedDataParallel(
        net(kind, seed), compute_dtype=torch.float64, **keywords
    )
    return model


def train_fully(
    lesson: Any, cases: tuple[tuple[str, str, int], ...], group: Any = None
) -> list[dict[str, list[float]]]:
    """Train a model in each case; return what ``full_state_dict`` has then."""
    rank, found = dist.get_rank(group), []
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is not written holds NaN
    for kind, optimizer, passes in cases:
        model = sharded_net(lesson, kind, rank, group)
        cls, options = OPTIMIZERS[optimizer]
        plain = cls([param for param in model.parameters() if param.requires_grad], **options)
        for step in range(STEPS):
            plain.zero_grad()
            for number in range(step * passes, (step + 1) * passes):
                loss_of(model, rank, number).backward()
            plain.step()
        model.load_full_state_dict(model.full_state_dict())  # changes nothing
        found.append(listed(model.full_state_dict()))
    return found


def use_twice(lesson: Any) -> dict[str, list[float]]:
    """Take a step on the loss of two forward passes; return the full state and the units' uses."""
    rank = dist.get_rank()
    model: Any = sharded_net(lesson, "plain", rank)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    (loss_of(model, rank, 0) + loss_of(model, rank, 1)).backward()
    plain.step()
    uses = [unit.number for unit in model.order.units]
    return listed(model.full_state_dict()) | {"uses": uses}


def restore(lesson: Any, kind: str, state: dict[str, list[float]]) -> dict[str, Any]:
    """Load a full state, then save and load the shards; return full states and a loss."""
    rank = dist.get_rank()
    model, other = sharded_net(lesson, kind, 7), sharded_net(lesson, kind, 8)
    shapes = {name: value.shape for name, value in net(kind, 0).state_dict().items()}
    model.load_full_state_dict(
        {
            name: torch.tensor(values, dtype=torch.float64).view(shapes[name])
            for name, values in state.items()
        }
    )
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        loss = loss_of(model, rank, 0).item()
    full = model.full_state_dict()
    net(kind, 0).load_state_dict(full)  # the plain model can load it
    return {"full": listed(full), "from shards": listed(other.full_state_dict()), "loss": loss}


def take_small_steps_fully(lesson: Any) -> dict[str, Any]:
    """Take 32 steps down from 1.0, each too small for the 16 bits to compute in."""
    plain = nn.Sequential(nn.Linear(1, 7, bias=False))
    plain[0].weight.data.fill_(1.0)
    model = lesson.FullyShardedDataParallel(plain, compute_dtype=torch.bfloat16)
    sgd = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    for _ in range(32):
        sgd.zero_grad()
        y = model(torch.ones(1, 1))
        y.sum().backward()
        sgd.step()
    (weight,) = model.full_state_dict().values()
    dtypes = sorted({str(param.dtype) for param in model.parameters()})
    return {"values": [float(weight.min()), float(weight.max())], "dtypes": [str(y.dtype), *dtypes]}


class Probe(nn.Module):
    """Notes what is held while its unit computes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_bytes: list[int] = []
        self.backward_bytes: list[int] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """Pass on, or fail."""
        if self.fails:
            raise ArithmeticError("as the test wants it")
        self.forward_bytes.append(live())
        if x.requires_grad:
            x.register_hook(lambda _: self.backward_bytes.append(live()))
        return x


def probed_chain(probe: Probe, num_frozen: int = 0, num_layers: int = FULL_LAYERS) -> nn.Sequential:
    """Layers as in ``chain``, each with a probe; the first ones frozen."""
    layers = [*chain(num_layers)]
    for layer in layers[:num_frozen]:
        layer.requires_grad_(False)
    return nn.Sequential(*(nn.Sequential(layer, probe) for layer in layers))


def hold_fully(lesson: Any, num_frozen: int) -> dict[str, int]:
    """Take two steps with Adam, evaluate, and fail; return bytes held between, and at most.

    With all layers frozen, a backward pass only brings the gradient of the input.
    """
    probe, found = Probe(), {}
    model = lesson.FullyShardedDataParallel(probed_chain(probe, num_frozen))
    trained = [param for param in model.parameters() if param.requires_grad]
    adam = torch.optim.Adam(trained, foreach=False) if trained else None
    x = torch.ones(1, WIDTH, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        y = model(x).sum()
        found["after a forward pass"] = live()
        y.backward()
        found["after a backward pass"] = live()
        if adam:
            adam.step()
    found["after step"] = live()
    with torch.no_grad():
        model(x)
    found["after evaluation"] = live()
    probe.fails = True
    with suppress(ArithmeticError):
        model(x)
    found["after a forward pass that failed"] = live()
    probe.fails = False
    half = len(probe.backward_bytes) // 2
    return found | {
        "in a forward pass": max(probe.forward_bytes),
        "in a backward pass": max(probe.backward_bytes[half:]),
    }


def mixed_chain() -> nn.Sequential:
    """Units of two layers as in ``chain``, of which the first is frozen."""
    layers = chain(SENT_LAYERS)
    for layer in layers[::2]:
        layer.requires_grad_(False)
    return nn.Sequential(*(layers[i : i + 2] for i in range(0, SENT_LAYERS, 2)))


def pass_through(
    lesson: Any, num_frozen: int, passes: int, is_evaluated: bool, is_mixed: bool
) -> None:
    """Go through forward, and back unless it is evaluated; before that, once forward in vain.

    Args:
        is_mixed: whether each unit has a frozen and a trained layer.
    """
    plain = mixed_chain() if is_mixed else probed_chain(Probe(), num_frozen, SENT_LAYERS)
    model = lesson.FullyShardedDataParallel(plain)
    x = torch.ones(1, WIDTH, requires_grad=True)
    for _ in range(passes):
        with torch.set_grad_enabled(not is_evaluated):
            model(x)
            y = model(x).sum()
        if not is_evaluated:
            y.backward()


TIMED_UNITS = 8


def half_frozen_unit() -> nn.Sequential:
    """Two layers of 256 * 128 parameters each, of which the first is frozen."""
    unit = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 256, bias=False))
    unit[0].requires_grad_(False)
    return unit


def go_back_once_fully(lesson: Any, kind: str) -> None:
    """Go forward and back once through units that take longer to compute than to gather.

    Half of each is frozen.

    Args:
        kind: "plain", "sharded", or only "made", without a pass.
    """
    model: nn.Module = nn.Sequential(*(half_frozen_unit() for _ in range(TIMED_UNITS)))
    if kind != "plain":
        model = lesson.FullyShardedDataParallel(model, compute_dtype=torch.float32)
    if kind != "made":
        model(torch.ones(256, 256, requires_grad=True)).sum().backward()


# What plain models do


def used_twice_plain(n: int) -> dict[str, list[float]]:
    """Return the parameters after the step of ``use_twice``, without any sharding."""
    model = net("plain", 0)
    for rank in range(n):
        for number in range(2):
            (loss_of(model, rank, number) / n).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return listed(dict(model.named_parameters()))


def loss_with(kind: str, state: dict[str, list[float]], rank: int) -> float:
    """Return the loss of a plain model with given parameters."""
    model = net(kind, 0)
    for name, value in model.state_dict().items():
        value.copy_(torch.tensor(state[name], dtype=value.dtype).view(value.shape))
    return loss_of(model, rank, 0).item()


def buckets_of(lesson: Any, sizes: tuple[int, ...], bucket_bytes: int) -> list[list[int]]:
    """Return which parameters each part of a sharded optimizer holds, by their numbers."""
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    sharded = lesson.ShardedGradientOptimizer(params, torch.optim.SGD, bucket_bytes=bucket_bytes)
    numbers = {id(param): number for number, param in enumerate(params)}
    return [[numbers[id(param)] for param in part] for part in sharded.parts]
