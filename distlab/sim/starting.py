"""Run a script that starts its own ranks, as many teaching programs do: those are simulated."""

import ast
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from distlab.sim.gpu.cuda import install_for_parent
from distlab.sim.hardware.cluster import Cluster, choose_cluster
from distlab.sim.isolation.children import Child, Children, be_child, noted
from distlab.sim.isolation.mains import Program
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.results.simulated import Options, Simulated
from distlab.sim.simulation import simulate
from distlab.util.replacing import replace_until

_STARTS = {"spawn", "start_processes", "Process"}
_JOINS = {"init_process_group", "init_device_mesh"}
_PLACES = {"RANK", "LOCAL_RANK"}  # variables that only a launcher sets
_OF_LAUNCHERS = {*_PLACES, "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def starts_its_own_ranks(tree: ast.Module, folder: Path) -> bool | None:
    """Return whether a script runs without a launcher, and starts processes that join a group.

    Returns None for a script that can start processes, but also names RANK or LOCAL_RANK without
    setting it, or leaves it to a module beside it to start them: what it does may depend on its
    arguments, so ``would_start_ranks`` has to try.

    Args:
        folder: Folder of the script.
    """
    own, imported = _names(tree), _names_in_modules(tree, folder)
    if not (own | imported) & _STARTS or not (own | imported) & _JOINS:
        return False
    if not own & _STARTS:
        return None
    places = [node for node in ast.walk(tree) if _is_place(node)]
    return True if not places or _assigned(tree) else None


def _names(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _names_in_modules(tree: ast.AST, folder: Path) -> set[str]:
    """Return the names in modules that a script imports from its own folder."""
    names: set[str] = set()
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for file in (folder / f"{module.replace('.', '/')}.py" for module in modules):
            with suppress(OSError, SyntaxError, ValueError):
                names |= _names(ast.parse(file.read_bytes()))
    return names


def _is_place(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in _PLACES


def _assigned(tree: ast.Module) -> list[ast.AST]:
    """Return where a script sets RANK or LOCAL_RANK: as ``x[…] = …``, in a dict or by keyword."""
    return [
        node
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and _is_place(node.slice)
        )
        or (isinstance(node, ast.Dict) and any(map(_is_place, filter(None, node.keys))))
        or (isinstance(node, ast.keyword) and node.arg in _PLACES)
    ]


def has_main_guard(tree: ast.Module) -> bool:
    """Return whether a script asks for its ``__name__``, as processes that it starts need."""
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(tree))


def run_parent(
    program: Program, cluster: Cluster, options: Options, num_ranks: int
) -> Simulated[None]:
    """Run a script once; the processes that it starts together become the ranks of a world.

    Args:
        num_ranks: Number of GPUs that the script sees, if it sees any and a node has that many.

    Raises:
        SimulationError: a world failed, the script started no ranks, or the cluster has fewer GPUs.
    """
    worlds = _Worlds(program, cluster, options)
    _run_first(program, worlds.simulate, cluster, options, num_ranks)
    return worlds.last()


def _run_first(
    program: Program,
    simulate_children: Callable[[list[Child]], object],
    cluster: Cluster,
    options: Options,
    num_ranks: int,
) -> None:
    """Run a script as the process that starts the ranks."""
    with noted(Children(simulate_children)), ExitStack() as undo:
        if options.semantics == "nccl" and cluster.gpu:
            num_gpus = min(cluster.gpus_per_node, num_ranks)
            install_for_parent(partial(replace_until, undo), cluster.gpu.name, num_gpus)
        program.run()


_SPAWNS, _IS_LAUNCHED = 17, 18  # exit statuses of the copy that tries a script


def would_start_ranks(*first: Any) -> bool:
    """Return whether a script starts ranks before it asks for its place in the environment.

    A copy of this process runs the script without input and output, and ends when it knows. Files
    that the script writes until then are written.

    Args:
        first: Arguments of ``run_parent``.
    """
    pid = os.fork()
    if not pid:
        _try(*first)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == _SPAWNS


def _try(program: Program, *settings: Any) -> NoReturn:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(nowhere, "w", encoding="utf-8")  # noqa: SIM115
    environ: Any = os.environ
    environ._data = _Watched(environ._data)
    with suppress(BaseException):
        _run_first(program, lambda _: os._exit(_SPAWNS), *settings)
    os._exit(_IS_LAUNCHED)


class _Watched(dict[bytes, bytes]):
    """An environment in which asking for a place that nobody has set ends the process."""

    def __getitem__(self, name: bytes) -> bytes:
        if name not in self and name.decode() in _OF_LAUNCHERS:
            os._exit(_IS_LAUNCHED)
        return super().__getitem__(name)


class _Worlds:
    """The worlds of a script's ranks, one for each time that it starts some."""

    def __init__(self, program: Program, cluster: Cluster, options: Options) -> None:
        self._program, self._cluster, self._options = program, cluster, options
        self._simulated: list[Simulated[None]] = []
        self._failure: SimulationError | None = None

    def simulate(self, children: list[Child]) -> None:
        """Run children as the ranks of a world."""
        try:
            simulated = simulate(
                partial(_be_child, children, self._program, self._program.mains.module),
                len(children),
                cluster=choose_cluster(self._cluster, len(children)),
                options=self._options,
                joined=False,
                own_modules=True,
            )
        except SimulationError as error:
            self._failure = error
            raise
        except ValueError as error:
            raise SimulationError(f"{self._program.script} starts its own ranks: {error}") from None
        self._simulated.append(simulated)

    def last(self) -> Simulated[None]:
        """Return the last world, unless one has failed, even if the script has caught its error."""
        if self._failure is not None:
            raise self._failure
        if not self._simulated:
            raise SimulationError(
                f"{self._program.script} started no ranks. On a machine without GPUs, which is "
                "what it sees here, torch.cuda.device_count() is 0"
            )
        return self._simulated[-1]


def _be_child(children: list[Child], program: Program, parent: ModuleType) -> None:
    child = children[int(os.environ["RANK"])]
    os.environ.clear()  # no launcher has set RANK or MASTER_ADDR for this process
    os.environ.update(child.variables)
    be_child(child, program, parent)
