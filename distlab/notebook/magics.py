"""The commands of a notebook: ``%cluster``, ``%%ranks``, ``%rank``, ``%push`` and ``%pull``."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from distlab.learner import folder
from distlab.notebook import checking
from distlab.notebook.cells import compiled
from distlab.notebook.output import output_of_thread
from distlab.notebook.page import Page
from distlab.notebook.simulated import SimulatedRanks
from distlab.notebook.targets import parse_ranks
from distlab.notebook.world import World
from distlab.sim import Cluster, Options
from distlab.sim.collectives.algorithms import ALGORITHMS
from distlab.sim.results.simulated import SEMANTICS

NO_RANKS = "there are no ranks: begin some by %cluster 8"
MAX_RANKS = 1024
NCCL_CLUSTER = "dgx-h100"  # of %cluster 8 --semantics nccl, which needs GPUs


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
        self._checked: dict[str, str] = {}  # the cells that were judged last, by task

    @magic_arguments()
    @argument("what", nargs="?", default="", help="Number of ranks, or a preset such as dgx-h100.")
    @argument("--ranks", type=int, help="Number of ranks of a preset.  [default: one per GPU]")
    @argument("--semantics", choices=SEMANTICS, default="gloo", help="Of which backend.")
    @argument("--algorithm", choices=ALGORITHMS, default="auto", help="Of built-in collectives.")
    @argument("--seed", type=int, default=0, help="Seeds the ranks' generators.")
    @argument("--off", action="store_true", help="End the ranks.")
    @line_magic
    def cluster(self, line: str) -> None:
        """Begin ranks: %cluster 8, or %cluster dgx-h100. Alone, it says what there is."""
        args = parse_argstring(self.cluster, line)
        if args.off or args.what:
            self.close()
        if args.what:
            self.world = _simulated(args)
        if self.world is None:
            print("The ranks have ended." if args.off else NO_RANKS)
        else:
            print("\n".join([self.world.title, *([] if args.what else self.world.state())]))

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run a cell on all ranks, or on some: %%ranks 0,2-3."""
        self._show(cell, line.strip())

    @line_magic
    def rank(self, line: str) -> None:
        """Show the value of an expression on one rank or several: %rank 1 x.grad."""
        which, _, expression = line.strip().partition(" ")
        if not which or not expression:
            raise UsageError("name ranks and an expression: %rank 1 x.grad, or %rank all x.grad")
        self._show(expression, which)

    @line_magic
    def push(self, line: str) -> None:
        """Give the notebook's variables to the ranks: %push x y."""
        known, world = self.shell.user_ns, self._world()
        for name in (names := line.replace(",", " ").split()):
            if name not in known:
                raise UsageError(f"the notebook has no variable {name}")
        world.push({name: known[name] for name in names}, range(world.num_ranks))

    @line_magic
    def pull(self, line: str) -> None:
        """Bring a variable of the ranks into the notebook, as a list by rank: %pull loss."""
        world = self._world()
        for name in line.replace(",", " ").split():
            try:
                by_rank = world.pull(name, range(world.num_ranks))
            except NameError as error:
                raise UsageError(str(error)) from None
            self.shell.user_ns[name] = [by_rank[rank] for rank in range(world.num_ranks)]

    @cell_magic
    def check(self, line: str, cell: str) -> None:
        """Judge a task's function as it stands in the cell: %%check 3.3."""
        with _learners_errors():
            here = folder.find()
            task = here.task(line.strip())
            self._checked[task.id] = cell
            print("\n".join(checking.check(here, task, cell)))

    @line_magic
    def save(self, line: str) -> None:
        """Write the function that %%check has judged into its template: %save 3.3."""
        with _learners_errors():
            here = folder.find()
            task = here.task(line.strip())
            if task.id not in self._checked:
                raise UsageError(f"nothing to save: judge a cell first, by %%check {task.id}")
            print(checking.save(here, task, self._checked[task.id]))

    def close(self) -> None:
        """End the ranks."""
        if self.world is not None:
            self.world.close()
            self.world = None

    def _world(self) -> World:
        if self.world is None:
            raise UsageError(NO_RANKS)
        return self.world

    def _show(self, source: str, which: str) -> None:
        """Run a cell on ranks, and show what comes of it."""
        world = self._world()
        cell = compiled(source, f"cell {len(self.shell.user_ns['In']) - 1}")  # as the prompt says
        ran = world.run(cell, _chosen(which, world.num_ranks))
        display(Page(ran))
        if ran.error:
            raise CellFailed(ran.error.splitlines()[0])


@contextlib.contextmanager
def _learners_errors() -> Iterator[None]:
    try:
        yield
    except folder.LearnerError as error:
        raise UsageError(str(error)) from None


def _chosen(which: str, num_ranks: int) -> Collection[int]:
    try:
        return parse_ranks(which, num_ranks)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _simulated(args: Any) -> SimulatedRanks:
    options = Options(semantics=args.semantics, algorithm=args.algorithm, seed=args.seed)
    try:
        if args.what.lstrip("-").isdigit():
            if not 1 <= int(args.what) <= MAX_RANKS:
                raise UsageError(f"a cluster has 1 to {MAX_RANKS} ranks, not {args.what}")
            preset = NCCL_CLUSTER if args.semantics == "nccl" else None
            return SimulatedRanks(int(args.what), preset, options)
        preset = args.what.replace("_", "-")
        num_ranks = args.ranks or Cluster.preset(preset, 1).num_gpus
        return SimulatedRanks(num_ranks, preset, options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def load(shell: InteractiveShell) -> Callable[[], None]:
    """Add the commands to a shell; return what ends the ranks.

    What a rank passes to ``display`` is shown in the output of that rank.
    """
    magics = ClusterMagics(shell)
    shell.register_magics(magics)
    publisher: Any = shell.display_pub
    publish = publisher.publish

    def publish_by_rank(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        output = output_of_thread()
        if output is None:
            publish(data, *args, **kwargs)
        else:
            output.shown.append(data)

    publisher.publish = publish_by_rank
    return magics.close
