"""NCCL's part of a process group, and its options, as programs see them."""

import contextlib
import copy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from distlab.util.replacing import replace_until

_NAME = "ProcessGroupNCCL"  # in torch; builds without CUDA lack it
_UNDEFINED = -(2**31)  # NCCL's value for a setting that nobody has set
_SETTINGS = ("blocking", "cga_cluster_size", "min_ctas", "max_ctas", "split_share", "traffic_class")


class NcclOptions:
    """Settings of NCCL, which a program may make and read; they change nothing here."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(**dict.fromkeys(_SETTINGS, _UNDEFINED), net_name=None)
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL:
    """The backend of a group for tensors of GPUs.

    Args:
        group: The group, which does the work.
        options: Options that the program gave, or None.
        timeout: Time limit of the group's operations.
    """

    Options = NcclOptions
    mem_allocator = None

    def __init__(self, group: Any, options: NcclOptions | None, timeout: timedelta) -> None:
        self._group = group
        self.options = copy.copy(options) if options else NcclOptions()
        self.options._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        group = super().__getattribute__("_group")  # no recursion in a copy that is being made
        return getattr(group, name)

    def name(self) -> str:
        return "nccl"

    @property
    def uid(self) -> int:
        return int(self._group.group_name) if self._group.group_name.isdigit() else -1

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout
        self._group.limit(timeout)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing, because simulated groups share one network and one allocator."""

    _group_start = _group_end = _add_ephemeral_timeout = _nothing
    register_mem_pool = deregister_mem_pool = _nothing


def install(undo: contextlib.ExitStack) -> None:
    """Show the class in ``torch.distributed`` until ``undo`` is closed."""
    owners: tuple[Any, ...] = (dist, dist.distributed_c10d)
    for owner in owners:
        if not hasattr(owner, _NAME):
            setattr(owner, _NAME, None)
            undo.callback(delattr, owner, _NAME)
        replace_until(undo, owner, _NAME, ProcessGroupNCCL)
