"""Ranks share a core if handing it over is fast, and the process gets all its cores back."""

import os
import sys

import pytest

from distlab.sim import simulate
from distlab.sim.isolation import host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen on Linux only")


def cores() -> set[int]:
    return os.sched_getaffinity(0)


@pytest.mark.parametrize(("hand_over_s", "is_one"), [(1e-6, True), (1.0, False)])
def test_ranks_share_a_core_if_handing_over_is_fast_there(
    hand_over_s: float, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cores()
    if len(before) < 2:
        pytest.skip("there is only one core")
    monkeypatch.setattr(host, "hand_over_s", lambda: hand_over_s)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    seen = simulate(cores, 3).results
    assert all(len(found) == 1 for found in seen) is is_one
    assert len({frozenset(found) for found in seen}) == 1
    assert set.union(*seen) <= before
    assert cores() == before


def test_a_hand_over_is_measured() -> None:
    assert 0 < host.hand_over_s() < 0.1
