"""Hooks and patches of the whole process that serve each thread separately.

Ranks are threads, but torch's hooks belong to the process. They are installed once, look up the
memory tracker of the calling thread, and are removed with the last tracker.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, UntypedStorage
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from distlab.sim.device.ledger import Category

_thread = threading.local()
_plain_resize = UntypedStorage.resize_


class Tracker(Protocol):
    """Receiver of the events that hooks observe."""

    def meet(self, parameter: Tensor) -> None:
        """Note a parameter."""

    def reclassify(self, tensor: Tensor, category: Category) -> None:
        """Count a tensor in another category."""

    def resize(self, storage: UntypedStorage, num_bytes: int) -> None:
        """Count a storage with another size."""


class SharedInstallation:
    """A change to the process that stays as long as at least one thread needs it.

    Args: install: Function that makes the change and returns a function that undoes it.
    """

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        self._lock, self._users = threading.Lock(), 0
        self._undo: Callable[[], None]

    def enter(self) -> None:
        """Make the change, unless another thread has made it."""
        with self._lock:
            if self._users == 0:
                self._undo = self._install()
            self._users += 1

    def leave(self) -> None:
        """Undo the change, unless another thread still needs it."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo()


def start_serving(tracker: Tracker) -> None:
    """Let the hooks report events of this thread to ``tracker``.

    Raises: RuntimeError: the thread already has a tracker.
    """
    if this_tracker() is not None:
        raise RuntimeError("this thread's memory is already tracked: use one tracker per thread")
    _HOOKS.enter()
    _thread.tracker = tracker


def stop_serving() -> None:
    """Let the hooks ignore this thread again."""
    _thread.tracker = None
    _HOOKS.leave()


def this_tracker() -> Tracker | None:
    """Return the memory tracker of this thread, or None without a device."""
    tracker: Tracker | None = getattr(_thread, "tracker", None)
    return tracker


def _install_hooks() -> Callable[[], None]:
    handles = [
        register_module_parameter_registration_hook(_on_registration),
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(_after_step),
    ]
    # FSDP2 frees and restores parameters by resize_, which is not a tensor operation.
    UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]

    def undo() -> None:
        del UntypedStorage.resize_  # uncovers the inherited method
        for handle in handles:
            handle.remove()

    return undo


_HOOKS = SharedInstallation(_install_hooks)


def _on_registration(module: object, name: str, parameter: Tensor | None) -> None:
    if (tracker := this_tracker()) and parameter is not None:
        tracker.meet(parameter)


def on_gradient(parameter: Tensor) -> None:
    """Serve as post-accumulate hook of a parameter."""
    if (tracker := this_tracker()) and parameter.grad is not None:
        tracker.reclassify(parameter.grad, "gradients")


def _before_step(optimizer: Optimizer, *arguments: object) -> None:
    if tracker := this_tracker():
        _thread.optimizer = ref(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tracker.meet(parameter)


def _after_step(optimizer: Optimizer, *arguments: object) -> None:
    if tracker := this_tracker():
        _classify_state(tracker, optimizer)


def recognise_optimizer_state() -> None:
    """Report the state of this thread's current or latest optimizer to its tracker."""
    tracker, optimizer = this_tracker(), getattr(_thread, "optimizer", lambda: None)()
    if tracker and optimizer is not None:
        _classify_state(tracker, optimizer)


def _classify_state(tracker: Tracker, optimizer: Optimizer) -> None:
    for leaf in tree_leaves(list(optimizer.state.values())):
        if isinstance(leaf, Tensor):
            tracker.reclassify(leaf, "optimizer_state")


def _resize(storage: UntypedStorage, nbytes: int) -> Any:
    if tracker := this_tracker():
        tracker.resize(storage, nbytes)
    return _plain_resize(storage, nbytes)
