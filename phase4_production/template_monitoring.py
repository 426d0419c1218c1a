"""Monitoring: where a step's time goes, how well hardware is used, and which ranks are slow.

Tasks 4.14 to 4.16. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 4.14``.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from phase4_production.given import Group, Part, StepTimes, Straggler, group_device

T = TypeVar("T")


class StepTimer:
    """Splits the time of each step into data, compute, exposed communication and the rest.

    For example, in this step of 100 ms, the wait for the all-reduce is inside the compute part:
        part("data")             ████                      20 ms
        part("compute")              ████████   ████       60 ms, without the inner part
        part("communication")                ███           15 ms
        the rest                                    █       5 ms

        timer = StepTimer(synchronize=lambda: torch.cuda.current_stream().synchronize())
        for batch in timer.batches(loader):
            with timer.part("compute"):
                loss(batch).backward()
                with timer.part("communication"):
                    wait_for_gradients()
                optimizer.step()
            times = timer.end_step()
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the first step.

        Args:
            clock: function that returns the time, in seconds.
            synchronize: function that waits until the device has finished the work on its current
                stream. It is called before each reading of the clock, because a GPU's kernels may
                still be running when the call that starts them returns. ``torch.cuda.synchronize``
                also waits for NCCL's streams, so it would charge exposed communication to compute.
        """
        # TODO 4.14: keep the arguments, and that no part is open; the first step begins now.
        #   Example: made at 100.0 s, first end_step at 100.25 s: step_s is 0.25.
        #   About 4 lines, and 10 for helpers.
        raise NotImplementedError(
            "Task 4.14: StepTimer.__init__, see guidelines.md#414-split-the-time-of-a-step"
        )

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Charge the time inside the ``with`` statement to a part of the step.

        Parts may be nested: time in the inner part does not count towards the outer one. An error
        inside a part ends the part and propagates. A part that is entered several times in a step
        gets the sum of its times.

        Args:
            name: name of the part.

        Raises:
            ValueError: no part has this name. The message contains this name and the names of the
                existing parts. The error is raised on entry: the code inside does not run, and
                nothing else changes.

        Cost: no communication.
        """
        # TODO 4.14: count the time from enter to exit, but not that of parts inside.
        #   Example: compute from 0 to 10 ms, communication inside from 4 to 7 ms: 7 ms and 3 ms.
        #   About 8 lines.
        raise NotImplementedError(
            "Task 4.14: StepTimer.part, see guidelines.md#414-split-the-time-of-a-step"
        )

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches, and charge the time spent waiting for them to ``data``.

        Starting the loader counts too, and so does the last wait, which yields no batch; it is
        charged to the step that follows. Each batch is requested only when the loop asks for it.

        Args:
            loader: iterable of batches, perhaps empty.
        """
        # TODO 4.14: yield the batches; all waiting for the loader is data.
        #   Example: a loader of 3 batches is asked 4 times, and each of these waits counts.
        #   About 9 lines.
        raise NotImplementedError(
            "Task 4.14: StepTimer.batches, see guidelines.md#414-split-the-time-of-a-step"
        )

    def end_step(self) -> StepTimes:
        """End the step and begin the next one.

        Call this outside all parts.

        Returns:
            The times of the step that ends. ``step_s`` counts from the end of the previous step or,
            for the first step, from the creation of the timer. Time outside all parts is
            ``rest_s``.

        Cost: no communication.
        """
        # TODO 4.14: return the times of this step, and begin the next one with none.
        #   Example: a step of 100 ms with 20 ms of data: StepTimes(0.1, 0.02, 0.0, 0.0).
        #   About 6 lines.
        raise NotImplementedError(
            "Task 4.14: StepTimer.end_step, see guidelines.md#414-split-the-time-of-a-step"
        )


def gather_times(times: StepTimes, group: Group = None) -> list[StepTimes]:
    """Return the times of all ranks, in rank order, on every rank.

    All ranks of the group call this, but they need not do so in every step.

    Args:
        times: times of this rank's step. They are sent without rounding.
        group: the ranks that take part; all ranks by default.

    Cost: one collective, to which each rank contributes 32 bytes.
    """
    # TODO 4.14: return the times of every rank.
    #   Example: on 3 ranks, a list of 3 StepTimes; this rank's own is at dist.get_rank(group).
    #   About 5 lines.
    raise NotImplementedError(
        "Task 4.14: gather_times, see guidelines.md#414-split-the-time-of-a-step"
    )


def throughput(num_samples: int, seconds: float, group: Group = None) -> float:
    """Return how many samples per second the job processes: the same value on all ranks.

    For example, if one rank processes 300 samples in 1 s, and another 100 samples in 2 s, the
    result is 200 samples/s.

    Args:
        num_samples: number of samples that this rank has processed; may be 0.
        seconds: time that this rank took, waiting included; above 0.
        group: the ranks of the job; all ranks by default.

    Returns:
        Samples per second, computed in float64.

    Cost: at most two collectives, to which each rank contributes at most 16 bytes in all.
    """
    # TODO 4.15: return the rate of the whole job.
    #   Example: samples 32, 32 and 0 in 0.5, 0.4 and 0.1 s: 128 samples/s.
    #   About 3 lines, and 4 for a helper.
    raise NotImplementedError(
        "Task 4.15: throughput, see guidelines.md#415-throughput-mfu-and-memory"
    )


def count_flops(step: Callable[[], object]) -> int:
    """Return how many floating-point operations a step executes.

    A product of an (m, k) and a (k, n) matrix takes 2·m·k·n operations. The backward pass of a
    linear layer takes as many as its forward pass for the gradient of the weight, and as many again
    for the gradient of the input. For tensors that need no gradient, such as the input of the first
    layer or frozen weights, the backward pass takes none.

    With activation checkpointing, the second forward pass is executed too, so it counts. Model
    FLOPs, which ``mfu`` needs, are those of a step without checkpointing.

    Args:
        step: function that runs a step on one rank, forward and backward. It is called once.
            Counting does not change what it does, or which random numbers it draws. Nothing is
            printed.

    Returns:
        FLOPs of matrix products and convolutions. Activations, norms and the addition of biases are
        not counted: in a large model, they take little time in comparison. Nor are fused kernels
        that torch's counter does not know, such as the attention kernel for CPUs.
    """
    # TODO 4.15: call the step and return its FLOPs.
    #   Example: Linear(4, 3) on 8 samples takes 192 FLOPs forward, and 192 for its weight.
    #   About 3 lines.
    raise NotImplementedError(
        "Task 4.15: count_flops, see guidelines.md#415-throughput-mfu-and-memory"
    )


def mfu(flops: float, step_s: float, peak_flops_per_s: float, group: Group = None) -> float:
    """Return the model FLOPs utilisation of the job: the same value on all ranks.

    For example, two ranks with 3e12 and 1e12 FLOPs, in steps of 10 ms and 8 ms, on devices with a
    peak of 1e15 FLOP/s each, give 0.2.

    Args:
        flops: model FLOPs of this rank's share of the batch; ranks may have different numbers.
        step_s: duration of this rank's step, waiting included; above 0.
        peak_flops_per_s: peak of this rank's device, in the dtype of the matrix products; above 0.
        group: the ranks of the job; all ranks by default.

    Returns:
        A fraction, not a percentage; computed in float64.

    Cost: at most two collectives, to which each rank contributes at most 24 bytes in all.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    # TODO 4.15: return the utilisation of the whole job.
    #   Example: two ranks of 2e12 FLOPs in 10 ms, at peaks of 1e15 FLOP/s: 0.2.
    #   About 3 lines.
    raise NotImplementedError("Task 4.15: mfu, see guidelines.md#415-throughput-mfu-and-memory")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory usage so far.

    Args:
        device: GPU or CPU. For a GPU, the result is the peak of the tensors on it, as reported by
            ``torch.cuda.max_memory_allocated``; for the CPU, the peak memory of this process.

    Returns:
        Bytes. The system's ``ru_maxrss`` counts KiB on Linux and bytes on macOS.
    """
    # TODO 4.15: return the peak of that device, in bytes.
    #   Example: on Linux, ru_maxrss = 250,000 means 256,000,000 bytes.
    #   About 4 lines.
    raise NotImplementedError(
        "Task 4.15: peak_memory_bytes, see guidelines.md#415-throughput-mfu-and-memory"
    )


class StragglerDetector:
    """Detects which ranks are slow, and in which part of a step.

    In synchronous training, a step takes equally long on all ranks, because the fast ranks wait. So
    the detector compares only the ranks' own work, that is, data and compute:
                 data_s   compute_s   communication_s   own work   ratio
        rank 0     0.01        0.10              0.11       0.11     1.0
        rank 1     0.12        0.10              0.00       0.22     2.0    a straggler in data
        rank 2     0.01        0.10              0.11       0.11     1.0
    """

    def __init__(self, group: Group = None, *, window: int = 50, factor: float = 1.3) -> None:
        """Start with an empty window.

        Args:
            group: the ranks that are compared; all ranks by default.
            window: number of steps that are judged together.
            factor: a rank is a straggler if its own work is more than this many times that of the
                median rank; at least 1.
        """
        # TODO 4.16: keep the arguments, and that no step was seen.
        #   Example: with window=50, the first 49 calls of add return [].
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.16: StragglerDetector.__init__, see guidelines.md#416-find-the-slow-rank"
        )

    def add(self, times: StepTimes) -> list[Straggler]:
        """Add the times of a step, and judge the ranks when the window is full.

        All ranks of the group call this after every step. After a full window, the next one begins
        empty.

        Args:
            times: times of this rank's step.

        Returns:
            The stragglers, sorted by their rank in the group; the same on all ranks. The list is
            empty after steps that do not fill the window. All medians are low medians: of the two
            values in the middle, the lower one.

            own work   the median over the window of the rank's data_s + compute_s
            ratio      the rank's own work over the median of all ranks' own work, in float64; inf
                       if that median is 0 and the rank's own work is not
            part       data or compute, whichever exceeds the median of all ranks by more seconds,
                       where each rank's value is its median over the window

        Cost: nothing is sent, except for one collective per window, to which each rank contributes
            24 bytes.
        """
        # TODO 4.16: keep the step; with a full window, gather medians and judge all ranks by them.
        #   Example: own work of 110, 220 and 110 ms, factor 1.3: rank 1 is at 2.0, above 1.3.
        #   About 14 lines, and 7 for helpers.
        raise NotImplementedError(
            "Task 4.16: StragglerDetector.add, see guidelines.md#416-find-the-slow-rank"
        )
