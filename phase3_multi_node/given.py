"""What phase 3 gives you: types, and what its lessons take from other phases.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

Values = TypeVar("Values")
Group = dist.ProcessGroup | None  # None: all ranks


class AllReduce(Protocol):
    """Sums a tensor over the group, in place."""

    def __call__(self, x: Tensor, /, group: Group = None) -> None: ...


def all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over the ranks of ``group``, in place: torch's own, as lessons take it."""
    dist.all_reduce(x, group=group)


def start_exchange(
    outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None
) -> Sequence[dist.Work]:
    """Start to send ``outgoing`` to ``dst`` and to receive ``incoming`` from ``src``.

    The two start together, so that ranks cannot deadlock, not even on NCCL. Until both are done,
    ``outgoing`` must not be written, and ``incoming`` neither read nor written.

    Args:
        outgoing: contiguous.
        dst: the rank inside ``group`` that receives ``outgoing``; not this rank.
        incoming: contiguous, with the shape and dtype of what ``src`` sends.
        src: the rank inside ``group`` that sends ``incoming``; not this rank.
        group: the ranks that take part; all by default.

    Returns:
        The works, to ``wait`` for.
    """
    both = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=src),
    ]
    works: list[dist.Work] = dist.batch_isend_irecv(both)
    return works


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``, as in task 1.4."""
    for work in start_exchange(outgoing, dst, incoming, src, group):
        work.wait()


def all_gather_shards(
    whole: Tensor, shard: Tensor, group: Group = None, async_op: bool = False
) -> dist.Work | None:
    """Fill ``whole`` (N·k,) with the shards (k,) of all ranks: torch's ``all_gather_single``.

    With ``async_op`` it returns at once, a work that must be waited for. A ``shard`` that is a view
    of its own part of ``whole`` needs no copy.
    """
    work: dist.Work | None = _ALL_GATHER(whole, shard, group=group, async_op=async_op)
    return work


def reduce_scatter_shards(
    shard: Tensor, whole: Tensor, group: Group = None, async_op: bool = False
) -> dist.Work | None:
    """Fill ``shard`` (k,) with this rank's part of the sum of all ``whole`` (N·k,).

    With ``async_op`` it returns at once, a work that must be waited for.
    """
    work: dist.Work | None = _REDUCE_SCATTER(shard, whole, group=group, async_op=async_op)
    return work


# torch 2.13 gave these names, and warns of the old ones
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_device(group: Group = None) -> torch.device:
    """Return where tensors must be to travel in ``group``: this rank's GPU with NCCL, else CPU."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


# ZeRO


class Flat:
    """Tensors in one memory, padded so that the ranks share it evenly.

    Three tensors of 4, 3 and 2 elements on 2 ranks; each shard has 5:
        data      a a a a b b b c c ·
        shards    0 0 0 0 0 1 1 1 1 1

    Attributes:
        data: (padded,), a copy of all.
        shard: (padded / N,), this rank's part of ``data``: a view.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Group = None) -> None:
        """Copy tensors of one dtype and one device, at least one of them."""
        self.shapes = [tensor.shape for tensor in tensors]
        self.sizes = [tensor.numel() for tensor in tensors]
        world_size = dist.get_world_size(group)
        padding = tensors[0].new_zeros(-sum(self.sizes) % world_size)
        self.data = torch.cat([*(tensor.detach().flatten() for tensor in tensors), padding])
        self.shard = self.data.view(world_size, -1)[dist.get_rank(group)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return where the tensors are in ``flat``, which is like ``data``: views of it."""
        parts = flat[: sum(self.sizes)].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def forget(self) -> None:
        """Free ``data`` and ``shard``; the layout remains, for ``views``."""
        del self.data, self.shard


def same_kind(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sort parameters by dtype, device and whether they are trained; each parameter once."""
    kinds: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for param in dict.fromkeys(params):
        kinds.setdefault((param.dtype, param.device, param.requires_grad), []).append(param)
    return list(kinds.values())


def cut_into_buckets(params: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Sort parameters as ``same_kind`` does, each kind cut into lists of up to so many bytes.

    The last parameters come first, because backward makes their gradients first. A parameter that
    is larger is alone.
    """
    buckets: list[list[nn.Parameter]] = []
    for same in same_kind(params):
        num_bytes = bucket_bytes + 1  # the first parameter opens a bucket
        for param in reversed(same):
            num_bytes += param.nbytes
            if num_bytes > bucket_bytes:
                buckets.append([])
                num_bytes = param.nbytes
            buckets[-1].append(param)
    return buckets


class Bucket:
    """Gradients that are reduced together; they take memory only while they come in.

    Attributes:
        params: whose gradients these are.
        shard: this rank's part of the gradients' sum, over ranks and backward passes.
        is_empty: whether no gradient has come in.
        is_full: whether all have.
    """

    def __init__(self, params: Sequence[nn.Parameter], flat: Flat) -> None:
        """Begin empty; ``flat`` is the layout."""
        self.params, self.flat = params, flat
        self.shard = torch.zeros_like(flat.shard)
        self._begin()

    def _begin(self) -> None:
        self._whole: Tensor | None = None
        self._missing = {*self.params}

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come in."""
        return self._whole is None

    @property
    def is_full(self) -> bool:
        """Whether all gradients have come in."""
        return not self._missing

    def put(self, param: nn.Parameter) -> None:
        """Move the gradient of a parameter here: ``param.grad`` is None afterwards."""
        if self._whole is None:
            self._whole = torch.zeros_like(self.flat.data)
        assert param.grad is not None, "only what a backward pass has just made comes in"
        place = next(i for i, each in enumerate(self.params) if each is param)
        self.flat.views(self._whole)[place].add_(param.grad)
        param.grad = None
        self._missing.discard(param)

    def take(self) -> Tensor:
        """Return all gradients (padded,), 0 where none has come in, and begin anew."""
        whole = torch.zeros_like(self.flat.data) if self._whole is None else self._whole
        self._begin()
        return whole


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call something when the backward pass that is under way ends.

    It works in hooks and in the ``backward`` of an autograd Function. What is registered twice is
    called twice.
    """
    Variable._execution_engine.queue_callback(callback)


def cast_floats(values: Values, dtype: torch.dtype) -> Values:
    """Return values whose floating-point tensors, also in tuples and dicts, have another dtype."""
    return tree_map_only(  # type: ignore[no-any-return]
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values
    )


class Place(NamedTuple):
    """Where a parameter stands: ``module.name``. A tied one stands in several places."""

    module: nn.Module
    name: str
    param: nn.Parameter
    path: str  # in the model, as in its state_dict


def units_of(model: nn.Module) -> dict[nn.Module, list[Place]]:
    """Cut a model into units, which are gathered one at a time; return what belongs to each.

    Every element of an ``nn.Sequential`` or ``nn.ModuleList`` is a unit, be it the model itself or
    one of its children. What is in none of them, or in several, belongs to the model, which then
    comes first.
    """
    children = [model] if isinstance(model, _LISTS) else [*model.children()]
    units = [unit for child in children if isinstance(child, _LISTS) for unit in child]
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner in (model, *units):
        for place in _places(owner):
            owners.setdefault(place.param, set()).add(owner)
    by_unit: dict[nn.Module, list[Place]] = {}
    for place in _places(model):
        in_units = owners[place.param] - {model}
        unit = in_units.pop() if len(in_units) == 1 else model
        by_unit.setdefault(unit, []).append(place)
    return {each: by_unit[each] for each in dict.fromkeys((model, *units)) if each in by_unit}


_LISTS = (nn.Sequential, nn.ModuleList)


def _places(module: nn.Module) -> list[Place]:
    return [
        Place(each, name, param, f"{prefix}.{name}" if prefix else name)
        for prefix, each in module.named_modules(remove_duplicate=False)
        for name, param in each.named_parameters(recurse=False, remove_duplicate=False)
    ]
