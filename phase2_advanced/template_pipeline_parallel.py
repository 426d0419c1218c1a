"""Pipeline parallelism: schedules as data, and a function that runs any of them.

Tasks 2.9 to 2.11. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 2.9``. When all are done,
``torchrun --nproc-per-node 4 phase2_advanced/template_pipeline_parallel.py`` trains with them.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase2_advanced import programs
from phase2_advanced.given import (
    Action,
    Batch,
    Group,
    LossSum,
    Schedule,
    cross_entropy_sum,
    grid,
    group_device,
    timeline,
)
from phase2_advanced.template_model_parallel import (
    partition_layers,
    recv_tensors,
    send_tensors,
)

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # chunks per stage, by schedule
NUM_HIDDEN = 8  # layers before the last one, in the model that ``main`` trains


def gpipe_schedule(num_stages: int, num_micro_batches: int) -> Schedule:
    """Schedule the forward passes of all micro-batches, and then all their backward passes.

    Args:
        num_stages: p, 1 or more.
        num_micro_batches: m, 1 or more.

    Returns:
        The same list of 2m actions for each of the p stages: the forward passes of micro-batches 0
        to m-1, and then the backward passes in reverse order, m-1 to 0. The activations that were
        kept last are used first, as in the backward pass of one process. All p lists may be the
        same object.

    Cost: each stage is idle for (p-1)/(m+p-1) of the time, and keeps the activations of up to m
        micro-batches.

    Source: Huang et al. 2019, GPipe (arXiv 1811.06965), figure 2(c).
    """
    # TODO 2.9: return the list of actions of every stage.
    #   print(grid(…)) draws what you return.
    #   Example: 4 stages and 8 micro-batches: 4 lists of 16 actions. Drawn, the schedule is 22
    #   columns wide, and in 6 of these a stage does nothing.
    #   About 4 lines.
    raise NotImplementedError(
        "Task 2.9: gpipe_schedule, see guidelines.md#29-two-schedules-gpipe-and-1f1b"
    )


def one_f_one_b_schedule(num_stages: int, num_micro_batches: int) -> Schedule:
    """Schedule backward passes as early as possible (1F1B), so that stages keep few activations.

    In the middle of a step, every stage alternates between one forward and one backward pass. GPipe
    takes just as long, but its memory grows with m.

    Args:
        num_stages: p, 1 or more.
        num_micro_batches: m, 1 or more; it may be less than p.

    Returns:
        For each stage, the forward and the backward passes of all micro-batches, each kind in the
        order 0 to m-1. At most p-s micro-batches are in flight in stage s, that is, between their
        forward pass and their backward pass.

    Cost: the time of m+p-1 forward and m+p-1 backward passes, which is no longer than GPipe's,
        however long a backward pass takes.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.1 (PipeDream-Flush).
    """
    # TODO 2.9: return the list of actions of every stage, within the limits of memory and time.
    #   print(grid(…)) draws the schedule, and shows where a stage gets stuck.
    #   Example: 4 stages and 8 micro-batches: at most 4, 3, 2 and 1 of them are in flight in stages
    #   0 to 3, and the drawing is 22 columns wide, as GPipe's is.
    #   About 10 lines; put the part that 2.11 can use too in a helper.
    raise NotImplementedError(
        "Task 2.9: one_f_one_b_schedule, see guidelines.md#29-two-schedules-gpipe-and-1f1b"
    )


def run_schedule(
    schedule: Schedule,
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[Batch],
    loss_sum: LossSum,
    group: Group = None,
) -> float:
    """Run all micro-batches forward and backward through a pipeline, in the order of a schedule.

    The p ranks of the group hold a model that is cut into v·p blocks: chunk c of rank s is block
    c·p+s. Each block takes one tensor, the output of the block before it, and returns one tensor,
    whose shape and dtype depend only on the shape and dtype of the first block's input.

    Afterwards, each parameter has the gradient that one process would compute for the mean loss
    over all targets of all micro-batches. Gradients from before the call are discarded: a frozen
    parameter ends up without a gradient, and a parameter on which the loss does not depend ends up
    with zeros or without a gradient.

    When an action is done, everything that no later action needs is freed: after ``B3``, a stage
    holds no tensors of micro-batch 3, except for the last message to each neighbour.

    Args:
        schedule: schedule of p stages; the same on every rank. Any order of the actions will do if
            it can be run, that is, if ``timeline`` gives every action a start.
        chunks: this rank's v blocks, on ``group_device``; the same number on every rank. They may
            use ``checkpoint`` from task 2.5.
        micro_batches: m micro-batches, 1 or more, of any sizes, on every rank. Only the rank of the
            first block reads the inputs, and only the rank of the last block reads the rest of a
            batch. What a rank does not read may be anything, such as None instead of a whole batch.
        loss_sum: called once for each micro-batch, on the rank of the last block, with this block
            as the model and a batch whose inputs are the output of the block before it. There,
            ``loss_sum.count(micro_batch)`` counts targets without a pass; it reads no inputs. All
            micro-batches together have at least one target.
        group: the ranks that hold the stages, in order; all by default.

    Returns:
        The mean loss over all targets; the same number on every rank.

    Raises:
        ValueError: raised with the same message on every rank, before anything is sent. If the
            schedule does not have as many stages as the group has ranks, the message names both
            numbers. If an action is missing, occurs twice, is not part of the step, or can never
            start (because its own ``F`` comes later, or because stages wait for each other), the
            message names the action, such as ``B1``, or any one of them if there are several.

    Cost: at most one ``send_tensors`` call for each output and each gradient that a block on
        another rank needs, and one broadcast or all-reduce of one or two numbers. A gradient needs
        no header: it has the shape and the dtype of its output. An output that requires no gradient
        gets none: an empty list may be sent in its place, or nothing. There is no deadlock even if
        sends are synchronous, or if messages between two ranks are sent one at a time, as with
        NCCL. A step takes as long as in ``timeline`` if all blocks take equally long, a backward
        pass takes twice as long as a forward pass, and messages take no time.
    """
    # TODO 2.10: do this rank's actions and its part of all messages; return the mean loss.
    #   Example: 1F1B with 4 stages, 8 micro-batches: rank 1 receives 8 outputs and sends 8,
    #   receives 8 gradients and sends 8, and never holds activations of more than 3 micro-batches.
    #   About 100 lines; write a class for what a rank holds.
    raise NotImplementedError("Task 2.10: run_schedule, see guidelines.md#210-run-any-schedule")


def interleaved_schedule(num_stages: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Schedule 1F1B over several short chunks per stage, so that stages idle less.

    The model is cut into v·p blocks; chunk c of stage s is block c·p+s. With 2 stages of 2 chunks
    each, a micro-batch goes through stages 0 1 0 1, and the second stage can start when a quarter
    of the model has been computed, instead of half.

    Args:
        num_stages: p, 1 or more.
        num_micro_batches: m, a multiple of p, 1 or more.
        num_chunks: v, the chunks per stage; 1 or more.

    Returns:
        For each stage, a forward and a backward pass of every micro-batch through every chunk, in
        an order that can be run. In stage s, at most (v-1)p + 2(p-1-s) + 1 passes are in
        flight, that is, done forward but not yet backward.

    Raises:
        ValueError: m is not a multiple of p; the message names both numbers.

    Cost: the time of vm+p-1 forward and vm+p-1 backward passes through one block, if all blocks
        take equally long. Of each, p-1 are bubble, which is 1/v as long as 1F1B's, at the price of
        about v times as many messages.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.2.
    """
    # TODO 2.11: return the list of actions of every stage, within the limits of memory and time.
    #   print(grid(…)) draws what you return.
    #   Example: 4 stages of 2 chunks, 8 micro-batches: each stage has 32 actions, the drawing is 38
    #   columns wide, and stages 0 to 3 have at most 11, 9, 7 and 5 passes in flight.
    #   About 8 lines.
    raise NotImplementedError(
        "Task 2.11: interleaved_schedule, see guidelines.md#211-several-chunks-on-each-stage"
    )


def main() -> None:
    """Train on digits in a pipeline, and compare the weights with those of one process."""
    options = _options()
    widths = [64, *[options.width] * NUM_HIDDEN]
    programs.join()
    programs.require_written(partition_layers, send_tensors, recv_tensors, run_schedule)
    try:
        schedule = _schedule(options.schedule, dist.get_world_size(), options.micro_batches)
        chunks, layers = _cut(widths, CHUNKS[options.schedule])
    except ValueError as error:
        programs.fail(error)
    programs.say(
        f"parameters by stage:  {programs.by_rank(sum(map(programs.num_parameters, chunks)))}"
    )
    programs.say(_drawing(schedule))
    if options.checkpointing:
        from phase2_advanced.template_activation_checkpointing import checkpoint

        chunks = programs.checkpointed(
            chunks, checkpoint, lambda copies: _train(copies, schedule, options.micro_batches, 1)[1]
        )
    losses, meter = _train(chunks, schedule, options.micro_batches, options.steps)
    programs.report(meter)
    programs.say(f"bubble:               {_bubble(schedule):.1%} if messages took no time")
    programs.compare_with_one_process(nn.ModuleList(chunks), widths, layers, options.steps)
    programs.say_loss(losses[0], losses[-1])
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedule", choices=CHUNKS, default="1f1b")
    parser.add_argument("--micro-batches", type=programs.positive, default=8, metavar="M")
    parser.add_argument("--width", type=programs.positive, default=64, help="of what a layer gets")
    parser.add_argument("--steps", type=programs.positive, default=20)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    return parser.parse_args()


def _schedule(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    if num_micro_batches < num_stages:
        raise ValueError(
            f"--micro-batches {num_micro_batches} is too few to keep {num_stages} stages busy: "
            f"take {num_stages} or more"
        )
    if num_micro_batches > programs.NUM_ROWS:
        raise ValueError(
            f"--micro-batches {num_micro_batches}: the data has {programs.NUM_ROWS} rows, take "
            f"{programs.NUM_ROWS} or fewer"
        )
    if name == "interleaved":
        programs.require_written(interleaved_schedule)
        return interleaved_schedule(num_stages, num_micro_batches, CHUNKS[name])
    make = gpipe_schedule if name == "gpipe" else one_f_one_b_schedule
    programs.require_written(make)
    return make(num_stages, num_micro_batches)


def _drawing(schedule: Schedule) -> str:
    longest = max(len(str(action)) for actions in schedule for action in actions)
    return programs.in_bands(grid(schedule), longest + 1)


def _cut(widths: Sequence[int], num_chunks: int) -> tuple[list[nn.Sequential], list[int]]:
    """Return this rank's chunks, and the indices of their layers."""
    rank, num_stages, layers = dist.get_rank(), dist.get_world_size(), programs.digit_layers(widths)
    costs = [programs.num_parameters(layer) for layer in layers]
    blocks = partition_layers(costs, num_chunks * num_stages)[rank::num_stages]
    chunks = [nn.Sequential(*layers[block.start : block.stop]) for block in blocks]
    return chunks, [*chain.from_iterable(blocks)]


def _train(
    chunks: Sequence[nn.Module], schedule: Schedule, num_micro_batches: int, num_steps: int
) -> tuple[list[float], programs.Meter]:
    images, labels = programs.load_digits()
    parts = images.tensor_split(num_micro_batches), labels.tensor_split(num_micro_batches)
    micro_batches = list(zip(*parts, strict=True))
    optimizer, meter, losses = (
        programs.optimizer_for(nn.ModuleList(chunks)),
        programs.Meter(chunks),
        [],
    )
    for _ in range(num_steps):
        with meter.step():
            losses.append(run_schedule(schedule, chunks, micro_batches, cross_entropy_sum))
        optimizer.step()
    return losses, meter


def _bubble(schedule: Schedule) -> float:
    """Return the fraction of the time during which the stages are idle."""
    events = timeline(schedule)
    busy = sum(event.time * (-1 if event.is_start else 1) for event in events)
    return 1 - busy / (len(schedule) * events[-1].time)


if __name__ == "__main__":
    main()
