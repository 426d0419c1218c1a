"""Programs return the same results on the simulated cluster and on real processes."""

import warnings
from functools import cache
from typing import Any

import programs
import pytest
import trainings
from same import assert_same

from distlab import launch
from distlab.sim import simulate

TIMEOUT_S = 600.0
WORLD_SIZES = (1, 2, 5)  # a single rank, an even and an odd number; eight processes in all
TOLERANCES = {2: 0.0, 4: 1e-12}  # gloo adds four numbers in a different order
CASES = [
    *((programs.all_calls, n, 0.0, call) for n in WORLD_SIZES for call in programs.CALLS),
    *(
        (trainings.all_trainings, *n, each)
        for n in TOLERANCES.items()
        for each in trainings.TRAININGS
    ),
]


@cache
def results(program: programs.Program, world_size: int, world: str) -> list[Any]:
    if world == "gloo":
        return launch.run(program, world_size, backend="gloo", timeout_s=TIMEOUT_S)
    with warnings.catch_warnings():  # restores the warning filters, which the programs change
        return simulate(program, world_size).results


@pytest.mark.parametrize(("program", "world_size", "tolerance", "name"), CASES)
def test_a_program_gives_what_it_gives_on_gloo(
    program: programs.Program, world_size: int, tolerance: float, name: str
) -> None:
    simulated, real = (
        [result[name] for result in results(program, world_size, world)]
        for world in ("sim", "gloo")
    )
    assert_same(simulated, real, tolerance)
