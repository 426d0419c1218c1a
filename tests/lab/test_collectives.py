"""Fit of α and β, and table of times; the suite judges what the tasks send and sum."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from solutions.phase1_data_parallel.collectives import AllReduceTimes, fit_alpha_beta

alpha_ = st.floats(1e-7, 1e-2)
beta_ = st.floats(1e-12, 1e-7)
sizes_ = st.lists(st.integers(0, 28).map(lambda k: 2**k), min_size=2, max_size=12, unique=True)


@given(alpha_, beta_, sizes_)
def test_fit_reproduces_points_that_lie_on_a_line(
    alpha: float, beta: float, sizes: list[int]
) -> None:
    seconds = [alpha + size * beta for size in sizes]
    fitted_alpha, fitted_beta = fit_alpha_beta(sizes, seconds)
    assert [fitted_alpha + size * fitted_beta for size in sizes] == pytest.approx(seconds, 1e-6)
    assert fitted_alpha == pytest.approx(alpha, abs=1e-6 * min(seconds))


times_ = st.floats(1e-6, 1e-2)


@pytest.fixture(scope="module")
def nnls() -> Callable[..., Any]:
    """SciPy's nnls, imported here because every rank would repeat an import at the top."""
    from scipy.optimize import nnls

    return nnls


@given(st.dictionaries(st.integers(0, 2**20), times_, min_size=2, max_size=8))
def test_fit_is_the_best_of_all_lines_without_a_negative_coefficient(
    nnls: Callable[..., Any], measured: dict[int, float]
) -> None:
    sizes, seconds = list(measured), list(measured.values())
    alpha, beta = fit_alpha_beta(sizes, seconds)
    assert alpha >= 0
    assert beta > 0
    relative = np.array([[1 / t, n / t] for n, t in measured.items()])
    scale = np.linalg.norm(relative, axis=0)
    _, least = nnls(relative / scale, np.ones(len(measured)))
    residual = float(np.linalg.norm(relative @ [alpha, beta] - 1))
    assert residual == pytest.approx(least, abs=1e-6)


def test_fit_is_the_same_bit_for_bit_whenever_it_is_computed() -> None:
    sizes, seconds = [4, 4096, 65536], [31e-6, 34.7e-6, 97.1e-6]
    elsewhere, fits = [], set()
    for size in range(50):  # as on ranks, each fit is computed with different tensors in memory
        elsewhere.append(torch.empty(size % 7 + 1))
        fits.add(fit_alpha_beta(sizes, seconds))
    assert len(fits) == 1


def test_table_has_a_row_for_each_size_and_a_column_for_each_strategy() -> None:
    times = AllReduceTimes(
        (4, 65536), {"exchange": (1e-5, 2e-5), "naive": (3e-5, 1.25e-3)}, 1.5e-5, 2.5e9
    )
    head, *rows, last = str(times).splitlines()
    assert head.split() == ["bytes", "exchange", "naive"]
    assert [row.split() for row in rows] == [
        ["4", "10.0", "µs", "30.0", "µs"],
        ["65536", "20.0", "µs", "1250.0", "µs"],
    ]
    assert last == "one message: α = 15.0 µs, 1/β = 2.500 GB/s"
    assert last == times.fit
    assert len({len(line) for line in (head, *rows)}) == 1
