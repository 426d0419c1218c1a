"""The weighted fit by a solver of least squares, in units near one.

right
"""

import sys
from collections.abc import Sequence

import numpy as np


def fit_alpha_beta(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    t, n = np.array(seconds, dtype=float), np.array(sizes_bytes, dtype=float)
    scale = max(n)
    matrix = np.stack([1 / t, n / scale / t], axis=1)
    alpha, beta = np.linalg.lstsq(matrix, np.ones(len(t)), rcond=None)[0]
    if beta <= 0:
        return float((1 / t).sum() / (1 / t**2).sum()), sys.float_info.min
    if alpha < 0:
        column = matrix[:, 1]
        return 0.0, float(column.sum() / (column @ column) / scale)
    return float(alpha), float(beta / scale)
