"""Values and gradients of one parameter on several ranks."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from distlab.sim.sanitizer.parameters import Digest
from distlab.util.text import joined

MAX_NAMES = 4


class Values(NamedTuple):
    """A parameter before a step."""

    name: str
    is_in_ddp: bool
    shape: torch.Size
    value: Digest | None
    gradient: Digest | None


def is_equal(digests: Iterable[Digest | None]) -> bool:
    """Return whether all digests are of equal tensors."""
    return len({d.key if d else None for d in digests}) == 1


def is_same(digests: Sequence[Digest | None]) -> bool:
    """Return whether tensors are equal, and not by chance, as constant ones may be."""
    first = digests[0]
    return first is not None and not first.is_constant and is_equal(digests)


def names_of(columns: Sequence[Sequence[Values]]) -> str:
    """Return the names of parameters, each of which is given by its values on several ranks."""
    names = [column[0].name for column in columns[:MAX_NAMES]]
    more = len(columns) - len(names)
    return joined([*names, f"{more} more"] if more else names)
