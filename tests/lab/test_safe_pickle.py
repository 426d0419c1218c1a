"""Plain data comes out of a pickle, code does not."""

import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch.distributed as dist

from distlab import launch, sim
from distlab.launch import safe_pickle, simulation_report
from distlab.launch.protocol import Outcome, Report, SimulationSpec, WorldFolder
from distlab.sim import Cluster

PLAIN = [1, 2.5, "a", None, True, b"x", (1, [2.0]), {"k": {3, 4}}, 2**70, float("inf")]


class Same(list[int]):
    def __eq__(self, other: object) -> bool:
        return True


class Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_arrives_as_it_is(value: object) -> None:
    assert safe_pickle.loads(cloudpickle.dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "name"),
    [(Same([1]), "Same"), (Runs(), "exec"), (print, "print"), ([Outcome.OK], "Outcome")],
)
def test_anything_else_is_refused_and_not_run(value: object, name: str) -> None:
    with pytest.raises(safe_pickle.NotPlainError, match=name):
        safe_pickle.loads(cloudpickle.dumps(value))


def test_what_is_no_pickle_is_refused() -> None:
    for data in (b"", b"no pickle", pickle.dumps([1, 2])[:-3]):
        with pytest.raises(safe_pickle.NotPlainError, match="cannot be read"):
            safe_pickle.loads(data)


def test_a_key_too_deep_to_be_hashed_is_refused_and_not_the_end_of_this_process() -> None:
    deep = b"\x80\x04})" + b"\x85" * 400_000 + b"K\x01s."
    with pytest.raises(safe_pickle.NotPlainError, match=r"signal 1[01]"):
        safe_pickle.loads(deep)


def shared(num_levels: int) -> bytes:
    """A tuple that holds the next one twice, and so on, as a key: its hash takes 2^n steps."""
    return b"\x80\x04})" + b"2\x86" * num_levels + b"K\x01s."


@pytest.mark.parametrize("num_levels", [30, 70, 10_000])
def test_a_key_whose_hash_never_ends_is_refused(num_levels: int) -> None:
    with pytest.raises(safe_pickle.NotPlainError, match="a key of more than 1000 items"):
        safe_pickle.loads(shared(num_levels))


def test_what_takes_too_long_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "TRIAL_TIMEOUT_S", 1.0)
    with pytest.raises(safe_pickle.NotPlainError, match="not read within 1 s"):
        safe_pickle.loads(shared(safe_pickle.FEW_BYTES))


KEYED = [
    {(number, str(number)): (number,) for number in range(10_000)},
    {(1, (2, frozenset({"a", (3,)}))): {4, (5, 6)}, None: {}, "x": frozenset()},
    [{}, set(), {1: {2: {3: ()}}}],
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", KEYED)
def test_dicts_and_sets_arrive_as_they_are(value: object, protocol: int) -> None:
    if protocol < 4 and "frozenset" in repr(value) + repr({frozenset()}):
        value = [{number: (number,)} for number in range(5)]  # before, sets came as classes
    assert safe_pickle.loads(pickle.dumps(value, protocol)) == value


FORGED = (
    # the class on the stack, changed by BUILD; then a list of one instance of it
    b"cdistlab.sim.collectives.phases\nPhase\n(N}S'__eq__'\ncdistlab.sim.reporting.errors\nSimulationError\nstb0]"
    b"(cdistlab.sim.collectives.phases\nPhase\noa."
)


def test_classes_of_distlab_are_refused_too() -> None:
    for data in (FORGED, pickle.dumps(Cluster(1, 2)), pickle.dumps(Report(Outcome.OK, 1))):
        with pytest.raises(safe_pickle.NotPlainError, match="distlab"):
            safe_pickle.loads(data)


@pytest.mark.parametrize(
    "forged",
    [
        {"outcome": "ok"},
        {"outcome": "ok", "at_ns": "x"},
        {"outcome": "perfect", "at_ns": 1},
        {"outcome": "ok", "at_ns": 1, "modules": None},
        {"outcome": "ok", "at_ns": 1, "more": 1},
        [],
        None,
    ],
)
def test_what_is_no_report_is_none(tmp_path: Path, forged: object) -> None:
    folder = WorldFolder(tmp_path)
    (tmp_path / "rank-0.report").write_bytes(pickle.dumps(forged))
    with pytest.raises(safe_pickle.NotPlainError, match="report"):
        folder.read_report(0)


def test_a_report_that_would_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.report")
    (tmp_path / "rank-1.report").symlink_to("/dev/zero")
    for rank in (0, 1, 2):
        with pytest.raises(OSError, match=r"rank-\d"):
            WorldFolder(tmp_path).read_report(rank)


def test_a_report_arrives_as_it_was_written(tmp_path: Path) -> None:
    report = Report(Outcome.EXCEPTION, 7, b"x", "ValueError", "ValueError: no", "…", ("pytest",))
    WorldFolder(tmp_path).write_report(3, report)
    assert WorldFolder(tmp_path).read_report(3) == report


def test_a_simulation_that_is_asked_for_arrives_whole() -> None:
    for plain_results in (False, True):
        simulated = launch.simulate(
            sends_its_rank, 3, cluster="laptop", plain_results=plain_results
        )
        here = sim.simulate(sends_its_rank, 3, cluster="laptop")
        assert simulated.trace.digest() == here.trace.digest()
        assert simulated.trace.state().keys() == here.trace.state().keys()
        assert (simulated.cluster.name, simulated.options) == (here.cluster.name, here.options)
        assert (simulated.results, simulated.flops) == (here.results, here.flops)


def sends_its_rank() -> list[int]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    return ranks


@pytest.mark.parametrize("sent", [None, [], {}, "error", {"error": "exec", "message": ""}])
def test_what_is_no_simulation_is_refused(sent: object) -> None:
    spec = SimulationSpec(2, None, None, wants_trace=True)
    with pytest.raises(safe_pickle.NotPlainError, match="no simulation"):
        simulation_report.read(pickle.dumps(sent), spec, plain_results=True)


def returns_a_list_that_equals_everything() -> object:
    return Same([1])


def returns_a_cluster() -> object:
    return Cluster(1, 2)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_world_returns_plain_results_where_it_is_asked_to(backend: str) -> None:
    with pytest.raises(launch.RankFailed, match=r"returned .*Same, which is not plain data"):
        launch.run(returns_a_list_that_equals_everything, 2, backend=backend, plain_results=True)
    with pytest.raises(launch.RankFailed, match=r"returned distlab.*Cluster, which is not plain"):
        launch.run(returns_a_cluster, 2, backend=backend, plain_results=True)
    assert launch.run(returns_a_list_that_equals_everything, 2, backend=backend) == [Same(), Same()]
