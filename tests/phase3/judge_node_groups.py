"""Judges ``node_groups`` of task 3.7: members, order, groups of some ranks, and refusals."""

from collections.abc import Sequence

import pytest

from distlab.grade import Grade, task
from judging.checks import check_refused
from judging.expect import expect
from phase3.node_groups import NAMES, make_groups, refusal
from phase3_multi_node.given import ranks_by_host

SHAPES = [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (1, 5), (2, 3), (3, 2), (7, 1), (2, 4), (4, 2)]
UNEVEN = [(2, 1), (1, 2), (1, 3), (2, 1, 2), (3, 3, 1), (1, 1, 1, 4), (3, 3, 2)]
MEMBERS = (1, 2, 4, 5, 6, 7)  # world ranks of the group of six
STUCK = (
    "new_group returns once all ranks that it concerns have called it: by default, all ranks of "
    "the world, members or not, for each group and in the same order."
)
CAUSES = {
    "inside": "These are all ranks of this rank's host, wherever the host's ranks are.",
    "across": "These are the ranks with the same index as this one inside their hosts, one of each "
    "host.",
}
OF_SOME_RANKS = (
    "Here the ranks outside of group never come to new_group: tell it to wait for its members "
    "alone (use_local_synchronization), and let every rank make equally many groups in the same "
    "order. The ranks that it takes are those of the world, not those inside group."
)
OF_GROUP = " hosts has an entry for each rank of the group, and new_group takes ranks of the world."


def _drawn(grade: Grade, counts: Sequence[int]) -> list[str]:
    """Draw the host of each rank; host i has ``counts[i]`` ranks."""
    names = grade.random.sample("abcdefgh", len(counts))
    hosts = [
        f"host-{name}" for name, count in zip(names, counts, strict=True) for _ in range(count)
    ]
    grade.random.shuffle(hosts)
    return hosts


def _check(grade: Grade, hosts: list[str], members: Sequence[int], world_size: int) -> None:
    stuck = STUCK if len(members) == world_size else OF_SOME_RANKS
    run = grade.run(make_groups, world_size, hosts, members, if_stuck=stuck)
    nodes = [[members[rank] for rank in ranks] for ranks in ranks_by_host(hosts)]
    is_part = len(members) < world_size
    of = f"group of the ranks {[*members]} of {world_size}, " if is_part else ""
    for rank in members:
        [own] = [node for node in nodes if rank in node]
        right = own, sorted(node[own.index(rank)] for node in nodes)
        for name, ranks, (got, total) in zip(NAMES, right, run.results[rank], strict=True):
            here = f"{of}hosts {hosts}: rank {rank}: "
            cause = CAUSES[name] + (OF_GROUP if is_part else "")
            expect(f"{here}the ranks of {name}", got, ranks, cause)
            what = f"{here}the sum of 2**rank over {name}"
            expect(what, total, float(sum(2**one for one in ranks)), stuck)


@task("3.7", real=True)
def test_each_rank_has_its_two_groups(grade: Grade) -> None:
    for nodes, gpus in SHAPES if grade.is_simulated else [(2, 2)]:
        size = nodes * gpus
        _check(grade, _drawn(grade, [gpus] * nodes), range(size), size)


@task("3.7")
@pytest.mark.parametrize("nodes", [1, 2, 3, 6])
def test_groups_of_some_ranks_of_the_world(grade: Grade, nodes: int) -> None:
    _check(grade, _drawn(grade, [6 // nodes] * nodes), MEMBERS, MEMBERS[-1] + 2)


@task("3.7")
def test_uneven_hosts_are_refused(grade: Grade) -> None:
    for counts in UNEVEN:
        hosts = _drawn(grade, counts)
        run = grade.run(refusal, len(hosts), hosts, if_stuck=UNEVEN_STUCK)
        numbers = sorted({str(count) for count in counts})
        check_refused(run.results, f"node_groups({hosts})", *numbers)


UNEVEN_STUCK = "Hosts with different numbers of ranks are refused on all ranks, before any group."
