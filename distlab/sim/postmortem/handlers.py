"""Notes on exceptions that ranks have caught, or may have caught in an ``except`` in the source.

A rank that has caught an exception may have skipped a call, and its waits do not show that. Python
keeps no record of caught exceptions, so the report can only ask.
"""

import ast
import functools
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from distlab.sim.engine.scheduler import Rank
from distlab.sim.reporting.errors import Deadlock, Mismatch, SimulationError
from distlab.sim.reporting.report import WHO, error_line, merged_notes, place_suffix
from distlab.sim.reporting.sites import PROGRAM, Exit, Places, Site
from distlab.util.text import rank_names

Node = TypeVar("Node", bound=ast.stmt | ast.ExceptHandler)
_LOOPS = (ast.For, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_TRIES = tuple(getattr(ast, name) for name in ("Try", "TryStar") if hasattr(ast, name))
_LEAVES = (ast.Return, ast.Continue, ast.Break)
DELIBERATE = ("KeyboardInterrupt", "StopIteration")  # exceptions that are caught on purpose


class Skipper(NamedTuple):
    """An ``except`` or ``suppress`` in the source that may make a program skip a line."""

    word: str
    line: int


def handler_around(site: Site) -> ast.ExceptHandler | None:
    """Return the innermost ``except`` clause that contains a line."""
    return _innermost(site, (ast.ExceptHandler,))


def raises(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler always raises, either the caught exception or another one."""
    blocks = [handler.body]
    for block in blocks:
        blocks += [node.body for node in block if isinstance(node, ast.With | ast.Try)]
    return any(isinstance(node, ast.Raise) for block in blocks for node in block)


def skipper_of(site: Site, *, is_in_loop: bool = False) -> Skipper | None:
    """Return an ``except`` or ``suppress`` that may make the line's function skip the line.

    Either the line is inside the ``try`` or ``with`` block, or it is below a handler that leaves
    the function, the loop or the iteration.

    Args:
        site: Line that may be skipped.
        is_in_loop: True to search only the innermost loop around the line.
    """
    line, function = site[1], _innermost(site, (ast.FunctionDef, ast.AsyncFunctionDef))
    scope = _own_nodes(function or _module(site[0]))
    if is_in_loop:
        loops = [node for node in scope if isinstance(node, _LOOPS) and _holds(node, line)]
        scope = (node for loop in loops[-1:] for node in _own_nodes(loop))
    return next((skipper for node in scope for skipper in _skippers_of_node(node, line)), None)


def _skippers_of_node(node: ast.AST, line: int) -> Iterator[Skipper]:
    if isinstance(node, _TRIES):
        is_inside = node.body[0].lineno <= line <= _end(node.body[-1])
        for handler in node.handlers:
            if _hides(handler) and (is_inside or _leaves_before(handler, line)):
                yield Skipper("except", handler.lineno)
    elif isinstance(node, ast.With) and _suppresses(node) and _holds(node, line):
        yield Skipper("suppress", node.lineno)


def _hides(handler: ast.ExceptHandler) -> bool:
    name = ast.unparse(handler.type) if handler.type else ""
    return name not in DELIBERATE and not raises(handler)


def _leaves_before(handler: ast.ExceptHandler, line: int) -> bool:
    return _end(handler) < line and any(isinstance(node, _LEAVES) for node in ast.walk(handler))


def _suppresses(node: ast.With) -> bool:
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(ast.unparse(call.func).endswith("suppress") for call in calls)


def _innermost(site: Site, kinds: tuple[type[Node], ...]) -> Node | None:
    nodes = ast.walk(_module(site[0]))
    around = [node for node in nodes if isinstance(node, kinds) and _holds(node, site[1])]
    return max(around, key=lambda node: node.lineno, default=None)


def _holds(node: ast.stmt | ast.ExceptHandler, line: int) -> bool:
    return node.lineno <= line <= _end(node)


def _end(node: ast.stmt | ast.ExceptHandler) -> int:
    return node.end_lineno or node.lineno


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, but not those of nested functions and classes."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, _SCOPES):
            yield node
            yield from _own_nodes(node)


def _module(file: str) -> ast.Module:
    """Parse a file; the module is empty if the file is missing or invalid."""
    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=16)
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


KINDS = ("peer ended", "missing rank", "order mismatch")  # deadlocks that a skipped call may cause


def suspicions(
    error: SimulationError, ranks: Sequence[Rank], places: Places, exits: Mapping[int, Exit]
) -> Iterator[str]:
    """Yield a question about a handler that may have hidden an error of the ranks to blame, if any.

    There is no question if one of these ranks ended inside an ``except``, because the report
    already says so.

    Args:
        exits: Exits of the ranks, by rank, if known.
    """
    # Even with many ranks, these are only a few lines.
    ends = {exits[rank].at for rank in error.ranks if rank in exits}
    if any(handler_around(site) for site in ends):
        return
    if isinstance(error, Mismatch) or (isinstance(error, Deadlock) and error.kind in KINDS):
        yield from _suspicions(error, ranks, places)


def handled(ranks: Sequence[Rank], places: Places) -> list[str]:
    """Return notes on exceptions that ranks have caught and are still handling."""
    return merged_notes(
        (
            rank,
            f"On {WHO}, an except deals with {error_line(error)}"
            f"{place_suffix(places.raised_at(error))}.",
        )
        for rank, error in exceptions_of(ranks)
        if not isinstance(error, SimulationError) and type(error).__name__ not in DELIBERATE
    )


def exceptions_of(ranks: Sequence[Rank]) -> Iterator[tuple[int, Exception]]:
    """Yield ranks that are handling or propagating an exception, each with its exception."""
    by_thread: Mapping[int, Any] = sys._current_exceptions()
    for rank in ranks:
        error = None if rank.has_ended else by_thread.get(rank.ident)
        if isinstance(error, tuple):  # (type, error, traceback) in Python 3.10 and 3.11
            error = error[1]
        if isinstance(error, Exception):
            yield rank.number, error


def _suspicions(error: SimulationError, ranks: Sequence[Rank], places: Places) -> Iterator[str]:
    blamed = set(error.ranks)
    frames = sys._current_frames()
    waiting = [rank for rank in ranks if not rank.has_ended and rank.ident in frames]
    victims = [rank for rank in waiting if rank.number not in blamed] or waiting
    sites = dict.fromkeys(s for rank in victims for s in _program_sites(frames[rank.ident], places))
    for site in sites:
        continues = any(other[::2] == site[::2] and other[1] > site[1] for other in sites)
        # In a mismatch, ranks have gone on to a later call: further down, or in a later iteration.
        is_in_loop = isinstance(error, Mismatch) and not continues
        if skipper := skipper_of(site, is_in_loop=is_in_loop):
            who = rank_names(blamed) if len(blamed) < len(ranks) else "a rank"
            yield (
                f"The {skipper.word} of line {skipper.line} can hide an error: did {who} come "
                "through it, and so leave out a call?"
            )
            return


def _program_sites(frame: FrameType | None, places: Places) -> Iterator[Site]:
    while frame is not None:
        code = frame.f_code
        if places.kind(code.co_filename) == PROGRAM:
            yield code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
