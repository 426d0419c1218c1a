"""Plain data comes out of a pickle, code does not."""

import pickle
from typing import Any

import cloudpickle
import pytest

from distlab import launch
from distlab.launch import plain, protocol
from distlab.launch.protocol import Outcome, Report

PLAIN = [1, 2.5, "a", None, True, b"x", (1, [2.0]), {"k": {3, 4}}, 2**70, float("inf")]


class Same(list[int]):
    def __eq__(self, other: object) -> bool:
        return True


class Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_arrives_as_it_is(value: object) -> None:
    assert plain.loads(cloudpickle.dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "name"),
    [(Same([1]), "Same"), (Runs(), "exec"), (print, "print"), ([Outcome.OK], "Outcome")],
)
def test_anything_else_is_refused_and_not_run(value: object, name: str) -> None:
    with pytest.raises(plain.NotPlainError, match=name):
        plain.loads(cloudpickle.dumps(value))


def test_what_is_no_pickle_is_refused() -> None:
    for data in (b"", b"no pickle", pickle.dumps([1, 2])[:-3]):
        with pytest.raises(plain.NotPlainError, match="cannot be read"):
            plain.loads(data)


def test_classes_that_are_named_come_too_and_functions_beside_them_do_not() -> None:
    report = Report(Outcome.OK, 1)
    assert plain.loads(pickle.dumps(report), (Report, Outcome).__contains__) == report
    with pytest.raises(plain.NotPlainError, match=r"distlab\.launch\.protocol\.pickled"):
        plain.loads(pickle.dumps(protocol.pickled), lambda _: True)


def returns_a_list_that_equals_everything() -> object:
    return Same([1])


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_world_returns_plain_results_where_it_is_asked_to(backend: str) -> None:
    with pytest.raises(launch.RankFailed, match=r"returned .*Same, which is no plain data"):
        launch.run(returns_a_list_that_equals_everything, 2, backend=backend, plain_results=True)
    assert launch.run(returns_a_list_that_equals_everything, 2, backend=backend) == [Same(), Same()]
