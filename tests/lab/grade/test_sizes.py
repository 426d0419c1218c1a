"""What a submission returns, prints or leaves beside itself is bounded; more is its failure."""

import contextlib
import os
import pickle
import re
import resource
from collections.abc import Callable
from typing import Any

import pytest

from distlab import launch
from distlab.launch import safe_pickle
from distlab.launch.protocol import WorldFolder


def itself() -> object:
    value: list[object] = []
    value.append(value)
    return value


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def doubling() -> object:
    """2**60 items for who walks it, 60 for pickle."""
    value: object = 1
    for _ in range(40):
        value = [value, value]
    return value


TOO_MUCH: list[tuple[Callable[[], object], str]] = [
    (itself, "inside of each other, or of themselves"),
    (lambda: nested(200), "the limit is 50"),
    (doubling, "too many items; the limit is 2,000,000"),
    (lambda: {"num_targets": 10**5000}, "an int of 16610 bits; the limit is 1000"),
    (lambda: -(2**1001), "an int of 1002 bits"),
    (lambda: dict.fromkeys(range(10**7)), r"[\d.]+ MiB; the limit is 16.0 MiB"),
    (lambda: 100_000_000 * "x", "95.4 MiB; the limit is 16.0 MiB"),
]


@pytest.mark.parametrize(("value", "says"), TOO_MUCH, ids=[says for _, says in TOO_MUCH])
def test_a_result_that_cannot_be_judged_is_refused(value: Callable[[], object], says: str) -> None:
    with pytest.raises(safe_pickle.NotPlainError, match=says):
        safe_pickle.loads_result(pickle.dumps(value()))


@pytest.mark.parametrize("value", [nested(50), 2**1000 - 1, float("nan"), list(range(10**6)), ""])
def test_what_can_be_judged_arrives(value: object) -> None:
    assert repr(safe_pickle.loads_result(pickle.dumps(value))) == repr(value)


BOMBS = [
    b"I1\nr\xff\xff\xff\x7f.",  # a memo of 2**31 places
    b"\x80\x04]" + b"]\x94" * 4_000_000 + b".",
]


@pytest.mark.parametrize("bomb", BOMBS, ids=["memo", "lists"])
def test_a_small_pickle_cannot_ask_for_much_memory(
    bomb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_pickle, "MAX_UNPICKLING_BYTES", 2**27)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(safe_pickle.NotPlainError):  # what fits may arrive
        safe_pickle.loads_result(bomb)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib * 1024 < 2 * safe_pickle.MAX_UNPICKLING_BYTES
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def returns_on_rank_1(make: str) -> Any:
    import torch.distributed as dist

    return eval(make) if dist.get_rank() == 1 else 0


@pytest.mark.parametrize("backend", ["gloo", "sim"])
@pytest.mark.parametrize("make", ["100_000_000 * 'x'", "10**5000"])
def test_the_error_names_the_rank_what_came_and_the_limit(backend: str, make: str) -> None:
    with pytest.raises(launch.RankFailed, match=r"rank 1.*; the limit is"):
        launch.run(returns_on_rank_1, 2, make, backend=backend, plain_results=True)


def forges_a_report(num_bytes: int) -> None:
    """Put a file of any size where the report goes, and stop there."""
    import gc

    folder = next(
        o for o in gc.get_objects() if isinstance(o, WorldFolder) and o.path.name != "none"
    )
    path = folder.path / "rank-0.report"
    path.touch()
    os.truncate(path, num_bytes)
    WorldFolder.write_report = lambda *_: None  # type: ignore[method-assign]


def test_a_report_of_3_gb_is_not_read() -> None:
    with pytest.raises(launch.RankFailed, match="has 3,000,000,000 bytes, limit 67,108,864"):
        launch.run(forges_a_report, 1, 3_000_000_000, backend="gloo", plain_results=True)


def prints(num_lines: int) -> None:
    for number in range(num_lines):
        print(f"line {number} " + 90 * "x")


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_what_ranks_print_is_shown_up_to_a_limit_then_its_end(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    launch.run(prints, 1, 100_000, backend=backend, plain_results=True)
    shown = capfd.readouterr().out
    assert len(shown) < 300_000
    assert "line 0 " in shown
    assert re.search(r"\n\[of 10,[\d,]+ bytes of output, the rest is not shown\]\n", shown)
    assert shown.splitlines()[-1].startswith("line 99999 xxx")


def test_an_own_program_may_print_and_return_as_it_likes(capfd: pytest.CaptureFixture[str]) -> None:
    launch.run(prints, 1, 10_000, backend="gloo")
    assert len(capfd.readouterr().out) > 1_000_000
    assert len(launch.run(returns_on_rank_1, 2, "20_000_000 * 'x'", backend="gloo")[1]) == 2e7
