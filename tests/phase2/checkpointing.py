"""Bodies (functions that ranks run) for tasks 2.5 and 2.6, and the functions they checkpoint."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import dropout

from distlab.grade import WrongResult
from distlab.sim.device.memory import this_tracker
from judging.calls import cause_told, refused, returned, typed
from judging.comparing import noting_changes
from judging.models import DOUBLE

ROWS, WIDTH = 512, 64
UNIT = 4 * ROWS * WIDTH  # bytes of one activation
LAYERS, BLOCKS = 6, 6  # layers per block, blocks per chain
LAYER_FLOPS = 2 * ROWS * WIDTH * WIDTH  # FLOPs of a layer's forward pass
TWICE = "backward through the graph a second time"
PARAMETERS_ONLY = (
    "No argument of fn requires a gradient here, only its parameters do. The result must require "
    "one all the same: autograd records a Function only if one of its inputs requires a gradient"
)
OUTSIDE = (
    "the backward pass went through the graph outside of the checkpointed function, and then came "
    "there again. Call the function a second time with detached tensors, so that the inner "
    "backward pass ends at them, and return their gradients"
)
Checkpoint = Callable[..., Any]
Found = dict[str, Any]


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` without checkpointing: the reference for ``checkpoint``."""
    return fn(*args, **kwargs)


def plain_sequential(layers: Sequence[nn.Module], segments: int, x: Tensor) -> Tensor:
    """Call the layers without checkpointing: the reference for ``checkpoint_sequential``."""
    return nn.Sequential(*layers)(x)  # type: ignore[no-any-return]


def given_back(value: Any) -> Any:
    return returned("checkpoint", value)


def counted(fn: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    """Count the calls of ``fn``; return ``fn`` itself if it is a module, or else a wrapper."""
    if isinstance(fn, nn.Module):
        if not fn._forward_pre_hooks:  # add only one hook, even if fn is used in several places
            fn.register_forward_pre_hook(lambda module, _: calls.update([type(module).__name__]))
        return fn

    @wraps(fn)
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[fn.__name__] += 1
        return fn(*args, **kwargs)

    return counting


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE).requires_grad_()


def linear(num_in: int = 4, num_out: int = 4) -> nn.Linear:
    return nn.Linear(num_in, num_out, **DOUBLE)


def finished(loss: Tensor, **leaves: Tensor | nn.Module) -> Found:
    """Run the backward pass; return the loss and the gradients, with zeros where there are none."""
    loss.backward()  # type: ignore[no-untyped-call]
    tensors: dict[str, Tensor] = {}
    for name, value in leaves.items():
        by_key = {"": value} if isinstance(value, Tensor) else dict(value.named_parameters())
        tensors |= {f"{name}.{key}".rstrip("."): x for key, x in by_key.items()}
    gradients = {
        name: [0.0] * x.numel() if x.grad is None else x.grad.flatten().tolist()
        for name, x in tensors.items()
    }
    return {"loss": loss.item(), "gradients": gradients}


# Task 2.5: functions whose results and gradients are compared. If an answer gets them wrong, the
# learner is shown the function's docstring as advice.


def a_module(checkpoint: Checkpoint) -> Found:
    """Does the gradient reach the argument, and all parameters of fn? Here, fn is a module with
    dropout, in training mode: does the second call draw the same random numbers as the first, and
    is the module still in training mode?
    """
    x, before, after = leaf(3, 4), linear(), linear()
    block = nn.Sequential(linear(), nn.Dropout(0.4), nn.Tanh(), linear())
    y = after(checkpoint(block, before(x)))
    return finished((y * y).sum(), x=x, before=before, block=block, after=after)


def arguments_of_any_kind(checkpoint: Checkpoint) -> Found:
    """Keyword arguments, and tensors inside lists, tuples and dicts, may need a gradient too:
    take_tensors finds them. Is every gradient in the right position?
    """
    x, y, z, scale, before = leaf(3, 4), leaf(3, 4), leaf(3, 4), leaf(3, 4), linear()
    layer, frozen = linear(), linear().requires_grad_(False)
    mask = torch.arange(12).view(3, 4) % 3 > 0

    def fn(
        pair: list[Tensor],
        options: dict[str, Any],
        rows: tuple[Tensor, int],
        *,
        by: Tensor,
        kind: str,
        nothing: Any,
    ) -> Tensor:
        a, b = pair
        mixed = torch.where(options["mask"], frozen(a) * layer(b), options["third"].exp())
        return getattr(torch, kind)(mixed * by)[rows[0]] * rows[1]

    third, by = before(z).sin(), scale.sin()
    options = {"mask": mask, "third": third}
    rows = torch.tensor([2, 0, 2]), 3
    result = checkpoint(fn, [x.cos(), y], options, rows, by=by, kind="tanh", nothing=None)
    loss = (result**2 + third + by).sum()
    return finished(loss, x=x, y=y, third=z, scale=scale, before=before, layer=layer, frozen=frozen)


def several_results(checkpoint: Checkpoint) -> Found:
    """Each result has its own gradient, except for those that are integers or not used, which have
    none. fn may return a tuple of one element.
    """
    x, layer, unused = leaf(3, 4), linear(), linear()

    def fn(x: Tensor) -> tuple[Any, ...]:
        h = layer(x).tanh()
        return h * 2, unused(h), h.argmax(dim=1), "words", h.exp()

    doubled, _, index, word, grown = tuple_of(5, checkpoint(fn, x.sin()))
    assert word == "words"
    (again,) = tuple_of(1, checkpoint(lambda x: (layer(x).tanh(),), x.sin()))
    loss = doubled.gather(1, index[:, None]).square().sum() + grown.sum() + again.square().sum()
    return finished(loss, x=x, layer=layer, unused=unused)


def tuple_of(size: int, found: Any) -> tuple[Any, ...]:
    if not isinstance(found, tuple) or len(found) != size:
        raise WrongResult(f"fn returned a tuple of {size}; checkpoint returned {found!r:.60}")
    return found


def only_parameters(checkpoint: Checkpoint) -> Found:
    """No argument needs a gradient here, but parameters that fn uses do. autograd records a
    Function only if one of its inputs requires a gradient.
    """
    embedding, layer = nn.Embedding(7, 4, **DOUBLE), linear()
    ids = torch.tensor([[0, 3, 3], [6, 1, 0]])
    of_module = checkpoint(nn.Sequential(embedding, nn.Tanh()), ids)
    of_function = checkpoint(lambda x: layer(x).sin(), torch.ones(2, 4, **DOUBLE))
    loss = (of_module**2).sum() + (of_function**2).sum()
    with cause_told({"does not require grad": PARAMETERS_ONLY}):
        return finished(loss, embedding=embedding, layer=layer)


def frozen_modules(checkpoint: Checkpoint) -> Found:
    """fn is a module whose parameters are frozen, but one of its arguments needs a gradient. In one
    of the calls, that is a keyword argument.
    """
    x, y = leaf(3, 4), leaf(3, 4)
    frozen = nn.Sequential(linear(), nn.Tanh()).requires_grad_(False)
    bilinear = nn.Bilinear(4, 4, 4, **DOUBLE).requires_grad_(False)
    of_argument = checkpoint(frozen, x.sin())
    of_keyword = checkpoint(bilinear, torch.randn(3, 4, **DOUBLE), input2=y.sin())
    return finished((of_argument**2 + of_keyword**2).sum(), x=x, y=y)


def used_twice(checkpoint: Checkpoint) -> Found:
    """A tensor may be passed twice, fn may return one of its arguments, and a module may be used in
    several places.
    """
    x, layer, module = leaf(3, 4), linear(), linear()
    h = x.sin()
    product = checkpoint(lambda a, b: layer(a) * b.exp(), h, h)
    same, grown = checkpoint(lambda x: (x, layer(x).exp()), x.cos())
    y = checkpoint(module, product) + checkpoint(module, h) + same * grown
    return finished((y**2).sum(), x=x, layer=layer, module=module)


def checkpoint_in_checkpoint(checkpoint: Checkpoint) -> Found:
    """Does the second call draw the same random numbers, even inside another checkpoint?"""
    x = leaf(3, 4)
    layers = nn.Sequential(linear(), linear(), linear())

    def inner(x: Tensor) -> Tensor:
        return dropout(layers[1](x).tanh(), 0.4)

    def outer(x: Tensor) -> Tensor:
        return layers[2](checkpoint(inner, dropout(layers[0](x), 0.4))).tanh()

    y = checkpoint(outer, x.sin())
    return finished((y**2).sum(), x=x, layers=layers)


CASES: dict[str, Callable[[Checkpoint], Found]] = {
    case.__name__: case
    for case in (
        *(a_module, arguments_of_any_kind, several_results, used_twice),
        *(only_parameters, frozen_modules, checkpoint_in_checkpoint),
    )
}


def run_case(lesson: Any, case: str, seed: int) -> Found:
    """Run one of ``CASES`` with the lesson's checkpoint; return loss, gradients and call counts.

    Raises:
        WrongResult: Results are missing.
        RuntimeError: The backward pass went twice through the graph outside the checkpoint.
    """
    torch.manual_seed(seed)
    calls: Counter[str] = Counter()

    def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return given_back(lesson.checkpoint(counted(fn, calls), *args, **kwargs))

    with cause_told({TWICE: OUTSIDE}):
        return {**CASES[case](checkpoint), "calls": dict(calls)}


# Task 2.5: number and arguments of calls


class Watched:
    """A function ``fn(x, y, ids, scale)`` that records its calls."""

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
    """Return the source files of all functions on the call stack, one per line."""
    files, frame = "", sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        files += frame.f_code.co_filename.replace("\\", "/") + "\n"
    return files


def watch_calls(lesson: Any) -> list[Found]:
    """Return a checkpointed function's calls when only x needs a gradient, and when only y does."""
    return [_watch(lesson, needing) for needing in ([True, False], [False, True])]


def _watch(lesson: Any, needing: list[bool]) -> Found:
    fn = Watched()
    x, y = (torch.randn(3, 4).requires_grad_(needs) for needs in needing)
    ids = torch.tensor([0, 2, 1, 1])
    given_back(lesson.checkpoint(fn, x, y, ids, 2.0)).sum().backward()
    return {"calls": fn.requires_grad, "needing": needing, "is_of_torch": fn.is_of_torch}


class Scaled(nn.Linear):
    """A layer with a required keyword argument."""

    def forward(self, x: Tensor, *, scale: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def call_without_gradients(lesson: Any) -> dict[str, list[Any]]:
    """Checkpoint a module under ``no_grad``, and one that is frozen.

    Returns:
        In each situation, how often the module is called, and whether its result needs a gradient.
    """
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
    """Change an argument between the forward and the backward pass.

    Returns:
        The error of the backward pass for each kind of argument in ``CHANGED``, or "" for none.
    """
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

DRAWN = {
    "y": "the results",
    "between": "the random numbers drawn between the passes",
    "gradient": "the gradient of x",
    "after": "the random numbers drawn after the backward pass",
}


def draw(lesson: Any, seed: int) -> Found:
    """Call ``draw_with`` with a different seed on each rank."""
    return draw_with(lesson.checkpoint, seed + dist.get_rank())


def draw_with(checkpoint: Checkpoint, seed: int) -> Found:
    """Checkpoint a function that draws dropout and noise.

    Returns:
        The results, the gradient, and random numbers drawn between the passes and after them.
    """
    torch.manual_seed(seed)
    x = torch.ones(20, **DOUBLE, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return dropout(x, 0.5) * torch.rand(20, **DOUBLE, device=x.device)

    y = given_back(checkpoint(fn, given_back(checkpoint(fn, x))))
    between = torch.rand(3).tolist()
    y.sum().backward()
    assert x.grad is not None
    after = torch.rand(3).tolist()
    return {"y": y.tolist(), "gradient": x.grad.tolist(), "between": between, "after": after}


Autocast = tuple[str, bool]  # dtype, whether autocast is enabled
OFF = ("bfloat16", False)
CASTS: list[tuple[Autocast, Autocast]] = [  # autocast in the forward and in the backward pass
    (("float16", True), OFF),
    (("bfloat16", True), ("float16", True)),
    (OFF, ("bfloat16", True)),
]


def cast(lesson: Any, seed: int) -> list[Found]:
    """Checkpoint a function, with autocast in different states in the forward and backward pass."""
    return [_cast(lesson, forward, backward, seed) for forward, backward in CASTS]


def _cast(lesson: Any, forward: Autocast, backward: Autocast, seed: int) -> Found:
    """Return autocast's state in each call and afterwards, the result's dtype, and the gradient."""
    torch.manual_seed(seed)
    layer, x = nn.Linear(8, 8), torch.randn(5, 8, requires_grad=True)
    seen: list[Autocast] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(autocast_now(x.device))
        hidden: Tensor = layer(x)
        return hidden.sin()

    with autocast(forward, x.device):
        y = given_back(lesson.checkpoint(fn, x * 1))
    with autocast(backward, x.device):
        y.double().sum().backward()
        after = autocast_now(x.device)
    assert x.grad is not None
    return {"seen": seen, "after": after, "dtype": str(y.dtype), "gradient": x.grad.tolist()}


def autocast(state: Autocast, device: torch.device) -> torch.autocast:
    dtype, is_enabled = state
    return torch.autocast(device.type, getattr(torch, dtype), is_enabled)


def autocast_now(device: torch.device) -> Autocast:
    dtype = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    return dtype, torch.is_autocast_enabled(device.type)


# Memory and FLOPs


def block() -> nn.Module:
    """Make six layers, each of which keeps one activation for the backward pass."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def live_bytes() -> int:
    """Return the bytes that this rank's tensors take up now; works only in a ``MEASURED`` world."""
    tracker = this_tracker()
    assert tracker is not None
    return tracker.live_bytes


def hold(lesson: Any) -> Found:
    """Checkpoint six layers, use the result and delete it; return the bytes that are still held."""
    fn, x = block(), torch.randn(ROWS, WIDTH, requires_grad=True)
    before = live_bytes()
    h = x + 1
    y = given_back(lesson.checkpoint(fn, h))
    loss = y.sum()  # its backward pass does not need y
    del h, y
    return {"held": live_bytes() - before, "before": before, "needs": loss.requires_grad}


def train_chain(lesson: Any) -> int:
    """Train a chain of checkpointed blocks for one step; return the bytes of their parameters."""
    blocks = [block() for _ in range(BLOCKS)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for fn in blocks:
        x = given_back(lesson.checkpoint(fn, x))
    x.sum().backward()
    return sum(p.nbytes for fn in blocks for p in fn.parameters())


# Task 2.6: checkpoint_sequential


class Layer(nn.Module):
    """A layer that records its calls; every third layer is in evaluation mode."""

    def __init__(self, number: int, calls: list[int], inner: nn.Module) -> None:
        super().__init__()
        self.number, self.calls, self.inner = number, calls, inner
        self.train(number % 3 != 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.number)
        return dropout(self.inner(x), 0.2, self.training)


def run_segments(lesson: Any, cases: list[tuple[int, int]], seed: int) -> list[Found]:
    """Run each case, a pair of (layers, segments), and return what was observed."""
    return [_run_segments(lesson, *case, seed) for case in cases]


def _run_segments(lesson: Any, num_layers: int, segments: int, seed: int) -> Found:
    """Run layers in segments; return the loss, the gradients, the layers called, and side effects.

    With an even number of segments, the input is part of a graph and gets a gradient. With an odd
    number of layers, the input consists of integers instead, and the first layer embeds them.
    """
    torch.manual_seed(seed)
    calls: list[int] = []
    inner: list[nn.Module] = [linear() for _ in range(num_layers)]
    source = torch.randn(3, 4, **DOUBLE).requires_grad_(segments % 2 == 0)
    x = source.clone()
    if num_layers % 2:
        inner[0], x = nn.Embedding(9, 4, **DOUBLE), torch.tensor([3, 0, 8])
    layers = [Layer(number, calls, module) for number, module in enumerate(inner)]
    given = [*layers]
    with noting_changes(x=x) as changed:
        y = typed("checkpoint_sequential", lesson.checkpoint_sequential(given, segments, x), Tensor)
        forward = [*calls]
        calls.clear()
        each_once = f"Every layer is called once, 0 to {num_layers - 1}; those called are {forward}"
        with cause_told({"does not require grad": each_once}):
            found = finished((y**2).sum(), layers=nn.ModuleList(layers), x=source)
    found |= {"forward": forward, "backward": calls, "after": torch.rand(3).tolist()}
    left = {"left": [layer.number for layer in given], "modes": [m.training for m in layers]}
    return {**found, **left, "changed": changed}


def train_segments(lesson: Any, num_layers: int, segments: int) -> int:
    """Train layers in segments for one step; return the bytes of their parameters."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    layers = tuple(blocks)  # a tuple, since any sequence is allowed
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = typed("checkpoint_sequential", lesson.checkpoint_sequential(layers, segments, x), Tensor)
    y.sum().backward()
    return sum(p.nbytes for layer in layers for p in layer.parameters())


def refuse_segments(lesson: Any, num_layers: int, segments: int) -> dict[str, str]:
    """Return how the lesson refuses a number of segments that does not fit the number of layers."""
    layers = [nn.Linear(4, 4) for _ in range(num_layers)]
    return refused(lesson, "checkpoint_sequential", layers, segments, torch.randn(2, 4))
