"""Tensors that a rank leaves on the GPU of another rank, such as a checkpoint that it has loaded.

A GPU is a rank's own if the rank has chosen it, or computes most there. A rank may use several, as
long as they are nobody else's.
"""

from collections.abc import Iterator, Sequence, Set

from distlab.sim.gpu.device import HostAndGpus
from distlab.sim.reporting.report import place
from distlab.util.text import rank_names

_REMEDIES = {"load": 'give torch.load map_location=f"cuda:{local_rank}" or "cpu"'}
_OF_OBJECTS = (
    "a pickled tensor arrives on the GPU that it had, so move tensors to the CPU before, or send "
    "them by a collective of tensors"
)
_REMEDY = 'name the rank\'s own GPU, f"cuda:{local_rank}"'


def strays(devices: Sequence[HostAndGpus], nodes: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield ranks that put tensors on others' GPUs, and a line for each of these GPUs.

    Args:
        devices: Host and GPUs of each rank.
        nodes: Node of each rank.
    """
    own = [{(node, gpu) for gpu in _own(d)} for d, node in zip(devices, nodes, strict=True)]
    for rank, device in enumerate(devices):
        for index in device.usage.placed:
            gpu = nodes[rank], device.visible()[index]
            owners = [other for other, gpus in enumerate(own) if gpu in gpus]
            if owners and rank not in owners:
                yield rank, _line(device, index, owners)


def _own(device: HostAndGpus) -> Set[int]:
    """Return the numbers, on the node, of the GPUs that a rank has chosen or computes most on."""
    most = [index for index, _ in device.usage.kernels.most_common(1)]
    return {device.visible()[index] for index in (*device.chosen, *most)}


def _line(device: HostAndGpus, index: int, owners: Sequence[int]) -> str:
    site, _, maker = device.usage.placed[index]
    remedy = _OF_OBJECTS if "object" in maker else _REMEDIES.get(maker, _REMEDY)
    return (
        f"{place(site)}: puts tensors on cuda:{index}, the GPU of {rank_names(owners)}, which "
        f"loses memory to them: {remedy}"
    )
