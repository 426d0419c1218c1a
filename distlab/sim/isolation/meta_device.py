"""``torch.meta``, the counterpart of ``torch.cuda``: FSDP2 needs it to shard over a "meta" mesh.

    mesh = init_device_mesh("meta", (dist.get_world_size(),))
    fully_shard(block, mesh=mesh)

FSDP takes a parameter on meta for one that was left there by mistake, and refuses to train. For
simulated ranks, meta is the GPU that holds models too large for this machine.
"""

import contextlib
import sys
from typing import Any

import torch

_OWNER = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class MetaHandle:
    """Streams and events of meta tensors: the CPU's, which do nothing.

    Args: undo: Stack that undoes the change to FSDP, made when a program first uses it.
    """

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._undo = undo
        self._is_used = False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """Return the number of the device; FSDP asks for it before anything else."""
        owner = sys.modules.get(_OWNER)
        if owner is not None and not self._is_used:
            self._is_used = True
            self._let_train(owner.FSDPParamGroup)
        return 0

    def _let_train(self, groups: Any) -> None:
        """Drop FSDP's check, but not earlier, because importing FSDP takes a second."""
        check = groups._validate_no_meta_params
        self._undo.callback(setattr, groups, "_validate_no_meta_params", check)
        groups._validate_no_meta_params = lambda _: None
