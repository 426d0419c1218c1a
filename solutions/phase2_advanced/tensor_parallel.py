"""Tensor parallelism: every layer on all ranks, each rank with its slice of the weights."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from phase2_advanced import programs
from phase2_advanced.given import MLP, Attention, Block, Group, group_device

WIDTH = 64  # width of the MLP's input and output in ``main``


def copy_to_tensor_region(x: Tensor, group: Group = None) -> Tensor:
    """Pass ``x`` on unchanged; the backward pass sums its gradient over the ranks.

    It is used where the ranks begin to apply different weights to the same input:
        2 ranks, gradients of 1.0 and 3.0 arrive  ->  4.0 leaves on both

    Args:
        x: tensor (…), the same on all ranks, in any layout; it need not require a gradient.
        group: the ranks that share the layer; all by default.

    Returns:
        A tensor with the values and the memory of ``x``: nothing is copied.

    Cost: nothing in the forward pass; in the backward pass, one all-reduce of the gradient, in its
        dtype. The incoming gradient is not changed, because another operation may hold it too.
        Gradients that ``x`` gets from operations other than this one are not summed.

    Source: Shoeybi et al. 2019, section 3, the operator f.
    """
    return _region(x, group, forward=_same, backward=_reduced)


def reduce_from_tensor_region(x: Tensor, group: Group = None) -> Tensor:
    """Sum ``x`` over the ranks; the backward pass leaves the gradient unchanged.

    It is used where the ranks' partial results are combined. After that, all ranks compute the same
    values, so each rank's gradient is already the gradient of the sum:
        2 ranks, 1.0 and 3.0 arrive  ->  4.0 on both;  a gradient of 1.0 on both stays 1.0

    Args:
        x: tensor (…), this rank's term of the sum, in any layout; not changed. It need not require
            a gradient.
        group: the ranks that share the layer; all by default.

    Returns:
        The sum in the dtype of ``x``, bit for bit the same on all ranks.

    Cost: in the forward pass, one all-reduce of ``x``, in its dtype; nothing in the backward pass.

    Source: Shoeybi et al. 2019, section 3, the operator g.
    """
    return _region(x, group, forward=_reduced, backward=_same)


_Operation = Callable[[Tensor, Group], Tensor]


def _region(x: Tensor, group: Group, *, forward: _Operation, backward: _Operation) -> Tensor:
    """Apply one operation to ``x`` and, in the backward pass, another to the gradient."""
    y: Tensor = _Region.apply(x, group, forward, backward)
    return y


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, forward: _Operation, backward: _Operation
    ) -> Any:
        ctx.group, ctx.operation = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.operation(gradient, ctx.group), None, None, None


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _reduced(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return ``x`` reduced over the ranks; ``x`` stays unchanged, because others may use it."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group)
    return total


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split over the ranks.

    Rank r of N computes the r-th of N equal parts of the output features:
        full weight (6, 4), 2 ranks  ->  rows 0 … 2 on rank 0, rows 3 … 5 on rank 1

    (The name comes from the paper, which writes Y = XA: a column of A is a row of torch's weight.)

    Attributes:
        weight: a parameter (out / N, in), this rank's rows of the full weight.
        bias: a parameter (out / N,), this rank's part of the full bias; None if there is none.

    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(self, full: nn.Linear, group: Group = None, gather_output: bool = False) -> None:
        """Take this rank's slice of ``full``.

        Args:
            full: the full layer, equal on all ranks; not changed. Weight and bias keep their dtype,
                and each of them is frozen if it is frozen in ``full``. The new layer keeps neither
                ``full`` nor any of its memory, so that ``full`` can be freed.
            group: the ranks that share the layer; all by default.
            gather_output: whether ``forward`` returns all output features on every rank.

        Raises:
            ValueError: N does not divide the number of output features. Raised on every rank, with
                the same message, which names both numbers.
        """
        super().__init__()
        self.weight = _slice(full.weight, 0, group, "output features")
        self.bias = None if full.bias is None else _slice(full.bias, 0, group, "output features")
        self.group, self.gather_output = group, gather_output

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's output features, or all of them with ``gather_output``.

        In the backward pass, ``x`` gets the same gradient as from the full layer on every rank, and
        weight and bias get the matching slices of the full gradients.

        Args:
            x: tensor (…, in), the same on all ranks, in any layout.

        Returns:
            A tensor (…, out / N); with ``gather_output``, a tensor (…, out) that is the same on all
            ranks, which must all continue with the same computation from here on. The gradient of
            either may have any layout.

        Cost: in the forward pass, nothing, or one all-gather of (…, out / N) with
            ``gather_output``; in the backward pass, one all-reduce of the gradient of ``x``, if
            ``x`` requires one. Both are in the dtype of ``x``.
        """
        y = F.linear(copy_to_tensor_region(x, self.group), self.weight, self.bias)
        if not self.gather_output:
            return y
        return _region(y, self.group, forward=_all_features, backward=_own_features)


def _slice(full: Tensor, dim: int, group: Group, what: str) -> nn.Parameter:
    """Return a copy of this rank's part along ``dim``; a view would keep ``full`` in memory."""
    part = _parts(full.detach(), dim, group, what)[dist.get_rank(group)]
    return nn.Parameter(part.clone(), requires_grad=full.requires_grad)


def _parts(x: Tensor, dim: int, group: Group, what: str) -> tuple[Tensor, ...]:
    """Split ``x`` along ``dim`` into one part per rank, all of the same size."""
    size, world_size = x.shape[dim], dist.get_world_size(group)
    if size % world_size:
        raise ValueError(f"{size} {what} cannot be split evenly over {world_size} ranks")
    return x.chunk(world_size, dim)


def _all_features(x: Tensor, group: Group) -> Tensor:
    return _gathered(x, -1, group)


def _own_features(x: Tensor, group: Group) -> Tensor:
    return _parts(x, -1, group, "features")[dist.get_rank(group)]


def _gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """Gather the ranks' parts, and join them along ``dim`` in rank order."""
    mine = x.contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group)
    return torch.cat(parts, dim)


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split over the ranks.

    Rank r of N multiplies the r-th of N equal parts of the input features, which a column-parallel
    layer has left on that rank, by its columns of the weight. The partial results are summed:
        full weight (4, 6), 2 ranks  ->  columns 0 … 2 on rank 0, columns 3 … 5 on rank 1

    Attributes:
        weight: a parameter (out, in / N), this rank's columns of the full weight.
        bias: a parameter (out,), the full bias, on every rank; None if there is none.

    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(self, full: nn.Linear, group: Group = None) -> None:
        """Take this rank's slice of ``full``.

        Args:
            full: the full layer, equal on all ranks; not changed. Weight and bias keep their dtype,
                and each of them is frozen if it is frozen in ``full``. The new layer keeps neither
                ``full`` nor any of its memory, so that ``full`` can be freed.
            group: the ranks that share the layer; all by default.

        Raises:
            ValueError: N does not divide the number of input features. Raised on every rank, with
                the same message, which names both numbers.
        """
        super().__init__()
        self.weight = _slice(full.weight, 1, group, "input features")
        self.bias = None if full.bias is None else _copy(full.bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's features by its weight, sum over the ranks, and add the bias once.

        In the backward pass, ``x`` and weight get the matching slices of the full gradients, and
        the bias gets its full gradient on every rank.

        Args:
            x: tensor (…, in / N), this rank's part of the input features, in any layout.

        Returns:
            A tensor (…, out), the same on all ranks. Its gradient may have any layout. From here
            on, all ranks must continue with the same computation.

        Cost: in the forward pass, one all-reduce of (…, out), in its dtype; nothing in the backward
            pass.
        """
        y = reduce_from_tensor_region(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def _copy(full: Tensor) -> nn.Parameter:
    return nn.Parameter(full.detach().clone(), requires_grad=full.requires_grad)


# The gradients of the weights do not depend on the sum over the ranks of the gradient of the input.
# So the layers that read an input are computed together, by a Function whose backward pass begins
# the sum, computes the gradients of the weights, and then waits for it.

_Pending = Callable[[], Tensor]  # waits for a collective that has begun, and returns its result


def _begin(collective: Any, *arguments: Any, group: Group, then: Callable[[], Tensor]) -> _Pending:
    """Begin a collective, and return a function that waits for it and returns its result."""
    is_async = not torch.compiler.is_compiling()  # compiled code has no others
    work = collective(*arguments, group=group, async_op=is_async)

    def wait() -> Tensor:
        if work:
            work.wait()
        return then()

    return wait


def _begin_sum(x: Tensor, group: Group) -> _Pending:
    """Sum ``x`` over the ranks, in its own memory."""
    total = x.contiguous()
    return _begin(dist.all_reduce, total, group=group, then=lambda: total)


def _at_hand(x: Tensor, group: Group) -> _Pending:
    return lambda: x


class _Entrance(NamedTuple):
    """How an input enters a region, and how the backward pass sums its gradient."""

    group: Group
    enter: _Operation
    begin_sum: Callable[[Tensor, Group], _Pending]
    begin_again: Callable[[Tensor, Group], _Pending] = _at_hand  # in the backward pass


def _copy_entrance(group: Group) -> _Entrance:
    return _Entrance(group, copy_to_tensor_region, _begin_sum)


def _products(x: Tensor, layers: Sequence[Any], entrance: _Entrance) -> dict[nn.Module, Tensor]:
    """Let ``x`` enter a region, and multiply it by the weights of the layers that begin there."""
    if x.requires_grad and any(layer.weight.requires_grad for layer in layers):
        parameters = *(layer.weight for layer in layers), *(layer.bias for layer in layers)
        return dict(zip(layers, _Products.apply(x, entrance, *parameters), strict=True))
    whole = entrance.enter(x, entrance.group)  # the sum of its gradient has nothing to run beside
    return {layer: F.linear(whole, layer.weight, layer.bias) for layer in layers}


class _Products(torch.autograd.Function):
    """Sums the gradient of x over the ranks while they compute those of weights and biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entrance: _Entrance, *parameters: Any) -> Any:
        whole = entrance.enter(x, entrance.group)
        weights, biases = _halves(parameters)
        products = tuple(F.linear(whole, *both) for both in zip(weights, biases, strict=True))
        kept = whole if entrance.begin_again is _at_hand else x
        ctx.save_for_backward(kept.to(products[0].dtype), *weights)  # 16 bits under autocast
        ctx.entrance, ctx.dtype = entrance, x.dtype
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (kept, *weights), (group, _, begin_sum, begin_again) = ctx.saved_tensors, ctx.entrance
        is_there = begin_again(kept, group)
        is_summed = begin_sum(_of_input(gradients, weights, ctx.dtype), group)
        of_parameters = _of_parameters(gradients, is_there(), ctx.needs_input_grad[2:])
        return is_summed(), None, *of_parameters


def _of_input(gradients: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return this rank's part of the gradient of the input of several layers."""
    products = zip(gradients, weights, strict=True)
    return reduce(torch.add, ((g @ weight.to(g.dtype)).to(dtype) for g, weight in products))


def _of_parameters(
    gradients: Sequence[Tensor], x: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of weights, then of biases, or None for those that are frozen."""
    weights, biases = (zip(gradients, half, strict=True) for half in _halves(needed))
    return [
        *(torch.einsum("...o,...i->oi", g, x) if is_needed else None for g, is_needed in weights),
        *(torch.einsum("...o->o", g) if is_needed else None for g, is_needed in biases),
    ]


def _halves(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    half = len(items) // 2
    return items[:half], items[half:]


def parallelize_mlp(mlp: MLP, group: Group = None) -> None:
    """Split an MLP over the ranks, in place: each rank keeps 1/N of the hidden features.

        x  ->  up, split by rows  ->  gelu of each feature  ->  down, split by columns  ->  sum

    Afterwards, ``mlp`` maps the same input to the same output as before, on every rank. The input
    and the parameters get the gradients that the full module would give them, or the rank's slices
    of these gradients if a parameter is split.

    Args:
        mlp: the MLP, equal on all ranks. Its layer ``up`` is replaced by one with ``weight`` and
            ``bias`` as in ``ColumnParallelLinear``, and ``down`` by one with ``weight`` and
            ``bias`` as in ``RowParallelLinear``; the classes of these layers are up to you. The
            MLP's input is a positional argument, may have any layout, and need not require a
            gradient.
        group: the ranks that share the module; all by default.

    Raises:
        ValueError: N does not divide the number of hidden features. Raised on every rank, with the
            same message, which names both numbers; ``mlp`` is left as it is.

    Cost: for an input of n bytes, one all-reduce of n bytes in the forward pass and one in the
        backward pass, and nothing else.

    Source: Shoeybi et al. 2019, section 3.
    """
    _begin_with(mlp, ("up",), _copy_entrance(group))
    _replace(mlp, "down", RowParallelLinear, group)


def parallelize_attention(attention: Attention, group: Group = None) -> None:
    """Split attention over the ranks by whole heads, in place: each rank keeps 1/N of the heads.

    Three layers read the same input, but its gradient is summed over the ranks only once.
    Afterwards, ``attention`` maps the same input to the same output as before, on every rank. The
    input and the parameters get the gradients that the full module would give them, or the rank's
    slices of these gradients if a parameter is split.

    Args:
        attention: the module, equal on all ranks, with the layers ``query``, ``key``, ``value`` and
            ``out``, and ``head_width``. The first three layers are replaced by ones with ``weight``
            and ``bias`` as in ``ColumnParallelLinear``, and ``out`` by one with ``weight`` and
            ``bias`` as in ``RowParallelLinear``; the classes of these layers are up to you. The
            module's input is a positional argument, may have any layout, and need not require a
            gradient. Gradients that the input gets from other operations are not summed.
        group: the ranks that share the module; all by default.

    Raises:
        ValueError: N does not divide the number of heads. Raised on every rank, with the same
            message, which names both numbers; ``attention`` is left as it is.

    Cost: for an input of n bytes, one all-reduce of n bytes in the forward pass and one in the
        backward pass, and nothing else.

    Source: Shoeybi et al. 2019, section 3.
    """
    _check_heads(attention, group)
    _begin_with(attention, ("query", "key", "value"), _copy_entrance(group))
    _replace(attention, "out", RowParallelLinear, group)


def _replace(
    module: nn.Module, name: str, layer: Callable[[nn.Linear, Group], nn.Module], group: Group
) -> None:
    setattr(module, name, layer(getattr(module, name), group))


def _begin_with(module: nn.Module, names: Sequence[str], entrance: _Entrance) -> None:
    """Split the layers that read the module's input, and pass them their products in its place.

    Nothing else may read the input.
    """
    for name in names:
        _replace(module, name, _Product, entrance.group)

    def products(module: nn.Module, inputs: tuple[Tensor]) -> Any:
        return (_products(inputs[0], [module.get_submodule(name) for name in names], entrance),)

    module.register_forward_pre_hook(products)


class _Product(ColumnParallelLinear):
    """A layer that is given all products, which a hook has computed together, and takes its own."""

    def forward(self, products: Any) -> Any:
        return products[self]


def _check_heads(attention: Attention, group: Group) -> None:
    heads = attention.query.out_features // attention.head_width
    if heads % dist.get_world_size(group):
        raise ValueError(
            f"{heads} heads cannot be split evenly over {dist.get_world_size(group)} ranks"
        )


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows, one for each token of the vocabulary, are split over the ranks.

        full weight (6, 4), 2 ranks  ->  tokens 0 … 2 on rank 0, tokens 3 … 5 on rank 1

    Attributes:
        weight: a parameter (V / N, width), this rank's rows of the full weight.

    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(self, full: nn.Embedding, group: Group = None) -> None:
        """Take this rank's rows of ``full``.

        Args:
            full: the full embedding, equal on all ranks, with finite weights; not changed. It has
                no ``padding_idx`` or other options. The slice has the same dtype, and is frozen if
                ``full`` is. The new layer keeps neither ``full`` nor any of its memory.
            group: the ranks that share the layer; all by default.

        Raises:
            ValueError: N does not divide the size V of the vocabulary. Raised on every rank, with
                the same message, which names both numbers.
        """
        super().__init__()
        self.weight = _slice(full.weight, 0, group, "tokens")
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens; a rank contributes zeros for those whose rows are on other ranks.

        In the backward pass, weight gets the matching rows of the full gradient.

        Args:
            tokens: tensor (…) int64, 0 to V - 1, the same on all ranks; not changed.

        Returns:
            A tensor (…, width), the same on all ranks. Its gradient may have any layout. From here
            on, all ranks must continue with the same computation.

        Cost: in the forward pass, one all-reduce of (…, width), in its dtype; nothing in the
            backward pass.
        """
        rows, is_here = _rows_here(tokens, len(self.weight), self.group)
        y = F.embedding(rows, self.weight).masked_fill(~is_here.unsqueeze(-1), 0)
        return reduce_from_tensor_region(y, self.group)


def _rows_here(ids: Tensor, num_rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return each id's row on this rank (0 if it has none here), and whether it has one."""
    rows = ids - num_rows * dist.get_rank(group)
    is_here = (rows >= 0) & (rows < num_rows)
    return rows.where(is_here, 0), is_here


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """Return the cross-entropy of each target, from logits that are split over the ranks.

    No rank ever holds the logits of the whole vocabulary, and none sends its own logits. Up to
    rounding, the losses are those of ``F.cross_entropy`` for the logits of all ranks together.

    Args:
        logits: tensor (…, V / N), the logits of this rank's part of the vocabulary (r·V/N to
            (r+1)·V/N - 1 on rank r), in any layout; not changed. They may be so large that exp(z)
            is infinite.
        targets: tensor (…) int64, 0 to V - 1, the same on all ranks; not changed. A target of -100
            does not count: its loss is 0, and its logits get a gradient of 0.
        group: the ranks that share the vocabulary; all by default.

    Returns:
        The losses, a tensor (…) in the dtype of ``logits``, the same on all ranks. From here on,
        all ranks must continue with the same computation. In the backward pass, ``logits`` gets the
        matching part of the full gradient.

    Cost: in the forward pass, at most three all-reduces, of three numbers per target in total, and
        nothing else; nothing in the backward pass.

    Source: Shoeybi et al. 2019, section 3.
    """
    greatest = _reduced(logits.detach().amax(-1), group, dist.ReduceOp.MAX)
    shifted = logits - greatest.unsqueeze(-1)
    total = reduce_from_tensor_region(shifted.exp().sum(-1), group)
    columns, is_here = _rows_here(targets, logits.shape[-1], group)
    mine = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
    losses = total.log() - reduce_from_tensor_region(mine, group)
    return losses.masked_fill(targets == -100, 0)


SEQUENCE = 1  # the dim of the positions in (B, T, …)


def gather_from_sequence_region(x: Tensor, group: Group = None) -> Tensor:
    """Gather all positions; the backward pass sums the gradient and keeps this rank's positions.

    With sequence parallelism, it takes the place of ``copy_to_tensor_region``.

    Args:
        x: tensor (B, T / N, …), this rank's part of the positions, split in rank order, in any
            layout; it need not require a gradient.
        group: the ranks that share the sequence; all by default.

    Returns:
        A tensor (B, T, …) in the dtype of ``x``, the same on all ranks.

    Cost: in the forward pass, one all-gather of ``x``; in the backward pass, one reduce-scatter of
        the gradient, which may have any layout and is not changed. Both are in the dtype of ``x``,
        and together they send as many bytes as one all-reduce of (B, T, …).

    Source: Korthikanti et al. 2022, section 4.2.2, the operator g.
    """
    return _region(x, group, forward=_all_positions, backward=_summed_positions)


def reduce_scatter_to_sequence_region(x: Tensor, group: Group = None) -> Tensor:
    """Sum ``x`` and keep this rank's positions; the backward pass gathers the gradients.

    With sequence parallelism, it takes the place of ``reduce_from_tensor_region``.

    Args:
        x: tensor (B, T, …), this rank's term of the sum, in any layout; not changed. It need not
            require a gradient.
        group: the ranks that share the sequence; all by default.

    Returns:
        A tensor (B, T / N, …) in the dtype of ``x``; on rank r, positions r·T/N to (r+1)·T/N - 1 of
        the sum.

    Raises:
        ValueError: N does not divide the number T of positions. Raised on every rank, with the same
            message, which names both numbers.

    Cost: in the forward pass, one reduce-scatter of ``x``; in the backward pass, one all-gather of
        the gradient, which may have any layout and is not changed. Both are in the dtype of ``x``.

    Source: Korthikanti et al. 2022, section 4.2.2, the operator g-bar.
    """
    return _region(x, group, forward=_summed_positions, backward=_all_positions)


def _all_positions(x: Tensor, group: Group) -> Tensor:
    return _begin_gather_of_positions(x, group)()


def _summed_positions(x: Tensor, group: Group) -> Tensor:
    return _begin_sum_of_positions(x, group)()


def _begin_gather_of_positions(x: Tensor, group: Group) -> _Pending:
    """Gather the ranks' positions."""
    mine = x.contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    joined = partial(torch.cat, parts, SEQUENCE)
    return _begin(dist.all_gather, parts, mine, group=group, then=joined)


def _begin_sum_of_positions(x: Tensor, group: Group) -> _Pending:
    """Sum over the ranks, and keep this rank's positions of the sum."""
    parts = [part.contiguous() for part in _parts(x, SEQUENCE, group, "positions")]
    total = torch.empty_like(parts[0])
    return _begin(dist.reduce_scatter, total, parts, group=group, then=lambda: total)


def parallelize_block(block: Block, group: Group = None, gather_again: bool = False) -> None:
    """Split a transformer block, in place: attention and MLP by weights, the rest by positions.

        x (B, T/N, E)  ->  norm  ->  gather  ->  attention: whole heads  ->  reduce-scatter  ->  +
                       ->  norm  ->  gather  ->  MLP: hidden features  ->  reduce-scatter  ->  +

    Afterwards, ``block`` maps this rank's positions of the input to this rank's positions of the
    output, and each norm sees only these positions. The input gets the same positions of the full
    gradient. The parameters get the gradients that the full module would give them, or the rank's
    slices of these gradients if a parameter is split.

    Args:
        block: the block, equal on all ranks. The layers of ``attention`` and ``mlp`` are replaced
            by layers with the same slices as in ``parallelize_attention`` and ``parallelize_mlp``.
            The parameters of the norms, and the biases of ``out`` and ``down``, see only T/N
            positions, so their gradients are summed over the ranks in each backward pass, and every
            rank gets the full gradient. Frozen parameters stay frozen. The block's input is a
            positional argument and may have any layout.
        group: the ranks that share the block; all by default.
        gather_again: a stretch that is not graded: keep this rank's positions of what attention and
            the MLP read, instead of all of them, and gather them once more in the backward pass.

    Raises:
        ValueError: N does not divide the number of heads. Raised on every rank, with the same
            message, which names both numbers; ``block`` is left as it is.

    Cost: two all-gathers and two reduce-scatters in the forward pass, and the same number of each
        in the backward pass. If (B, T, E) has n bytes, all of them together send as many bytes as
        four all-reduces of n bytes. The backward pass also sums the gradients of 6E parameters, or
        fewer if some are frozen, in one all-reduce or several.

    Source: Korthikanti et al. 2022, section 4.2.2.
    """
    _check_heads(block.attention, group)
    again = _begin_gather_of_positions if gather_again else _at_hand
    entrance = _Entrance(group, gather_from_sequence_region, _begin_sum_of_positions, again)
    _begin_with(block.attention, ("query", "key", "value"), entrance)
    _replace(block.attention, "out", _RowWithScatter, group)
    _begin_with(block.mlp, ("up",), entrance)
    _replace(block.mlp, "down", _RowWithScatter, group)
    for parameter in _parameters_on_positions(block):
        parameter.register_hook(partial(_reduced, group=group))


class _RowWithScatter(RowParallelLinear):
    """A row-parallel layer that leaves each rank with its positions of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_scatter_to_sequence_region(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def _parameters_on_positions(block: Block) -> list[nn.Parameter]:
    """Return the trainable parameters that every rank holds whole and applies to its positions."""
    biases = [block.attention.out.bias, block.mlp.down.bias]
    norms = [*block.attention_norm.parameters(), *block.mlp_norm.parameters()]
    return [p for p in (*norms, *biases) if p is not None and p.requires_grad]


def main() -> None:
    """Train an MLP on digits with split hidden features, and compare it with a one-process run."""
    options = _options()
    programs.join()
    programs.require_written(copy_to_tensor_region, reduce_from_tensor_region, parallelize_mlp)
    for layer in (ColumnParallelLinear, RowParallelLinear):
        programs.require_written(layer.__init__, layer.forward)
    (model, mlp), (alone, mlp_alone) = _model(options.hidden), _model(options.hidden)
    programs.say(f"parameters:           {programs.num_parameters(model):,} in one process")
    try:
        parallelize_mlp(mlp)
    except ValueError as error:
        programs.fail(f"--hidden {options.hidden}: {error}")
    programs.say(f"parameters by rank:   {programs.by_rank(programs.num_parameters(model))}")
    _say_what_a_step_sends(model)
    losses = programs.train(model, options.steps)
    programs.train_alone(alone, options.steps)
    parallelize_mlp(mlp_alone)
    programs.require_equal(model.parameters(), alone.parameters())
    programs.say_loss(losses[0], losses[-1])
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--hidden", type=programs.positive, default=256, help="features, over all ranks"
    )
    parser.add_argument("--steps", type=programs.positive, default=20)
    return parser.parse_args()


def _model(num_hidden: int) -> tuple[nn.Module, MLP]:
    """Return a digit classifier and the MLP inside it; the layers around the MLP stay whole."""
    torch.manual_seed(0)
    mlp = MLP(WIDTH)
    mlp.up, mlp.down = nn.Linear(WIDTH, num_hidden), nn.Linear(num_hidden, WIDTH)
    model = nn.Sequential(nn.Linear(64, WIDTH), mlp, nn.Linear(WIDTH, 10))
    return model.to(group_device(), torch.float64), mlp


def _say_what_a_step_sends(model: nn.Module) -> None:
    """Print the all-reduces of a step that does not change the weights."""
    images, labels = programs.load_digits()
    with programs.calls_of(dist.all_reduce) as forward:
        loss = F.cross_entropy(model(images), labels)
    with programs.calls_of(dist.all_reduce) as backward:
        loss.backward()
    for name, calls in {"forward": forward, "backward": backward}.items():
        sizes = [f"{call['tensor'].nbytes:,}" for call in calls]
        programs.say(
            f"{name + ':':22}{len(sizes)} all-reduce of {', '.join(sizes)} bytes on each rank"
        )


if __name__ == "__main__":
    main()
