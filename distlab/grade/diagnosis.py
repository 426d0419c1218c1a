"""Why a real world hung or crashed: the same body in the simulated one, where reports are exact.

What counts is what happened on the real processes. Where they all wait, and the same program
deadlocks there too, the hang is certain: it is not tried again with more time.
"""

from collections.abc import Callable

from distlab.launch import LaunchError, RankFailed, SetupError

# The line is known, and the simulated world would only hang there for as long again; or the cause
# does not lie in the program's messages.
KNOWN = ("endless loop", "blocked", "suspended", RankFailed.KIND, SetupError.KIND)


def add_cause(error: LaunchError, simulate: Callable[[], object]) -> None:
    """Add to the message of ``error`` what the simulated world says about the same program.

    If a hang is a deadlock there, it is one here too, and ``error.kind`` says so.
    """
    if error.kind in KNOWN:
        return
    try:
        simulate()
    except LaunchError as simulated:
        if (error.kind, simulated.kind) == ("all wait", "deadlock"):
            error.kind, error.advice = "deadlock", simulated.advice
        explanation = f"The same program in the simulated world: {simulated}"
    else:
        explanation = (
            "The same program succeeds in the simulated world, so look for what differs on real "
            "processes: a send that is still under way when the function returns, a work that is "
            "waited for twice, timing, the file system, or state that the ranks of one process "
            "share."
        )
    error.args = (f"{error}\n\n{explanation}", *error.args[1:])
