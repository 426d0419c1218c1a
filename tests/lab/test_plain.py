"""Plain data within limits arrives unchanged; code, classes and bombs do not arrive."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distlab import launch, sim
from distlab.launch import plain
from distlab.launch.protocol import Outcome, WorldFolder
from distlab.sim import Cluster  # noqa: F401 (the name in a string below)

NUMBERS = st.integers(-(2**1000) + 1, 2**1000 - 1) | st.floats(allow_nan=False)
TEXTS = st.text(st.characters(codec=None, exclude_categories=()))  # lone surrogates included
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS | st.binary()
KEYS = st.recursive(SCALARS, lambda keys: st.tuples(keys, keys) | st.frozensets(keys), max_leaves=4)


def containers(values: Any) -> Any:
    sequences = st.lists(values) | st.lists(values).map(tuple) | st.dictionaries(KEYS, values)
    return sequences | st.sets(KEYS) | st.frozensets(KEYS)


class Same(list[int]):
    def __eq__(self, other: object) -> bool:
        return True


class Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@given(st.recursive(SCALARS, containers, max_leaves=20))
def test_plain_data_arrives_as_it_is(value: object) -> None:
    arrived = plain.loads_result(plain.dumps_result(value))
    assert repr(arrived) == repr(value) or arrived == value  # the order of a set may differ
    assert type(arrived) is type(value)


def itself() -> object:
    value: list[object] = []
    value.append(value)
    return value


def doubling() -> object:
    """Return lists nested 40 deep, in which a traversal would visit 2^40 items."""
    value: object = 1
    for _ in range(40):
        value = [value, value]
    return value


REFUSED: dict[str, Any] = {
    "test_plain.Same, which is not plain data": Same([1]),
    "test_plain.Runs, which is not plain data": Runs(),
    "builtins.print, which is": print,
    "protocol.Outcome, which is": [Outcome.OK],
    "torch.Tensor, which is": {"loss": torch.ones(1)},
    "numpy.float64, which is": (np.float64(1),),
    "builtins.complex, which is": 1j,
    "containers inside of each other, or of themselves, .*; the limit is 50": itself(),
    "inside of each other, .* the limit is 50": nested(51),
    "too many items; the limit is 2,000,000": doubling(),
    "too many items": dict.fromkeys(range(2_000_000)),
    "an int of 16610 bits; the limit is 1000": {"num_targets": 10**5000},
    "an int of 1002 bits": -(2**1001),
    "a str of 95.4 MiB; the limit is 16.0 MiB": 100_000_000 * "x",
    "a list of 17.2 MiB; the limit is 16.0 MiB": [0.1234567890123456] * 950_000,
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_plain_or_too_much_arrives_as_the_reason(says: str) -> None:
    with pytest.raises(plain.NotPlainError, match=says):
        plain.loads_result(plain.dumps_result(REFUSED[says]))


HOSTILE = {
    "nothing": b"",
    "no JSON": b"no JSON",
    "half of it": plain.dumps([1, 2])[:-3],
    "an unknown tag": b'{"x":[1]}',
    "two tags": b'{"t":[1],"s":[1]}',
    "a tag without items": b'{"d":null}',
    "a key without a value": b'{"d":[1]}',
    "a key that has no hash": b'{"d":[[1],1]}',
    "more bytes than came": b'{"b":3}\nab',
    "a negative length": b'{"b":-1}\nab',
    "an int of a million digits": b"9" * 1_000_000,
    "lists in lists": b"[" * 1_000_000,
    "tuples in tuples": b'{"t":[' * 500_000 + b"]}" * 500_000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(plain.NotPlainError, match="cannot be read"):
        plain.loads_result(data)


def test_many_small_containers_are_refused_before_they_take_memory() -> None:
    with pytest.raises(plain.NotPlainError, match="too many items"):
        plain.loads(b"[" + b"[]," * 2_000_000 + b"[]]")


@pytest.mark.parametrize("tag", ["s", "d"])
def test_keys_that_share_a_hash_are_refused(tag: str) -> None:
    """Use multiples of 2^61 - 1, which all have the same hash, and so are slow to look up."""
    same = [place * (2**61 - 1) for place in range(100_000)]
    items = [item for number in same for item in (number, 0)] if tag == "d" else same
    with pytest.raises(plain.NotPlainError, match="100000 keys with the same hash"):
        plain.loads(json.dumps({tag: items}).encode())


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
def test_what_is_not_a_report_is_refused(tmp_path: Path, forged: object) -> None:
    (tmp_path / "rank-0.report").write_bytes(plain.dumps(forged))
    with pytest.raises(plain.NotPlainError, match="report"):
        WorldFolder(tmp_path).read_report(0)


def test_a_report_that_would_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.report")
    (tmp_path / "rank-1.report").symlink_to("/dev/zero")
    for rank in (0, 1, 2):
        with pytest.raises(OSError, match=r"rank-\d"):
            WorldFolder(tmp_path).read_report(rank)


@pytest.mark.parametrize("plain_results", [False, True])
def test_a_simulation_arrives_whole(plain_results: bool) -> None:
    simulated = launch.simulate(sends_its_rank, 3, cluster="laptop", plain_results=plain_results)
    here = sim.simulate(sends_its_rank, 3, cluster="laptop")
    assert simulated.trace.digest() == here.trace.digest()
    assert simulated.trace.state().keys() == here.trace.state().keys()
    assert (simulated.cluster.name, simulated.options) == (here.cluster.name, here.options)
    assert (simulated.results, simulated.flops) == (here.results, here.flops)


def sends_its_rank() -> list[int]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    return ranks


def returns_on_rank_1(make: str) -> object:
    return eval(make) if dist.get_rank() == 1 else 0


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("Same([1])", "Same, which is not plain data"),
        ("Cluster(1, 2)", r"distlab.*Cluster, which is not plain"),
        ("100_000_000 * 'x'", "a str of 95.4 MiB; the limit is"),
    ],
)
def test_the_error_names_the_rank_and_what_came(backend: str, make: str, says: str) -> None:
    with pytest.raises(launch.RankFailed, match=f"rank 1 of 2 returned .*{says}"):
        launch.run(returns_on_rank_1, 2, make, backend=backend, plain_results=True)
