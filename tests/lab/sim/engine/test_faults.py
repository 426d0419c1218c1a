"""Each fault costs exactly the time that it states, and changes nothing else."""

import math
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everything import a_bit_of_everything
from programs import me

from distlab.sim import Cluster, Deadlock, Faults, Options, simulate


def multiplies() -> float:
    x = torch.ones(256, 256)
    for _ in range(4):
        x = x @ x / 256
    before = time.perf_counter()
    dist.barrier()
    return before


def test_a_slow_rank_computes_slower_and_all_wait_for_it() -> None:
    usual = simulate(multiplies, 4, cluster="dgx-h100")
    slow = simulate(
        multiplies, 4, cluster="dgx-h100", options=Options(faults=Faults(slow_ranks={2: 3.0}))
    )
    for rank in range(4):
        factor = 3.0 if rank == 2 else 1.0
        assert slow.results[rank] == pytest.approx(factor * usual.results[rank])
    assert slow.seconds == pytest.approx(usual.seconds + 2.0 * usual.results[2])


def sends_a_megabyte() -> float:
    x = torch.zeros(250_000)
    if me() == 0:
        dist.send(x, 1)
    elif me() == 1:
        dist.recv(x, 0)
    return time.perf_counter()


def test_a_slow_link_and_a_delay_take_the_time_they_say() -> None:
    cluster = Cluster(1, 2)
    route = cluster.route(0, 1)
    usual_s = simulate(sends_a_megabyte, 2, cluster=cluster).seconds
    bytes_per_s = min(cluster.links[link].bytes_per_s for link in route.links)
    assert usual_s == pytest.approx(route.latency_s + 1e6 / bytes_per_s, rel=1e-12)

    slow = Faults(slow_links={"*": 10.0})
    slow_s = simulate(sends_a_megabyte, 2, cluster=cluster, options=Options(faults=slow)).seconds
    assert slow_s == pytest.approx(route.latency_s + 1e7 / bytes_per_s, rel=1e-12)

    late = Faults(delays_s={(0, 1): 0.25})
    late_s = simulate(sends_a_megabyte, 2, cluster=cluster, options=Options(faults=late)).seconds
    assert late_s == pytest.approx(usual_s + 0.25, rel=1e-12)
    other_way = Faults(delays_s={(1, 0): 0.25})
    options = Options(faults=other_way)
    assert simulate(sends_a_megabyte, 2, cluster=cluster, options=options).seconds == usual_s


def test_jitter_changes_the_history_and_not_the_results() -> None:
    usual = simulate(a_bit_of_everything, 5)
    jittered = [
        simulate(a_bit_of_everything, 5, options=Options(faults=Faults(jitter_s=1e-5, seed=seed)))
        for seed in (0, 0, 1, 2)
    ]
    sums = [[result[:5] for result in run.results] for run in (usual, *jittered)]
    assert all(result == sums[0] for result in sums)
    digests = [run.trace.digest() for run in (usual, *jittered)]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 4
    assert all(run.seconds > usual.seconds for run in jittered)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"jitter_s": -1e-6}, "seconds of 'jitter_s' must be 0 or more, got -1e-06"),
        ({"delays_s": {(0, 1): -0.5}}, r"seconds of \(0, 1\) must be 0 or more, got -0.5"),
        ({"kill_ranks": {2: math.nan}}, "seconds of 2 must be 0 or more, got nan"),
        ({"slow_ranks": {2: 0.0}}, "factor of 2 must be above 0, got 0.0"),
        ({"slow_links": {"node*": -1.0}}, r"factor of 'node\*' must be above 0, got -1.0"),
    ],
)
def test_impossible_faults_are_refused_when_they_are_made(
    faults: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Faults(**faults)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rign"}, "there is no algorithm 'rign'; valid: auto"),
        ({"p2p_order": "nccl"}, "p2p_order 'nccl'; valid: free, pair"),
        ({"overlap_cost": -0.1}, "overlap_cost must be 0 or more"),
    ],
)
def test_impossible_options_are_too(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)


def trains(steps: int) -> int:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        parameter.sum().backward()
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return steps


@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_dies_as_it_begins_the_step_that_is_named(step: int) -> None:
    faults = Faults(kill_at_steps={1: step})
    with pytest.raises(Deadlock, match="rank 1 was killed by a fault") as caught:
        simulate(trains, 3, 4, options=Options(faults=faults))
    assert {call.text.partition(" (")[0] for call in caught.value.calls} == {"all_reduce"}
    assert f"call {step + 1} of" in str(caught.value)  # rank 1 had made all earlier calls
    steps = "1 optimizer step" if step == 1 else f"{step} optimizer steps"
    where = rf"rank 1 +killed by a fault at .*s, {steps} begun +test_faults.py:\d+ in trains"
    assert re.search(where, str(caught.value))


def steps_before_its_first_call() -> None:
    x = torch.nn.Parameter(torch.ones(256, 256))
    (x @ x @ x @ x).sum().backward()
    torch.optim.SGD([x], lr=0.1).step()
    dist.barrier()


@pytest.mark.parametrize(
    ("kill_s", "text"),
    [
        (1e-6, r"killed by a fault at 1.00 µs +test_faults.py:\d+ in steps_before"),
        (0.0, "killed by a fault at 0 s +before its first call"),
    ],
)
def test_a_rank_dies_at_the_time_of_the_fault(kill_s: float, text: str) -> None:
    """Its program ends later, at its next call: what it does in between does not count."""
    faults = Faults(kill_ranks={1: kill_s})
    with pytest.raises(Deadlock) as caught:
        simulate(steps_before_its_first_call, 2, cluster="dgx-h100", options=Options(faults=faults))
    assert re.search(text, str(caught.value)), str(caught.value)


def test_steps_count_from_one_and_ranks_must_exist() -> None:
    with pytest.raises(ValueError, match="steps count from 1, but rank 2 has 0"):
        Faults(kill_at_steps={2: 0})
    with pytest.raises(ValueError, match="kill_at_step: there is no rank 7"):
        simulate(trains, 2, 1, options=Options(faults=Faults(kill_at_steps={7: 1})))


def test_faults_are_read_as_people_write_them() -> None:
    texts = ["slow_rank 3 2.0", "slow_rank 1 3", "slow_link node0.nic* 10", "kill_rank 5 0.01"]
    texts += ["kill_at_step 2 3", "delay 0 1 1e-6", "jitter 1e-3"]
    assert Faults.parse(texts, seed=7) == Faults(
        slow_ranks={3: 2.0, 1: 3.0},
        slow_links={"node0.nic*": 10.0},
        kill_ranks={5: 0.01},
        kill_at_steps={2: 3},
        delays_s={(0, 1): 1e-6},
        jitter_s=1e-3,
        seed=7,
    )
    assert Faults.parse([]) == Faults()
