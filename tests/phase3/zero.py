"""Bodies (functions that ranks run) for tasks 3.12 to 3.14.

The classes in these tasks share a contract, and each of them shards more than the one before.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.sim.device.memory import this_tracker
from judging.calls import cause_told

STATE, GRADIENTS = "ShardedOptimizer", "ShardedGradientOptimizer"
FULLY = "FullyShardedDataParallel"
FEATURES = 5
TWO = "two dtypes"
Case = tuple[str, str]  # kind of model, optimizer
Numbers = dict[str, list[float]]  # parameter name -> values
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD with momentum and decay": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    ),
}
# SGD comes first, because Adam hides a factor that all gradients share, such as the one between a
# sum and a mean.
CASES: tuple[Case, ...] = (
    ("plain", "SGD"),
    ("plain", "AdamW"),
    ("tied", "SGD with momentum and decay"),
    ("frozen", "AdamW"),
    ("unused", "Adam"),
    ("unused", "SGD with momentum and decay"),
    (TWO, "Adam"),
)
# Fully sharded models compute in one dtype, and torch's optimizers skip parameters without a
# gradient.
CASES_IN_SHARDS = CASES[:5]
IN_USE = "tied", "unused"  # models that have gradients before they are sharded
NEXT_LR = 0.02
# Actions before each step: calls of zero_grad, a new learning rate, and backward passes through the
# whole model or only one parameter.
LIFE = (
    ("a step with one backward pass", ("own", "pass")),
    ("a step after module.zero_grad() and zero_grad()", ("module", "own", "pass")),
    ("a step after three backward passes without zero_grad in between", ("own", *["pass"] * 3)),
    ("a step on the loss of two forward passes", ("own", "twice")),
    ("a step with another learning rate, set in optimizer.param_groups", ("own", "lr", "pass")),
    ("a second step with that learning rate", ("own", "pass")),
    ("a step with zero gradients", ("own",)),
    ("a step after zero_grad(), twice, without a backward pass", ("own", "own")),
    ("a step after a backward pass that uses the parameter scale alone", ("own", "scale")),
)
LIFE_IN_SHARDS = LIFE[:4]  # torch's optimizer skips parameters without a gradient
WALKED_TWICE = {
    "empty parameter list": "params is an iterator here, as model.parameters() is, and can be "
    "walked only once: if you need it twice, make a list of it first"
}
NOTHING = nn.Parameter(torch.zeros(1))  # placeholder if the whole model is frozen


class Net(nn.Module):
    """A model with sizes that few world sizes divide; scale and head belong to the model itself."""

    def __init__(self, kind: str) -> None:
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
            # This parameter precedes those of the layer in the block.
            self.blocks[0].register_parameter("spare", nn.Parameter(torch.rand(4)))
        self.double()
        if kind == TWO:
            layers[1].float()
            by_column = self.head.weight.detach().t().contiguous().t()
            self.head.weight = nn.Parameter(by_column)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output from the first three blocks."""
        for block in self.blocks[:3]:
            weight = next(iter(block.parameters()), x)
            is_narrow = self.kind == TWO and block is self.blocks[1]
            y = block(input=x.float() if is_narrow and weight.dtype == torch.float32 else x)
            x = x + y.to(x.dtype)
        return self.head(x) * self.scale + self.shift


def net(kind: str, seed: int) -> Net:
    """Return a model of the given kind, with small random values that the seed determines."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(kind)


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    """Return the loss on one of a rank's batches; pass inputs by keyword if its number is odd."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x, y = (
        torch.randn(4, width, generator=generator, dtype=torch.float64) for width in (FEATURES, 3)
    )
    output = model(x=x) if number % 2 else model(x)
    loss: Tensor = (output - y).square().mean()
    return loss


def listed(tensors: dict[str, Tensor]) -> Numbers:
    """Return the values of tensors by name."""
    return {name: value.flatten().tolist() for name, value in tensors.items()}


class Sharded:
    """A model and its optimizer, sharded by one of the lesson's classes.

    Attributes:
        model: The module to call.
        optimizer: An object with ``zero_grad`` and ``step``.
    """

    def __init__(
        self,
        lesson: Any,
        cls: str,
        model: nn.Module,
        optimizer_cls: type[torch.optim.Optimizer],
        options: dict[str, Any],
        *,
        group: Any = None,
        compute_dtype: torch.dtype = torch.float64,
    ) -> None:
        of_group = {"group": group} if group else {}
        self.model, self.plain, self.is_whole = model, model, cls != FULLY
        if self.is_whole:
            params = dict(model.named_parameters(remove_duplicate=False)).values()
            with cause_told(WALKED_TWICE, ValueError):
                make = getattr(lesson, cls)
                self.optimizer = make(iter(params), optimizer_cls, **options, **of_group)
        else:
            self.model = getattr(lesson, cls)(model, compute_dtype=compute_dtype, **of_group)
            trained = [param for param in self.model.parameters() if param.requires_grad]
            self.optimizer = optimizer_cls(trained or [NOTHING], **options)

    def act(self, action: str, rank: int, number: int) -> None:
        """Take one of the actions that precede a step in ``LIFE``."""
        if action == "own":
            self.optimizer.zero_grad()
        elif action == "module":
            self.model.zero_grad()
        elif action == "lr":
            _set_learning_rate(self.optimizer)
        else:
            _life_loss(self.model, action, rank, number).backward()

    def numbers(self) -> Numbers:
        """Return all parameters unsharded and, if the model is fully sharded, the buffers too.

        A fully sharded model also loads its own state, which must not detach the optimizer from the
        shards.
        """
        if self.is_whole:
            return listed(dict(self.plain.named_parameters(remove_duplicate=False)))
        state = self.model.full_state_dict()  # type: ignore[operator]
        self.model.load_full_state_dict(state)  # type: ignore[operator]
        return listed(state)


# Values


def train(lesson: Any, cls: str, cases: Sequence[Case], group: Any = None) -> list[dict[str, Any]]:
    """Train a model in each case; the ranks begin with different values."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN
    return [_trained(lesson, cls, *case, group) for case in cases]


def _trained(lesson: Any, cls: str, kind: str, optimizer: str, group: Any) -> dict[str, Any]:
    rank, numbers = dist.get_rank(group), []
    model = net(kind, rank)
    if cls != FULLY:
        _copy_frozen(net(kind, 0), model)
    before = dict(model.named_parameters(remove_duplicate=False))
    begun = listed(before)
    if cls == STATE and kind in IN_USE:  # the constructor should move these gradients, too
        loss_of(model, rank, 0).backward()
    optimizer_cls, options = OPTIMIZERS[optimizer]
    limit = {"bucket_bytes": 300} if cls == GRADIENTS else {}
    sharded = Sharded(lesson, cls, model, optimizer_cls, options | limit, group=group)
    for number, (_, actions) in enumerate(LIFE_IN_SHARDS if cls == FULLY else LIFE):
        for action in actions:
            sharded.act(action, rank, number)
        sharded.optimizer.step()
        numbers.append(sharded.numbers())
    after = dict(model.named_parameters(remove_duplicate=False))
    replaced = [name for name in before if cls != FULLY and after[name] is not before[name]]
    return {"begun": begun, "after": numbers, "replaced": replaced}


def _copy_frozen(source: nn.Module, target: nn.Module) -> None:
    """Make frozen parameters equal on all ranks, since the sharded optimizers do not do so."""
    for mine, first in zip(target.parameters(), source.parameters(), strict=True):
        if not mine.requires_grad:
            mine.data.copy_(first)


def _set_learning_rate(optimizer: Any) -> None:
    """Set the learning rate as a scheduler does."""
    for group in getattr(optimizer, "optimizer", optimizer).param_groups:
        group["lr"] = NEXT_LR


def _life_loss(model: nn.Module, action: str, rank: int, number: int) -> Tensor:
    if action == "pass":
        return loss_of(model, rank, number)
    if action == "twice":
        return loss_of(model, rank, number) + loss_of(model, rank, number + 10)
    return (rank + 1) * model.get_parameter("scale").sum()


def trained_plainly(kind: str, optimizer: str, n: int) -> list[Numbers]:
    """Return the parameters after each step of ``LIFE``, trained without any sharding."""
    model, after = net(kind, 0), []
    trained = [param for param in model.parameters() if param.requires_grad]
    cls, options = OPTIMIZERS[optimizer]
    plain = cls(trained, **options)  # type: ignore[call-arg]
    for number, (_, actions) in enumerate(LIFE):
        for param in trained:
            param.grad = torch.zeros_like(param)
        for action in actions:
            if action == "lr":
                _set_learning_rate(plain)
            for rank in range(n if action in ("pass", "twice", "scale") else 0):
                (_life_loss(model, action, rank, number) / n).backward()
        plain.step()
        after.append(listed(dict(model.named_parameters(remove_duplicate=False))))
    return after


def take_small_steps(lesson: Any, cls: str) -> dict[str, Any]:
    """Take 32 steps down from 1.0, each too small for 16 bits, and then a large one.

    Rank r begins with r + 1, and should be given rank 0's 1.0.

    Returns:
        The smallest and the largest parameter, and the dtypes of the output and the parameters.
        Unless the model is fully sharded, "reduced" holds the dtypes and the values of what
        ``reduce_gradients`` then returns if gradients are r + 1 on rank r.
    """
    layer = nn.Linear(1, 7, bias=False, dtype=torch.bfloat16)
    layer.weight.data.fill_(dist.get_rank() + 1.0)
    sharded = Sharded(
        *(lesson, cls, nn.Sequential(layer), torch.optim.SGD, {"lr": 2.0**-10}),
        compute_dtype=torch.bfloat16,
    )

    def go_back(factor: int) -> Tensor:
        sharded.optimizer.zero_grad()
        y: Tensor = sharded.model(torch.ones(1, 1, dtype=torch.bfloat16))
        (factor * y).sum().backward()
        return y

    for factor in (*[1] * 32, 512):
        y = go_back(factor)
        sharded.optimizer.step()
    (values,) = sharded.numbers().values()
    facts = {
        "values": [min(values), max(values)],
        "dtypes": [str(x.dtype) for x in (y, *sharded.model.parameters())],
    }
    if cls != FULLY:
        go_back(dist.get_rank() + 1)
        shards = sharded.optimizer.reduce_gradients()  # type: ignore[attr-defined]
        facts["reduced"] = [[str(shard.dtype), shard.tolist()] for shard in shards]
    return facts


# Memory

WIDTH, LAYERS = 64, 16


def chain(layers: int = LAYERS) -> list[nn.Linear]:
    """Return layers of WIDTH² 16-bit parameters each."""
    return [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)]


def live() -> int:
    """Return the bytes that this rank holds in a world with ``Options(has_devices=True)``."""
    tracker = this_tracker()
    return tracker.live_bytes if tracker else 0


class Probe(nn.Module):
    """Records the bytes held during its unit's forward pass, and during its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_bytes: list[int] = []
        self.backward_bytes: list[int] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """Pass the input on, or fail."""
        if self.fails:
            raise ArithmeticError("as the test wants it")
        self.forward_bytes.append(live())
        if x.requires_grad:
            x.register_hook(lambda _: self.backward_bytes.append(live()))
        return x


def probed_chain(probe: Probe, num_frozen: int = 0, num_layers: int = LAYERS) -> nn.Sequential:
    """Return layers as in ``chain``, each with a probe; the first ``num_frozen`` are frozen."""
    layers = chain(num_layers)
    for layer in layers[:num_frozen]:
        layer.requires_grad_(False)
    return nn.Sequential(*(nn.Sequential(layer, probe) for layer in layers))


def hold(
    lesson: Any, cls: str, keywords: dict[str, Any], num_frozen: int = 0, has_unused: bool = False
) -> dict[str, int]:
    """Take two 16-bit steps with Adam; return the bytes held between calls and during passes.

    With all layers frozen, a backward pass only computes the input's gradient. A fully sharded
    model is also evaluated, and made to fail.
    """
    probe, held = Probe(), dict[str, int]()
    plain = probed_chain(probe, num_frozen)
    if has_unused:
        plain.append(nn.Identity())
        plain[-1].spare = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    half = torch.bfloat16
    sharded = Sharded(lesson, cls, plain, torch.optim.Adam, keywords, compute_dtype=half)
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        sharded.optimizer.zero_grad()
        y = sharded.model(x).sum()
        if cls == FULLY:
            held["after a forward pass"] = live()
        y.backward()
        del y
        held["after a backward pass"] = live()
        sharded.optimizer.step()
        held["after step"] = live()
    half = len(probe.backward_bytes) // 2
    held["in the backward pass"] = max(probe.backward_bytes[half:])
    return held | (_held_without_gradients(sharded.model, probe, x) if cls == FULLY else {})


def _held_without_gradients(model: nn.Module, probe: Probe, x: Tensor) -> dict[str, int]:
    held = {"in a forward pass": max(probe.forward_bytes)}
    with torch.no_grad():
        model(x)
    held["after evaluation"] = live()
    probe.fails = True
    with suppress(ArithmeticError):
        model(x)
    held["after a forward pass that failed"] = live()
    return held


# Bytes

NARROW, WIDE, FROZEN = ((7, 2), (13,), (9,)), ((5,),), (11,)
PARTS = {  # numbers of elements sent together, and bytes per element
    STATE: [(14 + 13 + 9, 2), (5, 4)],
    GRADIENTS: [(5, 4), (13 + 9, 2), (14, 2)],  # buckets of 44 to 71 bytes
}


def take_mixed_steps(lesson: Any, cls: str, keywords: dict[str, Any], steps: int) -> dict[str, Any]:
    """Take steps of two backward passes each, the first of which does not use all parameters.

    The frozen parameter holds the rank plus 1, and one of the other parameters is listed twice.

    Returns:
        The values of the frozen parameter, the dtypes of the master copies, and the sizes of the
        parts, in order.
    """
    narrow = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in NARROW]
    wide = [nn.Parameter(torch.ones(shape)) for shape in WIDE]
    frozen = nn.Parameter(
        torch.full(FROZEN, dist.get_rank() + 1.0, dtype=torch.bfloat16), requires_grad=False
    )
    params = [*narrow, frozen, *wide, narrow[0]]
    sharded = getattr(lesson, cls)(params, torch.optim.SGD, lr=0.1, **keywords)
    for _ in range(steps):
        sharded.zero_grad()
        _total([*narrow[:2], *wide]).backward()
        _total([*narrow, *wide]).backward()
        sharded.step()
    return {
        "frozen": frozen.tolist(),
        "masters": [str(master.dtype) for master in sharded.masters],
        "parts": [sum(param.numel() for param in part) for part in sharded.parts],
    }


def _total(params: Sequence[Tensor]) -> Tensor:
    return torch.stack([param.float().sum() for param in params]).sum()


# Buckets


def start_twice(lesson: Any) -> list[list[float]]:
    """Start two reductions, and finish twice; return the shards in the order of their use.

    ``use`` calls a barrier, so that the trace shows what has started before it.
    """
    reduction, used = lesson.Reduction(None), list[list[float]]()

    def use(shard: Tensor) -> None:
        used.append(shard.tolist())
        dist.barrier()

    for number in (1.0, 2.0):
        whole = torch.full((2 * dist.get_world_size(),), number * (dist.get_rank() + 1))
        reduction.start(whole, use)
    reduction.finish()
    reduction.finish()
    return used


# Time


def go_back_once(lesson: Any, cls: str, keywords: dict[str, Any], kind: str) -> None:
    """Run one forward and one backward pass of layers that take as long to compute as to send.

    Args:
        kind: The kind of model: "plain", "sharded", or "made", which is sharded but runs no pass.
    """
    rows, model = _timed(cls)
    if kind != "plain":
        sharded = Sharded(
            *(lesson, cls, model, torch.optim.SGD, {"lr": 0.1, **keywords}),
            compute_dtype=torch.float32,
        )
        sharded.optimizer.zero_grad()
        model = sharded.model
    if kind != "made":
        model(torch.ones(rows, 256, requires_grad=cls == FULLY)).sum().backward()


TIMED_LAYERS, TIMED_UNITS = 12, 8


def _timed(cls: str) -> tuple[int, nn.Module]:
    """Return a number of rows, and a model made of layers or, for ``FULLY``, half-frozen units."""
    if cls != FULLY:
        return 64, nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(TIMED_LAYERS)))
    units = []
    for _ in range(TIMED_UNITS):
        unit = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 256, bias=False))
        unit[0].requires_grad_(False)
        units.append(unit)
    return 256, nn.Sequential(*units)
