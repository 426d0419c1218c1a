"""Run the same notebook session on simulated ranks, on real ones, and on those of ipyparallel.

    python benchmarks/notebook_session.py [--world simulated --world ipyparallel] [--rounds 3]

Prints the seconds of each cell, as medians of rounds in which the worlds take turns. It fails if
the values are not close, and prints how far those are apart that are not equal bit for bit.
"""

import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from textwrap import dedent
from typing import Annotated, NamedTuple

import torch
import typer
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import Tensor

from distlab.bench import harness

RANKS = 4

CELLS = {
    "variables": "x = torch.arange(4.0) / 7 + rank",
    "all_reduce": "dist.all_reduce(x)",
    "broadcast": """
        weights = torch.randn(5, generator=torch.Generator().manual_seed(rank))
        dist.broadcast(weights, src=2)""",
    "scatter": """
        part = torch.empty(2)
        parts = [torch.full((2,), n / 3) for n in range(world_size)] if rank == 0 else None
        dist.scatter(part, parts, src=0)""",
    "ring": """
        left = torch.empty(2)
        sent = dist.isend(part, (rank + 1) % world_size)
        dist.irecv(left, (rank - 1) % world_size).wait()
        sent.wait()""",
    "subgroup": """
        even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
        pair = left.clone()
        dist.all_reduce(pair, group=odd if rank % 2 else even)""",
    "DDP model": """
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)""",
    "DDP step": """
        torch.manual_seed(rank)
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()""",
    "all_gather": """
        losses = [torch.empty(()) for _ in range(world_size)]
        dist.all_gather(losses, loss.detach())
        values = {"x": x, "weights": weights, "part": part, "left": left, "pair": pair}
        values |= {"losses": torch.stack(losses)} | model.module.state_dict()""",
}


class World(NamedTuple):
    """A notebook's commands for ranks of one kind."""

    start: str
    on_ranks: str
    pull: str
    stop: str


LOAD, OURS = "%load_ext distlab", ("%%ranks", "%pull values", "%cluster --off")

IPYPARALLEL = f"""
import socket
import ipyparallel
client = ipyparallel.Cluster(n={RANKS}, log_level=40).start_and_connect_sync(activate=True)
with socket.create_server(("127.0.0.1", 0)) as server:
    address = f"tcp://127.0.0.1:{{server.getsockname()[1]}}"
client[:].push({{"world_size": {RANKS}, "address": address}}, block=True)
client[:].scatter("rank", range({RANKS}), flatten=True, block=True)
client[:].execute("import torch; import torch.distributed as dist", block=True)
join = "dist.init_process_group('gloo', address, rank=rank, world_size=world_size)"
client[:].execute(join, block=True)"""
PULL = "values = client[:].pull('values', block=True)"

WORLDS = {
    "simulated": World(f"{LOAD}\n%cluster {RANKS}", *OURS),
    "gloo": World(f"{LOAD}\n%cluster {RANKS} --world gloo", *OURS),
    "ipyparallel": World(IPYPARALLEL, "%%px", PULL, "client.cluster.stop_cluster_sync()"),
}

Values = Sequence[Mapping[str, Tensor]]  # by rank


def run_session(shell: InteractiveShell, world: World) -> tuple[dict[str, float], Values]:
    """Run the session on new ranks; return the seconds of each cell, and the ranks' values."""
    seconds: dict[str, float] = {}

    def run(name: str, cell: str) -> None:
        start_s = time.perf_counter()
        with capture_output():
            shell.run_cell(cell).raise_error()
        seconds[name] = time.perf_counter() - start_s

    run("start", world.start)
    for name, cell in CELLS.items():
        run(name, f"{world.on_ranks}\n{dedent(cell)}")
    run("pull", world.pull)
    seconds["the ten cells"] = sum(seconds.values()) - seconds["start"]
    run("stop", world.stop)
    return seconds, shell.user_ns["values"]


def differences(values: Values, others: Values) -> str:
    """Return which values are not the same bit for bit; fail if they are not even close."""
    lines = []
    for name in values[0]:
        one, other = (torch.stack([mine[name] for mine in ranks]) for ranks in (values, others))
        torch.testing.assert_close(one, other)
        if not torch.equal(one, other):
            lines.append(f"{name} differs by up to {(one - other).abs().max():.1e}")
    return ", ".join(lines) or "equal bit for bit"


def main(
    world: Annotated[list[str] | None, typer.Option(help=", ".join(WORLDS))] = None,
    rounds: Annotated[int, typer.Option(help="sessions in each world")] = 3,
) -> None:
    """Compare a session's values and seconds in several worlds."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of real ranks
    torch.set_num_threads(1)
    shell, names = InteractiveShell.instance(), world or [*WORLDS]
    turns = [{name: run_session(shell, WORLDS[name]) for name in names} for _ in range(rounds)]
    rows = [
        [cell, *(f"{median(turn[name][0][cell] for turn in turns):.3f}" for name in names)]
        for cell in turns[0][names[0]][0]
    ]
    harness.print_table("Seconds per cell", ["cell", *names], rows)
    for name in names[1:]:
        values = [turns[0][which][1] for which in (names[0], name)]
        print(f"{names[0]} and {name}: {differences(*values)}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
