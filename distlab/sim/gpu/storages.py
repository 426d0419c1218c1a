"""What storages of GPUs show of themselves: ``torch.save``, ``torch.load`` and deepcopy need it."""

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from distlab.sim.gpu.cuda import index_from
from distlab.sim.gpu.device import this_device
from distlab.sim.gpu.placement import Home, pin
from distlab.sim.gpu.tensors import CPU, move
from distlab.util.replacing import Replace

_Base: Any = torch._C.StorageBase
_plain_device = _Base.device.__get__
_plain_clone: Any = UntypedStorage.clone
_plain_to: Any = UntypedStorage.to


def _device(self: UntypedStorage) -> torch.device:
    home: Home | None = getattr(self, "_home", None)
    plain: torch.device = _plain_device(self)
    return plain if home is None or home.index < 0 else torch.device("cuda", home.index)


def _to(self: UntypedStorage, *, device: Any, non_blocking: bool = False) -> UntypedStorage:
    if this_device() is None:
        result: UntypedStorage = _plain_to(self, device=device, non_blocking=non_blocking)
        return result
    wanted = torch.device(device)
    if wanted.type == "cuda":
        wanted = torch.device("cuda", index_from(wanted))
    if wanted == self.device:
        return self
    return move(_flat(self), wanted, non_blocking=non_blocking).untyped_storage()


def _flat(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage)


def _cuda(self: UntypedStorage, device: Any = None, non_blocking: bool = False) -> UntypedStorage:
    return _to(self, device=torch.device("cuda", index_from(device)), non_blocking=non_blocking)


def _cpu(self: UntypedStorage) -> UntypedStorage:
    return _to(self, device=CPU)


def _clone(self: UntypedStorage) -> UntypedStorage:
    """Return a copy in the same place; ``copy.deepcopy`` of a tensor needs it."""
    home: Home | None = getattr(self, "_home", None)
    if home is None:
        plain: UntypedStorage = _plain_clone(self)
        return plain
    copied = _flat(self).clone()
    if home.is_pinned:
        pin(copied)
    return copied.untyped_storage()


def install(replace: Replace) -> None:
    """Make storages show their GPUs."""
    methods = {"device": property(_device), "to": _to, "cuda": _cuda, "cpu": _cpu, "clone": _clone}
    for name, method in methods.items():
        replace(UntypedStorage, name, method)
