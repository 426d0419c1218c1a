"""A GPT whose training step the simulator measures, to hold estimates against it.

It has what the formulas count and nothing else. Its tensors are on meta: they have no values, but
the simulator counts their memory, their FLOPs and the bytes that they send. Attention is written
out, because a fused kernel would keep no scores.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, softmax
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from phase3_multi_node.given import Layout, Transformer

DROPOUT = 0.1
MOMENTS = 3  # with the copy in float32, by parameter
HALF: Any = {"dtype": torch.float16, "device": "meta"}


class _Region(torch.autograd.Function):
    """Sum over the tensor group forward, or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, is_sum: bool) -> Tensor:
        ctx.group, ctx.is_sum = group, is_sum
        return _summed(x, group) if is_sum else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if ctx.is_sum else _summed(gradient, ctx.group), None, None


def _summed(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = softmax(q @ k.transpose(-1, -2), dim=-1)
    kept, _ = torch.native_dropout(weights, DROPOUT, True)
    return kept @ v


class Layer:
    """A layer's share of one rank.

    Attributes:
        parameters: all of them.
    """

    def __init__(self, model: Transformer, layout: Layout, group: Any) -> None:
        h, t = model.width, layout.tensor
        self.heads, self.group = model.heads // t, group if t > 1 else None
        self.checkpointing = layout.checkpointing
        shapes = [(3 * h // t, h), (h, h // t), (4 * h // t, h), (h, 4 * h // t)]
        self.weights = [_parameter(*shape) for shape in shapes]
        self.vectors = [_parameter(size) for size in (h, h, h, h, 3 * h // t, h, 4 * h // t, h)]
        self.parameters = [*self.weights, *self.vectors]

    def __call__(self, x: Tensor) -> Tensor:
        if self.checkpointing == "full":
            kept: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return kept
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        norm1, shift1, norm2, shift2, *biases = self.vectors
        size = x.shape[-1:]
        y = self._leave(self._attention(self._enter(layer_norm(x, size, norm1, shift1)), biases))
        x = x + y
        z = self._enter(layer_norm(x, size, norm2, shift2))
        z = linear(gelu(linear(z, self.weights[2], biases[2])), self.weights[3], biases[3])
        return x + self._leave(z)

    def _attention(self, x: Tensor, biases: list[Tensor]) -> Tensor:
        together = linear(x, self.weights[0], biases[0])
        parts = (part.unflatten(-1, (self.heads, -1)) for part in together.chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in parts)
        is_kept = self.checkpointing != "selective"
        attend = _attend if is_kept else partial(checkpoint, _attend, use_reentrant=False)
        context: Tensor = attend(q, k, v)
        return linear(context.transpose(1, 2).flatten(2), self.weights[1], biases[1])

    def _enter(self, x: Tensor) -> Tensor:
        y: Tensor = _Region.apply(x, self.group, False) if self.group else x  # type: ignore[no-untyped-call]
        return y

    def _leave(self, x: Tensor) -> Tensor:
        y: Tensor = _Region.apply(x, self.group, True) if self.group else x  # type: ignore[no-untyped-call]
        return torch.native_dropout(y, DROPOUT, True)[0]


def _parameter(*shape: int) -> Tensor:
    return torch.zeros(shape, **HALF).requires_grad_()


class Stage:
    """The layers of one rank, and the embedding or the logits if it is at an end.

    The rank is tensor · stage + its place in the tensor group; there is one copy of the model.
    """

    def __init__(self, model: Transformer, layout: Layout) -> None:
        rank, t = dist.get_rank(), layout.tensor
        groups = [dist.new_group([*range(i, i + t)]) for i in range(0, t * layout.pipeline, t)]
        self.model, self.layout, self.index = model, layout, rank // t
        count = model.layers // layout.pipeline
        self.layers = [Layer(model, layout, groups[self.index]) for _ in range(count)]
        self.is_first, self.is_last = self.index == 0, self.index == layout.pipeline - 1
        self.before, self.after = rank - t, rank + t
        rows = model.vocabulary + model.length * self.is_first
        self.table = _parameter(rows // t, model.width)
        self.parameters = [one for layer in self.layers for one in layer.parameters] + [self.table]
        self.optimizer = [
            torch.zeros(MOMENTS, *one.shape, device="meta") for one in self.parameters
        ]
        self.in_flight: list[tuple[Tensor, Tensor]] = []
        self.sent: list[Any] = []

    def forward(self) -> None:
        """Pass the next micro-batch on."""
        b, s, h = self.layout.micro_batch, self.model.length, self.model.width
        x = torch.zeros(b, s, h, **HALF)
        if self.is_first:
            x = embedding(torch.zeros(b, s, dtype=torch.int64, device="meta"), self.table)
        else:
            dist.recv(x, self.before)
            x.requires_grad_()
        y = x
        for layer in self.layers:
            y = layer(y)
        if self.is_last:
            y = linear(y, self.table[: self.model.vocabulary // self.layout.tensor])
        else:
            self.sent.append(dist.isend(y.detach(), self.after))
        self.in_flight.append((x, y))

    def backward(self) -> None:
        """Let the oldest micro-batch go backward."""
        x, y = self.in_flight.pop(0)
        gradient = torch.zeros_like(y)
        if not self.is_last:
            dist.recv(gradient, self.after)
        y.backward(gradient)
        if not self.is_first and x.grad is not None:
            self.sent.append(dist.isend(x.grad, self.before))


def step(model: Transformer, layout: Layout, batch_size: int) -> None:
    """Do one step by 1F1B, without the optimizer's update."""
    stage, m = Stage(model, layout), layout.micro_batches(batch_size)
    ahead = min(layout.pipeline - stage.index, m)
    passes: list[Callable[[], None]] = [stage.forward] * ahead
    passes += [stage.backward, stage.forward] * (m - ahead) + [stage.backward] * ahead
    with set_checkpoint_early_stop(False):  # which would leave out the last product
        for one in passes:
            one()
    for work in stage.sent:
        work.wait()


def measured_step(lesson: Any, model: list[int], layout: list[Any], batch_size: int) -> None:
    """The step itself: nothing of the learner's."""
    step(Transformer(*model), Layout(*layout), batch_size)
