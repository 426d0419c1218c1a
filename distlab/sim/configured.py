"""A simulated world by the options of ``distlab sim``, which ``%cluster`` of a notebook has too."""

import math
from collections.abc import Sequence
from typing import Any

from distlab.sim.engine.faults import Faults
from distlab.sim.hardware.cluster import Cluster, choose_cluster
from distlab.sim.hardware.costs import Costs
from distlab.sim.results.simulated import Options

PRESET = "dgx-h100"
GIB = 2**30
_REFUSED = {
    "--no-devices": "it is about when GPUs compute",
    "--overlap-cost": "kernels of several streams do not slow each other down",
    "--p2p-order": "it has NCCL's order anyway",
    "a cluster without GPUs": "take one with GPUs, such as --cluster dgx-h100",
}


def world(preset: str, nodes: int | None, ranks: int | None) -> tuple[Cluster, int]:
    """Return the cluster and its number of ranks, by default one per GPU.

    Raises:
        ValueError: There is no such preset, or there are too many ranks.
    """
    smallest = Cluster.preset(preset, nodes or 1)
    cluster = smallest if nodes or not ranks else choose_cluster(preset, ranks)
    num_ranks = ranks or cluster.num_gpus
    choose_cluster(cluster, num_ranks)  # raises an error if there are too many ranks
    return cluster, num_ranks


def unfit_for_nccl(
    cluster: Cluster, *, no_devices: bool, overlap_cost: float, p2p_order: str
) -> list[str]:
    """Return which of the given options do not go together with NCCL's semantics."""
    is_given = {
        "--no-devices": no_devices,
        "--overlap-cost": overlap_cost > 0,
        "--p2p-order": p2p_order != "free",
        "a cluster without GPUs": cluster.gpu is None,
    }
    return [name for name in _REFUSED if is_given[name]]


def options(
    cluster: Cluster,
    num_ranks: int,
    *,
    fault: Sequence[str],
    memory_gib: float | None,
    host_cost: Sequence[str],
    no_devices: bool,
    semantics: str,
    overlap_cost: float,
    p2p_order: str,
    seed: int,
    **others: Any,
) -> Options:
    """Return the settings of a world.

    Args:
        cluster: Cluster.
        num_ranks: Number of ranks.
        fault: Texts of ``--fault``.
        memory_gib: Memory of each GPU in GiB; None for what the cluster says.
        host_cost: Texts of ``--host-cost``.
        no_devices: True to account for neither computation nor memory.
        semantics: "gloo" or "nccl".
        overlap_cost: See ``Options``.
        p2p_order: See ``Options``.
        seed: See ``Options``; it also seeds the jitter.
        others: Further fields of ``Options``.

    Raises:
        ValueError: An option is wrong, or two do not go together.
    """
    unfit = unfit_for_nccl(
        cluster, no_devices=no_devices, overlap_cost=overlap_cost, p2p_order=p2p_order
    )
    if semantics == "nccl" and unfit:
        name = unfit[0]
        raise ValueError(f"--semantics nccl does not go together with {name}: {_REFUSED[name]}")
    if semantics == "gloo" and host_cost:
        raise ValueError("--host-cost needs --semantics nccl: with gloo, hosts cost no time")
    capacity_bytes = _capacity_bytes(memory_gib, no_devices=no_devices)
    return Options(
        faults=_faults(fault, seed, cluster, num_ranks),
        has_devices=False if no_devices else True if capacity_bytes else None,
        capacity_bytes=capacity_bytes,
        costs=_host_costs(host_cost),
        semantics=semantics,
        overlap_cost=overlap_cost,
        p2p_order=p2p_order,
        seed=seed,
        **others,
    )


def _faults(texts: Sequence[str], seed: int, cluster: Cluster, num_ranks: int) -> Faults:
    """Parse the faults; refuse those on ranks or links that do not exist."""
    try:
        faults = Faults.parse(texts, seed)
        faults.check_ranks(num_ranks)
        for pattern, factor in faults.slow_links.items():
            cluster.slowed(pattern, factor)
    except ValueError as error:
        raise ValueError(f"--fault: {error}") from None
    return faults


def _capacity_bytes(memory_gib: float | None, *, no_devices: bool) -> int | None:
    if memory_gib is None:
        return None
    if no_devices:
        raise ValueError("--memory-gib needs devices: leave out --no-devices")
    if not 0 < memory_gib < math.inf:
        raise ValueError(f"--memory-gib {memory_gib:g} must be above 0")
    return math.ceil(memory_gib * GIB)


def _host_costs(texts: Sequence[str]) -> Costs:
    try:
        return Costs.parse(texts)
    except ValueError as error:
        raise ValueError(f"--host-cost: {error}") from None
