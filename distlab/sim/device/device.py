"""One rank's virtual GPU: a context in which a thread's tensor operations take virtual time.

    with Device(gpu, advance=clock.advance) as device:
        train()
    device.memory.peak_by_category

Each operation takes as long as its arithmetic or its memory traffic, whichever is longer (the
roofline). A GPU with 800 TFLOP/s and 4.8 TB/s breaks even at 167 FLOPs per byte:

    (4096, 4096) @ (4096, 4096) in bfloat16   0.137 TFLOP 172 us   0.1 GB 21 us   takes 172 us
    relu of (4096, 4096) in bfloat16          0                    67 MB 14 us    takes 14 us
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass_type,
)

from distlab.sim.device import meta_cache
from distlab.sim.device.flops import Cost, Operation, describe, op_cost
from distlab.sim.device.memory import MemoryTracker, SharedInstallation
from distlab.sim.hardware.cluster import GPU

aten = torch.ops.aten
_innermost_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Charge time and memory for the operations of the thread that enters it.

    Views, metadata and communication take no time. If there is no GPU, no operation takes time,
    but memory is still accounted for.

    Args:
        gpu: GPU to simulate, or None. A dtype for which it lists no speed is as fast as float32.
        advance: Function called with (seconds, operation) after each operation that takes time.
        capacity_bytes: Memory size; None for that of the GPU, or for no limit if there is no GPU.
        slowdown: Factor on all durations; it may be changed at any time.
    Attributes:
        memory: Tracker of live tensors and peak memory.
        flops, bytes_moved: Totals of all operations so far; 0 without a GPU.
    Raises: OutOfMemory: the results of an operation do not fit; raised inside that operation.
    Cost: about 15 us of real time per operation, including 5 for torch; 12 us without a GPU. On
        meta tensors, a repeated call takes 15 us more, and a new one 100 to 400 us more.
    """

    def __init__(
        self,
        gpu: GPU | None,
        *,
        advance: Callable[[float, str], None],
        capacity_bytes: int | None = None,
        slowdown: float = 1.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if capacity_bytes is None and gpu is not None:
            capacity_bytes = int(gpu.memory_bytes)
        self.gpu, self.advance, self.slowdown = gpu, advance, slowdown
        self.memory = MemoryTracker(capacity_bytes)
        self.flops = self.bytes_moved = 0
        self._is_paused = False
        # Called before each operation while the user interrupts the ranks, to end this one.
        self.on_interrupt: Callable[[], None] | None = None
        self._rates = {} if gpu is None else _rates_by_dtype(gpu)

    def __enter__(self) -> "Device":
        self.memory.__enter__()
        _KERNELS.enter()
        # super().__enter__() would also set flags that all threads share.
        _push_mode(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _pop_mode()
        _KERNELS.leave()
        self.memory.__exit__(*exception)

    @contextlib.contextmanager
    def in_another_thread(self) -> Iterator[None]:
        """Charge for the calling thread's operations too; the device must already be entered."""
        self.memory.serve()
        _push_mode(self)
        try:
            yield
        finally:
            _pop_mode()
            self.memory.stop_serving()

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Run the operations in this context for free, without accounting for their memory."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Omit torch.compile's guard, which would cost a 2 s import, and 2 us per operation."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and charge for it."""
        if _innermost_mode(_FAKE) is not None:  # DTensor is computing the shapes of a new operation
            return func(*args, **(kwargs or {}))
        if self.on_interrupt is not None:
            self.on_interrupt()
        if types and _has_wrapper(types):  # a DTensor: its local tensors are dispatched separately
            for value in args:
                if isinstance(value, Parameter):
                    self.memory.meet(value)
            return NotImplemented
        kwargs, op = kwargs or {}, describe(func)
        if op.is_composite:
            return self._run_parts(func, args, kwargs)
        return self._run(func, op, args, kwargs)

    def _run(
        self,
        func: OpOverload[..., Any],
        op: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            out, cost = meta_cache.run(func, op, args, kwargs)
        except RuntimeError as error:
            self.memory.refuse(error, op.name)
            raise
        if not self._is_paused:
            self.memory.observe(op, args, out)
            if self.gpu is not None and not op.is_free:
                seconds = self._seconds(self.gpu, cost or op_cost(op, args, kwargs, out))
                if seconds:
                    self.advance(seconds * self.slowdown, op.name)
        return out

    def _run_parts(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a composite operation, and charge for its parts."""
        _push_mode(self)
        try:
            return func.decompose(*args, **kwargs)
        finally:
            _pop_mode()

    def _seconds(self, gpu: GPU, cost: Cost) -> float:
        """Count an operation's cost; return its duration on a GPU that is not slowed down."""
        self.flops += cost.flops
        self.bytes_moved += cost.bytes
        seconds = cost.bytes / gpu.memory_bytes_per_s
        if cost.flops:
            rate = self._rates.get(cost.dtype, self._rates[torch.float32])
            seconds = max(seconds, cost.flops / rate)
        return seconds


def _rates_by_dtype(gpu: GPU) -> dict[torch.dtype | None, float]:
    return {getattr(torch, name): rate for name, rate in gpu.achievable_flops.items()}


@cache
def _has_wrapper(types: tuple[type, ...]) -> bool:
    return any(is_traceable_wrapper_subclass_type(kind) for kind in types)


# On GPU and CPU, attention is one fused kernel that keeps no scores. Only for meta tensors does
# torch split it into parts and keep the scores: with 32 heads, T = 4096 and width 4096, they take
# 1.1 GB, while all other activations of a layer take 0.5 GB. So attention is fused here for meta
# tensors as well.


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` on meta tensors, fused where the CPU fuses it."""
    if dropout_p or (attn_mask is not None and attn_mask.requires_grad):
        out, _ = aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    else:
        out, _ = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
    result: Tensor = out
    return result


def _install_kernels() -> Callable[[], None]:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")  # type: ignore[no-untyped-call]
    # In evaluation mode, nn.TransformerEncoderLayer would be one operation without a FLOP formula.
    had_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)

    def undo() -> None:
        library._destroy()  # type: ignore[no-untyped-call]
        torch.backends.mha.set_fastpath_enabled(had_fast_path)

    return undo


_KERNELS = SharedInstallation(_install_kernels)
