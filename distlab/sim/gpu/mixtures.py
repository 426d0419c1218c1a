"""Tensors of two devices in one operation: torch's error, and a note on where they come from."""

from collections.abc import Iterator, Mapping

from distlab.sim.gpu.placement import Home
from distlab.sim.reporting.report import place

_NOTE = "note"


def mixture_error(name: str, homes: Mapping[int, Home | None], own: int, rank: int) -> RuntimeError:
    """Return torch's error for an operation with tensors on two devices.

    Args:
        name: Name of the operation.
        homes: Home of a tensor on each device, by number of the GPU, -1 for the host; None for an
            ordinary tensor of the host.
        own: Number of the GPU of LOCAL_RANK.
    """
    one, other = map(_device, homes)
    error = RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}! (in {name})"
    )
    foreign = {-1: homes[-1]} if -1 in homes else {i: homes[i] for i in homes if i != own}
    parts = [*_origins(foreign)]
    if parts and len(foreign) < len(homes) and -1 not in homes:
        parts.append(f"rank {rank}'s GPU is cuda:{own}: use cuda:LOCAL_RANK there")
    error.__dict__[_NOTE] = "; ".join(parts)
    return error


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
