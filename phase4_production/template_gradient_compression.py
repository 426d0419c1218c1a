"""Gradient compression: send part of the gradient, or a rounded one, now and the rest later.

Tasks 4.9 to 4.11. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 4.9``.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phase4_production.given import Codec, Group, Reduced, group_device


def top_k(gradient: Tensor, fraction: float, group: Group = None) -> Reduced:
    """Average the entries of largest magnitude; each rank chooses and sends its own.

    For example, two ranks have four entries each, and the fraction is 0.5, so that k = 2:
        rank 0    gradient    5  -1   0   2    sent    5   0   0   2
        rank 1    gradient    1  -4   0   3    sent    0  -4   0   3
        mean of what was sent                        2.5  -2   0   2.5

    Args:
        gradient: (n,), floating-point; differs from rank to rank. Not changed.
        fraction: share of the entries to send, above 0 and at most 1: k = round(fraction * n), but
            at least 1 if there are any entries.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, bit for bit the same on all ranks, and what this rank has sent: its gradient at
        the k indices that it chose, and 0 elsewhere. Both are in the gradient's dtype. Of equally
        large entries, any may be sent. A NaN counts as largest, so that all ranks notice it.

    Cost: each rank sends k values and k indices of 4 bytes to every other rank: 8k(N-1) bytes in
        float32.

    Source: Aji and Heafield 2017 (EMNLP); Lin et al. 2018 (ICLR).
    """
    # TODO 4.9: send this rank's k largest entries to all, and average what all have sent.
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

    For example, with ``top_k`` and k = 1, on one rank whose gradient is 4, 3 in every step:
        step    gradient + residual    sent    residual
           1        4    3             4  0     0    3
           2        4    6             0  6     4    0
           3        8    3             8  0     0    3

    Args:
        gradient: (n,), floating-point. Not changed.
        residual: (n,), of the gradient's dtype: what this rank has not sent so far; zeros before
            the first step. What is still unsent after this step is written into it.
        reduce: function that is called once, such as ``lambda x: top_k(x, 0.01)``. It gets
            ``gradient + residual``, in the gradient's dtype, and does not change it.

    Returns:
        The mean that ``reduce`` returned.

    Source: Seide et al. 2014 (Interspeech); Stich et al. 2018 (NeurIPS).
    """
    # TODO 4.9: add the residual, reduce, and keep what was not sent.
    #   Example: gradient 4, 3 plus residual 0, 3 is 4, 6. If 0, 6 is sent, the residual is 4, 0.
    #   About 4 lines.
    raise NotImplementedError(
        "Task 4.9: reduce_with_feedback, see guidelines.md#49-send-the-largest-keep-the-rest"
    )


def random_k(
    gradient: Tensor, fraction: float, generator: torch.Generator, group: Group = None
) -> Reduced:
    """Average entries at random indices that are the same on all ranks, and so need not be sent.

    For example, two ranks have four entries each, the fraction is 0.5, and both draw the indices 1
    and 2:
        rank 0    gradient    5  -1   0   2    sent    0  -1   0   0
        rank 1    gradient    1  -4   0   3    sent    0  -4   0   0
        mean of what was sent                        0  -2.5   0   0

    The values are not scaled by n/k, which would make the mean unbiased: the rest, which error
    feedback sends later, would then count twice.

    Args:
        gradient: (n,), floating-point; differs from rank to rank. Not changed.
        fraction: share of the entries to send, above 0 and at most 1: k = round(fraction * n), but
            at least 1 if there are any entries.
        generator: generator on the CPU, in the same state on all ranks. It alone decides which k
            indices are drawn; all indices are equally likely, and every call draws new ones.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, bit for bit the same on all ranks, and what this rank has sent: its gradient at
        the k indices, and 0 elsewhere. Both are in the gradient's dtype.

    Cost: an all-reduce of k values: 8k(N-1)/N bytes in float32 along a ring. It also takes a
        permutation of n numbers, of 8 bytes each, on the CPU.

    Source: Stich et al. 2018 (NeurIPS).
    """
    # TODO 4.10: draw k places, and average the entries there.
    #   Example: 1,000,000 entries, fraction 0.01, 8 ranks: a rank sends 70,000 bytes along a ring.
    #   About 7 lines.
    raise NotImplementedError(
        "Task 4.10: random_k, see guidelines.md#410-send-random-entries-or-all-that-are-large"
    )


def threshold(gradient: Tensor, least: float, group: Group = None) -> Reduced:
    """Average the entries whose magnitude is at least ``least``, however many each rank has.

    For example, for two ranks, if ``least`` is 3:
        rank 0    gradient    5  -1   0   2    sent    5   0   0   0
        rank 1    gradient    1  -4   0   3    sent    0  -4   0   3
        mean of what was sent                        2.5  -2   0   1.5

    Args:
        gradient: (n,), floating-point; differs from rank to rank. Not changed.
        least: smallest magnitude to send, above 0. NaNs are sent too, so that all ranks notice
            them.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, bit for bit the same on all ranks, and what this rank has sent: the entries of its
        gradient that are large enough, and 0 elsewhere. Both are in the gradient's dtype. There may
        be no such entries.

    Cost: at most 8L(N-1) bytes in float32, where L is the largest number of entries that any rank
        sends; and before that, at most 16(N-1) bytes to agree on L.

    Source: Strom 2015 (Interspeech).
    """
    # TODO 4.10: send the entries that are large enough, and average what all have sent.
    #   Example: three ranks with 2, 0 and 5 such entries: each sends 5 values and 5 indices.
    #   About 4 lines, and those that it shares with top_k.
    raise NotImplementedError(
        "Task 4.10: threshold, see guidelines.md#410-send-random-entries-or-all-that-are-large"
    )


class Int8:
    """Encodes each number in one byte, as a whole number of steps from -127 to 127."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round each number to the nearest of 255: 0, and 127 steps of max|x| / 127 on either side.

        For example, 2.54, -0.06 and 0.009 have the scale 0.02 and the codes 127, -3 and 0.

        Args:
            x: (n,), floating-point; n may be 0. Not changed.

        Returns:
            The codes, uint8 of shape (n,), and the scale: the length of a step, float32 of shape
            (). The scale is 0 if all of x is 0. If x holds a NaN or an infinity, ``decode`` returns
            no finite number.
        """
        # TODO 4.11: return the codes and the scale.
        #   Example: the code -3 is the byte 253.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.11: Int8.encode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the numbers that the codes stand for.

        Args:
            payload: bytes from ``encode``; other bytes may follow them.
            scale: scale from ``encode``.
            n: number of encoded numbers.

        Returns:
            The numbers, (n,), in float32. Each is within half the scale of the original number, and
            0 stays 0, unless the scale is below 1e-38, where float32 has few digits.
        """
        # TODO 4.11: return codes times scale.
        #   Example: the byte 253 with the scale 0.02 is -0.06.
        #   About 1 or 2 lines.
        raise NotImplementedError(
            "Task 4.11: Int8.decode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )


class Sign:
    """Encodes each number in one bit, as plus or minus the mean magnitude of all numbers."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the signs, eight to a byte, and the mean of all magnitudes.

        For example, 5, -1, 0 and 2 have the scale 2 and the signs + - + +. 0 counts as positive.

        Args:
            x: (n,), floating-point; n may be 0. Not changed.

        Returns:
            The signs, uint8 of shape (n / 8, rounded up), and the scale: the mean of |x|, float32
            of shape (). The scale is 0 if there are no numbers. If x holds a NaN or an infinity,
            ``decode`` returns no finite number.
        """
        # TODO 4.11: return the packed signs and the scale.
        #   Example: 10 numbers take 2 bytes; 6 bits of the last one mean nothing.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.11: Sign.encode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the numbers that the signs stand for: plus or minus the scale.

        Args:
            payload: bytes from ``encode``; other bytes may follow them.
            scale: scale from ``encode``.
            n: number of encoded numbers.

        Returns:
            The numbers, (n,), in float32.
        """
        # TODO 4.11: unpack the signs, and return as many as there are.
        #   Example: + - + + with the scale 2 is 2, -2, 2, 2.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.11: Sign.decode, see guidelines.md#411-send-coarse-numbers-both-ways"
        )


def quantized(gradient: Tensor, codec: Codec, group: Group = None) -> Reduced:
    """Average a gradient, encoding it on its way to the ranks that sum it and on its way back.

    Rank r owns chunk r of N, as cut by ``tensor_split``. For two ranks and ``Sign``:
        rank 0    gradient  3  1 |  4  2     encoded in chunks    2  2 |  3  3
        rank 1    gradient  2 -4 | -1  1     encoded in chunks    3 -3 | -1  1
    1.  Each owner gets its chunk from all ranks, and takes the mean:   2.5 -0.5 |  1  2
    2.  It encodes the mean, and sends it to all ranks:                 1.5 -1.5 | 1.5 1.5
    The owner bears the error of the second rounding: what it has sent of its own chunk is what it
    first encoded, minus N times what the second rounding took from the mean. So rank 0 has sent
    2 - 2·(2.5 - 1.5) and 2 - 2·(-0.5 + 1.5) of its own chunk, and 3 and 3 of the other chunk, that
    is, 0, 0, 3, 3; and rank 1 has sent 3, -3, 0, 0.

    Args:
        gradient: (n,), floating-point; differs from rank to rank. n need not be a multiple of N,
            and may be less than N, even 0. Not changed.
        codec: codec that encodes each chunk with its own scale.
        group: the ranks that take part; all ranks by default.

    Returns:
        The mean, bit for bit the same on all ranks, and what this rank has sent, as explained
        above. Both are in the gradient's dtype.

    Cost: at most 2(N-1)(b + 8) bytes, where b is the number of bytes in which the codec encodes a
        chunk of n/N entries (rounded up). Of the 8, 4 are the scale, and 4 are left for padding.

    Source: Tang et al. 2021 (ICML), where the error of the second rounding is called server error;
        Seide et al. 2014 (Interspeech).
    """
    # TODO 4.11: send each owner its chunk in codes, average there, and send all the mean in codes.
    #   Example: 1,000,000 entries, Int8, 8 ranks: two times 7 rows of 125,004 bytes.
    #   About 20 lines.
    raise NotImplementedError(
        "Task 4.11: quantized, see guidelines.md#411-send-coarse-numbers-both-ways"
    )
