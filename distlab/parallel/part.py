"""The part of a model that one rank of a mesh holds, and the trainer that trains all parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distlab import lessons
from distlab.models.gpt import GPT, Attention, FeedForward
from distlab.parallel.pipeline import Lesson, Pipeline, cut_into_stages, num_parameters
from distlab.parallel.sizes import Parallelism

DIMS = ("dp", "pp", "tp")  # tp varies fastest: shards communicate most, so they are neighbours


@dataclass(frozen=True)
class Part:
    """One rank's part of a model."""

    model: nn.Module  # maps tokens to logits; all ranks of a replica call it together
    groups: Mapping[str, dist.ProcessGroup]  # this rank's groups by dim; none if the model is whole
    sizes: Parallelism

    @property
    def layers(self) -> nn.Module:
        """The layers that this rank computes."""
        return self.model.stage if isinstance(self.model, Pipeline) else self.model

    def take_over(self, trainer: Any, optimizer: torch.optim.Optimizer, **how: Any) -> None:
        """Adapt Phase 1's ``Trainer``, made for this model and the group "dp", to train all parts.

        Args:
            trainer: Trainer that gets a log for all ranks and, for a pipeline, a new ``step``.
            optimizer: Optimizer of the trainer.
            how: The trainer's ``all_reduce`` and ``average``.
        """
        trainer.log = lessons.given_1.RankLog()
        if isinstance(self.model, Pipeline):
            group = self.groups["dp"]
            trainer.step = partial(self.model.train_step, optimizer, group=group, **how)

    def describe(self, batch_size: int) -> str:
        """Describe the mesh, the number of parameters per rank, and the micro-batch size.

        Cost: an all-gather of one number among the stages.
        """
        mine = torch.tensor([num_parameters(self.layers)], device=_mesh_device())
        numbers = [torch.empty_like(mine) for _ in range(self.sizes.pp)]
        dist.all_gather(numbers, mine, self.groups["pp"])
        counts = [f"{number.item():,}" for number in numbers]
        if not isinstance(self.model, Pipeline):
            return f"mesh {self.sizes}; parameters per rank: {counts[0]}"
        by_stage = ", ".join(f"stage {stage} {count}" for stage, count in enumerate(counts))
        size = self.model.micro_batch_size(batch_size // self.sizes.dp)
        return f"mesh {self.sizes}; parameters per rank: {by_stage}; micro-batches of {size}"


def check(gpt: GPT, sizes: Parallelism) -> None:
    """Check that ``split`` can split a model; all ranks raise the same error.

    Raises:
        ValueError: The model has too few blocks or heads, or is on the wrong device for stages.
    """
    sizes.check_model(len(gpt.blocks), _num_heads(gpt))
    device = gpt.head.weight.device.type
    if sizes.pp > 1 and device != _mesh_device():
        raise ValueError(
            f"over {dist.get_backend()}, stages exchange tensors that are on the "
            f"{_mesh_device()}, and the model is on {device}: leave --device out"
        )


def split(gpt: GPT, sizes: Parallelism, lesson: Lesson) -> Part:
    """Return this rank's part of a model; called on all ranks.

    Args:
        gpt: Whole model, equal on all ranks. The part reuses and changes some of its modules.
        sizes: Sizes that ``check`` accepts; their product is the number of ranks.
        lesson: Function that imports, by name, the lessons of Phase 2 that split the model.
    """
    mesh = init_device_mesh(_mesh_device(), (sizes.dp, sizes.pp, sizes.tp), mesh_dim_names=DIMS)
    groups = {name: mesh.get_group(name) for name in DIMS}
    if sizes.pp == 1:
        _shard(gpt, groups["tp"], sizes.tp, lesson)
        return Part(gpt, groups, sizes)
    stage = cut_into_stages(gpt, sizes.pp, lesson)[mesh.get_local_rank("pp")]
    _shard(stage, groups["tp"], sizes.tp, lesson)
    ends = _ends(mesh)
    pipeline = Pipeline(stage, gpt.head.out_features, group=groups["pp"], ends=ends, lesson=lesson)
    return Part(pipeline, {**groups, **({"first and last stage": ends} if ends else {})}, sizes)


def _mesh_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _num_heads(gpt: GPT) -> int:
    attention = next(module for module in gpt.modules() if isinstance(module, Attention))
    return attention.query.out_features // attention.head_width


def _shard(layers: nn.Module, group: dist.ProcessGroup, num_shards: int, lesson: Lesson) -> None:
    """Keep this rank's shard of each block; embedding, norms and head stay whole on every rank."""
    if num_shards == 1:
        return
    tensor_parallel = lesson("tensor_parallel")
    for module in list(layers.modules()):
        if isinstance(module, Attention):
            tensor_parallel.parallelize_attention(module, group)
        if isinstance(module, FeedForward):
            tensor_parallel.parallelize_mlp(module, group)


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of this pipeline's first and last rank, or None on the ranks in between."""
    pairs = mesh.mesh[:, [0, -1], :].movedim(1, -1).flatten(0, -2).tolist()
    group: dist.ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call]
    return group
