"""Values and gradients of one parameter on several ranks."""

from collections.abc import Iterable, Mapping, Sequence
from math import hypot, isfinite
from typing import NamedTuple

import torch

from distlab.sim.reporting.sites import Site
from distlab.sim.sanitizer.ddp import Uses, Wrapped
from distlab.sim.sanitizer.parameters import Digest
from distlab.util.text import some_of

FAR = 1e-2  # of a norm; rounding makes norms of gradients of 16 bits differ by less
FAR_ALONG = 0.1  # of a norm; the same for their projections


class Values(NamedTuple):
    """A parameter before a step.

    Attributes:
        ddp: What was done with its model in DistributedDataParallel; None if it is in none.
        left_out_by: Its model there, if it required no gradient when that was wrapped.
        taken_at: Line at which a collective took its gradient, or None.
        replacement: Text on what was replaced in the model when it came, or "".
        holder: Number that tells the module that holds it from others on the same rank.
        is_of_norm: True if that module is a layer norm or the like, which is never split.
        is_sharded: True if it is a DTensor of which each rank has a part; such parts are not
            compared, and have no digests.
        is_of_visitors: True if its gradient may come from data that an all_to_all has brought.
        is_of_gathered: The same, if an all_gather counts, too.
        has_come_back: True if its gradient comes from other ranks, by a layer's backward pass.
        terms_on: Ranks whose gradients add up to the parameter's, if each has but a term of it.
    """

    name: str
    ddp: Uses | None
    left_out_by: Wrapped | None
    taken_at: Site | None
    replacement: str
    shape: torch.Size
    value: Digest | None
    gradient: Digest | None
    holder: int
    is_of_norm: bool
    is_sharded: bool
    is_of_visitors: bool
    is_of_gathered: bool
    has_come_back: bool
    terms_on: tuple[int, ...]


def with_whole_gradients(values: Mapping[int, list[Values]]) -> dict[int, list[Values]]:
    """Return values by rank in which each term of a gradient stands for the whole sum."""
    return {
        rank: [
            v._replace(gradient=_summed(v.terms_on, number, values)) if v.terms_on else v
            for number, v in enumerate(mine)
        ]
        for rank, mine in values.items()
    }


def _summed(
    ranks: Sequence[int], number: int, values: Mapping[int, Sequence[Values]]
) -> Digest | None:
    """Return the digest of a sum; its norm is that of the terms beside one another."""
    of_ranks = [values[rank] for rank in ranks if rank in values]
    terms = [mine[number].gradient for mine in of_ranks if number < len(mine)]
    known = [term for term in terms if term is not None]
    if len(known) < len(ranks):
        return None
    return Digest(
        hash(tuple(term.key for term in known)),
        all(term.is_constant for term in known),
        all(term.has_equal_rows for term in known),
        hypot(*(term.norm for term in known)),
        sum(term.projection for term in known),
    )


def is_equal(digests: Iterable[Digest | None]) -> bool:
    """Return whether all digests are of equal tensors."""
    return len({d.key if d else None for d in digests}) == 1


def is_equal_not_by_chance(digests: Sequence[Digest | None]) -> bool:
    """Return whether tensors are equal, and none is constant, as those of equal biases may be."""
    first = digests[0]
    return first is not None and not first.is_constant and is_equal(digests)


def are_far_apart(digests: Sequence[Digest | None]) -> bool:
    """Return whether all ranks have a tensor, and they differ by more than rounding."""
    norms = [d.norm for d in digests if d]
    along = [d.projection for d in digests if d]
    if len(norms) < len(digests):
        return False
    if not all(map(isfinite, norms)):
        return any(map(isfinite, norms))
    is_far = max(norms) - min(norms) > FAR * max(norms)
    return is_far or max(along) - min(along) > FAR_ALONG * max(norms)


def names_of(columns: Sequence[Sequence[Values]]) -> str:
    """Return the names of parameters, each of which is given by its values on several ranks."""
    return some_of([column[0].name for column in columns])
