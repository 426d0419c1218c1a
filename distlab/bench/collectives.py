"""A counter of the collectives that a rank calls, on any backend and also inside a DTensor."""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")  # torch.distributed's, and DTensor's
NO_COLLECTIVES = ("send", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of the thread that enters it.

    Attributes:
        calls: Number of calls.
        num_bytes: Size of all their tensors, results included.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count it if it is a collective."""
        if DTensor in types:
            return NotImplemented  # its local tensors are dispatched separately
        if func.namespace in NAMESPACES and func._opname not in NO_COLLECTIVES:
            self.calls += 1
            self.num_bytes += sum(
                leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
            )
        return func(*args, **(kwargs or {}))
