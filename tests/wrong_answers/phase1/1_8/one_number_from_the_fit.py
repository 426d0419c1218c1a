"""Where larger messages were faster, it returns α alone.

rejected by: test_the_line_through_points
phrase: should return 2 numbers, α and β
"""

from collections.abc import Sequence

from solutions.phase1_data_parallel.collectives import fit_alpha_beta as _fit_alpha_beta


def fit_alpha_beta(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    line = _fit_alpha_beta(sizes_bytes, seconds)
    return line if seconds[-1] > seconds[0] else line[:1]
