"""Gradient compression: send a part of the gradient or coarse numbers, and the rest later.

Tasks 4.9 to 4.11. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 4.9``.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phase4_production.given import Codec, Group, Reduced, group_device


def top_k(gradient: Tensor, fraction: float, group: Group = None) -> Reduced:
    """Average the entries of largest magnitude: each rank sends its own, wherever they are.

    Two ranks, fraction 0.5 of four entries, so that k = 2:
        rank 0    gradient    5  -1   0   2    sent    5   0   0   2
        rank 1    gradient    1  -4   0   3    sent    0  -4   0   3
        mean of what was sent                        2.5  -2   0   2.5

    Args:
        gradient: (n,), floating; other values on each rank. It is not changed.
        fraction: share of the entries that travel, above 0 and at most 1: k = round(fraction * n),
            but at least 1 if there are any.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, the same on all ranks bit for bit, and what this rank has sent: its gradient
        at its k places, 0 elsewhere; both of gradient's dtype. Of entries that are equally large,
        any may be sent. A NaN counts as largest, so that all ranks notice.

    Cost: k values and k indices of 4 bytes to each other rank: 8k(N-1) bytes in float32.

    Source: Aji and Heafield 2017 (EMNLP); Lin et al. 2018 (ICLR).
    """
    # TODO 4.9: send this rank's k largest entries to all, and average what all have sent.
    #   Tools: torch.topk, torch.Tensor.int, dist.all_gather, torch.Tensor.index_add_.
    #   Example: fraction 0.01 of 1,000,000 entries: k is 10,000, and a rank sends 80,000 bytes to
    #   each other one, instead of the 4,000,000 of the whole gradient.
    #   About 12 lines.
    raise NotImplementedError(
        "Task 4.9: top_k, see guidelines.md#49-send-the-largest-keep-the-rest"
    )


def reduce_with_feedback(
    gradient: Tensor, residual: Tensor, reduce: Callable[[Tensor], Reduced]
) -> Tensor:
    """Average a gradient with a lossy ``reduce``, and keep what was not sent for the next step.

    With top_k and k = 1, on one rank, whose gradient is always 4, 3:
        step    gradient + residual    sent    residual
           1        4    3             4  0     0    3
           2        4    6             0  6     4    0
           3        8    3             8  0     0    3

    Args:
        gradient: (n,), floating; it is not changed.
        residual: (n,), of gradient's dtype: what this rank has not sent so far; zeros before the
            first step. What it has not sent now is written into it.
        reduce: called once; ``lambda x: top_k(x, 0.01)``, for example. It does not change what it
            is given.

    Returns:
        The mean that ``reduce`` returned.

    Source: Seide et al. 2014 (Interspeech); Stich et al. 2018 (NeurIPS).
    """
    # TODO 4.9: add the residual, reduce, and keep what was not sent.
    #   Tools: torch.Tensor.copy_.
    #   Example: gradient 4, 3 with the residual 0, 3, of which 0, 6 is sent: the residual is 4, 0.
    #   About 4 lines.
    raise NotImplementedError(
        "Task 4.9: reduce_with_feedback, see guidelines.md#49-send-the-largest-keep-the-rest"
    )


def random_k(
    gradient: Tensor, fraction: float, generator: torch.Generator, group: Group = None
) -> Reduced:
    """Average entries at random places, the same on all ranks, so that no index travels.

    Two ranks, fraction 0.5 of four entries; both draw the places 1 and 2:
        rank 0    gradient    5  -1   0   2    sent    0  -1   0   0
        rank 1    gradient    1  -4   0   3    sent    0  -4   0   0
        mean of what was sent                        0  -2.5   0   0

    The values are not scaled by n/k, which would make the mean right on average: with error
    feedback the rest comes later, and would come twice.

    Args:
        gradient: (n,), floating; other values on each rank. It is not changed.
        fraction: share of the entries that travel, above 0 and at most 1: k = round(fraction * n),
            but at least 1 if there are any.
        generator: generator on the CPU, in the same state on all ranks: it alone decides which k
            places are drawn, all equally likely, and other ones in the next call.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, the same on all ranks bit for bit, and what this rank has sent: its gradient
        at the k places, 0 elsewhere; both of gradient's dtype.

    Cost: an all-reduce of k values: 8k(N-1)/N bytes in float32 along a ring. A permutation of n
        numbers on the CPU, 8 bytes each.

    Source: Stich et al. 2018 (NeurIPS).
    """
    # TODO 4.10: draw k places, and average the entries there.
    #   Tools: torch.randperm, dist.all_reduce.
    #   Example: 1,000,000 entries, fraction 0.01, 8 ranks: a rank sends 70,000 bytes along a ring.
    #   About 7 lines.
    raise NotImplementedError(
        "Task 4.10: random_k, see guidelines.md#410-send-random-entries-or-all-that-are-large"
    )


def threshold(gradient: Tensor, least: float, group: Group = None) -> Reduced:
    """Average the entries whose magnitude is at least ``least``, as many as each rank has.

    Two ranks, least 3:
        rank 0    gradient    5  -1   0   2    sent    5   0   0   0
        rank 1    gradient    1  -4   0   3    sent    0  -4   0   3
        mean of what was sent                        2.5  -2   0   1.5

    Args:
        gradient: (n,), floating; other values on each rank. It is not changed.
        least: above 0; the magnitude from which on entries travel. A NaN travels too, so that all
            ranks notice.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, the same on all ranks bit for bit, and what this rank has sent: its gradient
        at these places, 0 elsewhere; both of gradient's dtype. There may be none.

    Cost: with L for the number of entries of the rank that has most, 8L(N-1) bytes in float32 at
        most, and before them the numbers of entries: at most 16(N-1) bytes.

    Source: Strom 2015 (Interspeech).
    """
    # TODO 4.10: send the entries that are large enough, and average what all have sent.
    #   Tools: torch.nonzero, dist.all_reduce, dist.ReduceOp, torch.nn.functional.pad, group_device
    #   (given), and those of top_k.
    #   Example: three ranks with 2, 0 and 5 such entries: each sends 5 values and 5 indices.
    #   About 4 lines, and those that it shares with top_k.
    raise NotImplementedError(
        "Task 4.10: threshold, see guidelines.md#410-send-random-entries-or-all-that-are-large"
    )


class Int8:
    """One byte for each number: whole steps from -127 to 127."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round to the nearest of 255 numbers: 0, and 127 steps of max|x| / 127 to either side.

        2.54, -0.06, 0.009 has the scale 0.02; the codes are 127, -3, 0.

        Args:
            x: (n,), floating; n may be 0. It is not changed.

        Returns:
            The codes, uint8 of shape (n,), and the scale: the length of a step, float32 of shape
            (). It is 0 if all of x is. If x holds a NaN or an infinity, no number that comes out of
            ``decode`` is finite.
        """
        # TODO 4.11: return the codes and the scale.
        #   Tools: torch.round, torch.where, torch.Tensor.view, which reads the bytes
        #   as another dtype.
        #   Example: the code -3 is the byte 253.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.11: Int8.encode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the numbers that the codes stand for.

        Args:
            payload: bytes from ``encode``; more bytes may follow.
            scale: scale from ``encode``.
            n: how many numbers were encoded.

        Returns:
            (n,), float32. Each is at most half a scale away from what was encoded; 0 stays 0. So
            it is unless the scale is below 1e-38, where float32 has few digits.
        """
        # TODO 4.11: return codes times scale.
        #   Tools: torch.Tensor.view.
        #   Example: the byte 253 with the scale 0.02 is -0.06.
        #   About 1 or 2 lines.
        raise NotImplementedError(
            "Task 4.11: Int8.decode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )


class Sign:
    """One bit for each number: plus or minus the mean magnitude of all."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the signs, eight in a byte, and the mean of all magnitudes.

        5, -1, 0, 2 has the scale 2 and the signs + - + +: 0 counts as positive.

        Args:
            x: (n,), floating; n may be 0. It is not changed.

        Returns:
            The signs, uint8 of shape (n / 8, rounded up), and the scale: mean |x|, float32 of
            shape (); 0 if there are no numbers. If x holds a NaN or an infinity, no number that
            comes out of ``decode`` is finite.
        """
        # TODO 4.11: return the packed signs and the scale.
        #   Tools: torch.nn.functional.pad, shifts of uint8.
        #   Example: 10 numbers take 2 bytes; 6 bits of the last one mean nothing.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.11: Sign.encode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the numbers that the signs stand for: plus or minus the scale.

        Args:
            payload: bytes from ``encode``; more bytes may follow.
            scale: scale from ``encode``.
            n: how many numbers were encoded.

        Returns:
            (n,), float32.
        """
        # TODO 4.11: unpack the signs, and return as many as there are.
        #   Tools: shifts of uint8, torch.where.
        #   Example: + - + + with the scale 2 is 2, -2, 2, 2.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.11: Sign.decode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )


def quantized(gradient: Tensor, codec: Codec, group: Group = None) -> Reduced:
    """Average a gradient that travels in codes, both to where it is summed and back.

    Each rank owns a chunk, as ``tensor_split`` makes them: rank r the r-th of N. Two ranks, with
    Sign:
        rank 0    gradient  3  1 |  4  2     encoded in chunks    2  2 |  3  3
        rank 1    gradient  2 -4 | -1  1     encoded in chunks    3 -3 | -1  1
    1.  Each owner gets its chunk from all ranks, and takes the mean:   2.5 -0.5 |  1  2
    2.  It encodes the mean again, and all ranks get it:                1.5 -1.5 | 1.5 1.5
    The second rounding is an error too, of the owner: it counts as sent what it had encoded, minus
    N times what the second rounding has taken from the mean. Rank 0 has sent
    2 - 2·(2.5 - 1.5), 2 - 2·(-0.5 + 1.5) and 3, 3, which makes 0, 0, 3, 3; rank 1 3, -3, 0, 0.

    Args:
        gradient: (n,), floating; other values on each rank. n need not be a multiple of N, and may
            be less, even 0. It is not changed.
        codec: encodes chunk by chunk, each with its own scale.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, the same on all ranks bit for bit, and what this rank has sent, as above;
        both of gradient's dtype.

    Cost: with b for the bytes in which the codec writes a chunk of n/N entries, rounded up,
        2(N-1)(b + 8) bytes at most.

    Source: Tang et al. 2021 (ICML), whose server error is that of the second rounding; Seide et al.
        2014 (Interspeech).
    """
    # TODO 4.11: send each owner its chunk in codes, average there, and send all the mean in codes.
    #   Tools: torch.Tensor.tensor_split, dist.all_to_all_single (on uint8), torch.Tensor.view,
    #   dist.all_gather.
    #   Example: 1,000,000 entries, Int8, 8 ranks: two times 7 rows of 125,004 bytes.
    #   About 20 lines.
    raise NotImplementedError(
        "Task 4.11: quantized, see guidelines.md#411-send-coarse-numbers-both-ways"
    )
