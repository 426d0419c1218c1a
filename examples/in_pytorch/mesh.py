"""Compare your all-reduce on two levels, in the groups of a device mesh, with torch's own.

distlab sim --ranks 4 examples/in_pytorch/mesh.py
torchrun --nproc-per-node 2 examples/in_pytorch/mesh.py
"""

import lesson
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

NODES = 2


def main() -> None:
    """Make the groups of two nodes in both ways, and sum a tensor in those of the mesh."""
    dist.init_process_group()
    topology = lesson.load("topology", "3.7")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (NODES, size // NODES), mesh_dim_names=("across", "inside"))
    hosts = [f"host {rank * NODES // size}" for rank in range(size)]
    for name, own in zip(("inside", "across"), topology.node_groups(hosts), strict=True):
        of_mesh, of_own = map(dist.get_process_group_ranks, (mesh.get_group(name), own))
        lesson.say(f"{name}: ranks {of_mesh} of the mesh, {of_own} of node_groups")

    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    ours, theirs = x.clone(), x.clone()
    topology.hierarchical_all_reduce(ours, mesh.get_group("inside"), mesh.get_group("across"))
    dist.all_reduce(theirs)
    lesson.compare("all-reduce", [ours], [theirs])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
