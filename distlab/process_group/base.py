"""Base class of all process groups: it turns the many forms of a call into one ``Call``.

Each method states which values must agree between the ranks, and the bytes, inputs and outputs of
the collective. How ranks wait for each other and how messages travel is up to a world's subclass.

torch 2.13 renamed ``_allgather_base``, ``_reduce_scatter_base``, ``alltoall_base`` and similar
methods; they are defined here under both names.
"""

# torch's stubs declare overloads of its C++ interface; c10d calls the methods below from Python.
# mypy: disable-error-code="override,assignment"

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.process_group import moves
from distlab.process_group.call import Call, Counts
from distlab.process_group.checks import (
    check_contiguous,
    check_one_per_rank,
    check_own_part,
    check_reduction,
    op_name,
)

Splits = Sequence[int] | None


class BaseGroup(dist.ProcessGroup):
    """One rank's view of a group of ranks.

    A world's subclass defines ``send``, ``recv``, ``recv_anysource`` and ``_take_part``.

    Args:
        rank: Rank inside the group.
        size: Number of ranks in the group.
        name: Name of the group, equal on all ranks that created it.

    Attributes:
        counts: Counts of the collectives that this rank has called on this group.
        adds_sparse: True if this world can sum sparse tensors in ``all_reduce``.
        has_uneven_reduce_scatter: True if ranks may get parts of different sizes.
    """

    world_name: ClassVar[str]
    adds_sparse: ClassVar[bool] = False
    has_uneven_reduce_scatter: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._me = rank
        self._num_ranks = size
        self._name = name
        self.counts = Counts()

    # Identity

    def rank(self) -> int:
        """Return this process's rank inside the group."""
        return self._me

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._num_ranks

    @property
    def group_name(self) -> str:
        """Return the name under which functional collectives look the group up."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Return a description for torch's messages."""
        return f"{self.world_name} group {self._name}"

    def getBackendName(self) -> str:
        """Return the name that torch's messages show."""
        return self.world_name

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self._me} of {self._num_ranks})"

    # Collectives

    def _meet(self, call: Call, results: Sequence[Tensor] | None = None) -> dist.Work:
        """Count and start the group's next collective; its result is ``results`` or the outputs.

        Raises:
            RuntimeError: The root is not a rank of the group.
        """
        if not 0 <= call.root < self.size():
            raise RuntimeError(
                f"{call.name}: the group has no rank {call.root}, its ranks are 0 to "
                f"{self.size() - 1}"
            )
        self.counts.add(call)
        return self._take_part(call, call.outputs if results is None else results)

    def _meet_alike(
        self,
        name: str,
        like: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        root: int | None = None,
        op: Any = None,
        num_parts: int = 1,
    ) -> dist.Work:
        """Start a collective whose tensors have the same sizes on all ranks.

        Args:
            like: Tensors whose sizes and dtypes must agree.
            root: Rank of the root, if there is one; the ranks must agree on it too.
            op: Kind of reduction, if the collective is one; the ranks must agree on it too.
            num_parts: Size of the whole buffer, as a multiple of the size of ``like``.
        """
        must_agree: dict[str, object] = {} if op is None else {"op": op_name(op)}
        must_agree |= {} if root is None else {"root": root}
        must_agree |= moves.alike(like)
        num_bytes = moves.nbytes(like) * num_parts
        return self._meet(Call(name, must_agree, num_bytes, inputs, outputs, root or 0, op))

    def is_for_nccl(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether NCCL alone takes these tensors: False, as gloo's rules hold here too."""
        return False

    def _take_part(self, call: Call, results: Sequence[Tensor]) -> dist.Work:
        """Start the group's next collective; the work's future holds ``results``."""
        raise NotImplementedError

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Copy the root's tensors to all ranks."""
        check_contiguous("broadcast", tensors, or_channels_last=True)
        root = _root_of(opts)
        inputs = tensors if self._me == root else ()
        return self._meet_alike("broadcast", tensors, inputs, tensors, root=root)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce over all ranks, in place; several tensors count as one call."""
        op = moves.op_of(opts)
        check_reduction(op, tensors, can_scale=self.is_for_nccl(tensors))
        can_be_sparse = self.adds_sparse and op == dist.ReduceOp.SUM
        check_contiguous("all_reduce", tensors, or_channels_last=True, or_sparse=can_be_sparse)
        return self._meet_alike("all_reduce", tensors, tensors, tensors, op=op)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce to the root; the tensors of other ranks keep their values."""
        op, root = moves.op_of(opts), _root_of(opts)
        tensors = moves.as_reals(op, tensors)
        check_reduction(op, tensors, can_scale=self.is_for_nccl(tensors))
        check_contiguous("reduce", tensors, or_channels_last=True)
        outputs = tensors if self._me == root else ()
        return self._meet_alike("reduce", tensors, tensors, outputs, root=root, op=op)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Give every rank the tensors of all ranks, each in its own output."""
        check_one_per_rank("all_gather", outputs[0], self.size(), inputs[0])
        return self._all_gather(outputs[0], inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Give every rank the tensors of all ranks, concatenated in one output."""
        return self.all_gather_single_coalesced([output], [input])

    def _all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dist.Work:
        check_contiguous("all_gather", inputs)
        return self._meet_alike("all_gather", inputs, inputs, outputs, num_parts=self.size())

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """All-gather several tensors in one call; ``output_lists[r][i]`` is tensor i of rank r."""
        by_tensor = list(zip(*output_lists, strict=True))
        for outputs, input in zip(by_tensor, inputs, strict=True):
            check_one_per_rank("all_gather_coalesced", outputs, self.size(), input)
        return self._all_gather([output for row in by_tensor for output in row], inputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """All-gather several tensors as one call."""
        cut = self._equal_parts("all_gather", outputs, inputs)
        return self._all_gather([part for parts in cut for part in parts], inputs)

    def _equal_parts(
        self, name: str, wholes: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> list[Sequence[Tensor]]:
        any_shape = self.is_for_nccl([*wholes, *parts])
        return [
            moves.equal_parts(name, whole, part, self.size(), any_shape=any_shape)
            for whole, part in zip(wholes, parts, strict=True)
        ]

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Give the root the tensors of all ranks."""
        root, size = _root_of(opts), self.size()
        parts = outputs[0] if self._me == root else []
        check_contiguous("gather", inputs)
        if self._me == root:
            check_one_per_rank("gather", parts, size, inputs[0])
        return self._meet_alike("gather", inputs, inputs, parts, root=root, num_parts=size)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Give every rank one of the root's tensors."""
        root, size = _root_of(opts), self.size()
        parts = inputs[0] if self._me == root else []
        check_contiguous("scatter", [*outputs, *parts])
        if self._me == root:
            check_one_per_rank("scatter", parts, size, outputs[0])
        return self._meet_alike("scatter", outputs, parts, outputs, root=root, num_parts=size)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce the k-th tensors of all ranks to rank k."""
        if self.has_uneven_reduce_scatter:
            check_own_part("reduce_scatter", inputs[0], self.size(), self._me, outputs[0])
        else:
            check_one_per_rank("reduce_scatter", inputs[0], self.size(), outputs[0])
        return self._reduce_scatter(outputs, inputs[0], moves.op_of(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce the k-th parts of all ranks' inputs to rank k."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce-scatter several tensors as one call."""
        cut = self._equal_parts("reduce_scatter", inputs, outputs)
        parts = [part for parts in cut for part in parts]
        return self._reduce_scatter(outputs, parts, moves.op_of(opts))

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any
    ) -> dist.Work:
        outputs, inputs = moves.as_reals(op, outputs), moves.as_reals(op, inputs)
        check_reduction(op, outputs, can_scale=self.is_for_nccl(outputs))
        check_contiguous("reduce_scatter", [*outputs, *inputs])
        must_agree: dict[str, object] = {"op": op_name(op), **moves.alike(outputs)}
        if len({tensor.numel() for tensor in inputs}) > 1:
            must_agree["size"] = [tensor.numel() for tensor in inputs]
        num_bytes = moves.nbytes(inputs)
        return self._meet(Call("reduce_scatter", must_agree, num_bytes, inputs, outputs, op=op))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Send the k-th input to rank k, and receive the k-th output from rank k."""
        return self._all_to_all(outputs, inputs, outputs)

    def _all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> dist.Work:
        check_contiguous("all_to_all", [*inputs, *outputs])
        if not len(inputs) == len(outputs) == self.size():
            raise RuntimeError(
                f"all_to_all over {self.size()} ranks needs as many input and output tensors, got "
                f"{len(inputs)} and {len(outputs)}"
            )
        num_bytes = moves.nbytes(inputs)
        call = Call("all_to_all", {"dtype": inputs[0].dtype}, num_bytes, inputs, outputs)
        return self._meet(call, results)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Splits = None,
        input_splits: Splits = None,
        opts: Any = None,
    ) -> dist.Work:
        """Do ``alltoall`` on parts of two tensors; the parts are equal unless sizes are given."""
        check_contiguous("all_to_all_single", [output, input])
        return self._all_to_all(
            moves.parts(output, output_splits, self.size()),
            moves.parts(input, input_splits, self.size()),
            [output],
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._meet(Call("barrier", {}, 0, (), ()))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. (torch itself allows this only for gloo groups.)"""
        self.barrier().wait()

    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Other methods that torch calls

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing, because here a coalesced block is just a sequence of calls."""

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        return None

    def abort(self) -> None:
        """Do nothing, because a group has no connection of its own."""

    def shutdown(self) -> None:
        """Do nothing, because a group has no connection of its own."""


def _root_of(opts: Any) -> int:
    return int(opts.rootRank) if opts else 0
