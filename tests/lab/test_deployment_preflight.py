"""The check of nodes before a training: what it blames, and that it runs on real processes."""

import os
import subprocess
import sys

import pytest
from deployment_files import ROOT
from processes import free_port

from distlab.production import preflight
from distlab.production.preflight import Pair
from distlab.sim.hardware.presets import CLUSTERS

TIMEOUT_S = 600
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CHECK = ["-m", "distlab.production.preflight", "--seconds=0"]
HOPELESS = ["dgx-h100", "--share=1e9"]  # nothing is as fast as that


def started(
    options: list[str], check: list[str], name: str, ranks: int = 2
) -> "subprocess.Popen[str]":
    """Start the check of one node."""
    command = [*TORCHRUN, f"--nproc-per-node={ranks}", *options, *CHECK, *check]
    own = {"PYTHONPATH": str(ROOT), "SLURMD_NODENAME": name, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    """Wait for processes; return the code and the two outputs of each."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(each.returncode, *two) for each, two in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize(("check", "is_well"), [([], True), (HOPELESS, False)])
def test_a_node_alone(check: list[str], is_well: bool) -> None:
    [(code, out, told)] = ended([started(["--standalone"], check, "node7")])
    assert (code == 0, out.strip()) == (is_well, "")
    for what in ("GPU 0: products per GPU: ", "GPU 1: ", "all-reduce inside the node: "):
        assert (what in told) == (not is_well)


def test_a_node_with_one_gpu_has_no_links_inside() -> None:
    slow = ["ethernet-10g", "--share=1e9"]  # has a rate inside a node, and none of a GPU
    [(code, *_)] = ended([started(["--standalone"], slow, "node7", ranks=1)])
    assert code == 0


def test_nodes_that_are_slow_together_are_named() -> None:
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-id=check"
    options = ["--nnodes=3", "--local-addr=127.0.0.1", *meeting.split()]
    nodes = [started(options, HOPELESS, f"node{number}", ranks=1) for number in (4, 5, 6)]
    codes, outs, _ = zip(*ended(nodes), strict=True)
    assert "".join(outs).split() == ["node4", "node5", "node6"]
    assert {*codes} == {1}


def test_neighbours_are_those_in_a_ring() -> None:
    assert preflight.pairs_of(["a", "b"]) == [("a", "b")]
    assert preflight.pairs_of(["a", "b", "c"]) == [("a", "b"), ("b", "c"), ("c", "a")]


@pytest.mark.parametrize(
    ("slow", "bad"),
    [
        ([], []),
        ([("a", "b"), ("b", "c")], ["b"]),
        ([("c", "d"), ("d", "a")], ["d"]),
        ([("b", "c")], []),  # a cable, perhaps: neither end is slow with its other neighbour
        ([("a", "b"), ("b", "c"), ("c", "d")], ["b", "c"]),
    ],
)
def test_the_node_that_both_neighbours_are_slow_with_is_bad(
    slow: list[Pair], bad: list[str]
) -> None:
    found = {pair: ["slow"] if pair in slow else [] for pair in preflight.pairs_of("abcd")}
    assert preflight.bad_nodes(found) == bad


def test_of_two_nodes_neither_is_blamed() -> None:
    assert preflight.bad_nodes({("a", "b"): ["slow"]}) == []


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_each_preset_has_rates(cluster: str) -> None:
    rates = preflight.rates_of(cluster, 8)
    assert 0 < rates.between <= rates.inside
    assert (rates.flops_per_s > 0) == (CLUSTERS[cluster].gpu is not None)


def test_ranks_that_use_a_part_of_a_node_have_a_part_of_its_network() -> None:
    """A rack of 72 GPUs is a node of the preset, but Slurm's nodes have four of them."""
    assert preflight.rates_of("gb200-nvl72", 4).between == 4 * 400e9 / 8
    assert preflight.rates_of("dgx-h100", 1).between == 400e9 / 8
    assert preflight.rates_of("ethernet-10g", 1).between == pytest.approx(10e9 * 0.94 / 8)
