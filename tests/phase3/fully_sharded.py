"""Bodies (functions that ranks run) for task 3.14: the order of events, everyday use, states."""

import inspect
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.calls import refusal_of
from phase3.zero import (
    WIDTH,
    Numbers,
    Probe,
    chain,
    listed,
    net,
    probed_chain,
)

FEATURES, BATCH = 8, 64
Mark = tuple[float, str]  # virtual seconds, and the event, such as "compute 0"


class Drawing(NamedTuple):
    """A model, and the required order of messages and computation in its passes.

    Attributes:
        uses: The units in the order in which they compute.
        forward: The events of the forward pass in order. A message counts when it starts, and a
            computation when it ends.
        backward: The events of the backward pass, in the same form.
        why: The likely cause if the backward pass differs.
        frozen: The units that are not trained.
        has_own: True if the model multiplies its input and its output by parameters of its own:
            ``scale``, and ``level``, which is frozen.
        needs_input: True if the input requires a gradient.
        is_second: True if another forward pass, without a backward pass, comes first.
    """

    uses: tuple[int, ...]
    forward: str
    backward: str
    why: str
    frozen: tuple[int, ...] = ()
    has_own: bool = False
    needs_input: bool = True
    is_second: bool = False


THREE = "gather 0, gather 1, compute 0, gather 2, compute 1, compute 2"
BACK = "gather 2, gather 1, compute 2, gather 0, compute 1, compute 0"
OWN = "gather level + gather scale"
DRAWINGS = {
    "three units, the first frozen, and an input that needs no gradient": Drawing(
        *((0, 1, 2), THREE, "gather 2, gather 1, compute 2"),
        "Of unit 0, autograd has saved nothing, so that it is not in to_come: do not fetch it.",
        frozen=(0,),
        needs_input=False,
    ),
    "three units, after a forward pass that was for nothing": Drawing(
        *((0, 1, 2), THREE, BACK),
        "When a pass begins, forget the uses that an earlier one has left in to_come.",
        is_second=True,
    ),
    "two units, of which unit 0 computes twice": Drawing(
        (0, 1, 0),
        "gather 0, gather 1, compute 0, compute 1, gather 0, gather 1, compute 0",
        "gather 0, gather 1, compute 0, gather 0, compute 1, compute 0",
        "Take one use out of to_come at a time: the unit's other use is yet to come.",
    ),
    "four units, of which 0 and 2 are frozen": Drawing(
        (0, 1, 2, 3),
        THREE.replace("compute 2", "gather 3, compute 2, compute 3"),
        f"gather 3, gather 2, compute 3, {BACK.removeprefix('gather 2, ')}",
        "Free frozen units at the first call for a use alone, before you fetch ahead: afterwards, "
        "one may be on its way.",
        frozen=(0, 2),
    ),
    "three units, and around them the model's own scale and frozen level": Drawing(
        *((0, 1, 2), f"{OWN}, {THREE}", f"{OWN}, {BACK}"),
        "Free only units that are frozen altogether: the model's own parameters are needed again "
        "after all others.",
        has_own=True,
    ),
}


class Block(nn.Module):
    """A unit of two layers, equally wide at both ends, that records when it has computed."""

    def __init__(self, number: int, marks: list[Mark]) -> None:
        super().__init__()
        self.number, self.marks = number, marks
        self.widen = nn.Linear(FEATURES, 9 + number, bias=False)
        self.narrow = nn.Linear(9 + number, FEATURES, bias=False)

    def mark(self, *_: Tensor) -> None:
        """Record that the block has computed."""
        self.marks.append((time.perf_counter(), f"compute {self.number}"))

    def forward(self, x: Tensor) -> Tensor:
        """Compute; record when this is done, and later, when the backward pass is done."""
        if x.requires_grad:
            x.register_hook(self.mark)
        y: Tensor = self.narrow(self.widen(x))
        self.mark()
        return y


class Drawn(nn.Module):
    """Units of different sizes, so that the bytes of a message identify its unit."""

    def __init__(self, drawing: Drawing, marks: list[Mark]) -> None:
        super().__init__()
        self.drawing = drawing
        self.blocks = nn.ModuleList([Block(i, marks) for i in range(1 + max(drawing.uses))])
        for number in drawing.frozen:
            self.blocks[number].requires_grad_(False)
        if drawing.has_own:
            self.scale = nn.Parameter(torch.ones(FEATURES))
            self.level = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Call the units in their order, between multiplications by the model's own parameters."""
        x = x * self.scale * self.level if self.drawing.has_own else x
        for number in self.drawing.uses:
            x = self.blocks[number](x)
        return x * self.scale * self.level if self.drawing.has_own else x


def words_by_bytes(n: int) -> dict[int, str]:
    """Return the name of each gather, by the bytes of one rank's shard in float32."""
    sizes = {f"gather {i}": 2 * FEATURES * (9 + i) for i in range(4)}
    sizes |= {"gather scale": FEATURES, "gather level": 1}
    return {-(-size // n) * 4: word for word, size in sizes.items()}


def draw(lesson: Any) -> list[list[Mark]]:
    """Run both passes of each drawing; return when each unit has computed.

    There are barriers before, between and after the two passes.
    """
    drawn = []
    for drawing in DRAWINGS.values():
        marks: list[Mark] = []
        model = lesson.FullyShardedDataParallel(Drawn(drawing, marks), compute_dtype=torch.float32)
        vain, x = (torch.ones(BATCH, FEATURES, requires_grad=drawing.needs_input) for _ in range(2))
        if drawing.is_second:
            model(vain)
        dist.barrier()
        marks.clear()
        y = model(x)
        dist.barrier()
        y.sum().backward()
        dist.barrier()
        drawn.append(marks)
    return drawn


# Everyday use

NARROW, WHOLE_NUMBER = "torch.bfloat16", "torch.int64"
SEEN = {
    **dict.fromkeys(("x", "mask", "more['pair'][0]"), NARROW),
    **dict.fromkeys(("labels", "more['pair'][1]"), WHOLE_NUMBER),
}
RETURNED = {"y": NARROW, "labels": WHOLE_NUMBER, "note": "as it was"}


class Everyday(nn.Module):
    """A model that takes tensors of several dtypes in several ways, and records their dtypes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3))
        self.register_buffer("average", torch.full((2,), rank + 0.1, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(rank))
        self.seen: dict[str, str] = {}

    def forward(self, x: Tensor, labels: Tensor, *, more: dict[str, Any], mask: Tensor) -> Any:
        """Return a dict that holds tensors and a string."""
        tensors = {"x": x, "labels": labels, "mask": mask}
        tensors |= {"more['pair'][0]": more["pair"][0], "more['pair'][1]": more["pair"][1]}
        self.seen = {name: str(tensor.dtype) for name, tensor in tensors.items()}
        y = self.layers(x.to(torch.bfloat16)) + more["pair"][0] * mask
        return {"y": y, "labels": labels, "note": more["note"]}


def use_every_day(lesson: Any) -> dict[str, Any]:
    """Run a model forward and backward; return the dtypes it saw, its results and its buffers."""
    plain, calls = Everyday(dist.get_rank()), []
    plain.register_forward_hook(lambda *_: calls.append(1))
    model = lesson.FullyShardedDataParallel(plain)
    before, beside = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    labels = torch.tensor([0, 2])
    more = {"pair": (2 * beside, labels), "note": "as it was"}
    result = model(2 * before, labels, more=more, mask=torch.ones(2, 3))
    result["y"].float().sum().backward()
    return {
        "seen": plain.seen,
        "returned": {name: str(getattr(x, "dtype", x)) for name, x in result.items()},
        "used": {
            "calls of a forward hook": len(calls),
            "input of args has a gradient": before.grad is not None,
            "input of kwargs has a gradient": beside.grad is not None,
        },
        "buffers": {name: [str(x.dtype), x.tolist()] for name, x in plain.named_buffers()},
        "refusal": refusal_of(lambda: lesson.FullyShardedDataParallel(_without_values())),
    }


UNBORN = "1.weight"


def reduce_in_float32(lesson: Any) -> float | None:
    """Return this rank's gradient if that of rank 0 is 256, and that of other ranks is 1.

    None if the answer has no ``reduce_dtype``, which it may leave out.
    """
    cls = lesson.FullyShardedDataParallel
    if "reduce_dtype" not in inspect.signature(cls).parameters:
        return None
    model = cls(nn.Linear(1, dist.get_world_size(), bias=False), reduce_dtype=torch.float32)
    model(torch.full((1, 1), 1.0 if dist.get_rank() else 256.0)).sum().backward()
    (shard,) = model.parameters()
    return float(shard.grad)


def _without_values() -> nn.Module:
    """Return a module with one layer on the meta device."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False, device="meta"))


def buffers_on(rank: int) -> dict[str, list[Any]]:
    """Return the dtypes and values of a rank's buffers; the values differ by rank."""
    return {"average": ["torch.float64", [rank + 0.1] * 2], "count": [WHOLE_NUMBER, rank]}


# States


MISSING = "blocks.1.0.weight"


def whole_numbers(kind: str) -> Numbers:
    """Return a full state whose values are exact in float16, and equal for tied parameters."""
    with torch.no_grad():
        model = net(kind, 0)
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) / 8)
    return listed(model.state_dict())


def dtypes_of(kind: str) -> dict[str, str]:
    """Return the dtypes in a model's full state."""
    return {name: str(value.dtype) for name, value in net(kind, 0).state_dict().items()}


def restore(lesson: Any, kind: str) -> dict[str, Any]:
    """Load a full float16 state, save and load the shards, then load an incomplete state.

    There is a barrier before and after the full state is saved.
    """
    model, other = (
        lesson.FullyShardedDataParallel(net(kind, seed), compute_dtype=torch.float64)
        for seed in (7, 8)
    )
    state = {
        name: torch.tensor(numbers, dtype=torch.float16).view(net(kind, 0).state_dict()[name].shape)
        for name, numbers in whole_numbers(kind).items()
    }
    model.load_full_state_dict(state)
    dist.barrier()
    full = model.full_state_dict()
    dist.barrier()
    other.load_state_dict(model.state_dict())
    net(kind, 0).load_state_dict(full)  # fails if the plain model cannot load it
    shards = [*model.parameters()]
    return {
        "full_state_dict": listed(full),
        "load_state_dict of the shards": listed(other.full_state_dict()),
        "dtypes": {name: str(value.dtype) for name, value in full.items()},
        "bytes": sum(shard.nbytes for shard in shards),
        "held": sum(shard.untyped_storage().nbytes() for shard in shards),
        "shards": sorted({str(shard.dtype) for shard in shards}),
        "error": _key_error_of(model, {name: x for name, x in state.items() if name != MISSING}),
    }


def _key_error_of(model: Any, state: dict[str, Tensor]) -> str:
    try:
        model.load_full_state_dict(state)
    except KeyError as error:
        return str(error)
    return "no KeyError"


# Bytes


SENT_LAYERS = 4


def pass_through(
    lesson: Any, num_frozen: int, passes: int, is_evaluated: bool, is_mixed: bool
) -> None:
    """Repeat two forward passes and, unless evaluating, the backward pass of the second one.

    Args:
        passes: The number of repetitions.
        is_mixed: True if each unit has a frozen and a trained layer.
    """
    plain = _mixed_chain() if is_mixed else probed_chain(Probe(), num_frozen, SENT_LAYERS)
    model = lesson.FullyShardedDataParallel(plain)
    x = torch.ones(1, WIDTH, requires_grad=True)
    for _ in range(passes):
        with torch.set_grad_enabled(not is_evaluated):
            model(x)
            y = model(x).sum()
        if not is_evaluated:
            y.backward()


def _mixed_chain() -> nn.Sequential:
    """Return units of two layers each, the first of which is frozen."""
    layers = chain(SENT_LAYERS)
    for layer in layers[::2]:
        layer.requires_grad_(False)
    return nn.Sequential(*(nn.Sequential(*layers[i : i + 2]) for i in range(0, SENT_LAYERS, 2)))
