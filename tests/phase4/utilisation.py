"""Bodies for task 4.15: rates of jobs, models whose FLOPs are known, and memory."""

import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from judging.calls import typed

BYTES_OF_BALLAST = 160 * 2**20


def rate(
    lesson: Any, function: str, by_rank: Sequence[Sequence[float]], group: Any = None
) -> float:
    """Call ``throughput`` or ``mfu`` with this rank's arguments."""
    options = {"group": group} if group else {}
    mine = by_rank[dist.get_rank(group)]
    return typed(function, getattr(lesson, function)(*mine, **options), float)


def count(lesson: Any, kind: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Count the FLOPs of a step.

    Returns:
        What was counted and printed, how often the step was called, and what is not as after a
        step that nobody counts: gradients, the state of torch's generator.
    """
    torch.manual_seed(5)
    model, step = STEPS[kind](*sizes)
    calls, printed, drawn = [], StringIO(), torch.get_rng_state()

    def counted() -> None:
        calls.append(kind)
        step()

    with redirect_stdout(printed):
        flops = typed("count_flops", lesson.count_flops(counted), int)
    found, counted_drawn = _taken_gradients(model), torch.get_rng_state()
    torch.set_rng_state(drawn)
    step()
    uncounted, uncounted_drawn = _taken_gradients(model), torch.get_rng_state()
    is_same = len(found) == len(uncounted) and all(map(torch.equal, found, uncounted))
    other = [] if is_same else ["the gradients"]
    other += [] if counted_drawn.equal(uncounted_drawn) else ["the state of torch's generator"]
    return {"flops": flops, "calls": len(calls), "printed": printed.getvalue(), "other": other}


def _taken_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


Step = Callable[[], object]


def _two_layers(m: int, k: int, h: int, n: int) -> tuple[nn.Sequential, Tensor]:
    model = nn.Sequential(nn.Linear(k, h), nn.ReLU(), nn.Dropout(), nn.Linear(h, n))
    return model, torch.randn(m, k)


def _trained(m: int, k: int, h: int, n: int) -> tuple[nn.Module, Step]:
    model, x = _two_layers(m, k, h, n)
    return model, lambda: model(x).sum().backward()


def _frozen(layer: int, m: int, k: int, h: int, n: int) -> tuple[nn.Module, Step]:
    model, x = _two_layers(m, k, h, n)
    model[layer].requires_grad_(False)
    return model, lambda: model(x).sum().backward()


def _forward(m: int, k: int, h: int, n: int) -> tuple[nn.Module, Step]:
    model, x = _two_layers(m, k, h, n)
    return model, lambda: model(x)


def _recomputed(m: int, k: int, h: int, n: int) -> tuple[nn.Module, Step]:
    model, x = _two_layers(m, k, h, n)
    return model, lambda: checkpoint(lambda: model(x), use_reentrant=False).sum().backward()  # type: ignore[union-attr]


def _convolution(m: int, channels: int, filters: int, width: int) -> tuple[nn.Module, Step]:
    model, x = nn.Conv2d(channels, filters, 3, padding=1), torch.randn(m, channels, width, width)
    return model, lambda: model(x).sum().backward()


STEPS: dict[str, Callable[..., tuple[nn.Module, Step]]] = {
    "trained": _trained,
    "frozen first layer": partial(_frozen, 0),
    "frozen last layer": partial(_frozen, 3),
    "forward only": _forward,
    "recomputed": _recomputed,
    "convolution": _convolution,
}


def process_memory(lesson: Any) -> dict[str, Any]:
    """Ask for the peak of this process, after it has held much more than it does now.

    Returns:
        What was told; and what the system tells right before and after that.
    """
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    ballast = torch.ones(BYTES_OF_BALLAST, dtype=torch.uint8)
    del ballast
    bounds = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes]
    told = typed("peak_memory_bytes", lesson.peak_memory_bytes(torch.device("cpu")), int)
    bounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes)
    return {"told": told, "bounds": bounds}


def gpu_memory(lesson: Any, index: int, num_bytes: int) -> Any:
    """Ask for the peak of a GPU that is not there, and of which torch tells what it is told to."""

    def peak(device: Any = None) -> int:
        if device is None:  # the current one, which is GPU 0
            return num_bytes
        return num_bytes + (device if isinstance(device, int) else torch.device(device).index)

    torch.cuda.max_memory_allocated = peak
    torch.cuda.memory_stats = lambda device=None: {"allocated_bytes.all.peak": peak(device)}
    return lesson.peak_memory_bytes(torch.device("cuda", index))
