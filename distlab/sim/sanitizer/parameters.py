"""The parameters that each rank has registered, by which ranks' tensors can be compared."""

from collections import Counter, defaultdict
from collections.abc import Collection, MutableMapping, Sequence
from math import isnan, nan
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site

MAX_DEPTH = 100  # of modules in one another, which may contain themselves
_DIRECTION = torch.randn(1021, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Storage = torch.UntypedStorage
Held = Tensor | nn.Module


class Parameters:
    """The parameters of all ranks, in the order in which each rank registered them."""

    def __init__(self) -> None:
        self._by_rank: defaultdict[int, list[ref[Tensor]]] = defaultdict(list)
        # The module that holds a parameter or a module, and under which name.
        self._holders: MutableMapping[Held, tuple[ref[nn.Module], str]] = WeakIdKeyDictionary()
        # The line that put a parameter or a module in the place of another one.
        self._replaced_at: MutableMapping[Held, Site] = WeakIdKeyDictionary()

    def register(self, rank: int, holder: nn.Module, name: str, parameter: Tensor) -> None:
        """Note that a rank has registered a parameter in a module."""
        self._by_rank[rank].append(ref(parameter))
        self.hold(holder, name, parameter)

    def hold(self, holder: nn.Module, name: str, held: Held) -> None:
        """Note that a module holds a parameter or another module."""
        self._holders[held] = ref(holder), name

    def replaces(self, held: Held, site: Site) -> None:
        """Note that a parameter or a module comes in the place of another one."""
        self._replaced_at[held] = site

    def replacement(self, parameter: Tensor) -> str:
        """Return text on what was replaced in a model by a parameter or a module with it, or ""."""
        held: Held | None = parameter
        for _ in self._path(parameter):
            if held in self._replaced_at and held is not None:
                name = _joined(self._path(held))
                return f"{name} was replaced at {place(self._replaced_at[held])}"
            held = self.holder(held)
        return ""

    def has_any(self, rank: int) -> bool:
        """Return whether a rank has registered parameters."""
        return bool(self._by_rank[rank])

    def name(self, parameter: Tensor) -> str:
        """Return a parameter's name in its outermost module, or its shape if it is in none."""
        return _joined(self._path(parameter)) or f"a parameter {tuple(parameter.shape)}"

    def name_anywhere(self, parameter: Tensor) -> str:
        """Return a parameter's name, even if no module has registered it, as with fully_shard."""
        holders = (holder() for holder, _ in self._holders.values())
        modules = [m for m in (*self._holders, *holders) if isinstance(m, nn.Module)]
        for module in modules if parameter not in self._holders else ():
            for name, held in module._parameters.items():
                if held is parameter:
                    return _joined([name, *self._path(module)])
        return self.name(parameter)

    def _path(self, held: Held | None) -> list[str]:
        """Return names: that of a parameter or module, that of the module which holds it, …"""
        names: list[str] = []
        while held is not None and held in self._holders and len(names) < MAX_DEPTH:
            holder, name = self._holders[held]
            names.append(name)
            held = holder()
        return names

    def holder(self, held: Held | None) -> nn.Module | None:
        """Return the module that holds a parameter or a module, or None."""
        return self._holders[held][0]() if held is not None and held in self._holders else None

    def of_gradient(self, rank: int, tensor: Tensor) -> "Owner | None":
        """Return the parameter whose whole gradient a tensor is, or None."""
        storage = storage_of(tensor)
        for number, reference in enumerate(self._by_rank[rank]):
            parameter = reference()
            gradient = None if parameter is None else parameter.grad
            if parameter is None or gradient is None or gradient.numel() != tensor.numel():
                continue
            is_same = storage is not None and storage_of(gradient) is storage
            if is_same and gradient.storage_offset() == tensor.storage_offset():
                return Owner(self._title(number, parameter), parameter)
        return None

    def has_all(self, rank: int, titles: Collection[str]) -> bool:
        """Return whether a rank has registered parameters with all these titles."""
        known = [reference() for reference in self._by_rank[rank]]
        return {*titles} <= {self._title(k, p) for k, p in enumerate(known) if p is not None}

    def _title(self, number: int, parameter: Tensor) -> str:
        """Return a parameter's name, and its number among those that a rank has registered."""
        return f"{self.name(parameter)} (parameter {number + 1})"


def _joined(path: Sequence[str]) -> str:
    return ".".join(reversed(path)).removeprefix("module.")


def distinct_names(parameters: Parameters, tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of an optimizer's parameters, with numbers where names are equal."""
    names = [parameters.name(tensor) for tensor in tensors]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{name} (parameter {number})"
        for number, name in enumerate(names, start=1)
    ]


class Owner(NamedTuple):
    """A parameter, as the owner of a gradient.

    Attributes:
        title: Its name and its number among those that its rank has registered.
        values: The parameter itself.
    """

    title: str
    values: Tensor


class Digest(NamedTuple):
    """A tensor's values, for comparison.

    Attributes:
        key: Hash of the bytes, in which all NaNs are equal.
        is_constant: True if all elements are equal, as those of a new bias are.
        has_equal_rows: True if all rows are equal, as where one is repeated.
        norm: Euclidean norm, for reports.
        projection: Product with a random vector, in which tensors of equal norms differ. Where a
            tensor's elements change by rounding, it changes about as much as their norm.
    """

    key: int
    is_constant: bool
    has_equal_rows: bool
    norm: float
    projection: float


def digest(tensor: Tensor | None) -> Digest | None:
    """Return a tensor's digest; None if it has no values of its own, as on ``meta``."""
    local: Any = getattr(tensor, "_local_tensor", tensor)  # a DTensor's
    if type(local) not in (Tensor, nn.Parameter) or local.layout is not torch.strided:
        return None
    values = local.detach().resolve_conj().resolve_neg().contiguous().flatten()
    if not values.numel() or values.is_meta:
        return None
    is_constant = bool((values == values[0]).all())
    wide = (torch.view_as_real(values).flatten() if values.is_complex() else values).double()
    norm = float(wide.norm())
    kept = wide.masked_fill(wide.isnan(), nan) if isnan(norm) else values
    return Digest(
        hash(kept.view(torch.uint8).numpy().tobytes()),
        is_constant,
        local.dim() > 1 and bool((local == local[:1]).all()),
        norm,
        _projection(wide),
    )


def _projection(values: Tensor) -> float:
    whole = len(values) // len(_DIRECTION) * len(_DIRECTION)
    rows, rest = values[:whole].view(-1, len(_DIRECTION)), values[whole:]
    return float((rows @ _DIRECTION).sum() + rest @ _DIRECTION[: len(rest)])


def storage_of(tensor: Tensor) -> Storage | None:
    """Return a tensor's storage, or None if it has no single one."""
    is_plain = tensor.layout is torch.strided and not hasattr(tensor, "_local_tensor")
    return tensor.untyped_storage() if is_plain else None
