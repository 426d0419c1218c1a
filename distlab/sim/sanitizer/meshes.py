"""Ranks of a device mesh."""

from collections.abc import Iterable

from torch.distributed.device_mesh import DeviceMesh

Ranks = tuple[int, ...]


def along(mesh: DeviceMesh, are_free: Iterable[bool]) -> Ranks:
    """Return the ranks of a mesh that share this rank's place along all dimensions but the free."""
    if (coordinate := mesh.get_coordinate()) is None:
        return ()
    pairs = zip(are_free, coordinate, strict=True)
    where = tuple(slice(None) if is_free else at for is_free, at in pairs)
    return tuple(mesh.mesh[where].flatten().tolist())
