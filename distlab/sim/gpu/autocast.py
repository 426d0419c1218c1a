"""``torch.autocast("cuda")`` for tensors of GPUs, which torch's C++ code takes for the CPU's.

Autocast on GPUs switches C++ code's autocast of the CPU on as well. The lists of both differ: in
float16, ``softmax`` and ``layer_norm`` compute in float32 only on GPUs. So CUDA's lists, which are
those of ``ATen/autocast_mode.h``, are registered beside the CPU's while a world runs.

    linear, matmul, conv2d, scaled_dot_product_attention     float16 or bfloat16
    softmax, sum, layer_norm, exp, pow, losses               float32
    addcmul, index_put, scatter_add                          the widest dtype among the arguments
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from distlab.sim.gpu.device import await_values
from distlab.sim.gpu.placement import index_of

_KEY = "AutocastCPU"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

# Operations that only CUDA's lists have.
_LOW = """
    addmv addr mv chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist renorm
    logsumexp norm.Scalar norm.ScalarOpt_dim upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
"""
_FLOAT32_RESULT = """
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"

# Operations of both lists: a tensor of the host keeps its dtype under CUDA's autocast.
_SHARED = """
    _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm
    scaled_dot_product_attention
"""
_BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
    "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which include the sigmoid"
)

Kernel = Callable[..., Any]


class _Cpu(threading.local):
    """Autocast on the CPU as the thread's program has asked for it."""

    enabled = False
    dtype = torch.bfloat16


_cpu = _Cpu()


# What the program asks for


def _settle() -> None:
    """Set the autocast that C++ code applies: CUDA's if it is on, otherwise the CPU's."""
    is_on = _is_enabled("cuda")
    _set_enabled("cpu", is_on or _cpu.enabled)
    _set_dtype("cpu", _get_dtype("cuda") if is_on else _cpu.dtype)


def _enable(device: Any, enabled: bool | None = None) -> None:
    if enabled is None:
        device, enabled = "cuda", device
    if device == "cpu":
        _cpu.enabled = enabled
    else:
        _set_enabled(device, enabled)
    _settle()


def _choose_dtype(device: str, dtype: torch.dtype) -> None:
    if device == "cpu":
        _cpu.dtype = dtype
    else:
        _set_dtype(device, dtype)
    _settle()


def _asks_for(device: str = "cuda") -> bool:
    return _cpu.enabled if device == "cpu" else _is_enabled(device)


def _asked_dtype(device: str) -> torch.dtype:
    return _cpu.dtype if device == "cpu" else _get_dtype(device)


# What the operations do


def _is_cast(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and index_of(value) >= 0
    )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of a GPU, or those of a sequence, in a dtype; others stay as they are."""
    if isinstance(value, list | tuple):
        return [cast(part, dtype) for part in value]
    return value.to(dtype) if _is_cast(value) else value


def _widest(args: Sequence[Any]) -> torch.dtype:
    is_wide = any(_is_cast(value) and value.dtype is torch.float32 for value in args)
    return torch.float32 if is_wide else _get_dtype("cuda")


def _casting(choose: Callable[[Sequence[Any]], torch.dtype], op: Kernel) -> Kernel:
    """Return an operation that first casts the tensors of GPUs among its arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if not _is_enabled("cuda"):
                return op(*args, **kwargs)
            dtype = choose(args)
            kwargs = {name: cast(value, dtype) for name, value in kwargs.items()}
            return op(*(cast(value, dtype) for value in args), **kwargs)

    return run


def _widening(op: Kernel) -> Kernel:
    """Return an operation whose result is in float32 unless the caller chooses a dtype."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            is_chosen = kwargs.get("dtype") is not None or _has_dtype(args)
            if not is_chosen and _is_enabled("cuda") and _is_cast(args[0]):
                kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return run


def _has_dtype(args: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.dtype) for value in args)


def _sparing(kernel: Any, op: Kernel) -> Kernel:
    """Return the CPU's kernel of an operation, without effect on the host under CUDA's autocast.

    It casts leaves while it holds a lock of the process. A rank that waited there for a message
    would keep the rank that sends it from casting, so it waits before.
    """

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if not _is_enabled("cuda") or any(map(_is_cast, values)):
            await_values(value for value in values if isinstance(value, Tensor))
            return kernel.call_boxed(keys, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return op(*args, **kwargs)

    return run


def _banning(kernel: Any, op: Kernel) -> Kernel:
    """Return an operation that raises as on GPUs."""
    spared = _sparing(kernel, op)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_enabled("cuda") and any(map(_is_cast, args)):
            raise RuntimeError(_BANNED)
        return spared(keys, *args, **kwargs)

    return run


_ADDED: Sequence[tuple[str, Callable[[Kernel], Kernel]]] = (
    (_LOW, partial(_casting, lambda _: _get_dtype("cuda"))),
    (_FLOAT32, partial(_casting, lambda _: torch.float32)),
    (_FLOAT32_RESULT, _widening),
    (_WIDEST, partial(_casting, _widest)),
)
_REPLACED: Sequence[tuple[str, Callable[[Any, Kernel], Kernel]]] = (
    (_SHARED, _sparing),
    ("binary_cross_entropy", _banning),
)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _register(impl: Callable[..., None]) -> None:
    for names, make in _ADDED:
        for name in names.split():
            impl(name, make(_op(name)), _KEY)
    for names, change in _REPLACED:
        for name in names.split():
            kernel = change(get_kernel(f"aten::{name}", _KEY), _op(name))
            impl(name, kernel, _KEY, with_keyset=True)


def install(undo: ExitStack, of_ranks: Callable[[Any, str, Any], None]) -> None:
    """Make autocast on GPUs take effect until ``undo`` is closed.

    Args:
        of_ranks: Function that replaces a function for the threads of ranks.
    """
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        _register(library.impl)
    functions = {
        "set_autocast_enabled": _enable,
        "set_autocast_dtype": _choose_dtype,
        "is_autocast_enabled": _asks_for,
        "get_autocast_dtype": _asked_dtype,
    }
    for name, function in functions.items():
        of_ranks(torch, name, function)
