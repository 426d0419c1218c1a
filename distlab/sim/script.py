"""Run a script on a simulated cluster as ``torchrun`` would: on every rank, as ``__main__``.

Ranks are threads of this process. The script's names and the modules that it imports exist once per
rank, except for installed packages, and objects can be pickled as in separate processes. A script
that starts its own ranks runs once, and the processes that it would start become the ranks. A
thread that the script itself starts sees the ``__main__`` of the ``distlab`` command, not the
script's.
"""

import ast
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

from distlab.sim.hardware.cluster import Cluster
from distlab.sim.isolation.mains import Program, as_program
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.results.simulated import Options, Simulated
from distlab.sim.simulation import simulate
from distlab.sim.starting import (
    has_main_guard,
    run_parent,
    starts_its_own_ranks,
    would_start_ranks,
)

_GPU = re.compile(r"cuda(:\d*)?|(cpu:gloo,)?(cuda:)?nccl")  # strings that a program passes to torch


def run_script(
    script: Path, arguments: Sequence[str], num_ranks: int, cluster: Cluster, options: Options
) -> Simulated[None]:
    """Run ``script`` with ``arguments`` on every rank, without a process group at the start.

    ``sys.argv``, ``sys.path`` and ``os.environ`` are as under torchrun. ``exit()`` and
    ``exit(0)`` end a rank normally. Ranks see no GPUs, even if the machine has some.

    If the script starts its own ranks, it decides how many there are. A script that can do either
    does so if it starts processes before it asks for RANK. If it does so several times,
    the result is that of the last time.

    Raises:
        SimulationError: the world failed, the script is not valid Python, or it starts its own
            ranks without a main guard.
    """
    tree, code = _compiled(script)
    starts, is_guarded = starts_its_own_ranks(tree, script.parent), has_main_guard(tree)
    if starts and not is_guarded:
        raise SimulationError(
            f"{script} starts its own ranks, which would start more: put the lines that start them "
            'under if __name__ == "__main__":'
        )
    with as_program(script, code, arguments) as program:
        first = program, cluster, options, num_ranks
        if starts or (starts is None and is_guarded and would_start_ranks(*first)):
            return run_parent(*first)
        return simulate(
            _be_main,
            num_ranks,
            program,
            cluster=cluster,
            options=options,
            joined=False,
            own_modules=True,
        )


def chooses_its_ranks(script: Path) -> bool:
    """Return whether a script starts its own ranks, and so decides how many there are."""
    return bool(starts_its_own_ranks(_compiled(script)[0], script.parent))


def title_of(script: Path) -> str:
    """Return the first line of the script's docstring, or the script's name if it has none."""
    docstring = ast.get_docstring(ast.parse(script.read_bytes()))
    return docstring.splitlines()[0].rstrip(".") if docstring else script.stem


def only_defines(script: Path) -> bool:
    """Return whether a script calls nothing, besides in its functions and classes."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(script.read_bytes()).body
    run = [statement for statement in body if not isinstance(statement, definitions)]
    return not any(isinstance(node, ast.Call) for part in run for node in ast.walk(part))


def names_gpus(script: Path) -> bool:
    """Return whether a script's code names CUDA, NCCL or an accelerator, comments aside."""
    try:
        nodes = [*ast.walk(ast.parse(script.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return False  # running it tells why
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    names = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return bool({"cuda", "accelerator"} & {*names}) or any(
        _GPU.fullmatch(string) for string in strings
    )


def _compiled(script: Path) -> tuple[ast.Module, CodeType]:
    try:
        text = script.read_bytes()
        return ast.parse(text), compile(text, str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        reason = "".join(traceback.format_exception_only(error)).strip()
        raise SimulationError(f"{script} cannot be run\n{reason}") from None


def _be_main(program: Program) -> None:
    program.run()
