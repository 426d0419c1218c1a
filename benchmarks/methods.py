"""Compare the costs of Phase 2's methods by formula, on a simulated cluster and on this machine.

    python benchmarks/methods.py        prints the table of docs/methods.md

The same function measures a method in both worlds; in the simulated one, ``perf_counter`` reads the
virtual clock. Simulated cores compute at 30 GFLOP/s, and messages take as long as in the preset
"laptop". Real ranks have one thread each, so two cores suffice. Times are medians over several
rounds, in which the steps to compare take turns.
"""

import ast
import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import method_bodies as bodies
from method_bodies import CHUNKS, LAYERS, MICRO_BATCHES, ROWS, SEGMENTS, WIDTH

from distlab import launch
from distlab.sim import GPU, Cluster

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
CORE = GPU("core", 16e9, 1e30, {"float32": 30e9}, {"float32": 30e9})
LAPTOP = replace(Cluster.preset("laptop"), gpu=CORE)


@dataclass(frozen=True)
class Method:
    """A table row: a ratio or a count, predicted by a formula and measured in both worlds."""

    name: str
    tasks: str
    solution: str  # written as file:function
    what: str  # the measured quantity
    formula: str
    predicted: float
    body: Callable[[], float]

    def row(self) -> str:
        """Run both measurements, and return the row in Markdown."""
        simulated = launch.simulate(self.body, RANKS, cluster=LAPTOP).results[0]
        real = launch.run(self.body, RANKS, backend="gloo", timeout_s=120)[0]
        numbers = (f"{number:.3g}" for number in (self.predicted, simulated, real))
        name = f"{self.name} ({self.tasks})"
        return f"| {' | '.join([name, str(self.lines), self.what, self.formula, *numbers])} |"

    @property
    def lines(self) -> int:
        """Number of code lines of the function and its helpers in the same file."""
        file, _, function = self.solution.partition(":")
        tree = ast.parse((ROOT / f"solutions/phase2_advanced/{file}.py").read_text())
        nodes = {node.name: node for node in tree.body if hasattr(node, "name")}
        reached = [function]
        for name in reached:  # the list grows during the loop
            used = {n.id for n in ast.walk(nodes[name]) if isinstance(n, ast.Name)}
            reached += sorted(used & {n for n in nodes if n.startswith("_")} - set(reached))
        return sum(code_lines(nodes[name]) for name in reached)


def code_lines(node: ast.AST) -> int:
    """Count the lines of code, without docstrings, comments and blank lines."""
    for part in ast.walk(node):
        body = getattr(part, "body", [])
        if isinstance(body, list) and body and _is_docstring(body[0]):
            del body[0]
    return len(ast.unparse(node).splitlines())


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


p, m, v, n, s = RANKS, MICRO_BATCHES, CHUNKS, LAYERS, SEGMENTS
PREDICTED = {
    bodies.accumulate: 1 / m,
    bodies.accumulate_over_ranks: 1,
    bodies.mixed: 1 / 2 + WIDTH / ROWS / 2,
    bodies.checkpoint_time: 4 / 3,
    bodies.checkpoint_memory: (s + n / s) / n,
    bodies.in_stages: 1,
    bodies.gpipe: (m + p - 1) / (m * p),
    bodies.one_f_one_b: p / m,
    bodies.interleaved: (m + (p - 1) / v) / (m * p),
    bodies.attention: 2,
    bodies.mlp: 1 / p,
    bodies.vocabulary: 3,
    bodies.sequence: 1 / p,
}
with Path(__file__).with_suffix(".csv").open() as file:
    ROWS = csv.DictReader(file, delimiter=";")
    METHODS = tuple(
        Method(**row, predicted=predicted, body=body)
        for row, (body, predicted) in zip(ROWS, PREDICTED.items(), strict=True)
    )


def main() -> None:
    """Print the table, row by row."""
    print("| method | lines | what is measured | formula | predicted | simulated | real |")
    print("|---|---|---|---|---|---|---|")
    for method in METHODS:
        print(method.row(), flush=True)


if __name__ == "__main__":
    main()
