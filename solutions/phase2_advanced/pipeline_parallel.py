"""Pipeline parallelism: schedules as data, and a function that runs any of them."""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

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
from solutions.phase2_advanced.model_parallel import (
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
    forwards = [Action("F", i) for i in range(num_micro_batches)]
    backwards = [Action("B", i) for i in reversed(range(num_micro_batches))]
    return [forwards + backwards for _ in range(num_stages)]


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
    forwards = [Action("F", i) for i in range(num_micro_batches)]
    backwards = [Action("B", i) for i in range(num_micro_batches)]
    return [_alternated(forwards, backwards, num_stages - 1 - s) for s in range(num_stages)]


def _alternated(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return ``warm_up`` forward passes, then both kinds in turn, then the last backward passes."""
    warm_up = min(warm_up, len(forwards))
    in_turn = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return forwards[:warm_up] + list(in_turn) + backwards[len(backwards) - warm_up :]


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
    num_stages = dist.get_world_size(group)
    _check(schedule, num_stages, len(chunks), len(micro_batches))
    stage = _Stage(chunks, micro_batches, loss_sum, group)
    for event in timeline(schedule):  # same on all ranks, so they agree on the order of messages
        if not event.is_start:
            stage.pass_on(event.stage, event.action)
        elif event.stage == stage.rank:
            stage.compute(event.action)
    return stage.finish()


def _check(schedule: Schedule, num_stages: int, num_chunks: int, num_micro_batches: int) -> None:
    """Raise ValueError unless the schedule can be run and has each action of a step once."""
    if len(schedule) != num_stages:
        raise ValueError(f"a schedule of {len(schedule)} stages, but {num_stages} ranks")
    passes = [(i, chunk) for i in range(num_micro_batches) for chunk in range(num_chunks)]
    wanted = Counter(Action(kind, *one) for kind in "FB" for one in passes)
    for stage, actions in enumerate(schedule):
        for problem, wrong in (
            ("lacks", wanted - Counter(actions)),
            ("has one too many of", Counter(actions) - wanted),
        ):
            if wrong:
                raise ValueError(f"stage {stage} {problem} {min(wrong)} in\n{grid(schedule)}")
    started = Counter(event.stage for event in timeline(schedule) if event.is_start)
    for stage, actions in enumerate(schedule):
        if started[stage] < len(actions):
            blocked = actions[started[stage]]
            raise ValueError(f"stage {stage} can never start {blocked}:\n{grid(schedule)}")


class _Stage:
    """One rank's blocks, and the tensors that it holds for later actions."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        micro_batches: Sequence[Batch],
        loss_sum: LossSum,
        group: Group,
    ) -> None:
        self.chunks = nn.ModuleList(chunks)
        self.chunks.zero_grad()
        self.micro_batches, self.loss_sum, self.group = micro_batches, loss_sum, group
        self.rank, self.num_stages = dist.get_rank(group), dist.get_world_size(group)
        is_last = self.rank == self.num_stages - 1  # no other rank has targets, or needs T
        self.num_targets = sum(map(loss_sum.count, micro_batches)) if is_last else 0
        self.mean = torch.zeros(1, dtype=torch.float64, device=group_device(group))
        self.messages = _Messages(_kinds(micro_batches) if self.rank == 0 else [], group)
        self.in_flight: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # inputs and outputs
        self.results: dict[Action, list[Tensor]] = {}  # keys: the actions that computed them

    def compute(self, action: Action) -> None:
        """Compute one action, and store its result for ``pass_on``."""
        run = self._forward if action.kind == "F" else self._backward
        self.results[action] = run(action)

    def _forward(self, action: Action) -> list[Tensor]:
        batch, chunk = self.micro_batches[action.micro_batch], self.chunks[action.chunk]
        (x,) = self.messages.take(action) or batch[:1]
        if self._next(self.rank, action):
            y = chunk(x)
        else:
            loss, _ = self.loss_sum(chunk, (x, *batch[1:]))
            y = loss / self.num_targets
            self.mean += loss.detach().double() / self.num_targets
        self.in_flight[action.micro_batch, action.chunk] = x, y
        return [y]

    def _backward(self, action: Action) -> list[Tensor]:
        x, y = self.in_flight.pop((action.micro_batch, action.chunk))
        gradient = self.messages.take(action)  # none arrives for a loss
        if y.requires_grad:
            y.backward(*gradient)
        if not x.requires_grad:
            return []
        return [torch.zeros_like(x) if x.grad is None else x.grad]

    def _next(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Return the stage and the action that need the result of ``action``, or None."""
        block = action.chunk * self.num_stages + stage + (1 if action.kind == "F" else -1)
        if not 0 <= block < self.num_stages * len(self.chunks):
            return None
        return block % self.num_stages, action._replace(chunk=block // self.num_stages)

    def pass_on(self, src: int, action: Action) -> None:
        """Do this rank's part in passing an action's result to the stage that needs it."""
        result = self.results.pop(action) if src == self.rank else []
        needed = self._next(src, action)
        if needed is None:
            return
        dst, next_action = needed
        if src == dst == self.rank:
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in result]
            self.messages.arrived[next_action] = leaves
        elif src == self.rank:
            self.messages.send(result, action, dst)
        elif dst == self.rank and action.kind == "F":
            self.messages.receive_output(next_action, src)
        elif dst == self.rank:
            _, y = self.in_flight[next_action.micro_batch, next_action.chunk]
            self.messages.receive_gradient(next_action, src, y)

    def finish(self) -> float:
        """Wait for all messages, and return the mean loss, which the last rank knows."""
        self.messages.wait()
        dist.broadcast(self.mean, group=self.group, group_src=self.num_stages - 1)
        return float(self.mean)


class _Format(NamedTuple):
    """What a receiver must know of a tensor beforehand."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


def _format_of(x: Tensor) -> _Format:
    return _Format(x.shape, x.dtype, x.requires_grad)


def _kinds(micro_batches: Sequence[Batch]) -> list[int]:
    """Number the kinds of micro-batches; those whose inputs have one format are of one kind."""
    formats = [_format_of(inputs) for inputs, *_ in micro_batches]
    return [formats.index(one) for one in formats]


class _Messages:
    """Sends results to the neighbours, and receives theirs while this rank computes.

    Micro-batches of one kind have outputs of one format, so only the first output of each kind has
    a header, for which the receiver must wait. With it come the kinds of all micro-batches.
    """

    def __init__(self, kinds: list[int], group: Group) -> None:
        self.kinds, self.group = kinds, group  # no kinds are known until a message tells them
        self.sent: dict[tuple[int, int], _Format] = {}  # keys: kind and chunk
        self.expected: dict[tuple[int, int], _Format] = {}  # keys: kind and chunk
        self.arrived: dict[Action, list[Tensor]] = {}  # keys: the actions that need them
        self.under_way: dict[Action, dist.Work] = {}  # each fills a tensor in ``arrived``
        self.sends: dict[int, list[dist.Work]] = {}  # keys: the ranks that they go to

    def take(self, action: Action) -> list[Tensor]:
        """Return what an action needs from another block, as soon as it has arrived."""
        if action in self.under_way:
            self.under_way.pop(action).wait()
        return self.arrived.pop(action, [])

    def send(self, result: list[Tensor], action: Action, dst: int) -> None:
        """Send an action's result, after the last messages to ``dst`` have arrived."""
        self._wait(dst)
        if action.kind == "F" and self._is_new(action, *result):
            kinds = torch.tensor(self.kinds, device=group_device(self.group))
            self.sends[dst] = send_tensors([*result, kinds], dst, self.group)
            return
        messages = (x.detach().contiguous() for x in result)
        self.sends[dst] = [dist.isend(x, group=self.group, group_dst=dst) for x in messages]  # type: ignore[misc]

    def _is_new(self, action: Action, y: Tensor) -> bool:
        """Return whether an output is the first of its kind, whose format the others must have."""
        key = self.kinds[action.micro_batch], action.chunk
        is_new, form = key not in self.sent, _format_of(y)
        if self.sent.setdefault(key, form) != form:
            raise ValueError(
                f"rank {dist.get_rank()}, {action}: the output is {form}, but for earlier inputs "
                f"of the same shape and dtype it was {self.sent[key]}"
            )
        return is_new

    def receive_output(self, action: Action, src: int) -> None:
        """Receive the output that ``action`` needs; return without it if its format is known."""
        key = (self.kinds[action.micro_batch], action.chunk) if self.kinds else None
        if key in self.expected:
            self._start(action, src, self.expected[key])
            return
        x, kinds = recv_tensors(src, self.group)
        self.kinds, self.arrived[action] = kinds.tolist(), [x]
        self.expected[self.kinds[action.micro_batch], action.chunk] = _format_of(x)

    def receive_gradient(self, action: Action, src: int, y: Tensor) -> None:
        """Start to receive the gradient of ``y``, if there is one."""
        if y.requires_grad:
            self._start(action, src, _format_of(y.detach()))

    def _start(self, action: Action, src: int, form: _Format) -> None:
        x = torch.empty(form.shape, dtype=form.dtype, device=group_device(self.group))
        self.under_way[action] = dist.irecv(x, group=self.group, group_src=src)  # type: ignore[assignment]
        self.arrived[action] = [x.requires_grad_(form.requires_grad)]

    def _wait(self, dst: int) -> None:
        """Wait until the last messages to ``dst`` have arrived, and let their memory be freed."""
        for work in self.sends.pop(dst, []):
            work.wait()

    def wait(self) -> None:
        """Wait until all messages have arrived."""
        for dst in list(self.sends):
            self._wait(dst)


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
    p, v = num_stages, num_chunks
    if num_micro_batches % p:
        raise ValueError(f"{num_micro_batches} micro-batches are not a multiple of {p} stages")
    firsts = range(0, num_micro_batches, p)  # p micro-batches go through all chunks together
    passes = [(first + i, chunk) for first in firsts for chunk in range(v) for i in range(p)]
    forwards = [Action("F", i, chunk) for i, chunk in passes]
    backwards = [Action("B", i, v - 1 - chunk) for i, chunk in passes]
    return [_alternated(forwards, backwards, (v - 1) * p + 2 * (p - 1 - s)) for s in range(p)]


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
        from solutions.phase2_advanced.activation_checkpointing import checkpoint

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
