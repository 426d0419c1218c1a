"""Groups that the program makes: every rank must call ``new_group`` for each, in the same order.

On each rank, torch counts the groups and uses the count as a group's name. If ranks call
``new_group`` for different groups, or some do not call it, different groups get the same name. On
gloo, ranks then hang or talk to the wrong ranks.
"""

from typing import NamedTuple

from distlab.sim.reporting.errors import Mismatch
from distlab.sim.reporting.report import Row, mismatch, place
from distlab.sim.reporting.sites import Site
from distlab.util.text import rank_names

_OF_A_MESH = "mesh_"  # prefix of torch's description of a mesh axis
_UNNAMED_AXIS = "dim_"
_WHOLE_MESH = "mesh_default"


class MadeGroup(NamedTuple):
    """A group made by ``new_group``, or for an axis of a mesh.

    Attributes:
        members: Global ranks of its members.
        site: File, line and function of the call.
        description: ``group_desc`` as given to torch, or "".
        rank: First rank that made it.
    """

    members: tuple[int, ...]
    site: Site
    description: str = ""
    rank: int = 0

    def name(self) -> str:
        """Return a name such as ``group 'metrics'``, or ``axis tp`` in a mesh; "" if unnamed."""
        if self.description in ("", _WHOLE_MESH):
            return ""
        if self.description.startswith(_OF_A_MESH):
            axis = self.description.removeprefix(_OF_A_MESH)
            return f"axis {axis.removeprefix(_UNNAMED_AXIS)}"
        return f"group {self.description!r}"

    def text(self) -> str:
        """Return text such as ``new_group of ranks 0-3``."""
        return f"new_group of {rank_names(self.members)}"

    def row(self) -> Row:
        """Return the group's row in a report."""
        return Row((self.rank,), self.text(), place(self.site))

    def mismatch(self, other: "MadeGroup") -> Mismatch:
        """Return the error for a group of the same name with different members."""
        return mismatch(
            "operation mismatch",
            f"{self.text()} on rank {self.rank}, but {other.text()} on rank {other.rank}",
            [self.row(), other.row()],
            "Every rank has to call new_group for every group in the same order, even for groups "
            "that it is not in.",
        )
