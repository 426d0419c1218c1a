"""Bodies for tasks 2.6 and 2.7, and the functions that they checkpoint."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import dropout

from distlab.sim.hooks import this_tracker
from judging.calls import refusal_of, returned

ROWS, WIDTH = 512, 64
UNIT = 4 * ROWS * WIDTH  # bytes of an activation
LAYERS, BLOCKS = 6, 6  # of a chain: layers in a block, blocks
LAYER_FLOPS = 2 * ROWS * WIDTH * WIDTH  # of a forward pass
TWICE = "backward through the graph a second time"
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
Checkpoint = Callable[..., Any]
Found = dict[str, Any]


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``checkpoint`` must equal."""
    return fn(*args, **kwargs)


def plain_sequential(layers: list[nn.Module], segments: int, x: Tensor) -> Tensor:
    """What ``checkpoint_sequential`` must equal."""
    for layer in layers:
        x = layer(x)
    return x


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE).requires_grad_()


def linear(num_in: int = 4, num_out: int = 4) -> nn.Linear:
    return nn.Linear(num_in, num_out, **DOUBLE)


def finished(loss: Tensor, **leaves: Tensor | nn.Module) -> Found:
    """Go backward from ``loss``; return it, and the gradients: without one, of zeros."""
    loss.backward()  # type: ignore[no-untyped-call]
    tensors: dict[str, Tensor] = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors |= {f"{name}.{key}": p for key, p in value.named_parameters()}
    gradients = {
        name: [0.0] * x.numel() if x.grad is None else x.grad.flatten().tolist()
        for name, x in tensors.items()
    }
    return {"loss": loss.item(), "gradients": gradients}


# Cases: what is checkpointed, in float64


def a_module(checkpoint: Checkpoint) -> Found:
    x, before, after = leaf(3, 4), linear(), linear()
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    y = after(checkpoint(block, before(x)))
    return finished((y * y).sum(), x=x, before=before, block=block, after=after)


def keyword_arguments(checkpoint: Checkpoint) -> Found:
    x, y, layer = leaf(3, 4), leaf(3, 4), linear()
    other = y.sin()

    def fn(x: Tensor, power: int, *, other: Tensor, scale: float, kind: str, mask: Any) -> Tensor:
        assert (kind, mask) == ("tanh", None)
        return getattr(torch, kind)(layer(x) ** power) * other * scale

    result = checkpoint(fn, x, 2, other=other, scale=0.5, kind="tanh", mask=None)
    return finished((result**2 + other).sum(), x=x, other=y, layer=layer)


def nested_arguments(checkpoint: Checkpoint) -> Found:
    x, y, z, before = leaf(3, 4), leaf(3, 4), leaf(3, 4), linear()
    mask = torch.arange(12).view(3, 4) % 3 > 0

    def fn(pair: list[Tensor], options: dict[str, Any], rows: tuple[Tensor, int]) -> Tensor:
        a, b = pair
        mixed = torch.where(options["mask"], a * b, options["third"].exp())
        return mixed[rows[0]] * rows[1]

    third = before(z).sin()
    options = {"mask": mask, "third": third}
    result = checkpoint(fn, [x.cos(), y], options, (torch.tensor([2, 0, 2]), 3))
    return finished((result**2 + third).sum(), x=x, y=y, third=z, before=before)


def several_results(checkpoint: Checkpoint) -> Found:
    x, layer, unused = leaf(3, 4), linear(), linear()

    def fn(x: Tensor) -> tuple[Any, ...]:
        h = layer(x).tanh()
        return h * 2, unused(h), h.argmax(dim=1), "words", h.exp()

    found = checkpoint(fn, x.sin())
    if not isinstance(found, tuple) or len(found) != 5 or found[3] != "words":
        raise TypeError(f"fn returned a tuple of five; checkpoint returned {found!r:.60}")
    doubled, _, index, _, grown = found
    picked = doubled.gather(1, index[:, None])
    return finished((picked**2).sum() + grown.sum(), x=x, layer=layer, unused=unused)


def only_parameters(checkpoint: Checkpoint) -> Found:
    embedding, layer = nn.Embedding(7, 4, **DOUBLE), linear()
    ids = torch.tensor([[0, 3, 3], [6, 1, 0]])
    of_module = checkpoint(nn.Sequential(embedding, nn.Tanh()), ids)
    of_function = checkpoint(lambda x: layer(x).sin(), torch.ones(2, 4, **DOUBLE))
    loss = (of_module**2).sum() + (of_function**2).sum()
    return finished(loss, embedding=embedding, layer=layer)


def some_need_none(checkpoint: Checkpoint) -> Found:
    x, fixed, layer, frozen = leaf(3, 4), torch.randn(3, 4, **DOUBLE), linear(), linear()
    frozen.requires_grad_(False)
    ids = torch.tensor([2, 0, 1])

    def fn(x: Tensor, fixed: Tensor, ids: Tensor) -> Tensor:
        return layer(frozen(x).tanh() * fixed)[ids]

    result = checkpoint(fn, x.sin(), fixed, ids)
    return finished((result**2).sum(), x=x, fixed=fixed, layer=layer, frozen=frozen)


def used_twice(checkpoint: Checkpoint) -> Found:
    x, layer = leaf(3, 4), linear()
    h = x.sin()
    product = checkpoint(lambda a, b: layer(a) * b.exp(), h, h)
    y = checkpoint(layer, product) + layer(h)
    return finished((y**2).sum(), x=x, layer=layer)


def argument_returned(checkpoint: Checkpoint) -> Found:
    x, layer = leaf(3, 4), linear()
    same, grown = checkpoint(lambda x: (x, layer(x).exp()), x.sin())
    return finished((same * grown).sum(), x=x, layer=layer)


def checkpoint_in_checkpoint(checkpoint: Checkpoint) -> Found:
    x = leaf(3, 4)
    layers = nn.Sequential(linear(), linear(), linear())

    def inner(x: Tensor) -> Tensor:
        return dropout(layers[1](x).tanh(), 0.4)

    def outer(x: Tensor) -> Tensor:
        return layers[2](checkpoint(inner, dropout(layers[0](x), 0.4))).tanh()

    y = checkpoint(outer, x.sin())
    return finished((y**2).sum(), x=x, layers=layers)


CASES: dict[str, tuple[Callable[[Checkpoint], Found], ...]] = {
    "arguments": (a_module, keyword_arguments, nested_arguments),
    "results": (several_results, argument_returned, used_twice),
    "parameters": (only_parameters, some_need_none, checkpoint_in_checkpoint),
}


def run_cases(lesson: Any, about: str, seed: int) -> dict[str, Found]:
    """Loss and gradients of the cases about something, by name.

    Raises:
        TypeError: results were lost.
        RuntimeError: with its cause, where the graph of the outside was walked through twice.
    """
    torch.manual_seed(seed)

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        return returned("checkpoint", lesson.checkpoint(*args, **kwargs))

    try:
        return {case.__name__: case(checkpoint) for case in CASES[about]}
    except RuntimeError as error:
        if TWICE in str(error):
            raise RuntimeError(OUTSIDE) from error
        raise


OUTSIDE = (
    "the backward pass went through the graph outside of the checkpointed function, and then came "
    "there again. Call the function a second time with detached tensors, so that the inner "
    "backward pass ends at them, and return their gradients"
)


def given_back(value: Any) -> Any:
    return returned("checkpoint", value)


# Calls: how often, and with what


class Watched:
    """``fn(x, y, ids, scale)`` that notes its calls."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4)
        self.requires_grad: list[list[bool]] = []
        self.is_of_torch = False  # whether torch.utils.checkpoint has called it

    def __call__(self, x: Tensor, y: Tensor, ids: Tensor, scale: float) -> Tensor:
        self.requires_grad.append([tensor.requires_grad for tensor in (x, y, ids)])
        self.is_of_torch |= "/torch/utils/checkpoint.py" in _callers()
        result: Tensor = (self.layer(x) * y)[ids] * scale
        return result


def _callers() -> str:
    """The files of the functions that are being called."""
    files, frame = "", sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        files += frame.f_code.co_filename.replace("\\", "/") + "\n"
    return files


def watch_calls(lesson: Any) -> list[Found]:
    """What the calls of a function got where x needs a gradient, and where y does."""
    return [_watch(lesson, needing) for needing in ([True, False], [False, True])]


def _watch(lesson: Any, needing: list[bool]) -> Found:
    fn = Watched()
    x, y = (torch.randn(3, 4).requires_grad_(needs) for needs in needing)
    ids = torch.tensor([0, 2, 1, 1])
    given_back(lesson.checkpoint(fn, x, y, ids, 2.0)).sum().backward()
    return {"calls": fn.requires_grad, "needing": needing, "is_of_torch": fn.is_of_torch}


def call_without_gradients(lesson: Any) -> dict[str, list[Any]]:
    """By situation: calls of a module in both passes, and whether its result needs a gradient."""
    found = {}
    for name, is_frozen in (("in no_grad", False), ("frozen", True)):
        layer = nn.Linear(4, 4).requires_grad_(not is_frozen)
        calls: list[bool] = []
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(True))
        with torch.set_grad_enabled(is_frozen):
            y = given_back(lesson.checkpoint(layer, torch.randn(3, 4)))
        found[name] = [len(calls), y.requires_grad]
    return found


def change_argument(lesson: Any) -> str:
    """The error of a backward pass before which an argument was changed, "" if there is none."""
    layer, h = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True).sin()
    y = given_back(lesson.checkpoint(lambda x: layer(x).tanh(), h))
    with torch.no_grad():
        h.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return ""


# Random numbers and autocast


def draw(lesson: Any, seed: int) -> Found:
    """Dropout and noise on every rank, each with a seed of its own."""
    return draw_with(lesson.checkpoint, seed + dist.get_rank())


def draw_with(checkpoint: Checkpoint, seed: int) -> Found:
    """Results, gradients, and what is drawn outside: between the passes, and after them."""
    torch.manual_seed(seed)
    x = torch.ones(20, **DOUBLE, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return dropout(x, 0.5) * torch.rand(20, **DOUBLE)

    y = given_back(checkpoint(fn, given_back(checkpoint(fn, x))))
    between = torch.rand(3).tolist()
    y.sum().backward()
    assert x.grad is not None
    after = torch.rand(3).tolist()
    return {"y": y.tolist(), "gradient": x.grad.tolist(), "between": between, "after": after}


Autocast = tuple[str, bool]  # dtype, whether it is enabled
OFF = ("bfloat16", False)
CASTS: list[tuple[Autocast, Autocast]] = [  # of the forward pass, of the backward pass
    (("float16", True), OFF),
    (("bfloat16", True), ("float16", True)),
    (OFF, ("bfloat16", True)),
]


def cast(lesson: Any, seed: int) -> list[Found]:
    """What comes out where autocast is not the same in both passes."""
    return [_cast(lesson, forward, backward, seed) for forward, backward in CASTS]


def _cast(lesson: Any, forward: Autocast, backward: Autocast, seed: int) -> Found:
    """What autocast was in the calls of a function, and after the backward pass; gradients."""
    torch.manual_seed(seed)
    layer, x = nn.Linear(8, 8), torch.randn(5, 8, requires_grad=True)
    seen: list[Autocast] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(autocast_now())
        hidden: Tensor = layer(x)
        return hidden.sin()

    with autocast(forward):
        y = given_back(lesson.checkpoint(fn, x * 1))
    with autocast(backward):
        y.double().sum().backward()
        after = autocast_now()
    assert x.grad is not None
    return {"seen": seen, "after": after, "dtype": str(y.dtype), "gradient": x.grad.tolist()}


def autocast(state: Autocast) -> torch.autocast:
    dtype, is_enabled = state
    return torch.autocast("cpu", getattr(torch, dtype), is_enabled)


def autocast_now() -> Autocast:
    dtype = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
    return dtype, torch.is_autocast_enabled("cpu")


# Memory, FLOPs and messages


def block() -> nn.Module:
    """Six layers, each of which keeps one activation for the backward pass."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def live_bytes() -> int:
    """Bytes of this rank's tensors, in a world with ``Options(has_devices=True)``."""
    tracker = this_tracker()
    assert tracker is not None
    return tracker.live_bytes


def hold(lesson: Any) -> Found:
    """How many bytes a checkpointed function holds after its forward pass, with its argument."""
    fn, x = block(), torch.randn(ROWS, WIDTH, requires_grad=True)
    before = live_bytes()
    h = x + 1
    y = given_back(lesson.checkpoint(fn, h))
    del h
    return {"held": live_bytes() - before, "before": before, "needs": y.requires_grad}


def train_chain(lesson: Any) -> int:
    """One forward and one backward pass through blocks, each checkpointed; bytes of parameters."""
    blocks = [block() for _ in range(BLOCKS)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for fn in blocks:
        x = given_back(lesson.checkpoint(fn, x))
    x.sum().backward()
    return sum(p.nbytes for fn in blocks for p in fn.parameters())


def send_inside(lesson: Any) -> Found:
    """Gradients where the function sums a number over all ranks on its way."""
    x = torch.arange(4.0).add(dist.get_rank()).requires_grad_()

    def fn(x: Tensor) -> Tensor:
        total = x.detach().sum()
        dist.all_reduce(total)
        return x * total

    given_back(lesson.checkpoint(fn, x)).sum().backward()
    assert x.grad is not None
    return {"gradient": x.grad.tolist()}


# Segments


class Layer(nn.Module):
    """Notes its number whenever it is called."""

    def __init__(self, number: int, calls: list[int], inner: nn.Module) -> None:
        super().__init__()
        self.number, self.calls, self.inner = number, calls, inner

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.number)
        return dropout(self.inner(x), 0.2)


def run_segments(lesson: Any, cases: list[tuple[int, int]], seed: int) -> list[Found]:
    """What comes out for several numbers of layers and segments."""
    return [_run_segments(lesson, *case, seed) for case in cases]


def _run_segments(lesson: Any, num_layers: int, segments: int, seed: int) -> Found:
    """Loss, gradients, and which layers were called in which pass.

    The input needs no gradient; of an odd number of layers, the first embeds integers.
    """
    torch.manual_seed(seed)
    calls: list[int] = []
    inner: list[nn.Module] = [linear() for _ in range(num_layers)]
    x = torch.randn(3, 4, **DOUBLE)
    if num_layers % 2:
        inner[0], x = nn.Embedding(9, 4, **DOUBLE), torch.tensor([3, 0, 8])
    layers = [Layer(number, calls, module) for number, module in enumerate(inner)]
    y = returned("checkpoint_sequential", lesson.checkpoint_sequential(layers, segments, x))
    forward = [*calls]
    calls.clear()
    found = finished((y**2).sum(), layers=nn.ModuleList(layers))
    return {**found, "forward": forward, "backward": calls, "after": torch.rand(3).tolist()}


def train_segments(lesson: Any, num_layers: int, segments: int) -> int:
    """One forward and one backward pass; bytes of the parameters."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = returned("checkpoint_sequential", lesson.checkpoint_sequential(layers, segments, x))
    y.sum().backward()
    return sum(p.nbytes for layer in layers for p in layer.parameters())


def refuse_segments(lesson: Any, cases: list[tuple[int, int]]) -> list[dict[str, str]]:
    """How numbers of segments are refused that do not fit the numbers of layers."""
    return [_refuse(lesson, *case) for case in cases]


def _refuse(lesson: Any, num_layers: int, segments: int) -> dict[str, str]:
    layers = [nn.Linear(4, 4) for _ in range(num_layers)]
    x = torch.randn(2, 4)
    return refusal_of(lambda: lesson.checkpoint_sequential(layers, segments, x))
