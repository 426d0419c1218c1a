"""What a program returns on the simulated cluster is what it returns on real processes."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

import programs
import pytest
import torch
import trainings
from torch import Tensor

from distlab import launch
from distlab.sim import simulate

WORLD_SIZES = (1, 2, 3, 5, 8)
TIMEOUT_S = 100.0


def on_gloo(program: programs.Program, world_size: int, *args: object) -> list[object]:
    return launch.run(program, world_size, *args, backend="gloo", timeout_s=TIMEOUT_S)


def on_sim(program: programs.Program, world_size: int, *args: object) -> list[object]:
    with warnings.catch_warnings():  # the programs change the filters
        return simulate(program, world_size, *args).results


def differences(
    simulated: object, real: object, tolerance: float, place: str = ""
) -> Iterator[str]:
    """Say where two results differ; floats may by ``tolerance`` of the larger one."""
    if type(simulated) is not type(real):
        yield f"{place}: simulated {type(simulated)} {simulated}, real {type(real)} {real}"
    elif isinstance(real, Tensor):
        yield from _tensor_differences(simulated, real, tolerance, place)
    elif isinstance(real, Mapping):
        yield from differences(list(simulated), list(real), 0.0, f"{place} keys")
        for key in real.keys() & simulated.keys():
            yield from differences(simulated[key], real[key], tolerance, f"{place}[{key!r}]")
    elif isinstance(real, Sequence) and not isinstance(real, str):
        if len(simulated) != len(real):
            yield f"{place}: simulated {len(simulated)} elements, real {len(real)}"
        for k, pair in enumerate(zip(simulated, real, strict=False)):
            yield from differences(*pair, tolerance, f"{place}[{k}]")
    elif isinstance(real, float):
        if abs(simulated - real) > tolerance * max(abs(simulated), abs(real)):
            yield f"{place}: simulated {simulated!r}, real {real!r}"
    elif simulated != real:
        yield f"{place}: simulated {simulated!r}, real {real!r}"


def _tensor_differences(
    simulated: Tensor, real: Tensor, tolerance: float, place: str
) -> Iterator[str]:
    ours, theirs = [(t.dtype, tuple(t.shape), t.requires_grad) for t in (simulated, real)]
    if ours != theirs:
        yield f"{place}: simulated {ours}, real {theirs}"
        return
    if tolerance and real.is_floating_point():
        same = torch.allclose(simulated, real, rtol=tolerance, atol=tolerance * 1e-2)
    else:
        same = torch.equal(simulated, real)
    if not same:
        yield f"{place}: simulated {simulated.tolist()}, real {real.tolist()}"


def assert_same(simulated: Sequence[object], real: Sequence[object], tolerance: float) -> None:
    found = list(
        chain.from_iterable(
            differences(*pair, tolerance, f"rank {rank}")
            for rank, pair in enumerate(zip(simulated, real, strict=True))
        )
    )
    assert not found, "\n".join(found[:20])


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

TOLERANCES = {2: 0.0, 4: 1e-12}  # of four numbers gloo makes the sum in another order


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
