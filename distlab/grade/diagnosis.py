"""The cause of a hang or crash on real processes, from a simulation, whose reports are exact.

The verdict is that of the real processes. If all of them wait, and the same program deadlocks in
the simulation, the hang is certain, and is not retried with more time.
"""

from collections.abc import Callable

from distlab.launch import LaunchError, RankFailed, SetupError

# Kinds of errors whose line is known, so that a simulation would only hang there again, or whose
# cause is not in the program's messages.
KNOWN = ("endless loop", "blocked", "suspended", RankFailed.KIND, SetupError.KIND)


def add_cause(error: LaunchError, simulate: Callable[[], object]) -> None:
    """Add the simulated world's report on the same program to the message of ``error``.

    If a hang is a deadlock there, ``error.kind`` becomes "deadlock".
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
