"""What a shell does for the ranks: it shows their outputs, and knows the names of their variables.

output          what a rank passes to `display` is shown in the output of that rank
completion      x.gr<TAB> in a cell of ranks, or after %rank 1
descriptions    `x?` in a cell of ranks, `%rank 1 x?`, and the tooltips of a notebook
edited files    are picked up by the next cell, also by one that does not run on ranks
cells           after `%autoranks on`, cells without a magic run on all ranks
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.interactiveshell import InteractiveShell

from distlab.notebook.magics import ClusterMagics
from distlab.notebook.names import completions, description, questioned
from distlab.notebook.output import route_displays
from distlab.notebook.reloading import ReloadError, reload_changed
from distlab.notebook.targets import parse_ranks

_CELL = re.compile(r"\s*%%ranks\b[ \t]*([\d,-]*).*\n")
_LINE = re.compile(r"%rank[ \t]+([\d,-]+|all)[ \t]")
_QUESTION = re.compile(r"\s*%rank[ \t]+(?P<arguments>.*\?)\s*")
_MAGICS = ("%", "!", "?")


def load(shell: InteractiveShell) -> Callable[[], None]:
    """Add the commands to a shell; return a function that ends the ranks and takes back all else.

    The commands stay, and say that there are no ranks.
    """
    magics = ClusterMagics(shell)
    shell.register_magics(magics)
    added = contextlib.ExitStack()
    added.callback(magics.close)
    added.callback(route_displays(shell))
    for addition in (_completion, _descriptions, _edits, _cells):
        added.enter_context(addition(shell, magics))
    return added.close


@contextlib.contextmanager
def _completion(shell: InteractiveShell, magics: ClusterMagics) -> Iterator[None]:
    @context_matcher(identifier="distlab")
    def names_of_ranks(context: CompletionContext) -> SimpleMatcherResult:
        cell, line = _CELL.match(context.full_text), _LINE.match(context.line_with_cursor.lstrip())
        is_in_cell = cell is not None and context.cursor_line > 0
        is_on_all = magics.is_automatic and not context.full_text.lstrip().startswith(_MAGICS)
        which = line[1] if line else cell[1] if cell and is_in_cell else "" if is_on_all else None
        if which is None or magics.world is None:
            return {"completions": []}
        try:
            rank = parse_ranks(which, magics.world.num_ranks)[0]
        except ValueError:
            return {"completions": []}
        [names] = magics.world.ask([rank], completions, context.token)
        offered = [SimpleCompletion(name.rstrip("( :")) for name in names]
        return {"completions": offered, "suppress": bool(offered)}

    matchers = shell.Completer.custom_matchers
    matchers.append(names_of_ranks)
    yield
    matchers.remove(names_of_ranks)


@contextlib.contextmanager
def _descriptions(shell: Any, magics: ClusterMagics) -> Iterator[None]:
    """Let the shell describe variables of rank 0 that the notebook itself does not have."""
    describe = shell.object_inspect_mime

    def describe_also_on_ranks(name: str, *args: Any, **options: Any) -> dict[str, str]:
        try:
            return dict(describe(name, *args, **options))
        except KeyError:
            if magics.world is None:
                raise
            try:
                return {"text/plain": magics.world.ask([0], description, name)[0]}
            except NameError:
                raise KeyError(name) from None

    shell.object_inspect_mime = describe_also_on_ranks
    yield
    shell.object_inspect_mime = describe


@contextlib.contextmanager
def _edits(shell: InteractiveShell, _: ClusterMagics) -> Iterator[None]:
    def reload(*_: object) -> None:
        try:
            reload_changed(shell.user_ns)
        except ReloadError as error:
            print(f"{error}; the notebook goes on with what it had loaded", file=sys.stderr)

    shell.events.register("pre_run_cell", reload)
    yield
    shell.events.unregister("pre_run_cell", reload)


@contextlib.contextmanager
def _cells(shell: InteractiveShell, magics: ClusterMagics) -> Iterator[None]:
    def transformed(lines: list[str]) -> list[str]:
        if len(lines) == 1 and (question := _QUESTION.fullmatch(lines[0])):
            # Otherwise, the shell itself would answer the question.
            return [f"get_ipython().run_line_magic('rank', {question['arguments']!r})\n"]
        has_magic = not lines or lines[0].startswith(_MAGICS) or questioned("".join(lines))
        return lines if has_magic or not magics.is_automatic else ["%%autoranks\n", *lines]

    # A terminal asks the other transformers whether a cell is complete; with a magic above it, it
    # would be only after an empty line.
    transformed.has_side_effects = True  # type: ignore[attr-defined]
    transformers = shell.input_transformers_cleanup
    transformers.append(transformed)
    yield
    transformers.remove(transformed)
