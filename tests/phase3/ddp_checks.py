"""What the judges of task 3.12 share: how they run a world, and its parameters."""

from typing import Any

from distlab.grade import Grade, Run
from distlab.launch import LaunchError
from phase3.ddp_models import Odd

PARAMETERS = dict(Odd(1).named_parameters())
TRAINABLE = [name for name, parameter in PARAMETERS.items() if parameter.requires_grad]
TOLERANCE = 1e-5  # one parameter is in float32
STUCK = (
    "All ranks should start the same all-reduces in the same order: that of the buckets, whichever "
    "is complete first, and also those that lack a gradient, in "
    "finish_gradient_synchronization."
)
CAUSES = {
    "mismatch": STUCK,
    "buffer changed": "A bucket travels from the start of its all-reduce until wait has returned, "
    "and nothing may write into it in between. Did it leave before its last gradient was added, "
    "did a backward pass inside of no_sync start it, or was it divided too early?",
}


def run_together(grade: Grade, body: Any, world_size: int, *args: object, **options: Any) -> Run:
    """Run a body; if ranks disagree or a bucket is overwritten, name the likely cause first."""
    try:
        return grade.run(body, world_size, *args, if_stuck=STUCK, **options)
    except LaunchError as error:
        headline = f"{error}".partition("\n")[0]
        cause = next((cause for words, cause in CAUSES.items() if words in headline), "")
        if cause:
            error.args = (f"{cause} Here: {error}", *error.args[1:])
        raise


def tolerance_of(expected: Any) -> float:
    """How far numbers may be from these, as rounding goes."""
    return TOLERANCE * max([1.0, *map(abs, expected or ())])


def collectives_named(run: Run, name: str) -> list[int]:
    """How many collectives whose name begins so each rank called."""
    events = run.trace.events if run.trace else []
    ranks = range(len(run.results))
    return [
        sum(e.rank == r and e.kind == "collective" and e.name.startswith(name) for e in events)
        for r in ranks
    ]
