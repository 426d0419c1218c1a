"""PowerSGD: send two thin factors of a gradient instead of the gradient itself.

Task 4.12. The docstring says what a function promises, its TODO gives an example, and guidelines.md
explains why and how. To grade it: ``distlab check 4.12``.
"""

import zlib
from collections.abc import Mapping, Sequence
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
    # TODO 4.12: write orthonormal columns over those of the matrix.
    #   Example: the column (3, 4) becomes (0.6, 0.8), or (-0.6, -0.8).
    #   About 2 lines.
    raise NotImplementedError(
        "Task 4.12: orthogonalize, see guidelines.md#412-send-two-thin-factors"
    )


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
        # TODO 4.12: store the arguments, and an empty container for each parameter's Q.
        #   Example: before the first step, it holds no Q.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.__init__, see guidelines.md#412-send-two-thin-factors"
        )

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
        # TODO 4.12: average P and the rest, orthogonalize P, average Q and keep it, return P Qᵀ.
        #   Example: a weight of 12 · 10, a bias of 12 and r = 2: the first all-reduce has 24 + 12
        #   elements, the second 20.
        #   About 45 lines with helpers.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.__call__, see guidelines.md#412-send-two-thin-factors"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what a later run needs to continue bit for bit."""
        # TODO 4.12: return a copy of what is kept from step to step.
        #   Example: after a step with the weight of 12 · 10 and r = 2, it holds one Q of 10 · 2.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.state_dict, see guidelines.md#412-send-two-thin-factors"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which is not changed."""
        # TODO 4.12: keep a copy of what is in the state.
        #   Example: a state with 3 matrices of Q is loaded; the next step begins with these 3.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.load_state_dict, see guidelines.md#412-send-two-thin-factors"
        )
