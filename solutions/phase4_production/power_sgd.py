"""PowerSGD: send two thin factors of a gradient instead of the gradient itself."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phase4_production.given import Group, Piece, Reduced


def orthogonalize(matrix: Tensor) -> None:
    """Make the columns of a matrix orthonormal, in place: each of length 1, all at right angles.

        3  3            0.6 -0.8
        4  4.5    ->    0.8  0.6        for example
        0  0            0    0

    Every original column is a linear combination of the new ones. Columns that are zero or linearly
    dependent on others are replaced by finite unit vectors orthogonal to the rest.

    Args:
        matrix: (n, r) with n >= r, in float32 or float64.
    """
    matrix.copy_(torch.linalg.qr(matrix).Q)


class PowerSGD:
    """Averages gradients over the ranks as products of two thin matrices.

    M_w is the gradient of rank w, a matrix of n rows and m columns; Q, of shape (m, r), comes from
    the previous step:
        P = mean of M_w Q           n · r numbers are sent
        orthogonalize(P)
        Q = mean of M_wᵀ P          m · r numbers are sent
        mean = P Qᵀ
    For a matrix of 1024 · 1024 numbers and r = 4, 8,192 numbers are sent instead of 1,048,576, that
    is, 128 times fewer.

    Args:
        rank: r, the number of columns of P and Q; at least 1.
        group: the ranks that average their gradients; all by default.
        seed: seed of the first Q; the same on all ranks.

    Source: Vogels et al. 2019 (arXiv 1905.13727), algorithm 1.
    """

    def __init__(self, rank: int, group: Group = None, seed: int = 0) -> None:
        """Store the settings; nothing is sent."""
        self.rank, self.group, self.seed = rank, group, seed
        self.qs: dict[str, Tensor] = {}  # previous step's Q, by parameter name

    def __call__(self, gradient: Tensor, pieces: Sequence[Piece]) -> Reduced:
        """Average a flat gradient over the ranks; all ranks of the group call this.

        A piece with two or more dimensions is treated as a matrix, with the first dimension as rows
        and the rest flattened into columns. It is compressed if its factors are smaller, that is,
        if r · (n + m) < n · m. Everything else is averaged uncompressed, together with P.

        Each parameter's Q is stored by name and is the starting point the next time that parameter
        appears, regardless of which other pieces share the buffer. Step by step, Q turns towards
        the directions in which the gradients are largest. The first Q is random, but depends only
        on the seed and the name, so it is the same on all ranks. Drawing it does not use torch's
        global generator.

        Two things must not spoil the steps that follow. A column of Q that would become zero is
        left unchanged, because it may find no direction again: after a gradient of zeros, for
        example, that is all of Q. And if a NaN or an infinity would get into a Q, all of that Q is
        left unchanged, so a non-finite gradient affects only the mean of that step, which training
        skips.

        Args:
            gradient: (n,), in float32 or float64. Not changed.
            pieces: contents of ``gradient``, in order; at least one piece, and the same on all
                ranks.

        Returns:
            The mean over the ranks, bit for bit the same on all of them, and what this rank sent:
            P (M_wᵀ P)ᵀ for the compressed pieces, and the other pieces unchanged.

        Cost: two all-reduces, whatever the number of pieces. The first carries Σ n · r elements and
        all uncompressed pieces; the second carries Σ m · r elements, and is left out if nothing is
        compressed.
        """
        is_low = [self._is_compressed(piece.shape) for piece in pieces]
        sizes = [piece.shape.numel() for piece in pieces]
        parts = gradient.split(sizes)
        rest = [part for part, low in zip(parts, is_low, strict=True) if not low]
        matrices = {
            piece.name: part.reshape(piece.shape[0], -1)
            for piece, part, low in zip(pieces, parts, is_low, strict=True)
            if low
        }
        old_qs = [self._q_of(name, matrix) for name, matrix in matrices.items()]
        own_ps = [_times(matrix, q) for matrix, q in zip(matrices.values(), old_qs, strict=True)]
        ps, rest_means = self._means(own_ps, rest)
        for p in ps:
            orthogonalize(p)
        own_qs = [_times(matrix.T, p) for matrix, p in zip(matrices.values(), ps, strict=True)]
        qs, _ = self._means(own_qs)
        for name, q, old in zip(matrices, qs, old_qs, strict=True):
            is_usable = q.isfinite().all() & q.any(dim=0)  # by column
            self.qs[name] = torch.where(is_usable, q, old)  # no ``if``: it would wait
        mean, sent = torch.empty_like(gradient), torch.empty_like(gradient)
        _fill(mean.split(sizes), is_low, zip(ps, qs, strict=True), rest_means)
        _fill(sent.split(sizes), is_low, zip(ps, own_qs, strict=True), rest)
        return Reduced(mean, sent)

    def _is_compressed(self, shape: torch.Size) -> bool:
        """Return whether the two factors are smaller than the matrix."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], shape[1:].numel()
        return self.rank * (rows + columns) < rows * columns

    def _q_of(self, name: str, matrix: Tensor) -> Tensor:
        """Return the Q to start from: that of the previous step, or a random one."""
        if name in self.qs:
            return self.qs[name].to(matrix)
        # not hash(name), which differs from process to process
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)

    def _means(
        self, factors: Sequence[Tensor], rest: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the means over the ranks of factors and of flat tensors, in one all-reduce.

        Factors are sent column by column, and so lie in memory, as ``_times`` makes and needs them.
        """
        tensors = [*(factor.T for factor in factors), *rest]
        if not tensors:
            return [], []
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        flat /= dist.get_world_size(self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        means = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        return [mean.T for mean in means[: len(factors)]], means[len(factors) :]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what a later run needs to continue bit for bit."""
        return {"qs": {name: q.clone() for name, q in self.qs.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which is not changed."""
        self.qs = {name: q.clone() for name, q in state["qs"].items()}


def _times(matrix: Tensor, thin: Tensor) -> Tensor:
    """Return matrix @ thin as a transposed product, which CPUs compute several times faster."""
    return (thin.T.contiguous() @ matrix.T).T


def _fill(
    parts: Sequence[Tensor],
    is_low: Sequence[bool],
    factors: Iterator[tuple[Tensor, Tensor]],
    rest: Iterable[Tensor],
) -> None:
    """Fill the parts of a flat tensor, in order: with P Qᵀ if compressed, or from ``rest``."""
    others = iter(rest)
    for part, is_one in zip(parts, is_low, strict=True):
        if is_one:
            p, q = next(factors)
            torch.mm(p, q.T, out=part.view(len(p), len(q)))
        else:
            part.copy_(next(others))
