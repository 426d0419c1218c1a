"""Edited files are picked up by the next cell, without a restart.

The module of an edited file is executed again. Its functions and classes remain the same objects,
so whatever was imported from it before, or made of it, has the new code too:

    from mine import step, Net
    net = Net()
                                 mine.py is edited
    step(net)                    the new step, on a network with the new methods

This goes further than IPython's autoreload, which keeps the old code of decorated functions, and
fails at a method that begins to use ``super()``. Constants that were imported by name stay old.
"""

import contextlib
import inspect
import linecache
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from distlab.launch.stacks import is_of_program
from distlab.lessons import COURSE
from distlab.util.imported import Imported, file_of

_ANNOTATIONS = "__annotate__" if sys.version_info >= (3, 14) else "__annotations__"
_OF_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__doc__", "__dict__", _ANNOTATIONS)
_OF_CLASS = {"__dict__", "__weakref__"}  # belong to the class object itself

Modules = Mapping[str, ModuleType]


class ReloadError(Exception):
    """An edited file cannot be loaded; the message is one line with its name and line number."""


class Watch:
    """Knows in which state files have been loaded as modules."""

    def __init__(self) -> None:
        self._loaded_ns: dict[str, int] = {}  # when each file was last changed, as it was loaded
        self._checked_ns = time.time_ns()

    @contextlib.contextmanager
    def edited(self, modules: Iterable[ModuleType]) -> Iterator[dict[str, CodeType]]:
        """Compile the files that have been edited since modules were loaded from them.

        The block must load them; if it fails, they count as edited the next time, too.

        Yields:
            Code by file.

        Raises:
            ReloadError: A file is not Python.
        """
        changed_ns = dict(_changes({file_of(module) for module in modules}))
        for file, change_ns in changed_ns.items():
            # A file seen for the first time was loaded after the last check.
            is_older = change_ns <= self._checked_ns
            self._loaded_ns.setdefault(file, change_ns if is_older else 0)
        self._checked_ns = time.time_ns()
        yield {
            file: _compiled(file)
            for file, change_ns in changed_ns.items()
            if self._loaded_ns[file] != change_ns
        }
        self._loaded_ns.update(changed_ns)


_watch = Watch()


def reload_changed(names: dict[str, Any]) -> None:
    """Load edited files of the course's folder and the working folder again in this process.

    Args:
        names: Variables of the cells.

    Raises:
        ReloadError: A file cannot be loaded; what was loaded before stays.
    """
    modules = _modules_here()
    with _watch.edited(modules.values()) as codes:
        reload(modules, codes, names)


def _modules_here() -> Modules:
    folders = f"{COURSE}{os.sep}", *_working_folder()
    return {
        name: module
        for name, module in _of_program.now().items()
        if file_of(module).startswith(folders)
    }


def _is_of_program(name: str, module: ModuleType) -> bool:
    file, is_main = file_of(module), name in ("__main__", "__mp_main__")
    return file.endswith(".py") and not is_main and is_of_program(file)


_of_program = Imported(_is_of_program)


def _working_folder() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # a cell may have removed it
        yield f"{os.getcwd()}{os.sep}"


def _changes(files: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield each file that exists, and the time of its last change in nanoseconds."""
    for file in files:
        with contextlib.suppress(OSError):
            yield file, os.stat(file).st_mtime_ns


def _compiled(file: str) -> CodeType:
    linecache.checkcache(file)
    try:
        return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:
        line, reason = getattr(error, "lineno", None), getattr(error, "msg", error)
        raise ReloadError(f"{_shown(file)}, line {line or 1}: {reason}") from None


def reload(modules: Modules, codes: Mapping[str, CodeType], names: dict[str, Any]) -> None:
    """Execute the modules of edited files again.

    Args:
        modules: All modules of the program, by name.
        codes: Code of the edited files, by file.
        names: Variables of the cells.

    Raises:
        ReloadError: A module raises an exception; it stays as it was.
    """
    edited = {name: codes[file] for name in modules if (file := file_of(modules[name])) in codes}
    for name in _in_order(edited):
        _execute(modules[name], edited[name], [names, *map(vars, modules.values())])


def _in_order(codes: Mapping[str, CodeType]) -> list[str]:
    """Return the names of modules, each after those that it imports."""
    order, visited = list[str](), set[str]()

    def visit(name: str) -> None:
        if name not in visited:
            visited.add(name)
            mentioned = {*codes[name].co_names}
            for other in codes:
                if {other, other.rpartition(".")[2]} & mentioned:
                    visit(other)
            order.append(name)

    for name in codes:
        visit(name)
    return order


def _execute(module: ModuleType, code: CodeType, namespaces: Sequence[dict[str, Any]]) -> None:
    """Execute a module again, or leave it as it was; bring its objects up to date everywhere.

    Args:
        module: Module.
        code: Its new code.
        namespaces: Variables that may hold its functions and classes.
    """
    names = vars(module)
    before = dict(names)
    try:
        exec(code, names)
    except BaseException as error:
        names.clear()
        names.update(before)
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ReloadError(_report(error, code.co_filename)) from error
    for name, old in before.items():
        new = names.get(name)
        if new is old or not _are_versions(old, new):
            continue
        if _become(old, new):
            names[name] = old
        else:
            _replace(old, new, namespaces)


def _replace(old: Any, new: Any, namespaces: Sequence[dict[str, Any]]) -> None:
    for namespace in namespaces:
        namespace.update({name: new for name, value in namespace.items() if value is old})


def _report(error: BaseException, file: str) -> str:
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == file), 1)
    return f"{_shown(file)}, line {line}: {type(error).__name__}: {error}"


def _shown(file: str) -> str:
    with contextlib.suppress(FileNotFoundError):  # the working folder is gone
        return os.path.relpath(file)
    return file


def _are_versions(old: Any, new: Any) -> bool:
    """Return whether two objects are functions or classes with the same definition's name."""
    full_name = _full_name(old)
    return full_name[1] is not None and full_name == _full_name(new)


def _full_name(value: Any) -> tuple[str | None, str | None]:
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None)


def _become(old: Any, new: Any) -> bool:
    """Give a function or class the code of its new version, if Python permits it."""
    if type(old) is not type(new):
        return False
    if isinstance(old, FunctionType):
        return _become_function(old, new)
    return isinstance(old, type) and _become_class(old, new)


def _become_function(old: FunctionType, new: FunctionType) -> bool:
    cells, new_cells = old.__closure__ or (), new.__closure__ or ()
    if len(cells) != len(new_cells) or old.__globals__ is not new.__globals__:
        return False
    for name in _OF_FUNCTION:
        setattr(old, name, getattr(new, name))
    for cell, new_cell in zip(cells, new_cells, strict=True):
        cell.cell_contents = new_cell.cell_contents
    return True


def _become_class(old: Any, new: Any) -> bool:
    is_fixed = any(issubclass(old, Enum) or "__slots__" in vars(kind) for kind in (old, new))
    if is_fixed or not _take_bases(old, new):
        return False
    _own_super(old, new)
    for name in vars(old).keys() - vars(new).keys():
        delattr(old, name)
    for name in vars(new).keys() - _OF_CLASS:
        value, member = vars(new)[name], vars(old).get(name)
        if isinstance(member, FunctionType) and _are_versions(member, value):
            value = member if _become(member, value) else value
        setattr(old, name, value)
    return True


def _take_bases(old: Any, new: Any) -> bool:
    try:
        if old.__bases__ != new.__bases__:
            old.__bases__ = new.__bases__
    except TypeError:  # objects of the classes differ in their layout
        return False
    return True


def _own_super(old: type, new: type) -> None:
    """Let ``super()`` in the methods of a class mean the old class, which goes on living."""
    for member in vars(new).values():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        function = inspect.unwrap(function) if callable(function) else None
        if isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars:
            place = function.__code__.co_freevars.index("__class__")
            (function.__closure__ or ())[place].cell_contents = old
