"""Random numbers of sharded tensors (``DTensor``): each shard gets its part of the whole tensor's.

    manual_seed(0); uniform_() of a tensor of 4 x 8 that is sharded by rows over 2 ranks
        rank 0    rows 0 and 1 of what the whole tensor would get, on a CPU as well
        rank 1    rows 2 and 3

So a program gets the same numbers on any number of ranks, copies of a shard are equal, and the
generators of all ranks go on alike. Every rank draws for the whole tensor, but a GPU takes only the
time and memory for its shard.

On GPUs, torch moves each rank's generator to the place of the shard instead, which needs the state
of a GPU's generator: 16 bytes with a seed and an offset.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import Shard, _dispatch, _op_schema, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from distlab.sim.gpu.device import CPU, HostAndGpus, this_device
from distlab.util.replacing import Replace

aten = torch.ops.aten
_OF_VALUES = {aten.native_dropout.default, aten.bernoulli.default}  # others overwrite theirs


def _shard_of(whole: Tensor, spec: DTensorSpec) -> Tensor:
    """Return this rank's shard of a tensor of the host."""
    for number, placement in enumerate(spec.placements):
        if isinstance(placement, Shard | _StridedShard):
            num_parts = spec.mesh.size(number)
            parts, _ = placement._split_tensor(
                whole, num_parts, with_padding=False, contiguous=False
            )
            whole = parts[spec.mesh.get_local_rank(number)]
    return whole


def _whole(value: Any, spec: DTensorSpec, *, has_values: bool) -> Any:
    """Return an operation's argument for the whole tensor: a tensor or a shape, if it has one."""
    if isinstance(value, list):
        return list(spec.shape)
    if not isinstance(value, Tensor):
        return value
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=CPU)
    if has_values:
        places = _shard_of(torch.arange(whole.numel(), device=CPU).view(spec.shape), spec)
        whole.zero_().put_(places, value)
    return whole


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the shards of a tensor their parts of the whole tensor's random numbers."""

    def __init__(self, spec: DTensorSpec, device: HostAndGpus) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spec, self._device = spec, device

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the shard, and replace its random numbers."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        out = func(*args, **(kwargs or {}))  # also waits for communication that fills the arguments
        torch.set_rng_state(before)
        with self._device.unnoticed():
            drawn = self._draw(func, args, kwargs or {})
            for shard, whole in zip(_tensors(out), _tensors(drawn), strict=True):
                shard.copy_(_shard_of(whole, self._spec))
        return out

    def _draw(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation on the whole tensor, on the host."""
        whole = partial(_whole, spec=self._spec, has_values=func in _OF_VALUES)
        placed = {name: CPU if name == "device" else whole(v) for name, v in kwargs.items()}
        return func(*map(whole, args), **placed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Omit a guard of torch's compiler, as ``Device`` does."""
        return False


def _tensors(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@contextmanager
def _drawing(spec: DTensorSpec) -> Iterator[None]:
    device = this_device()
    is_sharded = any(isinstance(p, Shard | _StridedShard) for p in spec.placements)
    if device is None or not is_sharded:
        yield
        return
    _push_mode(_Drawing(spec, device))
    try:
        yield
    finally:
        _pop_mode()


@contextmanager
def _region(
    _: _random.OffsetBasedRNGTracker,
    spec: DTensorSpec,
    generator: torch.Generator | None = None,
) -> Iterator[None]:
    """Draw for a sharded tensor in this block, from the rank's generator or the program's own."""
    if generator is None:
        with _drawing(spec):
            yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        with _drawing(spec):
            yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _run(spec: DTensorSpec, _: object, op: OpOverload[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for torch's operator that moves a GPU's generator; ``_places`` gives it spec."""
    with _drawing(spec):
        return op(*args, **kwargs)


def _places(_: object, spec: DTensorSpec) -> tuple[DTensorSpec, None]:
    return spec, None


class _States:
    """States of ranks' generators by a number of 16 bytes, the size of the state on a GPU.

    A tracker sends its state to all ranks, and compares it byte by byte.
    """

    def __init__(self) -> None:
        self._states: dict[bytes, Tensor] = {}

    def get(self, tracker: _random.OffsetBasedRNGTracker) -> Tensor:
        state = torch.get_rng_state()
        number = blake2b(state.numpy().tobytes(), digest_size=16).digest()
        self._states[number] = state
        return torch.tensor(list(number), dtype=torch.uint8, device=CPU).to(tracker._device)

    def set(self, _: object, number: Tensor) -> None:
        torch.set_rng_state(self._states[bytes(number.cpu().tolist())])


def _for_shapes(spec: DTensorSpec) -> Tensor:
    """Return a fake tensor for the shapes of an operation; torch lacks fake copies on GPUs."""
    meta: Any = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=CPU)


def install(replace: Replace) -> None:
    """Let DTensors on GPUs draw random numbers."""
    tracker, states = _random.OffsetBasedRNGTracker, _States()
    replace(tracker, "_distribute_region", _region)
    replace(tracker, "_compute_rng_offsets", _places)
    replace(tracker, "_get_device_state", lambda self: states.get(self))
    replace(tracker, "_set_device_state", lambda self, state: states.set(self, state))
    replace(_dispatch, "run_dtensor_rng_op", _run)
    replace(_op_schema, "_rebuild_tensor_from_dtensor_meta", _for_shapes)
