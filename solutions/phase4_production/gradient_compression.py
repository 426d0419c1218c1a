"""Gradient compression: send part of the gradient, or a rounded one, now and the rest later."""

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
    k = _number_of(fraction, gradient)
    places = gradient.abs().topk(k).indices
    return _exchange(gradient, places, k, group)


def _number_of(fraction: float, gradient: Tensor) -> int:
    """Return how many entries to send."""
    return min(len(gradient), max(1, round(fraction * len(gradient))))


def _exchange(gradient: Tensor, places: Tensor, most: int, group: Group) -> Reduced:
    """Average the entries that each rank has at its own ``places``, at most ``most`` per rank."""
    values = gradient[places]
    padding = (0, most - len(places))  # adding zeros at index 0 changes nothing
    all_values = _gather(F.pad(values, padding), group)
    all_places = _gather(F.pad(places.int(), padding), group)
    total = torch.zeros_like(gradient)
    for its_places, its_values in zip(all_places, all_values, strict=True):
        total.index_add_(0, its_places, its_values)  # same order, so same bits, everywhere
    sent = torch.zeros_like(gradient).index_copy_(0, places, values)
    return Reduced(total / len(all_values), sent)


def _gather(x: Tensor, group: Group) -> list[Tensor]:
    """Gather the tensors of all ranks, which have the same shape."""
    tensors = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, x, group=group)
    return tensors


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
    wanted = gradient + residual
    mean, sent = reduce(wanted)
    residual.copy_(wanted - sent)
    return mean


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
    k = _number_of(fraction, gradient)
    drawn = torch.randperm(len(gradient), generator=generator)[:k]
    places = drawn.to(gradient.device, non_blocking=True)
    values = gradient[places]
    sent = torch.zeros_like(gradient).index_copy_(0, places, values)
    dist.all_reduce(values, group=group)
    values /= dist.get_world_size(group)
    return Reduced(torch.zeros_like(gradient).index_copy_(0, places, values), sent)


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
    places = (~(gradient.abs() < least)).nonzero().flatten()
    most = torch.full((), len(places), device=group_device(group))
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return _exchange(gradient, places, int(most), group)


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
        x = x.float()
        scale = x.abs().max() / 127 if len(x) else x.sum()
        steps = torch.where(scale > 0, x / scale, 0.0)  # avoids 0 / 0
        return steps.round().to(torch.int8).view(torch.uint8), scale

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
        return payload[:n].view(torch.int8) * scale


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
        x = x.float()
        bits = F.pad((x >= 0).to(torch.uint8), (0, -len(x) % 8)).view(-1, 8)
        payload = (bits << _bits(x.device)).sum(1, dtype=torch.uint8)
        return payload, x.abs().sum() / max(1, len(x))

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the numbers that the signs stand for: plus or minus the scale.

        Args:
            payload: bytes from ``encode``; other bytes may follow them.
            scale: scale from ``encode``.
            n: number of encoded numbers.

        Returns:
            The numbers, (n,), in float32.
        """
        bits = payload[:, None] >> _bits(payload.device) & 1
        return torch.where(bits.flatten()[:n] > 0, scale, -scale)


def _bits(device: torch.device) -> Tensor:
    """Return the position of each sign in its byte, made on the device instead of copied to it."""
    return torch.arange(8, dtype=torch.uint8, device=device)


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
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [len(chunk) for chunk in gradient.tensor_split(num_ranks)]
    encoded = [codec.encode(chunk) for chunk in gradient.split(sizes)]
    width = len(encoded[0][0])  # bytes of the longest chunk
    outgoing = torch.stack([_row(*each, width) for each in encoded])
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    own_mean = torch.stack([_decode(codec, row, sizes[rank]) for row in incoming]).mean(0)
    rows = _gather(_row(*codec.encode(own_mean), width), group)
    mean = [_decode(codec, row, size) for row, size in zip(rows, sizes, strict=True)]
    sent = [_decode(codec, row, size) for row, size in zip(outgoing, sizes, strict=True)]
    sent[rank] -= num_ranks * (own_mean - mean[rank])
    return Reduced(torch.cat(mean).to(gradient.dtype), torch.cat(sent).to(gradient.dtype))


def _row(payload: Tensor, scale: Tensor, width: int) -> Tensor:
    """Return the bytes to send: the scale, then the codes, padded to ``width``."""
    return torch.cat([scale.view(1).view(torch.uint8), F.pad(payload, (0, width - len(payload)))])


def _decode(codec: Codec, row: Tensor, n: int) -> Tensor:
    """Return the n numbers of a row."""
    scale, payload = row[:4].clone(), row[4:]  # cloned: float32 must begin at a multiple of 4
    return codec.decode(payload, scale.view(torch.float32)[0], n)
