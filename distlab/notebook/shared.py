"""Names of torch that a cell on ranks has replaced: simulated ranks share them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from distlab.util.text import joined, verb

OWNERS: Mapping[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.distributed": dist,
    "torch.nn": torch.nn,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.functional": functional,
    "torch.optim": torch.optim,
    "torch.optim.Optimizer": torch.optim.Optimizer,
}
BY_TORCH = {  # what torch replaces itself when its compiler is loaded, as DDP does
    "torch.manual_seed",
    "torch.nn.Module.__init__",
    "torch.nn.Module.__setstate__",
}


class SharedTorch:
    """What torch's public names held at first; later names of torch's own are no change."""

    def __init__(self) -> None:
        self._first = {title: _public(title, owner) for title, owner in OWNERS.items()}
        self._told: dict[str, Any] = {}
        self._seen = _values()

    def begin(self) -> None:
        """Take what the notebook's own cells have replaced as it is."""
        if _same(self._seen, values := _values()):
            return
        self._seen = values
        for title, name, value in [*self._changes()]:
            if self._told.get(f"{title}.{name}") is not value:
                self._first[title][name] = value
                if value is GONE:
                    del self._first[title][name]

    def news(self) -> list[str]:
        """Return a line on the names that have changed since the last call, if there are any."""
        if _same(self._seen, values := _values()):
            return []
        self._seen = values
        changed = {f"{title}.{name}": value for title, name, value in self._changes()}
        told, self._told = self._told, changed
        new = [name for name in changed if name not in told or told[name] is not changed[name]]
        if not new:
            return []
        return [
            f"{joined(new)} {verb(new, 'were', 'was')} replaced, for all ranks and for the "
            "notebook's own cells, too: simulated ranks share torch. "
            f"%cluster --off restores {verb(new, 'them', 'it')}."
        ]

    def restore(self) -> None:
        """Give names that cells on ranks have replaced what they held before."""
        self.begin()
        for title, name, _ in [*self._changes()]:
            owner, first = OWNERS[title], self._first[title][name]
            if name in vars(owner):
                delattr(owner, name)
            if _held(owner).get(name) is not first:  # nor does a class inherit it
                setattr(owner, name, first)

    def _changes(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each owner and name that holds something else now, and what that is."""
        for title, first in self._first.items():
            now = _held(OWNERS[title])
            for name, value in first.items():
                if now.get(name, GONE) is not value:
                    yield title, name, now.get(name, GONE)


GONE = object()


def _values() -> list[Any]:
    values: list[Any] = []
    for owner in OWNERS.values():
        values += vars(owner).values()
    return values


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sequences hold the same objects: a tenth of the time of looking up their names."""
    try:
        return some == others  # which asks only objects that are not identical
    except Exception:  # they may raise anything, such as arrays, which have no truth value
        return False


def _held(owner: Any) -> Mapping[str, Any]:
    """Return what a module or a class holds, and what the class inherits."""
    held: dict[str, Any] = {}
    for base in reversed(getattr(owner, "__mro__", [owner])):
        held.update(vars(base))
    return held


def _public(title: str, owner: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in _held(owner).items()
        if not name.startswith("_") or (name.startswith("__") and callable(value))
        if f"{title}.{name}" not in BY_TORCH
    }
