"""Activation checkpointing: keep a function's inputs, recompute its intermediate results.

Tasks 2.5 and 2.6. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 2.5``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
    # TODO 2.5: return what fn returns; the backward pass has only the arguments to begin with.
    #   Without torch.utils.checkpoint.
    #   Example: 4 layers with activations of 1 MiB each: between the two passes 1 MiB is kept, the
    #   argument, instead of 4 MiB; after the backward pass each layer has been called twice.
    #   About 50 lines, with a class and its helpers.
    raise NotImplementedError("Task 2.5: checkpoint, see guidelines.md#25-checkpoint-a-function")


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
    # TODO 2.6: return what the last layer returns; at most the inputs of all segments and the
    #   activations of one segment are in memory at once.
    #   Example: 16 layers with activations of 1 MiB each, 4 segments: at most about 4 inputs and 4
    #   activations at once, 8 MiB instead of 16.
    #   About 8 lines.
    raise NotImplementedError(
        "Task 2.6: checkpoint_sequential, see guidelines.md#26-checkpoint-by-segments"
    )
