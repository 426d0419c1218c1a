"""Clusters: the routes of each topology, presets with a source for each number, and errors."""

import itertools
from typing import Any

import pytest

from distlab.sim.hardware.cluster import GPU, PRESETS, Cluster
from distlab.sim.hardware.presets import CLUSTERS, GPUS, Number
from distlab.sim.hardware.topology import TOPOLOGIES


def names(cluster: Cluster, src: int, dst: int) -> list[str]:
    """Return the names of the links on the route from src to dst."""
    return [cluster.links[link].name for link in cluster.route(src, dst).links]


def speeds(cluster: Cluster) -> dict[str, float]:
    return {link.name: link.bytes_per_s for link in cluster.links}


def small(topology: str, nodes: int = 2) -> Cluster:
    return Cluster(nodes, 4, topology=topology)


# --------------------------------------------------------------------------- every topology


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_there_is_a_route_between_any_two_gpus(topology: str, nodes: int) -> None:
    cluster = small(topology, nodes)
    for src, dst in itertools.permutations(range(cluster.num_gpus), 2):
        route = cluster.route(src, dst)
        assert route.links
        assert len(set(route.links)) == len(route.links)
        assert route.latency_s >= cluster.latency_s


# ----------------------------------------------------------------------------- switch, ethernet


def test_switch_uses_ports_inside_a_node_and_nics_between_nodes() -> None:
    cluster = Cluster(2, 4, latency_s=3e-6, net_latency_s=8e-6)
    assert names(cluster, 0, 1) == ["node0.gpu0.out", "node0.gpu1.in"]
    assert names(cluster, 2, 5) == ["node0.nic2.out", "node1.nic1.in"]
    assert cluster.route(0, 1).latency_s == 3e-6
    assert cluster.route(2, 5).latency_s == 8e-6
    assert speeds(cluster)["node0.gpu0.out"] == 300e9
    assert speeds(cluster)["node1.nic1.in"] == 25e9


def test_ethernet_crosses_pcie_and_the_one_nic_of_each_node() -> None:
    # gpu1 ── host ── nic0 ═══ nic0 ── host ── gpu0
    cluster = Cluster(2, 2, topology="ethernet", nvlink_bytes_per_s=31e9, nic_bytes_per_s=1e9)
    assert names(cluster, 1, 2) == [
        "node0.gpu1.out",
        "node0.nic0.out",
        "node1.nic0.in",
        "node1.gpu0.in",
    ]
    assert names(cluster, 0, 1) == ["node0.gpu0.out", "node0.gpu1.in"]
    assert speeds(cluster)["node0.nic0.out"] == 1e9


# -------------------------------------------------------------------------------- rail-optimised


def test_the_same_rail_goes_from_nic_to_nic() -> None:
    cluster = Cluster(2, 4, topology="rail-optimised", net_latency_s=8e-6)
    assert names(cluster, 1, 5) == ["node0.nic1.out", "node1.nic1.in"]
    assert cluster.route(1, 5).latency_s == 8e-6


def test_another_rail_is_reached_over_nvlink_to_its_gpu_at_home() -> None:
    #  node 0    gpu0 ═ NVLink ═> gpu2        rail 2 is the only one that reaches
    #                             nic2        gpu2 of node 1, which is GPU 6
    #  rail 2                      │
    #  node 1                     nic2 -> gpu2
    cluster = Cluster(2, 4, topology="rail-optimised", net_latency_s=8e-6, hop_latency_s=2e-6)
    assert names(cluster, 0, 6) == [
        "node0.gpu0.out",
        "node0.gpu2.in",
        "node0.nic2.out",
        "node1.nic2.in",
    ]
    assert cluster.route(0, 6).latency_s == pytest.approx(8e-6 + 2e-6)


# -------------------------------------------------------------------------------------- fat-tree


def test_fat_tree_passes_the_up_links_only_between_leaves() -> None:
    #            spine
    #        ┌─────┴─────┐
    #      leaf0       leaf1
    #     ┌──┴──┐     ┌──┴──┐
    #   node0 node1 node2 node3       2 GPUs each: GPU 0, 1 | 2, 3 | 4, 5 | 6, 7
    cluster = Cluster(4, 2, topology="fat-tree", nodes_per_leaf=2, oversubscription=4)
    assert names(cluster, 0, 3) == ["node0.nic0.out", "node1.nic1.in"]
    assert names(cluster, 0, 7) == ["node0.nic0.out", "leaf0.up", "leaf1.down", "node3.nic1.in"]
    assert cluster.route(0, 7).latency_s == pytest.approx(10e-6 + 2 * 1e-6)
    assert speeds(cluster)["leaf0.up"] == 2 * 2 * 25e9 / 4  # 4 NICs of 25 GB/s, oversubscribed 4:1


# ----------------------------------------------------------------------------------------- torus


def test_torus_goes_along_x_first_then_along_y() -> None:
    #         x 0   1   2   3
    #  y 0      0 ─ 1 ─ 2 ─ 3          GPU 1 to GPU 10:  1 -> 2, then 2 -> 6 -> 10
    #    1      4 ─ 5 ─ 6 ─ 7
    #    2      8 ─ 9 ─10 ─11
    #    3, 4   ...
    cluster = Cluster(5, 4, topology="torus", net_latency_s=9e-6, hop_latency_s=2e-6)
    assert names(cluster, 1, 10) == ["node0.gpu1.x+", "node0.gpu2.y+", "node1.gpu2.y+"]
    assert cluster.route(1, 10).latency_s == pytest.approx(9e-6 + 2 * 2e-6)


# --------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_lists_what_is_assumed(name: str) -> None:
    cluster = Cluster.preset(name, nodes=4)
    assert (cluster.name, cluster.nodes) == (name, 4)
    assert cluster.route(0, cluster.num_gpus - 1).latency_s >= 0
    preset = CLUSTERS[name]
    numbers = {key: n for key, n in vars(preset).items() if isinstance(n, Number)}
    numbers |= {f"gpu.{key}": n for key, n in GPUS.get(preset.gpu or "", {}).items()}
    listed = {line.split(" = ")[0] for line in cluster.assumptions()}
    assert listed == {key for key, number in numbers.items() if number.status == "assumed"}


# ---------------------------------------------------------------------------------------- faults


def test_slowed_returns_a_slower_copy() -> None:
    healthy = Cluster(2, 2)
    sick = healthy.slowed("node1.nic0.*", 10)
    assert speeds(sick)["node1.nic0.out"] == speeds(sick)["node1.nic0.in"] == 2.5e9
    assert speeds(sick)["node1.nic1.out"] == speeds(healthy)["node1.nic0.out"] == 25e9
    assert sick.route(0, 2) == healthy.route(0, 2)


def test_slowed_says_which_links_exist_if_none_matches() -> None:
    with pytest.raises(
        ValueError, match=r"no link matches 'node2\.nic0\.out'; there are node"
    ) as e:
        Cluster(2, 2).slowed("node2.nic0.out", 2)
    assert "node0.nic0.out" in str(e.value)


# ---------------------------------------------------------------------------------------- errors


def test_an_unknown_preset_names_the_valid_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown preset 'dgx_a100'; valid: laptop, dgx-a100") as e:
        Cluster.preset("dgx_a100")
    assert str(e.value).endswith("Did you mean 'dgx-a100'?")
    with pytest.raises(ValueError, match="Did you mean 'H100-80GB'"):
        GPU.preset("h100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "fattree"}, "unknown topology 'fattree'; .* Did you mean 'fat-tree'"),
        ({"nodes": 0}, "nodes must be 1 or more, got 0"),
        ({"gpus_per_node": 0}, "gpus_per_node must be 1 or more, got 0"),
        ({"nics_per_node": -1}, "nics_per_node must be 1 or more, got -1"),
        ({"nics_per_node": 3}, "8 GPUs cannot share 3 NICs evenly"),
        ({"nvlink_bytes_per_s": 0.0}, "nvlink_bytes_per_s must be above 0 and finite, got 0"),
        ({"nic_bytes_per_s": float("inf")}, "nic_bytes_per_s must be above 0 and finite, got inf"),
        ({"latency_s": -1e-6}, "latency_s must be 0 or more and finite, got -1e-06"),
        ({"oversubscription": 0.5, "topology": "fat-tree"}, "oversubscription must be 1 or more"),
        ({"oversubscription": 7.0}, "need topology='fat-tree', .* not 'switch'"),
        ({"numbering": "cycle"}, "unknown numbering 'cycle'; valid: block, cyclic"),
        ({"nodes_per_leaf": 2}, "need topology='fat-tree', .* not 'switch'"),
        (
            {"topology": "rail-optimised", "nics_per_node": 4},
            "needs one NIC per GPU, got 4 NICs for 8 GPUs",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_at_once(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**arguments)
