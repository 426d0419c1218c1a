"""Monitoring: where a step's time goes, how well hardware is used, and which ranks are slow."""

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
        self.clock, self.synchronize = clock, synchronize
        self.open: list[Part] = []  # the innermost is last
        self.step_began_s = self.read_s = self._now()
        self._forget()

    def _forget(self) -> None:
        self.seconds: dict[Part, float] = {"data": 0.0, "compute": 0.0, "communication": 0.0}

    def _now(self) -> float:
        """Wait until the device has finished, and return the time."""
        self.synchronize()
        return self.clock()

    def _charge(self) -> None:
        """Charge the time since the last reading to the innermost open part."""
        now_s = self._now()
        if self.open:
            self.seconds[self.open[-1]] += now_s - self.read_s
        self.read_s = now_s

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
        if name not in self.seconds:
            raise ValueError(f"{name!r} is no part of a step: {', '.join(self.seconds)} are")
        self._charge()
        self.open.append(name)
        try:
            yield
        finally:
            self._charge()
            self.open.pop()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches, and charge the time spent waiting for them to ``data``.

        Starting the loader counts too, and so does the last wait, which yields no batch; it is
        charged to the step that follows. Each batch is requested only when the loop asks for it.

        Args:
            loader: iterable of batches, perhaps empty.
        """
        with self.part("data"):
            source = iter(loader)
        while True:
            with self.part("data"):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch

    def end_step(self) -> StepTimes:
        """End the step and begin the next one.

        Call this outside all parts.

        Returns:
            The times of the step that ends. ``step_s`` counts from the end of the previous step or,
            for the first step, from the creation of the timer. Time outside all parts is
            ``rest_s``.

        Cost: no communication.
        """
        now_s = self._now()
        data_s, compute_s, communication_s = self.seconds.values()
        times = StepTimes(now_s - self.step_began_s, data_s, compute_s, communication_s)
        self.step_began_s = now_s
        self._forget()
        return times


def gather_times(times: StepTimes, group: Group = None) -> list[StepTimes]:
    """Return the times of all ranks, in rank order, on every rank.

    All ranks of the group call this, but they need not do so in every step.

    Args:
        times: times of this rank's step. They are sent without rounding.
        group: the ranks that take part; all ranks by default.

    Cost: one collective, to which each rank contributes 32 bytes.
    """
    return [StepTimes(*seconds) for seconds in _gather(times, group)]


def _gather(values: Sequence[float], group: Group) -> list[list[float]]:
    """Return the values of all ranks, in rank order."""
    mine = torch.tensor(values, dtype=torch.float64)
    mine = mine.to(group_device(group), non_blocking=True)
    by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, mine, group=group)
    numbers: list[list[float]] = torch.stack(by_rank).tolist()  # the only wait for a GPU
    return numbers


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
    by_rank = _gather([num_samples, seconds], group)
    samples, times_s = zip(*by_rank, strict=True)
    return float(sum(samples) / max(times_s))


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
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


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
    by_rank = _gather([flops, step_s, peak_flops_per_s], group)
    all_flops, times_s, peaks = zip(*by_rank, strict=True)
    return float(sum(all_flops) / (max(times_s) * sum(peaks)))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory usage so far.

    Args:
        device: GPU or CPU. For a GPU, the result is the peak of the tensors on it, as reported by
            ``torch.cuda.max_memory_allocated``; for the CPU, the peak memory of this process.

    Returns:
        Bytes. The system's ``ru_maxrss`` counts KiB on Linux and bytes on macOS.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


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
        self.group, self.window, self.factor = group, window, factor
        self.steps: list[StepTimes] = []

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
        self.steps.append(times)
        if len(self.steps) < self.window:
            return []
        works = [(t.data_s + t.compute_s, t.data_s, t.compute_s) for t in self.steps]
        self.steps = []
        by_rank = _gather(_medians(works), self.group)
        typical = _medians(by_rank)
        return [
            _judged(rank, mine, typical)
            for rank, mine in enumerate(by_rank)
            if mine[0] > self.factor * typical[0]
        ]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the low median of each column."""
    return [median_low(column) for column in zip(*rows, strict=True)]


def _judged(rank: int, mine: Sequence[float], typical: Sequence[float]) -> Straggler:
    """Return how slow a rank is, and in which part; both lists hold own work, data and compute."""
    more_data_s, more_compute_s = mine[1] - typical[1], mine[2] - typical[2]
    ratio = mine[0] / typical[0] if typical[0] else math.inf
    return Straggler(rank, "data" if more_data_s > more_compute_s else "compute", ratio)
