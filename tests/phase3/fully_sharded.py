"""Bodies for task 3.20: passes that can be drawn, a model's everyday use, and its states."""

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

FEATURES, BATCH = 8, 64
Mark = tuple[float, str]  # when, in seconds of virtual time, and what had just been computed


class Drawing(NamedTuple):
    """A model and its passes, as their messages and computing must come.

    Attributes:
        uses: the units that compute, in that order.
        frozen: units that are not trained.
        has_own: whether the model multiplies by parameters of its own, at its begin and its end: by
            ``scale``, and by ``level``, which is frozen.
        needs_input: whether the gradient of the input is wanted.
        is_second: whether there was a forward pass before, without a backward pass.
        forward, backward: messages when they set out, computing when it ends.
        why: the backward pass must be so.
    """

    uses: tuple[int, ...]
    frozen: tuple[int, ...]
    has_own: bool
    needs_input: bool
    is_second: bool
    forward: str
    backward: str
    why: str


THREE = "gather 0, gather 1, compute 0, gather 2, compute 1, compute 2"
DRAWINGS = {
    "three units, the first frozen, and an input that needs no gradient": Drawing(
        *((0, 1, 2), (0,), False, False, False),
        forward=THREE,
        backward="gather 2, gather 1, compute 2",
        why="Of unit 0, autograd has saved nothing, so that it is not in to_come: do not fetch it.",
    ),
    "three units, after a forward pass that was for nothing": Drawing(
        *((0, 1, 2), (), False, True, True),
        forward=THREE,
        backward="gather 2, gather 1, compute 2, gather 0, compute 1, compute 0",
        why="When a pass begins, forget the uses that an earlier one has left in to_come.",
    ),
    "two units, of which unit 0 computes twice": Drawing(
        *((0, 1, 0), (), False, True, False),
        forward="gather 0, gather 1, compute 0, compute 1, gather 0, gather 1, compute 0",
        backward="gather 0, gather 1, compute 0, gather 0, compute 1, compute 0",
        why="Take one use out of to_come at a time: the unit's other use is yet to come.",
    ),
    "four units, of which 0 and 2 are frozen": Drawing(
        *((0, 1, 2, 3), (0, 2), False, True, False),
        forward=THREE.replace("compute 2", "gather 3, compute 2, compute 3"),
        backward="gather 3, gather 2, compute 3, gather 1, compute 2, gather 0, compute 1, "
        "compute 0",
        why="Free frozen units at the first call for a use alone, before you fetch ahead: "
        "afterwards, one may be on its way.",
    ),
    "three units, and around them the model's own scale and frozen level": Drawing(
        *((0, 1, 2), (), True, True, False),
        forward=f"gather level + gather scale, {THREE}",
        backward="gather level + gather scale, gather 2, gather 1, compute 2, gather 0, compute 1, "
        "compute 0",
        why="Free only units that are frozen altogether: the model's own parameters are needed "
        "again after all others.",
    ),
}


class Block(nn.Module):
    """Two layers between the same number of features; marks the end of computing."""

    def __init__(self, number: int, marks: list[Mark]) -> None:
        super().__init__()
        self.number, self.marks = number, marks
        self.widen = nn.Linear(FEATURES, 9 + number, bias=False)
        self.narrow = nn.Linear(9 + number, FEATURES, bias=False)

    def mark(self, *_: Tensor) -> None:
        """Note that the block has computed."""
        self.marks.append((time.perf_counter(), f"compute {self.number}"))

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and mark it; when the backward pass has been here, mark that too."""
        if x.requires_grad:
            x.register_hook(self.mark)
        y: Tensor = self.narrow(self.widen(x))
        self.mark()
        return y


class Drawn(nn.Module):
    """Units of different sizes: the bytes of a message tell whose parameters it brings."""

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
        """Call the units in their order, between the model's own parameters."""
        x = x * self.scale * self.level if self.drawing.has_own else x
        for number in self.drawing.uses:
            x = self.blocks[number](x)
        return x * self.scale * self.level if self.drawing.has_own else x


def words_by_bytes(n: int) -> dict[int, str]:
    """Return what is gathered, by the bytes of a rank's shard in float32."""
    sizes = {f"gather {i}": 2 * FEATURES * (9 + i) for i in range(4)}
    sizes |= {"gather scale": FEATURES, "gather level": 1}
    return {-(-size // n) * 4: word for word, size in sizes.items()}


def draw(lesson: Any) -> list[list[Mark]]:
    """Go through each drawing; barriers stand around its forward and its backward pass."""
    found = []
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
        found.append(marks)
    return found


# Everyday use


NARROW, WHOLE_NUMBER = "torch.bfloat16", "torch.int64"
SEEN = {
    **dict.fromkeys(("x", "mask", "more['pair'][0]"), NARROW),
    **dict.fromkeys(("labels", "more['pair'][1]"), WHOLE_NUMBER),
}
RETURNED = {"y": NARROW, "labels": WHOLE_NUMBER, "note": "as it was"}


class Everyday(nn.Module):
    """Takes tensors of several dtypes in several ways, and notes the dtypes that it sees."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3))
        self.register_buffer("average", torch.full((2,), rank + 0.1, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(rank))
        self.seen: dict[str, str] = {}

    def forward(self, x: Tensor, labels: Tensor, *, more: dict[str, Any], mask: Tensor) -> Any:
        """Return a dict, in which not all are tensors."""
        tensors = {"x": x, "labels": labels, "mask": mask}
        tensors |= {"more['pair'][0]": more["pair"][0], "more['pair'][1]": more["pair"][1]}
        self.seen = {name: str(tensor.dtype) for name, tensor in tensors.items()}
        y = self.layers(x.to(torch.bfloat16)) + more["pair"][0] * mask
        return {"y": y, "labels": labels, "note": more["note"]}


def use_every_day(lesson: Any) -> dict[str, Any]:
    """Go through a model forward and back; return what it saw, what came out, and its buffers."""
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
        "result": {name: str(getattr(one, "dtype", one)) for name, one in result.items()},
        "calls of the hook": len(calls),
        "has gradient": [before.grad is not None, beside.grad is not None],
        "buffers": {name: [str(one.dtype), one.tolist()] for name, one in plain.named_buffers()},
    }


def buffers_on(rank: int) -> dict[str, list[Any]]:
    """Return the buffers of a rank, which the others have with other numbers."""
    return {"average": ["torch.float64", [rank + 0.1] * 2], "count": [WHOLE_NUMBER, rank]}


# States


class Stored(nn.Module):
    """Two units: one of three parameters in float32, one of two dtypes, its weight column-wise."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Linear(3, 2, dtype=torch.float64)
        wide.weight = nn.Parameter(wide.weight.detach().t().contiguous().t())
        first = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
        self.blocks = nn.ModuleList([first, nn.Sequential(wide, nn.LayerNorm(3))])


MISSING = "blocks.1.0.weight"
STORED = {name: str(param.dtype) for name, param in Stored().named_parameters()}
SHARDS = ["torch.float32", "torch.float64", "torch.float32"]


def store(lesson: Any) -> dict[str, Any]:
    """Save, load another dtype's numbers, and load what lacks one; a barrier around the saving."""
    model = lesson.FullyShardedDataParallel(Stored())
    dist.barrier()
    full = model.full_state_dict()
    dist.barrier()
    num_bytes = sum(shard.numel() * shard.element_size() for shard in model.parameters())
    other = {
        name: torch.arange(x.numel(), dtype=torch.float16).view_as(x) for name, x in full.items()
    }
    model.load_full_state_dict(other)
    loaded = model.full_state_dict()
    text = "no KeyError"
    try:
        model.load_full_state_dict({name: x for name, x in other.items() if name != MISSING})
    except KeyError as error:
        text = str(error)
    return {
        "dtypes": {name: str(x.dtype) for name, x in full.items()},
        "bytes": num_bytes,
        "shards": [str(shard.dtype) for shard in model.parameters()],
        "held": sum(shard.untyped_storage().nbytes() for shard in model.parameters()),
        "loaded": {name: x.flatten().tolist() for name, x in loaded.items()},
        "error": text,
    }


def stored_numbers() -> dict[str, list[float]]:
    """Return what ``store`` has loaded, by name."""
    params = Stored().named_parameters()
    return {name: [float(i) for i in range(param.numel())] for name, param in params}
