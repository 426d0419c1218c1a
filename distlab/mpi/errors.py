"""What can go wrong between the ranks of an MPI world.

MpiError
├── Mismatch  two ranks called the same collective, or send and recv, differently
├── RankLeft  a rank has ended that this one still waits for
└── TimeIsUp  an operation took longer than its group allows
"""


class MpiError(RuntimeError):
    """An operation that cannot be completed; the message names ranks and call."""


class Mismatch(MpiError):
    """Ranks disagree on an operation: its kind, its order, a size, a dtype, a root."""


class RankLeft(MpiError):
    """A rank ended, by ``sys.exit`` or at the end of its program, and others need it."""


class TimeIsUp(MpiError):
    """No rank failed and none left, but the operation is not done."""
