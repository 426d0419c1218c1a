"""Functions that phase 3 gives: groups of nodes, and collectives with chunks of any size."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from distlab.sim import simulate
from phase3_multi_node.given import (
    LinkCost,
    Topology,
    all_gather,
    check_has_values,
    node_groups,
    pair_groups,
    reduce_scatter,
)

pytestmark = pytest.mark.usefixtures("forked")


def members(hosts: Sequence[str]) -> list[list[int]]:
    groups = node_groups(hosts)
    return [dist.get_process_group_ranks(group) for group in groups]


@pytest.mark.parametrize(
    ("hosts", "inside", "across"),
    [
        ("aabb", [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ("abab", [[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ("aaa", [[0, 1, 2]] * 3, [[0], [1], [2]]),
        ("ab", [[0], [1]], [[0, 1]] * 2),
    ],
)
def test_a_rank_is_in_a_group_of_its_node_and_in_one_across(
    hosts: str, inside: list[list[int]], across: list[list[int]]
) -> None:
    result = simulate(members, len(hosts), [*hosts]).results
    assert result == [list(pair) for pair in zip(inside, across, strict=True)]


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equally many ranks, got \[2, 1\]"):
        node_groups(["a", "b", "a"])


def scattered_and_gathered(num_elements: int) -> tuple[list[float], list[float]]:
    x = torch.arange(float(num_elements))
    mine = reduce_scatter(x)
    result = mine.tolist()
    all_gather(x)
    return result, x.tolist()


@pytest.mark.parametrize("num_elements", [10, 2, 0])
def test_torchs_collectives_take_chunks_of_any_size(num_elements: int) -> None:
    total = 4 * torch.arange(float(num_elements))
    for rank, (mine, x) in enumerate(simulate(scattered_and_gathered, 4, num_elements).results):
        assert mine == total.tensor_split(4)[rank].tolist()
        assert x == total.tolist()


def test_a_topology_sorts_its_ranks_by_host() -> None:
    topology = Topology(("b", "a", "b"), LinkCost(1.0, 0.5), None)
    assert topology.nodes == ((0, 2), (1,))
    assert topology.inside is not None
    assert topology.inside.seconds(4) == 3.0


def pairs_of(servers: Sequence[int], workers: Sequence[int]) -> dict[int, list[int]]:
    groups = pair_groups(servers, workers)
    return {other: dist.get_process_group_ranks(group) for other, group in groups.items()}


def test_each_server_has_a_group_with_each_worker() -> None:
    result = simulate(pairs_of, 5, [3, 0], [4, 1]).results
    assert result == [
        {4: [0, 4], 1: [0, 1]},
        {3: [1, 3], 0: [0, 1]},
        {},
        {4: [3, 4], 1: [1, 3]},
        {3: [3, 4], 0: [0, 4]},
    ]


def test_a_module_without_values_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"1\.weight is on the device meta.*to_empty"):
        check_has_values(module)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False, device="meta"))
    with pytest.raises(ValueError, match=r"0\.running_mean is on the device meta"):
        check_has_values(module)
    check_has_values(module.to_empty(device="cpu"))
