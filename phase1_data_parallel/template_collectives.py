"""Collectives from point-to-point messages alone: exchange, broadcast, two all-reduces, their cost.

Everything here sends and receives; nothing else. Ranks are ranks inside ``group``.

Tasks 1.4 to 1.8. The docstring says what a function promises, its TODO what you need for it,
guidelines.md why and how. To grade one: ``pytest tests/test_phase1.py -k 1.4``.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
AllReduce = Callable[[Tensor, Group], None]


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    """Send ``outgoing`` to ``dst`` while receiving ``incoming`` from ``src``.

    Both are posted before either is waited for. With two blocking calls all ranks would send
    first, and where a send returns only when it was received (NCCL) nobody would ever receive.

    Args:
        outgoing: contiguous; must not be written before this returns.
        dst: rank that receives it.
        incoming: contiguous, shape and dtype of what ``src`` sends; holds it on return.
            Must not overlap ``outgoing``.
        src: rank that sends it; may differ from ``dst`` (a ring) or equal it (a pair).
        group: the ranks that take part; all by default.

    Cost: one message each way at the same time: α + max(bytes out, bytes in)·β seconds.
    """
    # TODO 1.4: on return ``incoming`` holds what src sent, and ``outgoing`` may be written again.
    #   It must not stand still where a send returns only once it was received.
    #   Tools: dist.isend, dist.irecv, dist.P2POp, dist.batch_isend_irecv; group_peer= counts inside
    #   the group.
    #   Worked: ranks 0, 1, 2 send their number to the right neighbour: they receive 2, 0, 1.
    #   About 6 lines.
    raise NotImplementedError("Task 1.4: exchange, see guidelines.md#14-exchange-without-deadlock")


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    """Copy ``x`` of rank ``src`` to all ranks, in place, along a binomial tree.

    In every round each rank that has the data passes it on. N = 6, src = 0:
        round 0    0→1
        round 1    0→2  1→3
        round 2    0→4  1→5

    Args:
        x: contiguous, same shape and dtype on all ranks; overwritten except on ``src``.
        src: rank that has the data.
        group: the ranks that take part; all by default.

    Cost: ⌈log2 N⌉ rounds, ⌈log2 N⌉(α + nβ) seconds; N-1 messages in all, at most ⌈log2 N⌉ from
        one rank.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.2 (binomial tree).
    """
    # TODO 1.5: all ranks hold what src had, after ⌈log2 N⌉ rounds. Any src, any N.
    #   Tools: dist.send and dist.recv, with group_dst= and group_src=.
    #   Worked: N = 6, src = 4: round 0 is 4→5, round 1 is 4→0 and 5→1, round 2 is 4→2 and 5→3.
    #   About 10 lines.
    raise NotImplementedError("Task 1.5: broadcast, see guidelines.md#15-broadcast-along-a-tree")


def all_reduce_naive(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place: rank 0 adds up everything, then broadcasts the sum.

    Args:
        x: contiguous, same shape and dtype on all ranks; holds the sum on return.
        group: the ranks that take part; all by default.

    Cost: rank 0 receives (N-1)·n bytes one after the other, (N-1)(α + nβ) seconds, and the
        broadcast adds ⌈log2 N⌉(α + nβ). All others wait for rank 0.
    """
    # TODO 1.6: all ranks hold the sum; rank 0 has added it up.
    #   Tools: dist.send, dist.recv, one tensor of the size of ``x`` on rank 0, your broadcast.
    #   Worked: three ranks hold 1, 2 and 4: rank 0 receives two messages, and all hold 7.
    #   About 9 lines.
    raise NotImplementedError(
        "Task 1.6: all_reduce_naive, see guidelines.md#16-all-reduce-the-naive-way"
    )


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place: partners at distance 1, 2, 4, … swap and add.

    N = 4; a cell is the partner, below it what the rank has summed afterwards:
                  r0      r1      r2      r3
        round 0   1       0       3       2
                  0+1     0+1     2+3     2+3
        round 1   2       3       0       1
                  0…3     0…3     0…3     0…3
    If N is no power of two, the ranks from the largest power P ≤ N on hand their ``x`` to rank - P
    first and get the sum back at the end.

    Args:
        x: contiguous, same shape and dtype on all ranks; holds the sum on return, bit for bit
            the same on all ranks.
        group: the ranks that take part; all by default.

    Cost: N = 2^k: log2 N messages and n·log2 N bytes sent per rank, log2 N (α + nβ) seconds.
        Else two more rounds: (⌊log2 N⌋ + 2)(α + nβ) seconds.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.5 (recursive doubling).
    """
    # TODO 1.7: all ranks hold the sum, after log2 N rounds if N is a power of two, else after two
    #   more than for the largest power below it.
    #   Tools: your exchange, dist.send and dist.recv, one more tensor of the size of ``x``.
    #   Worked: N = 6: 4→0 and 5→1; then 0↔1 and 2↔3; then 0↔2 and 1↔3; then 0→4 and 1→5.
    #   About 20 lines.
    raise NotImplementedError(
        "Task 1.7: all_reduce_recursive_doubling, see guidelines.md#17-all-reduce-by-doubling"
    )


def native_all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place, by the library's own all-reduce."""
    dist.all_reduce(x, group=group)


ALL_REDUCES: dict[str, AllReduce] = {
    "native": native_all_reduce,
    "naive": all_reduce_naive,
    "recursive_doubling": all_reduce_recursive_doubling,
}


@dataclass(frozen=True)
class AllReduceTimes:
    """What ``measure_all_reduce`` found; equal on all ranks.

    ``str()`` draws the table: a row a size, a column a strategy, then α and 1/β.
    """

    sizes_bytes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]  # strategy -> seconds by size; "exchange": one message
    alpha_s: float  # latency: seconds per message; 0 where noise hides it
    bandwidth_bytes_per_s: float  # 1/β

    def __str__(self) -> str:
        columns = list(self.seconds)
        lines = ["     bytes" + "".join(f"{name:>22}" for name in columns)]
        for row, size in enumerate(self.sizes_bytes):
            cells = (f"{self.seconds[name][row] * 1e6:>19.1f} µs" for name in columns)
            lines.append(f"{size:>10}" + "".join(cells))
        return "\n".join([*lines, self.fit])

    @property
    def fit(self) -> str:
        """The line of α and 1/β."""
        latency = f"α = {self.alpha_s * 1e6:.1f} µs"
        if not self.alpha_s:
            latency = "α not measurable: small messages took no longer than their bytes"
        speed = f"1/β = {self.bandwidth_bytes_per_s / 1e9:.3f} GB/s"
        if self.bandwidth_bytes_per_s > 1e15:
            speed = "1/β not measurable: larger messages took no longer"
        return f"one message: {latency}, {speed}"


def measure_all_reduce(
    strategies: Mapping[str, AllReduce],
    sizes_bytes: Sequence[int],
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> AllReduceTimes:
    """Time every strategy at every size, and fit α and β of one message.

    Each time is the median of ``repeats`` runs of the slowest rank, all ranks having started
    together. α and β are fitted to ``exchange`` with the neighbour, the bare message.

    Args:
        strategies: by name; each sums a tensor in place.
        sizes_bytes: multiples of 4 (float32), at least two different ones for the fit.
        repeats: timed runs of each, after one that is not timed.
        device: where the tensors live.
        group: at least two ranks; all by default.

    Returns:
        The table, equal on all ranks; its extra column ``exchange`` is the single message.

    Raises:
        ValueError: fewer than two ranks, two sizes or one repeat, a size that is no multiple of 4,
            or a strategy called "exchange".

    Cost: about (repeats + 1) runs of every cell and as many tiny all-reduces as barriers.
    """
    # TODO 1.8: the table of seconds, and α and 1/β of its column "exchange".
    #   For every cell: one run that is not timed, then ``repeats`` times: all start together, each
    #   rank takes its own time, the slowest counts. All ranks must end up with the same table.
    #   Tools: time.perf_counter, _exchange_in_ring and _finish (given), your all-reduces (to start
    #   together and to share the times), median, your fit_alpha_beta.
    #   Worked: α = 7 µs, 1/β = 13 GB/s, 4 ranks, 40,000 bytes: exchange takes 10.1 µs,
    #   all_reduce_naive 3 + 2 messages, 50.4 µs.
    #   About 35 lines with a helper of your own.
    raise NotImplementedError(
        "Task 1.8: measure_all_reduce, see guidelines.md#18-measure-latency-and-bandwidth"
    )


def fit_alpha_beta(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = α + bytes·β by least squares of the relative errors.

    Absolute errors would see the largest message only; small ones carry α.
        [0, 1000, 2000] bytes in [5, 6, 7] µs  ->  α = 5 µs, β = 1 ns/byte

    Where noise asks for a negative α or β, it is 0 and the other one alone is fitted: the best of
    all lines without negative coefficients.

    Returns:
        α in seconds per message, 0 or more; β in seconds per byte, at least the smallest positive
        number.
    """
    # TODO 1.8: return α and β of the line through the measured points.
    #   Tools: sums, or numpy; each point weighs 1 / seconds².
    #   Worked: as above. And [1000, 2000] bytes in [1, 3] µs: α = 0, β = 15/13 ns per byte.
    #   About 10 lines.
    raise NotImplementedError(
        "Task 1.8: fit_alpha_beta, see guidelines.md#18-measure-latency-and-bandwidth"
    )


def _exchange_in_ring(x: Tensor, group: Group) -> None:
    """One message to the right neighbour, one from the left."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    exchange(x, (rank + 1) % world_size, torch.empty_like(x), (rank - 1) % world_size, group)


def _finish(x: Tensor) -> None:
    """Wait for a GPU, which returns before it is done."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
