"""Tensors of two devices in one operation: torch's error, and a note on where they come from."""

import sys
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from distlab.sim.gpu.placement import Home
from distlab.sim.reporting.report import place

_NOTE = "note"


def mixture_error(
    name: str, homes: Mapping[int, Home | None], own: int, rank: int, attribute: str = ""
) -> RuntimeError:
    """Return torch's error for an operation with tensors on two devices.

    Args:
        name: Name of the operation.
        homes: Home of a tensor on each device, by number of the GPU, -1 for the host; None for an
            ordinary tensor of the host.
        own: Number of the GPU of LOCAL_RANK.
        attribute: Text on the attribute of a module that holds the host's tensor, or "".
    """
    one, other = map(_device, homes)
    error = RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}! (in {name})"
    )
    foreign = {-1: homes[-1]} if -1 in homes else {i: homes[i] for i in homes if i != own}
    parts = [*filter(None, [attribute]), *_origins(foreign)]
    if parts and len(foreign) < len(homes) and -1 not in homes:
        parts.append(f"rank {rank}'s GPU is cuda:{own}: use cuda:LOCAL_RANK there")
    error.__dict__[_NOTE] = "; ".join(parts)
    return error


def attribute_on_host(tensor: Tensor) -> str:
    """Return text on a plain attribute with this tensor of a module that runs now, or ""."""
    wanted, frame = (tensor, tensor._base), sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        module = frame.f_locals.get("self")
        for name, value in vars(module).items() if isinstance(module, nn.Module) else ():
            if isinstance(value, Tensor) and any(value is x for x in wanted):
                return (
                    f"the one on cpu is self.{name} of {type(module).__name__}, a plain attribute: "
                    ".to() moves only parameters and buffers, so give it to register_buffer()"
                )
    return ""


def note_on(error: BaseException) -> str:
    """Return a sentence for the report of an error; "" if it is another one."""
    text: str = error.__dict__.get(_NOTE, "")
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _device(index: int) -> str:
    return "cpu" if index < 0 else f"cuda:{index}"


def _origins(homes: Mapping[int, Home | None]) -> Iterator[str]:
    """Yield where the tensors were made or, failing that, first written, as far as it is known."""
    for index, home in homes.items():
        written = [a.site for a in home.accesses if a.is_write] if home else []
        if home and home.made:
            yield f"the one on {_device(index)} was made at {place(home.made)}"
        elif written:
            yield f"the one on {_device(index)} was written at {place(written[0])}"
