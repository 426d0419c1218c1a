"""Tensors of which ranks declare that they are equal, and which are not.

    rank 0   x of batch 0 ─▶ ColwiseParallel: "x is a Replicate" ┐
    rank 1   x of batch 1 ─▶ ColwiseParallel: "x is a Replicate" ┘ parts of two batches are summed

torch does not compare them: ``DTensor.from_local`` believes what it is told.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distlab.sim.gpu.device import await_values
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Places, Site
from distlab.sim.sanitizer.draws import Unnoticed
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.meshes import Ranks, along
from distlab.sim.sanitizer.parameters import Digest, digest
from distlab.sim.sanitizer.values import is_equal
from distlab.util.replacing import Replace
from distlab.util.text import joined, rank_names, told_apart

MAX_NORMS = 4


class _Call(NamedTuple):
    """A call that makes a DTensor of each rank's tensor, by its number at this line."""

    ranks: Ranks
    site: Site
    number: int


class Declared:
    """Compares tensors that become replicated DTensors."""

    def __init__(
        self, findings: Findings, rank_states: RankStates, places: Places, unnoticed: Unnoticed
    ) -> None:
        self._findings, self._rank_states, self._places = findings, rank_states, places
        self._unnoticed = unnoticed
        self._counts: Counter[tuple[int, Ranks, Site]] = Counter()
        self._digests: defaultdict[_Call, dict[int, Digest | None]] = defaultdict(dict)

    def install(self, replace: Replace) -> None:
        """Watch every tensor that becomes a DTensor."""
        make = DTensor.from_local

        def look_and_make(
            local_tensor: Tensor,
            device_mesh: DeviceMesh | None = None,
            placements: Sequence[Placement] | None = None,
            **kwargs: Any,
        ) -> DTensor:
            is_many = local_tensor.numel() > 1
            if is_many and device_mesh and placements and self._rank_states.is_in_rank():
                self._look(local_tensor, device_mesh, placements)
            return make(local_tensor, device_mesh, placements, **kwargs)

        replace(DTensor, "from_local", staticmethod(look_and_make))

    def _look(self, tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        rank, ranks = self._rank_states.current, along(mesh, [True] * mesh.ndim)
        if len(ranks) < 2 or not all(p.is_replicate() for p in placements):
            return  # copies of shards may differ for a while; MeshCopies looks at them
        site = self._places.call_site()[0]
        self._counts[rank, ranks, site] += 1
        call = _Call(ranks, site, self._counts[rank, ranks, site])
        await_values([tensor])
        with self._unnoticed():
            self._digests[call][rank] = digest(tensor)
        if len(self._digests[call]) == len(ranks):
            self._compare(call, tensor, mesh, self._digests.pop(call))

    def _compare(
        self, call: _Call, tensor: Tensor, mesh: DeviceMesh, digests: dict[int, Digest | None]
    ) -> None:
        found = [digests[rank] for rank in call.ranks]
        if is_equal(found) or None in found:
            return
        norms = told_apart([d.norm for d in found[:MAX_NORMS] if d], 4)
        self._findings.add(
            ("declared", ""),
            f"{rank_names(call.ranks)} give a layer that is split between them different tensors "
            f"(shape {tuple(tensor.shape)}, norm {joined(norms)}), which DTensor takes for equal "
            f"({_where(mesh)}). These ranks need the same batch, chosen by their place along the "
            f"data-parallel dimension and not by their rank, and the same dropout masks; "
            f"{place(call.site)}",
        )


def _where(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    return f"Replicate on mesh dimension {', '.join(names)}" if names else "Replicate"
