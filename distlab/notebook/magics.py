"""The commands of a notebook: ``%cluster``, ``%%ranks``, ``%rank``, ``%push`` and ``%pull``."""

import contextlib
import re
import shlex
import textwrap
import traceback
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    line_magic,
    magics_class,
    no_var_expand,
)
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display

from distlab.course import Task
from distlab.learner import folder
from distlab.notebook import checking
from distlab.notebook.cells import NAME, Cell, compiled, naming_cells
from distlab.notebook.clusters import begun
from distlab.notebook.folding import GROUPINGS
from distlab.notebook.live import show_while
from distlab.notebook.names import description, questioned
from distlab.notebook.output import RankOutput
from distlab.notebook.page import Page, Picture
from distlab.notebook.targets import parse_ranks
from distlab.notebook.world import Ran, World
from distlab.sim.collectives.algorithms import ALGORITHMS
from distlab.sim.results.simulated import P2P_ORDERS, SEMANTICS
from distlab.util.text import joined

NO_RANKS = "there are no ranks: start some with %cluster 8"
MAX_ERROR_CHARS = 100
WORLDS = ("sim", "gloo", "nccl", "mpi")


class CellFailed(Exception):
    """Ends a notebook's cell after its report has been shown, so that later cells do not run."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@magics_class
class ClusterMagics(Magics):
    """Runs cells on ranks.

    Attributes:
        world: The ranks, or None.
    """

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.world: World | None = None
        self._error: str | None = None  # report on the last cell, None before the first
        self._is_running = False  # while a cell runs on ranks
        self.is_automatic = False  # whether cells without a magic run on all ranks
        self._checked: dict[str, str] = {}  # the cells that were judged last, by task

    @magic_arguments()
    @argument("size", nargs="*", help="Number of ranks, a preset such as laptop, or both.")
    @argument("--help", action="store_true", help="List the options.")
    @argument("--off", action="store_true", help="End the ranks.")
    @argument("--why", action="store_true", help="Which ranks waited for which in the last cell.")
    @argument(
        "--lanes",
        nargs="?",
        const="",
        metavar="FILE",
        help="Draw what the ranks did in the last cell; FILE ends in .svg, .png or .pdf.",
    )
    @argument("--world", choices=WORLDS, default="sim", help="Simulated, or real processes.")
    @argument(
        "--cluster", metavar="PRESET", help="Such as dgx-h100, p4d, laptop.  [default: dgx-h100]"
    )
    @argument(
        "--nodes", type=int, metavar="N", help="Number of nodes.  [default: as the ranks need]"
    )
    @argument("--ranks", type=int, metavar="N", help="Of a preset.  [default: one per GPU]")
    @argument("--semantics", choices=SEMANTICS, default="gloo", help="nccl: ranks have GPUs.")
    @argument(
        "--algorithm",
        choices=ALGORITHMS,
        default="auto",
        metavar="NAME",
        help=f"Of collectives: {joined(ALGORITHMS)}.",
    )
    @argument("--seed", type=int, metavar="N", default=0, help="Seeds the ranks' generators.")
    @argument(
        "--eager-bytes", type=int, metavar="N", default=-1, help="Buffer sends up to this size."
    )
    @argument("--strict", action="store_true", help="Report tensors changed while being sent.")
    @argument("--sanitize", action="store_true", help="Look for mistakes that raise no error.")
    @argument("--fault", action="append", default=[], help="As for distlab sim.")
    @argument("--memory-gib", type=float, metavar="X", help="Memory of each GPU.")
    @argument("--overlap-cost", type=float, metavar="X", default=0.0, help="As for distlab sim.")
    @argument("--p2p-order", choices=P2P_ORDERS, default="free", help="As for distlab sim.")
    @argument("--host-cost", action="append", default=[], help="As for distlab sim.")
    @argument("--no-devices", action="store_true", help="Computation takes no time.")
    @line_magic
    def cluster(self, line: str) -> None:
        """Begin ranks: %cluster 8, or %cluster dgx-h100. Alone, it says what there is."""
        self._refuse_ranks()
        args, given = _parsed(self.cluster, line), _given(self.cluster, line)
        match given:
            case []:
                world = self._world()
                print(self._named("\n".join([world.title, *world.state()])))
            case ["help"]:
                usage = self.cluster.parser.format_usage().strip(":\n ")
                print(re.sub(r"\n +", "\n    ", usage), "%cluster? explains them.", sep="\n")
            case ["off"]:
                ended = "The ranks have ended." if self.world else "There are no ranks."
                self.close()
                print(ended)
            case ["why"]:
                self._world()
                if self._error is None:
                    raise UsageError("no cell has run yet")
                print(self._error or "The last cell ended without an error.")
            case ["lanes"]:
                self._draw(args.lanes)
            case _:
                self._begin(args, given)

    def _begin(self, args: Any, given: Collection[str]) -> None:
        try:
            with _usage_errors():
                world = begun(args, given)
        except KeyboardInterrupt:
            raise UsageError("interrupted: no new ranks have begun") from None
        had_ranks = self.world is not None  # after a mistyped option, they are still there
        self.close()
        if had_ranks:
            print("The previous ranks have ended, and their variables are gone.")
        self.world = world
        print(world.title)

    def _draw(self, file: str) -> None:
        """Show the lanes of the last cell, or write them into a file."""
        with _usage_errors():
            lanes = self._world().lanes()
            if file:
                lanes.savefig(file)
        display(Picture(lanes)) if not file else print(f"{file}: what the ranks did in the cell")

    @magic_arguments()
    @argument("which", nargs="*", help="Ranks, such as 0,2-3.  [default: all]")
    @argument("--targets", "-t", help="The same, as for %%%%px.")
    @argument(
        "--group-outputs",
        choices=GROUPINGS,
        default=GROUPINGS[0],
        help="equal: ranks that show the same in one; engine: each rank for itself; type: first "
        "what all print, then what they display, then values.",
    )
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run a cell on all ranks, or on some: %%ranks 0,2-3."""
        args = _parsed(self.ranks, line)
        self._show(f"\n{cell}", args.targets or " ".join(args.which), args.group_outputs)

    @line_cell_magic
    @no_var_expand
    def rank(self, line: str, cell: str | None = None) -> None:
        """Show the value of an expression on one rank or several: %rank 1 x.grad."""
        if cell is not None:
            self.ranks(line, cell)
            return
        which, _, expression = line.strip().partition(" ")
        if not which or not expression:
            raise UsageError("name ranks and an expression: %rank 1 x.grad, or %rank all x.grad")
        self._show(expression, which)

    @line_cell_magic
    def autoranks(self, line: str, cell: str | None = None) -> None:
        """Run every cell that begins with no magic on all ranks: %autoranks on, %autoranks off."""
        if cell is not None:  # such a cell, which the shell has marked by a line above it
            self._show(cell, "all")
            return
        if line.strip() not in ("on", "off"):
            raise UsageError("write %autoranks on, or %autoranks off")
        self.is_automatic = line.strip() == "on"

    @line_magic
    def push(self, line: str) -> None:
        """Give the notebook's variables to the ranks: %push x y."""
        known, world = self.shell.user_ns, self._world()
        for name in (names := _names(line, "%push x y")):
            if name not in known:
                raise UsageError(f"the notebook has no variable {name}")
        with _usage_errors():
            world.push({name: known[name] for name in names})

    @line_magic
    def pull(self, line: str) -> None:
        """Bring a variable of the ranks into the notebook, as a list by rank: %pull loss."""
        world = self._world()
        for name in _names(line, "%pull loss"):
            with _usage_errors(), self._ends_named():
                self.shell.user_ns[name] = world.pull(name)

    @cell_magic
    def check(self, line: str, cell: str) -> None:
        """Judge a task's function as it stands in the cell: %%check 3.3."""
        with _usage_errors():
            here, task = _task(line, "%%check 3.1")
            self._compiled(f"\n{cell}")  # a cell that is not Python shows its line
            self._checked[task.id] = cell
            print("\n".join(checking.check(here, task, cell)))

    @line_magic
    def save(self, line: str) -> None:
        """Write the function that %%check has judged into its template: %save 3.3."""
        with _usage_errors():
            here, task = _task(line, "%save 3.1")
            if task.id not in self._checked:
                raise UsageError(f"nothing to save: judge a cell first, by %%check {task.id}")
            print(checking.save(here, task, self._checked[task.id]))

    def close(self) -> None:
        """End the ranks."""
        if self.world is not None:
            self.world.close()
            self.world, self._error = None, None

    @contextlib.contextmanager
    def _ends_named(self) -> Iterator[None]:
        """Say in a line that the ranks were interrupted, or cannot run anything more."""
        try:
            yield
        except (RuntimeError, KeyboardInterrupt) as error:
            raise CellFailed(self._named(str(error)) or "interrupted") from None

    def _world(self) -> World:
        self._refuse_ranks()
        if self.world is None:
            raise UsageError(NO_RANKS)
        return self.world

    def _refuse_ranks(self) -> None:
        """Raise an error if the code of a cell on ranks has called a command."""
        if self._is_running:
            raise UsageError("ranks run Python alone: give this command in a cell of its own")

    def _show(self, source: str, which: str, grouping: str = GROUPINGS[0]) -> None:
        """Run a cell on ranks, and show what comes of it."""
        world = self._world()
        with _usage_errors():
            ranks = parse_ranks(which, world.num_ranks)
            if name := questioned(source):
                print(*world.ask(ranks[:1], description, name))
                return
        cell = self._compiled(source)
        self._error = ""
        outputs = {rank: RankOutput() for rank in ranks}
        with self._ends_named():
            ran = show_while(
                lambda: self._run(cell, outputs),
                lambda ran: Page(outputs, ran, grouping),
                is_live=hasattr(self.shell, "kernel"),
            )
        if ran.error:
            raise CellFailed(
                textwrap.shorten(ran.error.splitlines()[0], MAX_ERROR_CHARS, placeholder=" …")
            )

    def _run(self, cell: Cell, outputs: Mapping[int, RankOutput]) -> Ran:
        world, self._is_running = self._world(), True
        try:
            ran = world.run(cell, outputs)
        finally:
            self._is_running = False
        notes = [*map(self._named, ran.notes), *self._to_push(ran.error)]
        self._error = error = self._named(ran.error)
        return Ran(error, notes, ran.cost)

    def _to_push(self, error: str) -> Iterator[str]:
        """Yield a hint if a rank lacks a variable that the notebook has."""
        missing = re.search(r"^NameError: name '(\w+)' is not defined", error, re.MULTILINE)
        if missing and missing[1] in self.shell.user_ns:
            yield f"The notebook has {missing[1]}, the ranks do not: %push {missing[1]}"

    def _named(self, report: str) -> str:
        return naming_cells(report, self.shell.compile._filename_map)

    def _compiled(self, source: str) -> Cell:
        """Compile a cell under the number of its prompt."""
        try:
            return compiled(source, f"{NAME}{len(self.shell.user_ns['In']) - 1}")
        except SyntaxError as error:
            if command := re.match(r"\s*([%!]+\w+)", error.text or ""):
                advice = f"ranks run Python alone; begin another cell with {command[1]}"
                raise UsageError(f"line {error.lineno}: {advice}") from None
            *lines, last = traceback.format_exception_only(error)
            print("".join(lines), end="")
            raise CellFailed(last.strip()) from None


def _parsed(magic: Any, line: str, first: Namespace | None = None) -> Any:
    """Parse a magic's arguments, of which some are in quotes: --fault 'slow_rank 3 1.6'."""
    with _usage_errors():
        return magic.parser.parse_args(shlex.split(line), first)


def _given(magic: Any, line: str) -> list[str]:
    """Return the names of the arguments that are in the line, whether or not they are defaults."""
    nothing = Namespace(**dict.fromkeys(vars(_parsed(magic, ""))))
    args = _parsed(magic, line, nothing)
    return [name for name, value in vars(args).items() if value not in (None, [])]


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """Let the user see errors of the user's making in one line."""
    try:
        yield
    except (folder.LearnerError, ValueError, NameError, OSError) as error:
        raise UsageError(str(error)) from None


def _task(line: str, example: str) -> tuple[folder.CourseFolder, Task]:
    if not line.strip():
        raise UsageError(f"name a task: {example}")
    here = folder.find()
    return here, here.task(line.strip())


def _names(line: str, example: str) -> list[str]:
    names = line.replace(",", " ").split()
    if not names:
        raise UsageError(f"name variables: {example}")
    return names
