"""Compare the results of ranks in one of our worlds with their results on gloo."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor


def differences(ours: object, gloos: object, tolerance: float, place: str = "") -> Iterator[str]:
    """Yield a line per difference; floats may differ by ``tolerance`` times the larger one."""
    if type(ours) is not type(gloos):
        yield f"{place}: ours {type(ours)} {ours}, gloo's {type(gloos)} {gloos}"
    elif isinstance(gloos, Tensor):
        yield from _tensor_differences(ours, gloos, tolerance, place)
    elif isinstance(gloos, Mapping):
        yield from differences(list(ours), list(gloos), 0.0, f"{place} keys")
        for key in gloos.keys() & ours.keys():
            yield from differences(ours[key], gloos[key], tolerance, f"{place}[{key!r}]")
    elif isinstance(gloos, Sequence) and not isinstance(gloos, str):
        if len(ours) != len(gloos):
            yield f"{place}: ours {len(ours)} elements, gloo's {len(gloos)}"
        for k, pair in enumerate(zip(ours, gloos, strict=False)):
            yield from differences(*pair, tolerance, f"{place}[{k}]")
    elif isinstance(gloos, float):
        if abs(ours - gloos) > tolerance * max(abs(ours), abs(gloos)):
            yield f"{place}: ours {ours!r}, gloo's {gloos!r}"
    elif ours != gloos:
        yield f"{place}: ours {ours!r}, gloo's {gloos!r}"


def _tensor_differences(ours: Tensor, gloos: Tensor, tolerance: float, place: str) -> Iterator[str]:
    kinds = [(t.dtype, tuple(t.shape), t.requires_grad) for t in (ours, gloos)]
    if kinds[0] != kinds[1]:
        yield f"{place}: ours {kinds[0]}, gloo's {kinds[1]}"
        return
    if tolerance and gloos.is_floating_point():
        same = torch.allclose(ours, gloos, rtol=tolerance, atol=tolerance * 1e-2)
    else:
        same = torch.equal(ours, gloos)
    if not same:
        yield f"{place}: ours {ours.tolist()}, gloo's {gloos.tolist()}"


def assert_same(ours: Sequence[object], gloos: Sequence[object], tolerance: float) -> None:
    found = list(
        chain.from_iterable(
            differences(*pair, tolerance, f"rank {rank}")
            for rank, pair in enumerate(zip(ours, gloos, strict=True))
        )
    )
    assert not found, "\n".join(found[:20])
