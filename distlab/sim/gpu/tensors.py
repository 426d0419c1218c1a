"""What tensors of GPUs show of themselves, and how they move between host and GPUs.

C++ code takes them for the CPU's, so all that reads their place or moves them by it is replaced
while a world with GPUs runs.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.utils.clip_grad
import torch.optim.optimizer
import torch.utils._foreach_utils
from torch import Tensor, _tensor_str, nn
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from distlab.sim.gpu.accesses import Span
from distlab.sim.gpu.cuda import CudaStream, index_from
from distlab.sim.gpu.device import await_values, this_device
from distlab.sim.gpu.placement import home_of, index_of, pin, put_on
from distlab.util.replacing import Replace

_Base: Any = torch._C.TensorBase
_plain_device = _Base.device.__get__
_plain_to, _plain_list, _plain_numpy = _Base.to, _Base.tolist, _Base.numpy
_parse_to: Any = torch._C._nn._parse_to
CPU = torch.device("cpu")


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor as the program sees it."""
    if shards := getattr(tensor, "_local_shards", ()):  # a ShardedTensor, as FSDP1 makes them
        tensor = shards[0].tensor
    index = _shown_index(tensor)
    plain: torch.device = _plain_device(tensor)
    return torch.device("cuda", index) if index >= 0 else plain


def _shown_index(tensor: Tensor) -> int:
    """Return the number of the GPU that holds a tensor, or the local part of a DTensor."""
    index = index_of(tensor)
    if index < 0 and type(tensor) not in _PLAIN:
        local = getattr(tensor, "_local_tensor", None)
        return -1 if local is None else _shown_index(local)
    return index


_PLAIN = (Tensor, nn.Parameter)


def _make_wrapper(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """Make a tensor that wraps others; C++ code, which has no GPUs, takes it for the CPU's."""
    if device is None or torch.device(device).type != "cuda":
        made: Tensor = _plain_wrapper(*args, device=device, **kwargs)
        return made
    made = _plain_wrapper(*args, device=CPU, **kwargs)
    put_on(made, index_from(device))
    return made


_plain_wrapper: Any = Tensor._make_wrapper_subclass


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device = this_device()
    if device is None:
        result: Tensor = _plain_to(self, *args, **kwargs)
        return result
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        args = (device_of(args[0]), args[0].dtype, *args[1:])
    if "other" in kwargs:
        other = kwargs.pop("other")
        args = (device_of(other), other.dtype, *args)
    if len(args) > 3 or (len(args) == 3 and isinstance(args[0], torch.dtype)):
        *args_left, copy = args
        args = tuple(args_left)
    wanted, dtype, non_blocking, memory_format = _parse_any_to(*args, **kwargs)
    if wanted is not None and wanted.type == "cuda":
        wanted = torch.device("cuda", index_from(wanted))
    formatted = {} if memory_format is None else {"memory_format": memory_format}
    return move(self, wanted, dtype, non_blocking=non_blocking, copy=copy, **formatted)


def _parse_any_to(*args: Any, **kwargs: Any) -> Any:
    """Parse arguments of ``to``, where a number stands for a GPU."""
    if args and type(args[0]) is int:
        args = (_named(args[0]), *args[1:])
    if type(kwargs.get("device")) is int:
        kwargs["device"] = _named(kwargs["device"])
    return _parse_to(*args, **kwargs)


def move(
    x: Tensor,
    wanted: torch.device | None,
    dtype: torch.dtype | None = None,
    *,
    non_blocking: bool = False,
    copy: bool = False,
    **formatted: Any,
) -> Tensor:
    """Return a tensor on a device and of a dtype, as ``Tensor.to`` does."""
    dtype = dtype or x.dtype
    if wanted is None or wanted == device_of(x):
        result: Tensor = _plain_to(x, dtype, non_blocking=non_blocking, copy=copy, **formatted)
        return result
    if x.requires_grad and torch.is_grad_enabled():
        options = {**formatted, "non_blocking": non_blocking}
        result = _Move.apply(x, wanted, dtype, options)  # type: ignore[no-untyped-call]
    else:
        result = _moved(x, wanted, dtype, non_blocking=non_blocking, **formatted)
    if non_blocking and wanted.type == "cpu":
        pin(result)  # as torch does, since the copy would block otherwise
    return result


def _moved(x: Tensor, wanted: torch.device, dtype: torch.dtype, **options: Any) -> Tensor:
    device = this_device()
    with device.moving() if device else nullcontext():
        moved: Tensor = _plain_to(x, wanted, dtype, copy=True, **options)
    return moved


class _Move(torch.autograd.Function):
    """A move between devices, of which autograd's own backward would see nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wanted: torch.device, dtype: torch.dtype, options: dict[str, Any]
    ) -> Tensor:
        ctx.source = device_of(x), x.dtype
        return _moved(x, wanted, dtype, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return move(grads[0], *ctx.source), None, None, None


def _cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **formatted: Any) -> Tensor:
    wanted = torch.device("cuda", index_from(device))
    return move(self, wanted, non_blocking=non_blocking, **formatted)


def _cpu(self: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
    return move(self, CPU, memory_format=memory_format)


def _tolist(self: Tensor) -> Any:
    readable = _read_by_host(self, ".tolist()")
    with torch._C.DisableTorchFunction():  # under a default device, torch would call this again
        return _plain_list(readable)


def _showing(show: Callable[..., str]) -> Callable[..., str]:
    """Return torch's function that formats a tensor, which reads its values past all patches."""

    def show_and_wait(tensor: Tensor, **options: Any) -> str:
        if tensor.dim() == 0:
            tensor = _read_by_host(tensor, ".item()")
        else:  # .tolist() will wait, but the number of digits is chosen before that
            await_values([tensor])
        return show(tensor, **options)

    return show_and_wait


def _read_by_host(tensor: Tensor, text: str) -> Tensor:
    """Return what the host can read of a tensor, after it has waited for the GPU."""
    device, home = this_device(), home_of(tensor)
    if device is None or home is None or device.is_paused:
        return tensor
    if home.index >= 0:
        stream, site = device.current_stream(home.index), device.places.call_site()[0]
        device.await_bytes(home, Span.of(tensor), False, stream)
        device.launch(stream, device.costs.shortest_kernel_s, text, site)
        device.use(tensor, home, stream, text, site, is_write=False)
        device.sync(text, [stream], site)
    else:
        device.host_uses(tensor, home, text, is_write=False)
    return tensor


def _numpy(self: Tensor, *, force: bool = False) -> Any:
    device = this_device()
    if index_of(self) >= 0 and not (device and device.is_paused):
        if not force:
            raise TypeError(
                f"can't convert {device_of(self)} device type tensor to numpy. Use Tensor.cpu() "
                "to copy the tensor to host memory first."
            )
        return _plain_numpy(_cpu(self), force=True)
    return _plain_numpy(_read_by_host(self, "numpy()"), force=force)


def _pin_memory(self: Tensor, *_: Any) -> Tensor:
    if index_of(self) >= 0:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    copied = self.clone()
    pin(copied)
    return copied


def _is_pinned(self: Tensor, *_: Any) -> bool:
    home = home_of(self)
    return home is not None and home.is_pinned


def _record_stream(self: Tensor, stream: CudaStream) -> None:
    """Let the memory live until the stream is done with what it has got when the tensor dies."""
    home = home_of(self)
    if home is not None:
        home.recorded = (*home.recorded, stream.stream)


def _new_tensor(
    self: Tensor,
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    **_: Any,
) -> Tensor:
    made = torch.tensor(data, dtype=dtype or self.dtype)
    wanted = device_of(self) if device is None else torch.device(device)
    return _to(made, wanted).requires_grad_(requires_grad)


def _type(self: Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    if dtype is None and index_of(self) >= 0:
        return _plain_type(self).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, _CudaType):
        name = f"torch.cuda.{name}"
    if name.startswith("torch.cuda."):
        plain = getattr(torch, name.rpartition(".")[2])
        return _cuda(self, non_blocking=non_blocking).to(plain.dtype)
    return _plain_type(self, dtype, non_blocking)


_plain_type = _Base.type


class _CudaType(type):
    """The class of ``torch.cuda.FloatTensor`` and its like, which make tensors on the GPU."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, Tensor)
            and instance.dtype == cls.dtype
            and _shown_index(instance) >= 0
        )

    def __call__(cls, *args: Any) -> Tensor:
        plain: Callable[..., Tensor] = getattr(torch, cls.__name__)
        return _cuda(plain(*args))


_KINDS = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Byte", "Bool")


def _new(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _to(_plain_new(self, *args, **kwargs), device_of(self))


_plain_new = _Base.new


@cache
def _numbered(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function whose ``device`` may be a number."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = _named(kwargs["device"])
        return make(*args, **kwargs)

    return made


_FACTORIES = ("zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "zeros_like")


@cache
def _moving(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes a tensor on the host first, if it is to be on a GPU."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if this_device() is None:
            return make(*args, **kwargs, **({} if device is None else {"device": device}))
        if device is None:
            is_copy = bool(args) and isinstance(args[0], Tensor)
            device = device_of(args[0]) if is_copy else _default_device()
        needs_grad = kwargs.pop("requires_grad", False)
        moved = _to(make(*args, **kwargs, device=CPU), torch.device(_named(device)))
        return moved.requires_grad_() if needs_grad else moved

    return made


def _default_device() -> torch.device:
    """Return the device of ``with torch.device(…)`` or ``torch.set_default_device``."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((m.device for m in reversed(modes) if isinstance(m, DeviceContext)), CPU)


def _named(device: Any) -> Any:
    return torch.device("cuda", device) if isinstance(device, int) else device


def _by_device(lists: Any, places: list[int]) -> Iterator[tuple[torch.device, Any]]:
    """Yield the parts of a group of lists that are on one device."""
    numbers: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(lists[0]):
        numbers.setdefault(device_of(tensor), []).append(number)
    for device, chosen in numbers.items():
        parts = [[part[k] for k in chosen] if part else part for part in lists]
        yield device, (parts, [places[k] for k in chosen] if places else places)


def _grouping(group: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function that groups tensors by device, with the devices as shown."""

    def grouped(lists: Any, *args: Any, **kwargs: Any) -> Any:
        groups = group(lists, *args, **kwargs)
        if this_device() is None:
            return groups
        return {
            (device, dtype): part
            for (_, dtype), of in groups.items()
            for device, part in _by_device(*of)
        }

    return grouped


_plain_generator: Any = torch.Generator


class _AnyGenerator(type(_plain_generator)):  # type: ignore[misc]
    """Makes ``isinstance(x, torch.Generator)`` true for the generators that torch makes itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _plain_generator)


class Generator(_plain_generator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """``torch.Generator``; one of a GPU computes on the CPU."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made: Generator = _plain_generator.__new__(cls, device="cpu")
        made._shown = torch.device(_named(device))
        return made

    def __init__(self, device: Any = "cpu") -> None:
        """Do nothing: ``__new__`` has done everything."""

    _shown: torch.device

    @property
    def device(self) -> torch.device:
        """Device that the program asked for."""
        return self._shown


_GROUPERS = (torch.utils._foreach_utils, torch.nn.utils.clip_grad)


_plain_device_class: Any = torch.device


class _AnyDevice(type):
    """Makes ``isinstance(x, torch.device)`` true for torch's own devices, the only ones."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _plain_device_class)


class Device(metaclass=_AnyDevice):
    """``torch.device``, for which a number stands for a GPU."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a device of torch."""
        if this_device() is not None and args and type(args[0]) is int:
            return _plain_device_class("cuda", args[0])
        return _plain_device_class(*args, **kwargs)


def _replace_builtin(replace: Replace, name: str, wrapper: Callable[..., Tensor]) -> None:
    """Replace a function of torch, also for ``torch.jit.script``, which can compile no wrapper."""
    builtin = _find_builtin(replace(torch, name, wrapper))  # type: ignore[no-untyped-call]
    if builtin:
        _register_builtin(wrapper, builtin)


def install(replace: Replace) -> None:
    """Make tensors show their GPUs."""
    methods = {
        "device": property(device_of),
        "is_cuda": property(lambda self: _shown_index(self) >= 0),
        "is_cpu": property(lambda self: device_of(self).type == "cpu"),
        "get_device": _shown_index,
        "to": _to,
        "cuda": _cuda,
        "cpu": _cpu,
        "tolist": _tolist,
        "numpy": _numpy,
        "type": _type,
        "new": _new,
        "type_as": lambda self, other: _to(self, other),
        "pin_memory": _pin_memory,
        "is_pinned": _is_pinned,
        "record_stream": _record_stream,
        "new_tensor": _new_tensor,
    }
    for name, method in methods.items():
        replace(Tensor, name, method)
    replace(_tensor_str, "_str", _showing(_tensor_str._str))
    _device_constructors()  # it keeps the functions that it finds first
    for name in ("tensor", "as_tensor"):
        _replace_builtin(replace, name, _moving(getattr(torch, name)))
    for name in _FACTORIES:
        _replace_builtin(replace, name, _numbered(getattr(torch, name)))
    for name in (f"{kind}Tensor" for kind in _KINDS):
        plain = getattr(torch, name)
        replace(torch.cuda, name, _CudaType(name, (), {"dtype": plain.dtype}))
    replace(torch._C._nn, "_parse_to", _parse_any_to)
    for owner in _GROUPERS:
        name = "_group_tensors_by_device_and_dtype"
        replace(owner, name, _grouping(getattr(owner, name)))
    replace(Tensor, "_make_wrapper_subclass", staticmethod(_make_wrapper))
    replace(torch, "Generator", Generator)
    replace(torch, "device", Device)
