"""Activation checkpointing: keep a function's inputs, recompute its intermediate results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from phase2_advanced.given import generators_of, take_tensors


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, keeping only the arguments for the backward pass.

    Intermediate results of ``fn`` are freed immediately, and the backward pass calls ``fn`` again:
                        forward        kept       backward
        fn(x)           x → a → b → y  x, a, b    y → b → a → x
        checkpointed    x → a → b → y  x          x → a → b → y, then y → b → a → x

    The second call repeats the first: it draws the same random numbers, so that dropout drops the
    same elements, and runs under the same autocast settings, on the CPU and on CUDA devices.
    Afterwards, torch's generators are restored to the states they had before the second call.

    Parameters that ``fn`` uses get their gradients too, whether or not an argument requires one.
    ``fn`` is called only once, as if it were not checkpointed, if there is nothing to compute a
    gradient for: if gradients are disabled, or if no argument requires one and ``fn`` is a module
    without trainable parameters. If ``fn`` is not a module, there is no telling which parameters it
    uses, so its result may require a gradient even if nothing that it uses does.

    Args:
        fn: function that returns the same result for the same arguments, random numbers and
            autocast settings, even if gradients are disabled in its first call and enabled in its
            second. It returns a tensor, or a tuple of tensors and other values; a result may be one
            of the arguments. ``checkpoint`` need not pass gradients through tensors in a list or
            dict inside this tuple, and may return a named tuple as a plain tuple. Apart from
            parameters, every tensor that ``fn`` uses and that requires a gradient must be an
            argument. ``fn`` may itself call ``checkpoint``.
        args, kwargs: arguments of ``fn``, of any types. Tensors inside tuples, lists and dicts
            count as arguments too, and get their gradients. In the second call, a tensor requires a
            gradient if and only if it does in the first.

    Returns:
        The result of ``fn``.

    Raises:
        RuntimeError: in the backward pass, if a tensor among the arguments was changed in place
            after the forward pass.

    Cost: between the forward and the backward pass, memory for the arguments and the generators'
        states; during the backward pass of ``fn``, memory for its activations. The second call of
        ``fn`` makes a step 4/3 times as long if a backward pass takes twice as long as a forward
        pass. Messages that ``fn`` sends are sent twice.
    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4.
    """
    tensors, put_back = take_tensors((args, kwargs))
    if not _needs_gradient(fn, tensors):
        return fn(*args, **kwargs)

    def run(*tensors: Tensor) -> Any:
        args, kwargs = put_back(tensors)
        return fn(*args, **kwargs)

    anchor = torch.empty(0, requires_grad=True)  # in case only fn's parameters need a gradient
    return _Recomputed.apply(run, anchor, *tensors)


def _needs_gradient(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> bool:
    """Return True if a gradient may be needed; a plain function may use unknown parameters."""
    if not torch.is_grad_enabled():
        return False
    if not isinstance(fn, nn.Module):
        return True
    return any(tensor.requires_grad for tensor in (*tensors, *fn.parameters()))


class _Recomputed(torch.autograd.Function):
    """Calls ``run(*tensors)`` and keeps only the tensors; ``backward`` calls ``run`` again."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.run, ctx.generators = run, generators_of(tensors)
        ctx.states = [generator.get_state() for generator in ctx.generators]
        ctx.autocast = _autocast_now(tensors)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return run(*tensors)  # nothing inside is recorded: gradients are disabled in a Function

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Detach the inputs, or the inner backward pass would continue into the outer graph.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad(), ctx.autocast, _rewound(ctx.generators, ctx.states):
            found = ctx.run(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        pairs = [
            (get_gradient_edge(output), grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        del found, outputs  # the backward pass needs only their graph
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(x.grad for x in inputs)


def _autocast_now(tensors: Sequence[Tensor]) -> torch.autocast:
    """Return a context that restores the current autocast settings."""
    kind = "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"
    return torch.autocast(
        kind,
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        torch.is_autocast_cache_enabled(),
    )


@contextmanager
def _rewound(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> Iterator[None]:
    """Run the body with the generators in earlier states, then restore their current states."""
    now = [generator.get_state() for generator in generators]
    _set_states(generators, states)
    try:
        yield
    finally:
        _set_states(generators, now)


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def checkpoint_sequential(layers: Sequence[nn.Module], segments: int, x: Tensor) -> Tensor:
    """Run ``x`` through the layers, one after the other, checkpointing them segment by segment.

    A segment is a run of consecutive layers that is checkpointed as one function. The sizes of the
    segments differ by at most 1:
        10 layers, 4 segments    3, 3, 2 and 2 layers, in any order

    The last segment need not be checkpointed, because the backward pass begins with it.

    Args:
        layers: modules, each of which takes the result of the one before it. Neither the sequence
            nor the mode of any layer (training or evaluation) is changed.
        segments: number of segments, from 1 to the number of layers. About √L segments need the
            least memory for L layers.
        x: the first layer's input, of any dtype, which need not require a gradient. If neither
            ``x`` nor any parameter requires one, the layers need not be called a second time.

    Returns:
        The result of the last layer.

    Raises:
        ValueError: ``segments`` is below 1 or above the number of layers; the message gives both
            numbers.

    Cost: memory for the inputs of all segments and the activations of one segment at a time: for L
        layers of equal size, segments + L/segments activations instead of L. Each layer is called
        once in the forward pass and at most once more in the backward pass.
    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4.
    """
    num_layers = len(layers)
    if not 1 <= segments <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {segments} segments: take at least 1 segment, "
            "and at least 1 layer for each"
        )
    bounds = [num_layers * segment // segments for segment in range(segments + 1)]
    for start, end in pairwise(bounds):
        x = checkpoint(nn.Sequential(*layers[start:end]), x)
    return x
