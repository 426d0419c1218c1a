"""Model parallelism: every rank holds a stage (a run of layers), and one rank works at a time."""

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

_FIRST_BYTES = 512  # size of a header's first message; enough for a handful of tensors
_LENGTH_BYTES = 8  # size of the length field at the header's start
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
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} layers into {num_stages} stages")
    before = [0, *accumulate(costs)]  # before[i]: cost of all layers before layer i

    @cache
    def best(stages: int, end: int) -> tuple[float, int]:
        """Cut the layers before ``end``; return the highest stage cost and the last start."""
        if stages == 1:
            return before[end], 0
        starts = range(stages - 1, end)  # each earlier stage has at least one layer
        return min((max(best(stages - 1, i)[0], before[end] - before[i]), i) for i in starts)

    ends = [len(costs)]
    for stages in range(num_stages, 0, -1):
        ends.append(best(stages, ends[-1])[1])
    return [range(start, end) for start, end in pairwise(reversed(ends))]


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
    device = group_device(group)
    header = pickle.dumps([(x.dtype, x.shape, x.requires_grad) for x in tensors])
    header = len(header).to_bytes(_LENGTH_BYTES, "big") + header.ljust(_FIRST_BYTES - _LENGTH_BYTES)
    parts = header[:_FIRST_BYTES], header[_FIRST_BYTES:]
    messages = [
        *(torch.tensor([*part], dtype=torch.uint8, device=device) for part in parts if part),
        *(x.detach().contiguous() for x in tensors),
    ]
    # Each work keeps its tensor until it is done, so the header and copies live long enough.
    return [dist.isend(x, group=group, group_dst=dst) for x in messages]  # type: ignore[misc]


def recv_tensors(src: int, group: Group = None) -> list[Tensor]:
    """Receive the tensors of one ``send_tensors`` call on rank ``src``, in the same order.

    Args:
        src: the rank inside ``group`` that sends.
        group: the group in which ``src`` is numbered; all ranks by default.

    Returns:
        New tensors on ``group_device(group)``, with the values, shapes and dtypes of those sent.
        Each is a leaf, and requires a gradient if the tensor that was sent does.
    """
    receive = partial(_receive, src=src, group=group)
    first = bytes(receive([_FIRST_BYTES], torch.uint8).tolist())
    num_bytes, header = int.from_bytes(first[:_LENGTH_BYTES], "big"), first[_LENGTH_BYTES:]
    if num_bytes > len(header):
        header += bytes(receive([num_bytes - len(header)], torch.uint8).tolist())
    return [
        receive(shape, dtype).requires_grad_(requires_grad)
        for dtype, shape, requires_grad in pickle.loads(header)
    ]


def _receive(shape: Sequence[int], dtype: torch.dtype, src: int, group: Group) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device=group_device(group))
    dist.recv(x, group=group, group_src=src)
    return x


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
        inputs = inputs if self.rank == 0 else tuple(recv_tensors(self.rank - 1, self.group))
        result: Tensor | tuple[Tensor, ...] = self.stage(*inputs)
        self.inputs, self.outputs = inputs, result if isinstance(result, tuple) else (result,)
        if self.rank == self.num_stages - 1:
            return result
        for work in send_tensors(self.outputs, self.rank + 1, self.group):
            work.wait()
        return None

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
        outputs = [x for x in self.outputs if x.requires_grad]
        if loss is not None:
            loss.backward()
        elif outputs:
            torch.autograd.backward(outputs, recv_tensors(self.rank + 1, self.group))
        gradients = [_gradient(x) for x in self.inputs if x.requires_grad and self.rank > 0]
        if gradients:
            for work in send_tensors(gradients, self.rank - 1, self.group):
                work.wait()
        self.inputs = self.outputs = ()


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def main() -> None:
    """Train on digits with a stage per rank, and compare the weights with those of one process."""
    options = _options()
    programs.join()
    programs.require_written(partition_layers, send_tensors, recv_tensors)
    programs.require_written(StageRunner.forward, StageRunner.backward)
    stage, layers = _cut(programs.digit_layers(WIDTHS))
    programs.say(f"parameters by stage:  {programs.by_rank(programs.num_parameters(stage))}")
    if options.checkpointing:
        from solutions.phase2_advanced.activation_checkpointing import checkpoint

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
