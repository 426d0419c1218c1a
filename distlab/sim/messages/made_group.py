"""What a report can say of a group that a program has made."""

from typing import NamedTuple

from distlab.sim.reporting.sites import Site

_OF_A_MESH = "mesh_"  # with which torch begins the description of a mesh's axis
_UNNAMED_AXIS = "dim_"
_WHOLE_MESH = "mesh_default"


class MadeGroup(NamedTuple):
    """A group that was made by ``new_group``, or for an axis of a mesh.

    Attributes:
        members: global numbers of its ranks.
        site: the line that has made it.
        description: what torch was given as ``group_desc``; "": nothing.
    """

    members: tuple[int, ...]
    site: Site
    description: str = ""

    def name(self) -> str:
        """Write ``axis tp`` of a mesh's group, ``group 'metrics'`` of another; "" if unnamed."""
        if self.description in ("", _WHOLE_MESH):
            return ""
        if self.description.startswith(_OF_A_MESH):
            axis = self.description.removeprefix(_OF_A_MESH)
            return f"axis {axis.removeprefix(_UNNAMED_AXIS)}"
        return f"group {self.description!r}"
