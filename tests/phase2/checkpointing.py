"""Bodies for tasks 2.6 and 2.7, besides the cases that compare gradients."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import dropout

from distlab.sim.device.hooks import this_tracker
from judging.calls import cause_told, refusal_of, typed
from phase2.checkpoint_cases import DOUBLE, Checkpoint, Found, finished, given_back, linear

ROWS, WIDTH = 512, 64
UNIT = 4 * ROWS * WIDTH  # bytes of an activation
LAYERS, BLOCKS = 6, 6  # of a chain: layers in a block, blocks
LAYER_FLOPS = 2 * ROWS * WIDTH * WIDTH  # of a forward pass


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``checkpoint`` must equal."""
    return fn(*args, **kwargs)


def plain_sequential(layers: Sequence[nn.Module], segments: int, x: Tensor) -> Tensor:
    """What ``checkpoint_sequential`` must equal."""
    for layer in layers:
        x = layer(x)
    return x


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


class Scaled(nn.Linear):
    """Takes a keyword argument, without which it cannot be called."""

    def forward(self, x: Tensor, *, scale: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def call_without_gradients(lesson: Any) -> dict[str, list[Any]]:
    """By situation: calls of a module in both passes, and whether its result needs a gradient."""
    found = {}
    for name, is_frozen in (("in no_grad", False), ("frozen", True)):
        layer = Scaled(4, 4).requires_grad_(not is_frozen)
        calls: list[bool] = []
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(True))
        with torch.set_grad_enabled(is_frozen):
            y = given_back(lesson.checkpoint(layer, torch.randn(3, 4), scale=2.0))
        found[name] = [len(calls), y.requires_grad]
    return found


CHANGED = ("an argument that requires a gradient", "an argument that requires none")


def change_argument(lesson: Any) -> dict[str, str]:
    """The error of a backward pass before which an argument was changed, by which; "": none."""
    return {which: _change(lesson, place) for place, which in enumerate(CHANGED)}


def _change(lesson: Any, place: int) -> str:
    layer = nn.Linear(4, 4)
    given = torch.randn(3, 4, requires_grad=True).sin(), torch.rand(3, 4)
    y = given_back(lesson.checkpoint(lambda x, mask: (layer(x) * mask).tanh(), *given))
    with torch.no_grad():
        given[place].add_(1)
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
    """How many bytes are held when a checkpointed function's result has been used and deleted."""
    fn, x = block(), torch.randn(ROWS, WIDTH, requires_grad=True)
    before = live_bytes()
    h = x + 1
    y = given_back(lesson.checkpoint(fn, h))
    loss = y.sum()  # its backward pass does not need y
    del h, y
    return {"held": live_bytes() - before, "before": before, "needs": loss.requires_grad}


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
    """Notes its number whenever it is called; each third layer is in evaluation mode."""

    def __init__(self, number: int, calls: list[int], inner: nn.Module) -> None:
        super().__init__()
        self.number, self.calls, self.inner = number, calls, inner
        self.train(number % 3 != 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.number)
        return dropout(self.inner(x), 0.2, self.training)


def run_segments(lesson: Any, cases: list[tuple[int, int]], seed: int) -> list[Found]:
    """What comes out for several numbers of layers and segments."""
    return [_run_segments(lesson, *case, seed) for case in cases]


def _run_segments(lesson: Any, num_layers: int, segments: int, seed: int) -> Found:
    """Loss, gradients, which layers were called in which pass, and what is left of the sequence.

    The input needs no gradient; of an odd number of layers, the first embeds integers.
    """
    torch.manual_seed(seed)
    calls: list[int] = []
    inner: list[nn.Module] = [linear() for _ in range(num_layers)]
    x = torch.randn(3, 4, **DOUBLE)
    if num_layers % 2:
        inner[0], x = nn.Embedding(9, 4, **DOUBLE), torch.tensor([3, 0, 8])
    layers = [Layer(number, calls, module) for number, module in enumerate(inner)]
    given = [*layers]
    y = typed("checkpoint_sequential", lesson.checkpoint_sequential(given, segments, x), Tensor)
    forward = [*calls]
    calls.clear()
    each_once = f"Every layer is called once, 0 to {num_layers - 1}; those called are {forward}"
    with cause_told({"does not require grad": each_once}):
        found = finished((y**2).sum(), layers=nn.ModuleList(layers))
    found |= {"forward": forward, "backward": calls, "after": torch.rand(3).tolist()}
    left = {"left": [layer.number for layer in given], "modes": [m.training for m in layers]}
    return {**found, **left}


def train_segments(lesson: Any, num_layers: int, segments: int) -> int:
    """One forward and one backward pass; bytes of the parameters."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    layers = tuple(blocks)  # any sequence will do
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = typed("checkpoint_sequential", lesson.checkpoint_sequential(layers, segments, x), Tensor)
    y.sum().backward()
    return sum(p.nbytes for layer in layers for p in layer.parameters())


def refuse_segments(lesson: Any, cases: list[tuple[int, int]]) -> list[dict[str, str]]:
    """How numbers of segments are refused that do not fit the numbers of layers."""
    return [_refuse(lesson, *case) for case in cases]


def _refuse(lesson: Any, num_layers: int, segments: int) -> dict[str, str]:
    layers = [nn.Linear(4, 4) for _ in range(num_layers)]
    x = torch.randn(2, 4)
    return refusal_of(lambda: lesson.checkpoint_sequential(layers, segments, x))
