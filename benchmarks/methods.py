"""Measure what each method of Phase 2 costs: by formula, on a simulated cluster, on this machine.

    python benchmarks/methods.py        prints the table of docs/methods.md

One body per method runs in both worlds; ``perf_counter`` is the virtual clock in the simulated one.
The simulated cores compute 30 GFLOP/s, and send messages as the preset laptop does. Real ranks have
one thread each, so two cores suffice. Times are medians over steps that take turns.
"""

import ast
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
    """A row of the table: a ratio or a number, by formula and measured twice."""

    name: str
    tasks: str
    solution: str  # file:function
    what: str  # is measured
    formula: str
    predicted: float
    body: Callable[[], float]

    def row(self) -> str:
        """Measure; return the row in Markdown."""
        simulated = launch.simulate(self.body, RANKS, cluster=LAPTOP).results[0]
        real = launch.run(self.body, RANKS, backend="gloo", timeout_s=120)[0]
        numbers = (f"{number:.3g}" for number in (self.predicted, simulated, real))
        name = f"{self.name} ({self.tasks})"
        return f"| {' | '.join([name, str(self.lines), self.what, self.formula, *numbers])} |"

    @property
    def lines(self) -> int:
        """Lines of code of the function and of its helpers in the same file."""
        file, _, function = self.solution.partition(":")
        tree = ast.parse((ROOT / f"solutions/phase2_advanced/{file}.py").read_text())
        nodes = {node.name: node for node in tree.body if hasattr(node, "name")}
        reached = [function]
        for name in reached:  # it grows
            found = {n.id for n in ast.walk(nodes[name]) if isinstance(n, ast.Name)}
            reached += sorted(found & {n for n in nodes if n.startswith("_")} - set(reached))
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
METHODS = (
    Method(
        "gradient accumulation",
        "2.1, 2.2",
        "gradient_accumulation:accumulate_step",
        "activations, m micro-batches / 1",
        "1/m",
        1 / m,
        bodies.accumulate,
    ),
    Method(
        "accumulation over ranks",
        "2.3",
        "gradient_accumulation:accumulate_step_over_ranks",
        "all-reduces in a step",
        "1",
        1,
        bodies.accumulate_over_ranks,
    ),
    Method(
        "mixed precision",
        "2.4, 2.5",
        "mixed_precision:mixed_precision_step",
        "activations, bfloat16 / float32",
        "1/2 + E/2B",
        1 / 2 + WIDTH / ROWS / 2,
        bodies.mixed,
    ),
    Method(
        "checkpointing a function",
        "2.6",
        "activation_checkpointing:checkpoint",
        "time, recomputed / kept",
        "4/3",
        4 / 3,
        bodies.checkpoint_time,
    ),
    Method(
        "checkpointing in s segments",
        "2.7",
        "activation_checkpointing:checkpoint_sequential",
        "activations, s segments / kept",
        "(s + L/s)/L",
        (s + n / s) / n,
        bodies.checkpoint_memory,
    ),
    Method(
        "model parallelism",
        "2.8, 2.9",
        "model_parallel:StageRunner",
        "time, p ranks / 1",
        "1",
        1,
        bodies.in_stages,
    ),
    Method(
        "GPipe",
        "2.10, 2.12",
        "pipeline_parallel:gpipe_schedule",
        "time, p ranks / 1",
        "(m+p-1)/mp",
        (m + p - 1) / (m * p),
        bodies.gpipe,
    ),
    Method(
        "1F1B",
        "2.11, 2.12",
        "pipeline_parallel:one_f_one_b_schedule",
        "activations of rank 0, 1F1B / GPipe",
        "p/m",
        p / m,
        bodies.one_f_one_b,
    ),
    Method(
        "interleaved 1F1B",
        "2.12, 2.13",
        "pipeline_parallel:interleaved_schedule",
        "time, p ranks / 1",
        "(m+(p-1)/v)/mp",
        (m + (p - 1) / v) / (m * p),
        bodies.interleaved,
    ),
    Method(
        "split attention",
        "2.14 to 2.17",
        "tensor_parallel:parallelize_attention",
        "all-reduces, forward and backward",
        "2",
        2,
        bodies.attention,
    ),
    Method(
        "split MLP",
        "2.14 to 2.17",
        "tensor_parallel:parallelize_mlp",
        "time, p ranks / 1",
        "1/p",
        1 / p,
        bodies.mlp,
    ),
    Method(
        "split vocabulary",
        "2.18",
        "tensor_parallel:vocab_parallel_cross_entropy",
        "numbers all-reduced per target",
        "3",
        3,
        bodies.vocabulary,
    ),
    Method(
        "sequence parallelism",
        "2.19",
        "tensor_parallel:parallelize_block",
        "activations of the norms, split / whole",
        "1/p",
        1 / p,
        bodies.sequence,
    ),
)


def main() -> None:
    """Print the table, row by row."""
    print("| method | lines | what is measured | formula | predicted | simulated | real |")
    print("|---|---|---|---|---|---|---|")
    for method in METHODS:
        print(method.row(), flush=True)


if __name__ == "__main__":
    main()
