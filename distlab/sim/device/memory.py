"""Memory use of one rank, now and at its peak.

    model = nn.Linear(1000, 1000)                          parameters       4,004,000 bytes
    model(x).sum().backward()                              gradients        4,004,000
    torch.optim.Adam(model.parameters()).step()            optimizer_state  8,008,008

A parameter is recognised by its registration in a module or by its use, a gradient as the ``.grad``
of a parameter, and optimizer state as a tensor in ``optimizer.state``. An activation is any other
result that autograd may differentiate, even if it is soon freed. Everything else is "other":
inputs, buffers, temporaries of the backward pass.

Sizes are exact. An allocator that rounds up to 512 bytes, as CUDA's does, uses a little more; one
that fragments uses much more. The account misses memory used inside an operation, and tensors made
before it started, in other threads, or without an operation (``torch.Tensor([1.0])``).
"""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from distlab.sim.device.flops import Operation, tensors_in
from distlab.sim.device.ledger import Account, Category
from distlab.util.text import bytes_text

_REMEDIES = {
    "parameters": "shard the parameters, or store them in 16 bits",
    "gradients": "shard the gradients, or free them early: zero_grad(set_to_none=True)",
    "optimizer_state": "shard the optimizer state",
    "activations": "use smaller micro-batches, or checkpoint activations",
    "other": "free buffers and temporaries earlier",
}
_PLAIN = (Tensor, Parameter)


_ASKED = re.compile(r"tried to allocate (\d+) bytes")  # in an error of torch


class OutOfMemory(RuntimeError):
    """A rank needed more memory than its device has; the message lists the memory's contents."""


class SharedInstallation:
    """A process-wide change that stays in place as long as at least one thread needs it.

    Args: install: Function that makes the change and returns a function that undoes it.
    """

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        self._lock, self._users = threading.Lock(), 0
        self._undo: Callable[[], None]

    def enter(self) -> None:
        """Make the change, unless another thread has already made it."""
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


class MemoryTracker:
    """Account for the memory of the thread that enters it.

    The thread's ``Device`` reports operations to it, and hooks report everything else.

    Args: capacity_bytes: Largest number of live bytes, or None for no limit.

    Attributes: on_resize: Function that learns of a storage's new size, or None.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.on_resize: Callable[[UntypedStorage, int], None] | None = None
        self._account = Account()
        self._parameters: dict[int, tuple[ref[Tensor], RemovableHandle | None]] = {}

    def __enter__(self) -> "MemoryTracker":
        self.serve()
        return self

    def serve(self) -> None:
        """Start accounting for the calling thread's memory.

        Raises: RuntimeError: the thread already has a tracker.
        """
        if this_tracker() is not None:
            raise RuntimeError(
                "this thread's memory is already tracked: use one tracker per thread"
            )
        _HOOKS.enter()
        _thread.tracker = self

    def stop_serving(self) -> None:
        """Stop accounting for the calling thread's memory."""
        self._update()
        _thread.tracker = None
        _HOOKS.leave()

    def __exit__(self, *exception: object) -> None:
        self.stop_serving()
        for _, handle in self._parameters.values():
            if handle:
                handle.remove()
        self._parameters.clear()

    # Contents

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        return self._update().live_bytes

    @property
    def live_by_category(self) -> dict[str, int]:
        """Bytes held now, by category; they sum to ``live_bytes``."""
        return dict(self._update().live)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes held at any time since the start, or since ``restart_peak``."""
        return self._account.peak_bytes

    def restart_peak(self) -> None:
        """Restart the peak from the bytes held now."""
        self._update().restart_peak()

    @property
    def peak_by_category(self) -> dict[str, int]:
        """Bytes by category at the time of ``peak_bytes``; each category's own peak may differ."""
        return dict(self._update().peak)

    def reclassify(self, tensor: Tensor, category: Category) -> None:
        """Set the category of one of this rank's tensors, such as a hand-coded momentum buffer."""
        for storage in _storages(tensor):
            block = self._account.find(storage)
            if block and block.category != category:
                self._account.move(block, category)

    def _update(self) -> Account:
        """Return the account, updated for parameters whose memory ``model.bfloat16()`` replaced."""
        for reference, _ in list(self._parameters.values()):
            if (parameter := reference()) is not None:
                self.meet(parameter)
        self._account.forget_dead()
        return self._account

    # Events

    def observe(self, op: Operation, args: Sequence[Any], out: Any) -> None:
        """Account for an operation that has just run.

        Raises: OutOfMemory: its results do not fit; they stay out of the account.
        """
        self._account.forget_dead()
        inputs = tensors_in(args[:1] if op.is_view else args)
        is_differentiable = self._classify_inputs(inputs)
        if op.creates:
            if fresh := self._fresh(tensors_in(out), inputs if op.may_alias else ()):
                is_activation = is_differentiable and not _is_buffer(op, inputs)
                self._allocate(fresh, "activations" if is_activation else "other", op.name)
        elif op.resizes:
            self._follow_sizes(tensors_in(out), op.name)

    def meet(self, parameter: Tensor) -> None:
        """Register a parameter, and its gradient now or as soon as it has one."""
        if is_lazy(parameter):
            return  # a lazy parameter has neither shape nor memory yet
        self.reclassify(parameter, "parameters")
        if parameter.grad is not None:
            self.reclassify(parameter.grad, "gradients")
        known = self._parameters.get(id(parameter))
        if known is None or known[0]() is not parameter:
            handle = None
            if parameter.requires_grad and parameter.is_leaf:
                register: Any = parameter.register_post_accumulate_grad_hook
                handle = register(_on_gradient)
            self._parameters[id(parameter)] = (ref(parameter), handle)

    def resize(self, storage: UntypedStorage, nbytes: int) -> None:
        """Account for a storage whose size is about to change.

        Raises: OutOfMemory: the new size does not fit; the storage must keep its size.
        """
        if block := self._account.find(storage):
            self._require(nbytes - block.nbytes, "resize_")
            self._account.set_size(block, nbytes)
        if self.on_resize is not None:
            self.on_resize(storage, nbytes)

    def _classify_inputs(self, inputs: list[Tensor]) -> bool:
        """Recognise parameters and activations by use; return True if results need gradients."""
        is_recorded = torch.is_grad_enabled()
        for tensor in inputs:
            if type(tensor) is Parameter:
                self.meet(tensor)
            elif is_recorded and tensor.requires_grad:
                self._recognise_activation(tensor)
        return is_recorded and any(tensor.requires_grad for tensor in inputs)

    def _recognise_activation(self, tensor: Tensor) -> None:
        """Reclassify an activation that was received or comes from an ``autograd.Function``."""
        block = self._account.find(tensor.untyped_storage())
        if block and block.category == "other":
            self._account.move(block, "activations")

    def _fresh(self, results: list[Tensor], sources: Sequence[Tensor]) -> list[Tensor]:
        """Return the results that have new memory, one for each storage.

        Results that share memory with ``sources`` are views that the operation's schema does not
        mark as such; they have no new memory.
        """
        known = self._account.blocks
        fresh = {id(storage): t for t in results if id(storage := t.untyped_storage()) not in known}
        for tensor in sources:
            fresh.pop(id(tensor.untyped_storage()), None)
        return list(fresh.values())

    def _allocate(self, tensors: list[Tensor], category: Category, op_name: str) -> None:
        self._require(sum([tensor.untyped_storage().nbytes() for tensor in tensors]), op_name)
        for tensor in tensors:
            self._account.add(tensor, category)

    def _follow_sizes(self, tensors: list[Tensor], op_name: str) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            block = self._account.find(storage)
            if block and block.nbytes != storage.nbytes():
                self._account.set_size(block, storage.nbytes())
        self._require(0, op_name)

    # The limit

    def refuse(self, error: RuntimeError, op_name: str) -> None:
        """Let an operation that asked too much of this machine's memory fail as on the device.

        Raises: OutOfMemory: torch could not allocate memory, and the device has less still.
        """
        if asked := _ASKED.search(str(error)):
            self._require(int(asked[1]), op_name)

    def _require(self, nbytes: int, op_name: str) -> None:
        capacity = self.capacity_bytes
        if capacity is not None and self._account.live_bytes + nbytes > capacity:
            _recognise_optimizer_state()  # an unfinished first step's state is not classified yet
            raise OutOfMemory(_explain(self._update(), nbytes, capacity, op_name))


def _is_buffer(op: Operation, inputs: list[Tensor]) -> bool:
    """Return whether a result only copies a leaf's shape, or is the 1.0 that starts backward."""
    return op.is_factory and (inputs[0].is_leaf or op.name == "ones_like")


def _storages(value: object) -> list[UntypedStorage]:
    """Return the storages of a tensor or of a DTensor's local part; none if it is sparse."""
    if type(value) not in _PLAIN and is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return [storage for name in names for storage in _storages(getattr(value, name))]
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return [value.untyped_storage()]
    return []


def _explain(account: Account, nbytes: int, capacity: int, op_name: str) -> str:
    """Return an error message: the memory's contents, if any, and the usual remedy."""
    held = sorted(account.live.items(), key=lambda item: -item[1])
    verdict = (
        f"out of memory in {op_name}: it needs {bytes_text(nbytes)} more, "
        f"{bytes_text(account.live_bytes)} of {bytes_text(capacity)} are in use"
    )
    if not account.live_bytes:
        return verdict
    return "\n".join(
        [
            verdict,
            *(f"  {name:16}{bytes_text(n):>12}{n / max(1, capacity):>7.0%}" for name, n in held),
            "largest tensors",
            *(
                f"  {block.category:16}{bytes_text(block.nbytes):>12}  {tuple(block.shape)} "
                + str(block.dtype).removeprefix("torch.")
                + (f", {count} of them" if count > 1 else "")
                for block, count in account.largest(5)
            ),
            f"what may help: {_REMEDIES[held[0][0]]}",
        ]
    )


# Hooks and patches. Ranks are threads, but torch's hooks belong to the process. So they are
# installed once, look up the tracker of the calling thread, and are removed with the last tracker.

_thread = threading.local()
_plain_resize = UntypedStorage.resize_


def this_tracker() -> MemoryTracker | None:
    """Return the memory tracker of this thread, or None if it has no device."""
    tracker: MemoryTracker | None = getattr(_thread, "tracker", None)
    return tracker


def _install_hooks() -> Callable[[], None]:
    handles = [
        register_module_parameter_registration_hook(_on_registration),
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(_after_step),
    ]
    # FSDP2 frees and restores parameters with resize_, which is not a tensor operation.
    UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]

    def undo() -> None:
        del UntypedStorage.resize_  # restores the inherited method
        for handle in handles:
            handle.remove()

    return undo


_HOOKS = SharedInstallation(_install_hooks)


def _on_registration(module: object, name: str, parameter: Tensor | None) -> None:
    if (tracker := this_tracker()) and parameter is not None:
        tracker.meet(parameter)


def _on_gradient(parameter: Tensor) -> None:
    """Classify a parameter's gradient; this is the parameter's post-accumulate hook."""
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


def _recognise_optimizer_state() -> None:
    """Classify the state of this thread's current or latest optimizer as optimizer state."""
    tracker, optimizer = this_tracker(), getattr(_thread, "optimizer", lambda: None)()
    if tracker and optimizer is not None:
        _classify_state(tracker, optimizer)


def _classify_state(tracker: MemoryTracker, optimizer: Optimizer) -> None:
    for leaf in tree_leaves(list(optimizer.state.values())):
        if isinstance(leaf, Tensor):
            tracker.reclassify(leaf, "optimizer_state")


def _resize(storage: UntypedStorage, nbytes: int) -> Any:
    if tracker := this_tracker():
        tracker.resize(storage, nbytes)
    return _plain_resize(storage, nbytes)
