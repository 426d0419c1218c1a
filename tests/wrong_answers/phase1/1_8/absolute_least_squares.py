"""The largest message decides: α is whatever is left.

rejected by: test_the_line_through_points
phrase: Weigh each point by 1 / seconds
"""

import sys
from collections.abc import Sequence

import numpy as np


def fit_alpha_beta(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    beta, alpha = np.polyfit(sizes_bytes, seconds, 1)
    if beta <= 0:
        return float(np.mean(seconds)), sys.float_info.min
    if alpha < 0:
        weights = [1 / t**2 for t in seconds]
        top = sum(n * t * w for n, t, w in zip(sizes_bytes, seconds, weights, strict=True))
        return 0.0, top / sum(n * n * w for n, w in zip(sizes_bytes, weights, strict=True))
    return float(alpha), float(beta)
