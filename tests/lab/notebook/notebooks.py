"""A notebook for tests: a shell of IPython, and what its cells show."""

from typing import Any

from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.utils.capture import capture_output

from distlab.notebook.cells import compiled
from distlab.notebook.output import RankOutput
from distlab.notebook.world import Ran, World


def run(world: World, source: str, *ranks: int) -> tuple[Ran, dict[int, RankOutput]]:
    """Run a cell on some ranks, or on all."""
    outputs = {rank: RankOutput() for rank in ranks or range(world.num_ranks)}
    return world.run(compiled(source, "cell 5"), outputs), outputs


class Notebook:
    """A shell, and what its last cell has shown."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.result: ExecutionResult | None = None

    def run(self, cell: str) -> str:
        """Run a cell, and return what it shows as text."""
        self.shell.display_pub.outputs.clear()
        with capture_output(display=False) as printed:
            self.result = self.shell.run_cell(cell, store_history=True)
        return "\n".join([printed.stdout, printed.stderr, self._shown("text/plain")]).strip()

    def html(self) -> str:
        """Return the last cell's HTML."""
        return self._shown("text/html")

    def _shown(self, kind: str) -> str:
        outputs = self.shell.display_pub.outputs
        return "\n".join(output["data"].get(kind, "") for output in outputs)

    def completions(self, line: str) -> list[str]:
        """Return what the tab key offers at the end of a line."""
        with provisionalcompleter():
            offered = self.shell.Completer.completions(line, len(line))
            return [line[: entry.start] + entry.text for entry in offered]

    def pulled(self, name: str) -> list[Any]:
        """Return the values of a variable of the ranks."""
        self.run(f"%pull {name}")
        values: list[Any] = self.shell.user_ns[name]
        return values

    @property
    def magics(self) -> Any:
        """The commands, whose `world` is the ranks."""
        return self.shell.magics_manager.registry["ClusterMagics"]

    @property
    def has_failed(self) -> bool:
        assert self.result is not None
        return not self.result.success
