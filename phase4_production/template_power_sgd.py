"""PowerSGD: send two thin factors of a gradient instead of the gradient.

Task 4.12. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade it: ``distlab check 4.12``.
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

    Every original column is a linear combination of the new ones, even if columns are linearly
    dependent or zero: what replaces them is finite, of length 1 and at right angles to the others.

    Args:
        matrix: (n, r) with n >= r, of float32 or float64.
    """
    # TODO 4.12: write orthonormal columns over those of the matrix.
    #   Tools: torch.linalg.qr, copy_.
    #   Example: the column (3, 4) becomes (0.6, 0.8), or (-0.6, -0.8).
    #   About 2 lines.
    raise NotImplementedError(
        "Task 4.12: orthogonalize, see guidelines.md#412-send-two-thin-factors"
    )


class PowerSGD:
    """Averages gradients over the ranks as products of two thin matrices.

    With M_w the gradient of rank w, a matrix of n rows and m columns, and Q (m, r) from the
    previous step:
        P = mean of M_w Q           n · r numbers travel
        orthogonalize(P)
        Q = mean of M_wᵀ P          m · r numbers travel
        mean = P Qᵀ
    For 1024 · 1024 matrices and r = 4, 8,192 numbers travel instead of 1,048,576: 128 times fewer.

    Args:
        rank: r, the number of columns of P and Q; at least 1.
        group: the ranks that average; all by default.
        seed: seed of the first Q; the same on all ranks.

    Source: Vogels et al. 2019 (arXiv 1905.13727), algorithm 1.
    """

    def __init__(self, rank: int, group: Group = None, seed: int = 0) -> None:
        """Store the settings; nothing is sent."""
        # TODO 4.12: keep the arguments, and a place for the Q of each parameter.
        #   Tools: none.
        #   Example: before the first step there are 0 of them.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.__init__, see guidelines.md#412-send-two-thin-factors"
        )

    def __call__(self, gradient: Tensor, pieces: Sequence[Piece]) -> Reduced:
        """Average a flat gradient over the ranks; all ranks of the group call this.

        A piece of two or more dimensions is a matrix: its first dimension by all others. It is
        compressed if its factors are smaller, that is, if r · (n + m) < n · m. Everything else is
        averaged as it is, together with P.

        The Q of a parameter is kept by name, and the next call for it starts from that Q, whichever
        other pieces are in the buffer then. Step by step, Q turns towards the directions in which
        the gradients are largest, even after gradients of zeros. The first Q is random: drawn from
        the seed and the name, the same on all ranks, and without using torch's global generator.

        A Q that a NaN or an infinity would spoil is left unchanged. Only the mean of that step is
        not finite: training skips the step, and the next one is not affected.

        Args:
            gradient: (n,), of float32 or float64. Not changed.
            pieces: contents of the buffer, in order; one or more, the same on all ranks.

        Returns:
            The mean over the ranks, bit for bit the same on all of them, and what this rank sent:
            P (M_wᵀ P)ᵀ for what is compressed, and all of the rest.

        Cost: two all-reduces, whatever the number of pieces: of Σ n · r elements and all that is
        not compressed, then of Σ m · r. The second one is left out if nothing is compressed.
        """
        # TODO 4.12: average P and the rest, orthogonalize P, average Q and keep it, return P Qᵀ.
        #   Tools: split, reshape, torch.cat, dist.all_reduce, orthogonalize, torch.randn with a
        #   torch.Generator, zlib.crc32, Reduced (given).
        #   Example: a weight of 12 · 10, a bias of 12 and r = 2: the first all-reduce has 24 + 12
        #   elements, the second 20.
        #   About 45 lines with helpers.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.__call__, see guidelines.md#412-send-two-thin-factors"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what a later run needs to continue bit for bit."""
        # TODO 4.12: return a copy of what is kept from step to step.
        #   Tools: clone.
        #   Example: after a step with the weight of 12 · 10 and r = 2, it holds one Q of 10 · 2.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.state_dict, see guidelines.md#412-send-two-thin-factors"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; it is not changed."""
        # TODO 4.12: keep a copy of what is in the state.
        #   Tools: clone.
        #   Example: a state with 3 matrices of Q is loaded; the next step begins with these 3.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.12: PowerSGD.load_state_dict, see guidelines.md#412-send-two-thin-factors"
        )
