"""Bodies for task 4.15: rates of jobs, models with known FLOPs, and memory."""

import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from judging.calls import typed
from judging.tensors import given_group

BYTES_OF_BALLAST = 160 * 2**20


def rate(
    lesson: Any, function: str, by_rank: Sequence[Sequence[float]], group: Any = None
) -> float:
    """Call ``throughput`` or ``mfu`` with this rank's arguments."""
    mine = by_rank[dist.get_rank(group)]
    return typed(function, getattr(lesson, function)(*mine, **given_group(group)), float)


def _step(kind: str, m: int, k: int, h: int, n: int) -> tuple[nn.Module, Callable[[], object]]:
    """Make a model and its step, of one of the kinds of ``judge_utilisation.COUNTS``."""
    model: nn.Module = nn.Sequential(nn.Linear(k, h), nn.ReLU(), nn.Dropout(), nn.Linear(h, n))
    x, recomputed = torch.randn(m, k), cast(Any, checkpoint)
    if kind == "convolution":
        model, x = nn.Conv2d(k, h, 3, padding=1), torch.randn(m, k, n, n)

    def backward() -> None:
        is_kept = kind != "recomputed"
        (model(x) if is_kept else recomputed(model, x, use_reentrant=False)).sum().backward()

    return model, (lambda: model(x)) if kind == "forward only" else backward


def count(lesson: Any, kind: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Count the FLOPs of a step, and compare its effects with a step that was not counted."""
    torch.manual_seed(5)
    model, step = _step(kind, *sizes)
    calls, printed, generator = [], StringIO(), torch.get_rng_state()

    def counted() -> None:
        calls.append(kind)
        step()

    with redirect_stdout(printed):
        flops = typed("count_flops", lesson.count_flops(counted), int)
    gradients, generator_after = _taken_gradients(model), torch.get_rng_state()
    torch.set_rng_state(generator)
    step()
    uncounted = _taken_gradients(model)
    is_same = len(gradients) == len(uncounted) and all(map(torch.equal, gradients, uncounted))
    is_drawn_alike = generator_after.equal(torch.get_rng_state())
    other = [] if is_same else ["the gradients"]
    other += [] if is_drawn_alike else ["the state of torch's generator"]
    return {"flops": flops, "calls": len(calls), "printed": printed.getvalue(), "other": other}


def _taken_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def process_memory(lesson: Any) -> tuple[int, int, int]:
    """Return the peak of this process, between what the system says before and after it."""
    ballast = torch.ones(BYTES_OF_BALLAST, dtype=torch.uint8)
    del ballast
    before = _max_rss_bytes()
    answer = typed("peak_memory_bytes", lesson.peak_memory_bytes(torch.device("cpu")), int)
    return before, answer, _max_rss_bytes()


def _max_rss_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def gpu_memory(lesson: Any, index: int, num_bytes: int) -> Any:
    """Ask for the peak of a GPU that is not there; torch's functions add its index to a number."""

    def peak(device: Any = None) -> int:
        if device is None:  # the current one, which is GPU 0
            return num_bytes
        return num_bytes + (device if isinstance(device, int) else torch.device(device).index)

    torch.cuda.max_memory_allocated = peak
    torch.cuda.memory_stats = lambda device=None: {"allocated_bytes.all.peak": peak(device)}
    return lesson.peak_memory_bytes(torch.device("cuda", index))
