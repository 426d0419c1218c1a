"""Cycles and knots in the graph of waiting ranks."""

import pytest

from distlab.sim.postmortem.standstill import find_cycle, find_knots


@pytest.mark.parametrize(
    ("waits_for", "cycle"),
    [
        ({}, []),
        ({0: [1], 1: [2]}, []),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [0]}, [0]),
        ({2: [0], 0: [1], 1: [2]}, [0, 1, 2]),
        ({0: [1], 1: [2], 2: [3], 3: [1]}, [1, 2, 3]),
        ({0: [1, 2], 1: [3], 2: [0], 3: [0]}, [0, 2]),
        ({0: [5], 1: [2], 2: [1]}, [1, 2]),
    ],
)
def test_a_cycle_is_found_and_is_a_shortest(
    waits_for: dict[int, list[int]], cycle: list[int]
) -> None:
    assert find_cycle(waits_for) == cycle


@pytest.mark.parametrize(
    ("waits_for", "knots"),
    [
        ({}, []),
        ({0: [1], 1: [0]}, [[0, 1]]),
        ({0: [1], 1: [0], 2: [0], 3: [2, 1]}, [[0, 1]]),  # 2 and 3 only wait for the knot
        ({0: [1], 1: [0], 2: [3], 3: [2]}, [[0, 1], [2, 3]]),
        ({0: [1], 1: [0, 2], 2: [3], 3: [2]}, [[2, 3]]),  # 0 and 1 are no knot: 1 also waits for 2
        ({0: [9], 1: [0]}, []),  # 9 has ended
        ({0: [1, 9], 1: [0]}, []),
        ({3: [3]}, [[3]]),
        ({0: [1, 2], 1: [0, 2], 2: [0, 1]}, [[0, 1, 2]]),
    ],
)
def test_knots_wait_for_nobody_else(
    waits_for: dict[int, list[int]], knots: list[list[int]]
) -> None:
    assert find_knots(waits_for) == knots
