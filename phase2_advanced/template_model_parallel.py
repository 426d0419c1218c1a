"""Model parallelism: every rank holds a stage (a run of layers), and one rank works at a time.

Tasks 2.7 and 2.8. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 2.7``. When both are done,
``torchrun --nproc-per-node 2 phase2_advanced/template_model_parallel.py`` trains with them.
"""

import argparse
import math
import pickle
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phase2_advanced import programs
from phase2_advanced.given import Group, group_device

WIDTHS = (64, 128, 96, 64, 64, 32)  # widths of the layers' inputs in ``main``


def partition_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut a model's layers into stages so that the most expensive stage is as cheap as possible.

    Costs of 3, 1, 1, 1, 3 in 3 stages:
        3 | 1 1 1 | 3      the most expensive stage costs 3: the best cut
        3 1 | 1 1 | 3      the most expensive costs 4: balances numbers of layers, not costs

    Args:
        costs: costs of the layers in order, in any unit (seconds, FLOPs, parameters), as a list or
            a tuple; none is negative. Not changed.
        num_stages: number of stages, at least 1 and at most the number of layers.

    Returns:
        The layers of each stage as a ``range``, in order: the first range starts with layer 0, each
        of the others starts where the one before it stops, and the last stops after the last layer.
        No range is empty. If several cuts are equally good, any of them will do.

    Raises:
        ValueError: if ``num_stages`` is less than 1 or more than the number of layers; the
            message names both numbers.

    Cost: for L layers, at most about L²·num_stages additions and comparisons.
    """
    # TODO 2.7: return the cut whose most expensive stage costs least.
    #   Example: for costs of 3, 3, 2, 6, 1 and 4 in 3 stages, the most expensive stage costs 8.
    #   About 14 lines.
    raise NotImplementedError(
        "Task 2.7: partition_layers, see guidelines.md#27-cut-a-model-into-stages"
    )


def send_tensors(tensors: Sequence[Tensor], dst: int, group: Group = None) -> list[dist.Work]:
    """Start sending tensors to a rank that knows nothing about them; return without waiting.

    A header is sent first. It gives the number of tensors, the dtype and the shape of each, and
    whether each requires a gradient. Its format is up to you.

    Args:
        tensors: any number of tensors, even none, of any shapes and dtypes, contiguous or not. They
            are not changed. The caller must not write to them until all works are done, but need
            not keep references to them, because each work keeps its tensor.
        dst: the rank inside ``group`` that calls ``recv_tensors``.
        group: the group in which ``dst`` is numbered; all ranks by default.

    Returns:
        The works of all messages; the caller must ``wait`` exactly once on each.

    Cost: at most two messages for the header, with at most 1,024 bytes in total for up to four
        tensors; then one message for each tensor, with exactly its bytes. No collectives.
    """
    # TODO 2.8: send a header and the tensors, and return the works without waiting for them.
    #   Example: 10 and 20 numbers in float32 are messages of 40 and 80 bytes after the header.
    #   About 8 lines.
    raise NotImplementedError("Task 2.8: send_tensors, see guidelines.md#28-run-a-stage")


def recv_tensors(src: int, group: Group = None) -> list[Tensor]:
    """Receive the tensors of one ``send_tensors`` call on rank ``src``, in the same order.

    Args:
        src: the rank inside ``group`` that sends.
        group: the group in which ``src`` is numbered; all ranks by default.

    Returns:
        New tensors on ``group_device(group)``, with the values, shapes and dtypes of those sent.
        Each is a leaf, and requires a gradient if the tensor that was sent does.
    """
    # TODO 2.8: return new tensors with the values, shapes and dtypes of those that were sent.
    #   Example: float32 activations that require a gradient and an int64 mask arrive as two leaves,
    #   of which only the first requires a gradient.
    #   About 10 lines.
    raise NotImplementedError("Task 2.8: recv_tensors, see guidelines.md#28-run-a-stage")


class StageRunner:
    """Runs a stage of a model on its own rank; rank 0 has the first layers, the last rank the last.

    A stage knows nothing about its neighbours: the number of tensors that arrive, their shapes and
    their dtypes may differ from stage to stage and from step to step.
        forward     rank 0 ─ activations ─► rank 1 ─ activations ─► rank 2 ─► output
        backward    rank 0 ◄─── gradients ─ rank 1 ◄─── gradients ─ rank 2 ◄─ loss

    In every step, outputs and gradients are those that one process with all stages would compute. A
    parameter on which the loss does not depend may have a gradient of zeros or None. To evaluate
    the model, call ``forward`` on all ranks under ``torch.no_grad()``, without ``backward``; such a
    pass records no graph.

    Args:
        stage: this rank's layers, called with what the previous stage returns: a tensor or a
            tuple of tensors, of any dtypes, which may or may not require gradients. Some or all of
            the stage's parameters may be frozen, or it may have no parameters at all. It does not
            write to its inputs.
        group: the ranks that hold the stages, in order; all by default.
    """

    def __init__(self, stage: nn.Module, group: Group = None) -> None:
        self.stage, self.group = stage, group
        self.rank, self.num_stages = dist.get_rank(group), dist.get_world_size(group)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...] | None:
        """Run the stage on ``inputs``, or on what the previous rank sends; pass the result on.

        Args:
            inputs: on rank 0, the inputs of the whole model, of any dtypes; nothing on other ranks.
                An input that is a leaf and requires a gradient gets it from ``backward``.

        Returns:
            On the last rank, what its stage returns; None elsewhere.

        Cost: the cost of ``send_tensors`` for the result of each stage but the last, and no other
            messages. On return, everything sent has arrived.
        """
        # TODO 2.8: run this stage between receiving and sending, and remember what backward needs.
        #   Example: each of 3 ranks multiplies by 2. From 1.0 on rank 0, the last rank returns 8.0,
        #   and the other two return None.
        #   About 8 lines.
        raise NotImplementedError("Task 2.8: StageRunner.forward, see guidelines.md#28-run-a-stage")

    def backward(self, loss: Tensor | None = None) -> None:
        """Run the backward pass of the last ``forward``, adding to the parameters' gradients.

        For each tensor sent forward that requires a gradient, a gradient is sent back: zeros if the
        loss does not depend on the tensor. Nothing is sent back for other tensors.

        Args:
            loss: on the last rank, a scalar computed from the output; None on other ranks.

        Cost: the cost of ``send_tensors`` for these gradients, or nothing if there are none. On
            return, everything sent has arrived, and no tensor of the step is kept for the next
            step. Tensors kept by an evaluation pass may stay until the next ``forward``.
        """
        # TODO 2.8: each parameter's grad has grown by what one process would add to it.
        #   Example: with y = w·x and x = 5 on rank 0, and loss = 3·y on rank 1, w.grad grows by 15.
        #   About 11 lines.
        raise NotImplementedError(
            "Task 2.8: StageRunner.backward, see guidelines.md#28-run-a-stage"
        )


def main() -> None:
    """Train on digits with a stage per rank, and compare the weights with those of one process."""
    options = _options()
    programs.join()
    programs.require_written(partition_layers, send_tensors, recv_tensors)
    programs.require_written(StageRunner.forward, StageRunner.backward)
    stage, layers = _cut(programs.digit_layers(WIDTHS))
    programs.say(f"parameters by stage:  {programs.by_rank(programs.num_parameters(stage))}")
    if options.checkpointing:
        from phase2_advanced.template_activation_checkpointing import checkpoint

        [stage] = programs.checkpointed([stage], checkpoint, lambda copies: _train(copies[0], 1)[1])
    losses, meter = _train(stage, options.steps)
    programs.report(meter)
    p = dist.get_world_size()
    programs.say(f"bubble:               {1 - 1 / p:.0%}: one rank of {p} works at a time")
    programs.compare_with_one_process(stage, WIDTHS, layers, options.steps)
    first, last = (programs.from_all_ranks(losses[step])[-1] for step in (0, -1))
    programs.say_loss(first, last)
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=programs.positive, default=20)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    return parser.parse_args()


def _cut(layers: list[nn.Module]) -> tuple[nn.Sequential, range]:
    """Return this rank's stage, and the indices of its layers."""
    costs = [programs.num_parameters(layer) for layer in layers]
    try:
        mine = partition_layers(costs, dist.get_world_size())[dist.get_rank()]
    except ValueError as error:
        programs.fail(error)
    return nn.Sequential(*layers[mine.start : mine.stop]), mine


def _train(stage: nn.Module, num_steps: int) -> tuple[list[float], programs.Meter]:
    """Train this rank's stage; return the losses (NaN except on the last rank) and the meter."""
    images, labels = programs.load_digits()
    runner, optimizer, meter = (
        StageRunner(stage),
        programs.optimizer_for(stage),
        programs.Meter([stage]),
    )
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with meter.step():
            output = runner.forward(images) if dist.get_rank() == 0 else runner.forward()
            loss = cross_entropy(output, labels) if isinstance(output, Tensor) else None
            runner.backward(loss)
        optimizer.step()
        losses.append(math.nan if loss is None else loss.item())
    return losses, meter


if __name__ == "__main__":
    main()
