"""Groups of a report are told apart by the axis of a mesh, or by their number."""

import pytest
import torch.distributed as dist

from distlab.sim import Deadlock, simulate
from distlab.sim.messages.roster import MadeGroup

SITE = ("/home/me/ring.py", 41, "exchange")


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("", ""),
        ("mesh_default", ""),
        ("mesh_tp", "axis tp"),
        ("mesh_dim_0", "axis 0"),
        ("metrics", "group 'metrics'"),
    ],
)
def test_a_group_has_the_name_that_torch_was_given(description: str, name: str) -> None:
    assert MadeGroup((0, 1), SITE, description).name() == name


def headline(report: str) -> str:
    return report.splitlines()[0]


def report_of(program: object, num_ranks: int = 2) -> str:
    with pytest.raises(Deadlock) as caught:
        simulate(program, num_ranks)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_group_is_not_numbered_without_another_of_the_same_ranks() -> None:
    def program() -> None:
        groups = [dist.new_group(), dist.new_group()]
        if dist.get_rank() == 0:
            dist.barrier(groups[1])

    assert "group for" not in headline(report_of(program))


def test_a_described_group_has_its_description() -> None:
    def program() -> None:
        group = dist.new_group(group_desc="metrics")
        if dist.get_rank() == 0:
            dist.barrier(group)

    assert "on group 'metrics' for rank 1" in headline(report_of(program))
