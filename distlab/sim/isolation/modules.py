"""Each rank's own copies of the modules that the program imports, as in separate processes.

Many libraries keep their process group in a module. If the ranks shared that module, all of them
would use the group that the last rank stored there.

    rank 0    import state    state.rank = 0                                     state.rank is 0
    rank 1                                      import state    state.rank = 1

While a rank runs, ``sys.modules`` holds its copies; ``RankState`` swaps them. Installed packages,
such as torch, stay shared, but for a few.
"""

import contextlib
import functools
import importlib._bootstrap
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from distlab.sim.isolation.rank_states import MAIN, RankStates
from distlab.util.imported import Imported, file_of

_bootstrap: Any = importlib._bootstrap  # untyped, because the stubs lack its private names
_OF_PYTHON = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib"))
_OF_DISTLAB = str(Path(__file__).parents[2])
_INSTALLED = {"site-packages", "dist-packages"}
_PER_RANK = {"tqdm"}  # installed packages that count something in the process, such as their bars


@functools.cache
def is_of_program(file: str) -> bool:
    """Return whether a file belongs to the program, not to Python, an installed package or us."""
    others = (*_OF_PYTHON, _OF_DISTLAB)
    is_other = file.startswith(("<", *(f"{folder}{os.sep}" for folder in others)))
    return not is_other and not _INSTALLED & set(Path(file).parts)


@contextlib.contextmanager
def separate(rank_states: RankStates) -> Iterator[None]:
    """Give each rank its own copy of every module of the program that it imports in this block.

    Ranks do not see the program's modules that were imported before.
    """
    finder = _Finder(rank_states)
    hidden = {name: sys.modules.pop(name) for name in _separate.now()}
    main = sys.modules[MAIN]  # ranks may have their own
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        rank_states.state().take_modules()
        sys.modules.update(hidden)
        sys.modules[MAIN] = main


def _is_separate(name: str, module: ModuleType) -> bool:
    """Return whether a module is the program's, except for its main module."""
    file = file_of(module)
    is_path = os.path.isabs(file)  # that of torch.ops, for one, is none
    is_separate = (is_path and is_of_program(file)) or _is_per_rank(name)
    return is_separate and name not in (MAIN, "__mp_main__")


_separate = Imported(_is_separate)


def _is_per_rank(name: str) -> bool:
    return name.partition(".")[0] in _PER_RANK


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do, and marks those of the program as the rank's own."""

    def __init__(self, rank_states: RankStates) -> None:
        self._rank_states = rank_states
        self._codes: dict[str, CodeType] = {}  # compiled files, so that each is compiled only once

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, or None to let the other finders look for it."""
        if not self._rank_states.is_in_rank():
            return None
        spec = self._found_by_others(fullname, path, target)
        if spec is None or not (_is_own(spec) or _is_per_rank(fullname)):
            return spec
        self._rank_states.state().own_modules.add(fullname)
        # If this rank communicates while it imports the module, another rank may import its own
        # copy meanwhile. It must not wait for the lock of this import, which is held by now.
        _bootstrap._module_locks.pop(fullname, None)
        if type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._codes)
        return spec

    def _found_by_others(self, *wanted: Any) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(*wanted) for finder in others)
        return next((spec for spec in specs if spec is not None), None)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, codes: dict[str, CodeType]) -> None:
        super().__init__(name, path)
        self._codes = codes

    def get_code(self, fullname: str) -> CodeType | None:
        if self.path not in self._codes:
            self._codes[self.path] = super().get_code(fullname)  # type: ignore[assignment]
        return self._codes[self.path]

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "tqdm.std":  # otherwise a thread looks at each rank's bars for ever
            module.tqdm.monitor_interval = 0


def _is_own(spec: ModuleSpec) -> bool:
    """Return whether a module is a Python file of the program, or a package in its folders."""
    if spec.origin is not None and spec.has_location:
        return spec.origin.endswith(".py") and is_of_program(spec.origin)
    return any(map(is_of_program, spec.submodule_search_locations or ()))
