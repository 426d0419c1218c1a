"""Tensor parallelism: every layer on all ranks, each rank with its slice of the weights.

Tasks 2.12 to 2.17. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 2.12``. When all are done,
``torchrun --nproc-per-node 2 phase2_advanced/template_tensor_parallel.py`` trains with them.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
    # TODO 2.12: x forward, the sum of the ranks' gradients backward.
    #   Example: x = 5.0 on 2 ranks, and gradients of 1.0 and 3.0: y = 5.0, and x.grad = 4.0 on
    #   both.
    #   About 10 lines.
    raise NotImplementedError(
        "Task 2.12: copy_to_tensor_region, see guidelines.md#212-enter-and-leave-a-region"
    )


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
    # TODO 2.12: the sum over the ranks forward, the gradient as it comes backward.
    #   Example: x = 1.0 and 3.0 on 2 ranks, and a gradient of 1.0 on both: y = 4.0 and x.grad = 1.0
    #   on both (not 2.0).
    #   About 8 lines.
    raise NotImplementedError(
        "Task 2.12: reduce_from_tensor_region, see guidelines.md#212-enter-and-leave-a-region"
    )


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
        # TODO 2.13: keep this rank's rows of the weight and entries of the bias, and nothing else
        #   of full.
        #   Example: Linear(4, 6) on 3 ranks: weight (2, 4) and bias (2,), 10 numbers instead of 30.
        #   About 10 lines.
        raise NotImplementedError(
            "Task 2.13: ColumnParallelLinear.__init__, see guidelines.md#213-split-the-outputs"
        )

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
        # TODO 2.13: this rank's outputs, or all of them, with the gradients of the full layer.
        #   Example: Linear(4, 6) on 3 ranks, x (5, 4): y (5, 2), with gather_output (5, 6).
        #   About 5 lines, and 12 for the gather.
        raise NotImplementedError(
            "Task 2.13: ColumnParallelLinear.forward, see guidelines.md#213-split-the-outputs"
        )


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
        # TODO 2.14: keep this rank's columns of the weight, and the whole bias.
        #   Example: Linear(6, 4) on 3 ranks: weight (4, 2) and bias (4,), 12 numbers instead of 28.
        #   About 5 lines.
        raise NotImplementedError(
            "Task 2.14: RowParallelLinear.__init__, see guidelines.md#214-split-the-inputs"
        )

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
        # TODO 2.14: the output of the full layer on every rank, with the gradients of the full
        #   layer.
        #   Example: partial products 1.0 and 2.0 on 2 ranks, and a bias of 10.0: 13.0 on both (not
        #   23.0).
        #   About 2 lines.
        raise NotImplementedError(
            "Task 2.14: RowParallelLinear.forward, see guidelines.md#214-split-the-inputs"
        )


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
    # TODO 2.15: the layers of mlp are replaced, with one all-reduce forward and one backward.
    #   Example: MLP(8) on 2 ranks: up.weight (16, 8) and down.weight (8, 16) on each.
    #   About 2 lines.
    raise NotImplementedError(
        "Task 2.15: parallelize_mlp, see guidelines.md#215-two-layers-one-all-reduce"
    )


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
    # TODO 2.15: the layers of attention are replaced, with one all-reduce forward and one backward.
    #   Example: Attention(8, heads=4) on 2 ranks: query.weight (4, 8), which is 2 heads, on each.
    #   About 12 lines.
    raise NotImplementedError(
        "Task 2.15: parallelize_attention, see guidelines.md#215-two-layers-one-all-reduce"
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
        # TODO 2.16: keep this rank's rows of the weight.
        #   Example: Embedding(6, 4) on 3 ranks: weight (2, 4), of tokens 2 and 3 on rank 1.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 2.16: VocabParallelEmbedding.__init__, see guidelines.md#216-split-the-vocabulary"
        )

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
        # TODO 2.16: the embeddings of all tokens on every rank.
        #   Example: 6 tokens on 3 ranks, token 3: row 1 of rank 1, plus zeros of ranks 0 and 2.
        #   About 6 lines.
        raise NotImplementedError(
            "Task 2.16: VocabParallelEmbedding.forward, see guidelines.md#216-split-the-vocabulary"
        )


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
    # TODO 2.16: the losses of the full logits on every rank, from three numbers per target.
    #   Example: logits [0.0] and [ln 3] on 2 ranks, target 1: ln(4/3) = 0.288 on both.
    #   About 12 lines.
    raise NotImplementedError(
        "Task 2.16: vocab_parallel_cross_entropy, see guidelines.md#216-split-the-vocabulary"
    )


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
    # TODO 2.17: all positions forward, this rank's part of the summed gradient backward.
    #   Example: (1, 1, 1) with 5.0 and 7.0 on 2 ranks, gradients [1, 2] and [10, 20]: y = [5, 7] on
    #   both, and x.grad = 11 on rank 0 and 22 on rank 1.
    #   About 15 lines.
    raise NotImplementedError(
        "Task 2.17: gather_from_sequence_region, see guidelines.md#217-split-the-sequence"
    )


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
    # TODO 2.17: this rank's positions of the sum forward, all positions' gradients backward.
    #   Example: [1, 2] and [10, 20] on 2 ranks: y = 11 on rank 0 and 22 on rank 1; gradients of 5
    #   and 7: x.grad = [5, 7] on both.
    #   About 5 lines.
    raise NotImplementedError(
        "Task 2.17: reduce_scatter_to_sequence_region, see guidelines.md#217-split-the-sequence"
    )


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
    # TODO 2.17: as in 2.15, with positions split wherever the weights are not.
    #   Example: (1, 8, E) on 2 ranks: each norm sees (1, 4, E), and attention computes with (1, 8,
    #   E).
    #   About 25 lines.
    raise NotImplementedError(
        "Task 2.17: parallelize_block, see guidelines.md#217-split-the-sequence"
    )


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
