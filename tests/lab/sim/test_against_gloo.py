"""Programs return the same results on the simulated cluster and on real processes."""

import warnings
from functools import cache

import programs
import pytest
import trainings
from same import assert_same

from distlab import launch
from distlab.sim import simulate

WORLD_SIZES = (1, 2, 5)  # a single rank, an even and an odd number; eight processes in all
TIMEOUT_S = 600.0


def on_gloo(program: programs.Program, world_size: int, *args: object) -> list[object]:
    return launch.run(program, world_size, *args, backend="gloo", timeout_s=TIMEOUT_S)


def on_sim(program: programs.Program, world_size: int, *args: object) -> list[object]:
    with warnings.catch_warnings():  # restores the warning filters, which the programs change
        return simulate(program, world_size, *args).results


# --- the functions of torch.distributed ----------------------------------------------------------


@cache
def all_calls(world: str, world_size: int) -> list[dict[str, object]]:
    run = on_sim if world == "sim" else on_gloo
    return run(programs.all_calls, world_size)


@pytest.mark.parametrize("name", programs.CALLS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_call_gives_what_it_gives_on_gloo(world_size: int, name: str) -> None:
    simulated, real = (
        [results[name] for results in all_calls(world, world_size)] for world in ("sim", "gloo")
    )
    assert_same(simulated, real, tolerance=0.0)


# --- torch's parallel modules, and the course's own ----------------------------------------------

TOLERANCES = {2: 0.0, 4: 1e-12}  # gloo adds four numbers in a different order


@cache
def all_trainings(world: str, world_size: int) -> list[dict[str, object]]:
    run = on_sim if world == "sim" else on_gloo
    return run(trainings.all_trainings, world_size)


@pytest.mark.parametrize("name", trainings.TRAININGS)
@pytest.mark.parametrize("world_size", TOLERANCES)
def test_training_gives_what_it_gives_on_gloo(world_size: int, name: str) -> None:
    simulated, real = (
        [results[name] for results in all_trainings(world, world_size)] for world in ("sim", "gloo")
    )
    assert_same(simulated, real, TOLERANCES[world_size])
