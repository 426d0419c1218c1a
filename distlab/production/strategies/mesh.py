"""The mesh of ranks: all groups in which ranks share a model and a batch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.types import Group
from distlab.util.text import counted

DIMS = ("dp", "pp", "tp")  # shards communicate most, so they are neighbours


@dataclass(frozen=True)
class Mesh:
    """Groups of this rank; None stands for all ranks.

    On 8 ranks with pp=2 and tp=2, where replicas are the ranks that share a batch:
        replica 0    stage 0: ranks 0, 1    stage 1: ranks 2, 3
        replica 1    stage 0: ranks 4, 5    stage 1: ranks 6, 7
    """

    replicas: Group = None  # ranks with the same part of the model, such as 0 and 4
    stages: Any = None  # ranks of a pipeline in the order of their stages, such as 0 and 2
    shards: Any = None  # ranks that share the layers of a stage, such as 0 and 1
    ends: Any = None  # first and last rank of a pipeline, of a language model with tied weights


def mesh_of(config: Config, device: torch.device) -> Mesh:
    """Create the groups that a configuration asks for; called on all ranks.

    Raises:
        ConfigError: The number of ranks does not fit.
    """
    sizes, num_ranks = config.parallelism, dist.get_world_size()
    if sizes.num_ranks not in (None, num_ranks):
        raise ConfigError(
            f"parallelism {sizes} is of {counted(sizes.num_ranks or 0, 'rank')}, and here are "
            f"{num_ranks}: start {sizes.num_ranks}, or leave dp out"
        )
    if num_ranks % (sizes.pp * sizes.tp):
        raise ConfigError(
            f"parallelism {sizes} needs a multiple of {sizes.pp * sizes.tp} ranks, and here are "
            f"{num_ranks}: set num_gpus to one"
        )
    if not config.splits_model:
        return Mesh()
    shape = num_ranks // (sizes.pp * sizes.tp), sizes.pp, sizes.tp
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMS)
    replicas, stages, shards = (mesh.get_group(name) for name in DIMS)
    has_ends = config.is_language and sizes.pp > 1
    return Mesh(replicas, stages, shards, _ends(mesh) if has_ends else None)


def _ends(mesh: DeviceMesh) -> Group:
    """Return the group of this pipeline's first and last rank, or None on the ranks in between."""
    pairs = mesh.mesh[:, [0, -1], :].movedim(1, -1).flatten(0, -2).tolist()
    group: Group
    group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call]
    return group
