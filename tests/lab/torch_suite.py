"""Run torch's own tests of ``torch.distributed``, which come with every torch wheel, in any world.

python tests/lab/torch_suite.py sim gloo mpi            # a line for each test, and the totals
python tests/lab/torch_suite.py sim --only test_broadcast

torch starts a process for each rank of a test. Here, a world of three ranks is started instead, and
each rank calls the test's method, as torch's processes do. Tests that torch skips on CPUs are
skipped. On ``sim``, the profiler is disabled, because all simulated ranks share one. On ``mpi``,
each test that is not skipped on ``sim`` runs in an mpirun job of its own.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import unittest
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from distlab import launch
from distlab.doctor import find_mpirun
from distlab.sim import SimulationError, simulate

NUM_RANKS = 3
SEED = 1234
TIMEOUT_S = 60.0
RANK = "--rank"  # marks a process that mpirun started
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Outcome(NamedTuple):
    """Outcome of a test, and its reason."""

    kind: str
    reason: str = ""


@cache
def suite() -> ModuleType:
    """Set the variables that torch's tests read; return the module with the tests."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=f"{NUM_RANKS}", TEMP_DIR=tempfile.gettempdir())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test

    return distributed_test


def names() -> list[str]:
    """Return the names of all tests."""
    return sorted(
        name for name in dir(suite().DistributedTest._DistTestBase) if "test_" in name[:5]
    )


def run_in(world: str, name: str) -> Outcome:
    """Run one test on three ranks of a world; a simulated world runs in this process."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if world == "mpi":
                return _in_mpi_job(name, folder)
            if world == "sim":
                found = simulate(on_rank, NUM_RANKS, name, folder, False).results
            else:
                found = launch.run(
                    on_rank, NUM_RANKS, name, folder, backend=world, timeout_s=TIMEOUT_S
                )
        except (launch.LaunchError, SimulationError) as error:
            return Outcome(FAILED, str(error).partition("\n")[0])
    return Outcome(*max(found))


def _in_mpi_job(name: str, folder: str) -> Outcome:
    simulated = run_in("sim", name)
    if simulated.kind == SKIPPED:
        return simulated
    command = [str(find_mpirun()), "-np", f"{NUM_RANKS}", sys.executable, __file__, RANK]
    job = subprocess.run(
        [*command, name, folder], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    outcome = re.search(r"^outcome (\w+) ?(.*)$", job.stdout, re.MULTILINE)
    if job.returncode == 0 and outcome:
        return Outcome(*outcome.groups())
    errors = [line for line in job.stderr.splitlines() if re.match(r"\S*(Error|rank )", line)]
    return Outcome(FAILED, next(iter(errors), f"mpirun ended with {job.returncode}"))


def _be_rank_of_mpi_job(name: str, folder: str) -> None:
    found = launch.run(on_rank, NUM_RANKS, name, folder, backend="mpi", timeout_s=TIMEOUT_S)
    if os.environ["PMI_RANK"] == "0":
        print("outcome", *max(found))


def on_rank(name: str, folder: str, has_profiler: bool = True) -> tuple[str, str]:
    """Run one rank of a test; return the outcome, or raise what the test raises."""
    skips = {skip.exit_code: skip.message for skip in _skips().values()}
    case = _case(name, folder)
    if not has_profiler:
        profilers: tuple[Any, ...] = (torch.autograd.profiler, torch.profiler)
        for profiler in profilers:
            profiler.profile = lambda *_, **__: contextlib.nullcontext()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(case, name)()
    except unittest.SkipTest as skip:
        return SKIPPED, str(skip)
    except SystemExit as end:
        if end.code not in skips:
            raise
        return SKIPPED, skips[end.code]
    return PASSED, ""


def _case(name: str, folder: str) -> Any:
    """Make this rank's test case, as torch's ``_run`` does in each process."""
    from torch.testing._internal.common_utils import set_rng_seed

    meet = _meeting_place()

    class Case(suite().TestDistBackend, suite().DistributedTest._DistTestBase):  # type: ignore[misc]
        def _barrier(self, *_: object, **__: object) -> None:
            meet()

    case: Any = Case(name)
    case.rank, case.file_name = dist.get_rank(), str(Path(folder) / "store")
    os.environ["TEMP_DIR"] = folder
    for inner in ("test_dir", "barrier", "init_dir"):
        (Path(folder) / inner).mkdir(exist_ok=True)
    set_rng_seed(SEED)
    return case


def _meeting_place() -> Callable[[], None]:
    """Return a barrier built on the store; torch's own uses files and needs separate processes."""
    store, times = _get_default_store(), count()

    def meet() -> None:
        key = f"met {next(times)}"
        if store.add(f"{key}, ranks", 1) == NUM_RANKS:
            store.set(key, "1")
        store.wait([key])

    return meet


def _skips() -> dict[str, Any]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return TEST_SKIPS


def main() -> None:
    """Run the tests in the worlds asked for, and print their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="+", choices=["sim", "gloo", "mpi"])
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    totals: dict[str, Counter[str]] = {world: Counter() for world in options.worlds}
    for name in options.only or names():
        outcomes = {world: run_in(world, name) for world in options.worlds}
        for world, outcome in outcomes.items():
            totals[world][outcome.kind] += 1
        print(name, *(f"{world}: {' '.join(o)}" for world, o in outcomes.items()), sep="\t")
    for world, total in totals.items():
        print(world, *(f"{total[kind]} {kind}" for kind in (PASSED, FAILED, SKIPPED)))


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        _be_rank_of_mpi_job(*sys.argv[2:])
    else:
        main()
