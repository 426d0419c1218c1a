"""Count host syncs, messages and bytes of the solutions, one call or training step each.

    python benchmarks/lesson_costs.py               prints a table for 4 simulated ranks

The cases are those that benchmarks/gpu.py calls on a GPU. Host syncs are counted on the CPU, as
operations that would make the host wait for a GPU; messages and bytes are those that a rank sends.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import gpu_cases as cases
import torch
import typer

from distlab.bench import harness
from distlab.sim import Options, Simulated, simulate
from distlab.util.text import bytes_text

WITHOUT = ("4.18",)  # needs the profiler, which the simulator lacks


class Cost(NamedTuple):
    """Costs of one call on the rank where each is highest."""

    syncs: int
    messages: int
    num_bytes: float


def cost_of(name: str, num_ranks: int) -> Cost:
    """Return what a case's third call costs: later calls cost the same."""
    two, three = (run_calls(name, num_ranks, calls) for calls in (2, 3))
    messages = _most_more(three.trace.messages, two.trace.messages)
    num_bytes = _most_more(three.trace.bytes_sent, two.trace.bytes_sent)
    return Cost(max(three.results), int(messages), num_bytes)


def _most_more(late: Sequence[float], early: Sequence[float]) -> float:
    """Return by how much more a rank has than before, of the rank where that is most."""
    return max(after - before for after, before in zip(late, early, strict=True))


def run_calls(name: str, num_ranks: int, num_calls: int) -> Simulated:
    """Call a case several times on simulated ranks; results are the last call's host syncs."""
    options = Options(has_events=False)
    return simulate(last_of_calls, num_ranks, name, num_calls, cluster="laptop", options=options)


def last_of_calls(name: str, num_calls: int) -> int:
    """Call a case on this rank; return how many host syncs the last call has."""
    device = torch.device("cpu")
    call = cases.CASES[name](device)
    for _ in range(num_calls - 1):
        call()
    with cases.host_syncs(device) as sites:
        call()
    return sites.total()


def main(
    ranks: Annotated[int, typer.Option(help="how many simulated ranks")] = 4,
    only: Annotated[list[str] | None, typer.Option(help="a task, such as 3.11")] = None,
) -> None:
    """Count host syncs, messages and bytes of the solutions."""
    names = [name for name in only or cases.CASES if name not in WITHOUT]
    costs = {name: cost_of(name, ranks) for name in names}
    rows = [
        [name, str(cost.syncs), str(cost.messages), bytes_text(cost.num_bytes)]
        for name, cost in costs.items()
    ]
    headings = ["task", "host syncs", "messages", "bytes"]
    harness.print_table(f"One call or step, {ranks} ranks, the rank with most", headings, rows)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
