"""The line that task 1.8 should find, computed exactly; times compared and written."""

from fractions import Fraction
from sys import float_info

Line = tuple[float, float]  # α, β


def best_line(sizes: list[int], seconds: list[float]) -> Line:
    """The line without negative coefficients whose relative errors have the least squares."""
    n, t = [Fraction(size) for size in sizes], [Fraction(second) for second in seconds]
    w = [1 / second**2 for second in t]
    w0, wn, wt = sum(w), _dot(w, n), _dot(w, t)
    wnn, wnt = _dot(w, n, n), _dot(w, n, t)
    beta = (w0 * wnt - wn * wt) / (w0 * wnn - wn**2)
    alpha_s = (wt - beta * wn) / w0
    if beta <= 0:
        return float(wt / w0), float_info.min
    return (0.0, float(wnt / wnn)) if alpha_s < 0 else (float(alpha_s), float(beta))


def _dot(*columns: list[Fraction]) -> Fraction:
    total = Fraction(0)
    for row in zip(*columns, strict=True):
        product = Fraction(1)
        for value in row:
            product *= value
        total += product
    return total


def are_close(got: list[float], expected: list[float], tolerance: float) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(abs(a - b) <= tolerance * b for a, b in pairs)


def in_us(seconds: list[float]) -> str:
    return f"[{', '.join(f'{second * 1e6:.4g}' for second in seconds)}] µs"
