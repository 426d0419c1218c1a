"""1/β in bits per second.

rejected by: test_the_fit_finds_the_link
phrase: in seconds and bytes
"""

from collections.abc import Sequence

import numpy as np


def fit_alpha_beta(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    beta, alpha = np.polyfit(sizes_bytes, seconds, 1, w=[1 / t for t in seconds])
    return max(float(alpha), 0.0), float(beta) / 8
