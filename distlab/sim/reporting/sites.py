"""Call sites: the innermost line of the program itself, not of torch or the simulator."""

import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import typing_extensions

from distlab import process_group
from distlab.sim.reporting.torch_calls import INDIRECT

Site = tuple[str, int, str]  # (file, line, function); the file is "" in given code
CallSite = tuple[Site, bool, str]  # (site, whether torch makes the call, its function or "")

_SIMULATOR = f"{Path(__file__).parents[1]}{os.sep}"
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
PROGRAM, GIVEN, SIMULATOR, API, TORCH, STANDARD_LIBRARY = range(6)


def outside() -> FrameType:
    """Return the innermost frame outside the simulator: the frame of the code that called it.

    The number of the simulator's functions on the stack does not matter.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_SIMULATOR) and frame.f_back is not None:
        frame = frame.f_back
    return frame


class Exit(NamedTuple):
    """The place at which a rank's program ended.

    Attributes:
        at: Last line of the rank's program.
        left_group_at: Line that destroyed its process group, or None.
    """

    at: Site
    left_group_at: Site | None = None


class Death(NamedTuple):
    """Where and when a fault killed a rank.

    Attributes:
        at: Line of the rank's next call, at which its program ended; None if it never began.
        time_s: Virtual time of the fault.
        num_steps: Number of optimizer steps that the rank had begun.
    """

    at: Site | None
    time_s: float
    num_steps: int


def _folder(file: str | None) -> str:
    return f"{Path(file or '').parent}{os.sep}"


# Kinds of files by the start of their path; the first match counts. They distinguish the program's
# calls from those that torch makes by itself.
_KINDS = (
    (_SIMULATOR, SIMULATOR),
    (_folder(process_group.__file__), SIMULATOR),
    (f"{_folder(dist.__file__)}distributed_c10d.py", API),
    (f"{_folder(dist.__file__)}c10d_logger.py", STANDARD_LIBRARY),  # wraps c10d's functions
    # A call passes through these two while a default device is set, say by torch.device("cpu").
    (f"{_folder(torch.__file__)}overrides.py", STANDARD_LIBRARY),
    (f"{_folder(torch.__file__)}utils{os.sep}_device.py", STANDARD_LIBRARY),
    (_folder(torch.__file__), TORCH),
    ("<frozen", STANDARD_LIBRARY),
    (typing_extensions.__file__, STANDARD_LIBRARY),  # wraps torch's deprecated functions
)
# Methods that a program calls, directly or indirectly.
_PUBLIC = ("forward", "backward", "step", "full_tensor", "redistribute")
_OF_PARALLELISM = (_folder(dist.__file__), f"{_folder(torch.__file__)}nn{os.sep}parallel{os.sep}")
# Code that runs in every operation on DTensors, and the collectives through which it communicates.
_NOT_OF_PARALLELISM = (f"{_folder(dist.__file__)}tensor{os.sep}", functional_collectives.__file__)
_WRAPS = re.compile(r"wrapper|^inner")  # names of functions made by decorators
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_LIBRARY = _folder(threading.__file__)
_PACKAGES = ("site-packages", "dist-packages")  # folders below _LIBRARY that are not part of it


class Places:
    """Distinguishes the program's lines from those of the simulator, torch and Python.

    Args:
        given: Folders or files of the simulator's caller; their code does not count as the
            program's.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        self._given = tuple(os.path.realpath(folder) for folder in given)
        self._kinds: dict[str, int] = {}
        self._starts: dict[int, Site] = {}
        # Cache of sites by code and instruction, because Python walks a table to find a line. The
        # code objects are kept alive, so that their ids are not reused.
        self._sites: dict[tuple[int, int], tuple[CodeType, Site]] = {}

    def kind(self, file: str) -> int:
        """Return the kind of code that a file holds, such as PROGRAM or TORCH."""
        kind = self._kinds.get(file)
        if kind is None:
            kind = self._kinds[file] = self._find_kind(file)
        return kind

    def _find_kind(self, file: str) -> int:
        for start, kind in _KINDS:
            if file.startswith(start):
                return kind
        if file.startswith(_LIBRARY) and not file[len(_LIBRARY) :].startswith(_PACKAGES):
            return STANDARD_LIBRARY
        real = os.path.realpath(file)
        is_given = any(real == path or real.startswith(path + os.sep) for path in self._given)
        return GIVEN if is_given else PROGRAM

    def is_in_program(self, frame: FrameType | None) -> bool:
        """Return whether a frame is of the program, or of a library that the program calls."""
        while frame is not None and self._is_of_library(file := frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None and not file.startswith(_OURS)

    def _is_of_library(self, file: str) -> bool:
        is_of_program = self.kind(file) in (PROGRAM, GIVEN) and {*_PACKAGES}.isdisjoint(
            Path(file).parts
        )
        return not is_of_program and not file.startswith(_OURS)

    def note_start(self, thread: int, site: Site) -> None:
        """Record the line that started a thread, in case the thread runs no line of the program."""
        self._starts[thread] = site

    def call_site(self, frame: FrameType | None = None, thread: int = 0) -> CallSite:
        """Return the program's innermost line, whether torch makes the call, and torch's function.

        The function is "" if the program called the operation itself.

        Args:
            frame: Innermost frame to look at; None for the caller's.
            thread: Identifier of the thread that runs the frame; 0 for the calling thread.
        """
        frame = frame or sys._getframe(1)
        kind_of, is_by_torch, innermost, maker = self._kinds.get, False, frame, ""
        while (kind := kind_of(frame.f_code.co_filename)) != PROGRAM:
            if kind == API:
                maker = frame.f_code.co_name
            else:
                if kind is None:
                    self.kind(frame.f_code.co_filename)
                    continue
                is_by_torch = is_by_torch or kind == TORCH
            outer = frame.f_back
            if outer is None:
                start = self._starts.get(thread or threading.get_ident())
                return start or self._given_site(innermost), is_by_torch, ""
            frame = outer
        if is_by_torch:
            maker = self._maker(innermost, frame)
        elif maker not in INDIRECT:
            maker = ""
        return self._site(frame), is_by_torch, maker

    def _site(self, frame: FrameType) -> Site:
        code, instruction = frame.f_code, frame.f_lasti
        known = self._sites.get((id(code), instruction))
        if known is None:
            site = code.co_filename, frame.f_lineno, _function_name(frame)
            known = self._sites[id(code), instruction] = code, site
        return known[1]

    def line(self) -> Site:
        """Return the program's innermost line; much cheaper than ``call_site``."""
        frame: FrameType | None = sys._getframe(1)
        kind_of, sites = self._kinds.get, self._sites
        while frame is not None and kind_of(frame.f_code.co_filename, PROGRAM) != PROGRAM:
            frame = frame.f_back
        known = None if frame is None else sites.get((id(frame.f_code), frame.f_lasti))
        return self.call_site()[0] if known is None else known[1]

    def caller(self) -> Site:
        """Return the line from which the program called its innermost function; else that line."""
        frame: FrameType | None = sys._getframe(1)
        kind_of, innermost = self._kinds.get, None
        while frame is not None:
            file = frame.f_code.co_filename
            if not kind_of(file) and self.kind(file) == PROGRAM:
                if innermost is not None:
                    return self._site(frame)
                innermost = frame
            frame = frame.f_back
        return ("", 0, "") if innermost is None else self._site(innermost)

    def _maker(self, inner: FrameType, program: FrameType) -> str:
        """Return the name of the torch function through which the program made this call.

        This is the outermost function for parallelism, such as ``ScheduleGPipe.step``, or, if there
        is none, the outermost torch function. The name is "" for a functional collective, which
        torch posts only later.
        """
        makers = []
        frame: FrameType | None = inner
        while frame is not None and frame is not program:
            code = frame.f_code
            if self.kind(code.co_filename) in (API, TORCH) and not _WRAPS.search(code.co_name):
                makers.append(frame)
            frame = frame.f_back
        special = [
            f
            for f in makers
            if f.f_code.co_filename.startswith(_OF_PARALLELISM)
            and not f.f_code.co_filename.startswith(_NOT_OF_PARALLELISM)
        ]
        if not makers:
            return ""
        maker = (special or makers)[-1]
        is_functional = maker.f_code.co_filename == functional_collectives.__file__
        return "" if is_functional else _method_name(maker)

    def raised_at(self, error: BaseException) -> Site:
        """Return the innermost line of the program in an exception's traceback."""
        site, trace = ("", 0, ""), error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if self.kind(code.co_filename) == PROGRAM:
                site = (code.co_filename, trace.tb_lineno, code.co_name)
            trace = trace.tb_next
        return site

    def _given_site(self, frame: FrameType) -> Site:
        """Return a site without a line; it names the innermost given function, or else torch's."""
        names: dict[int, str] = {}
        outer: FrameType | None = frame
        while outer is not None:
            names.setdefault(self.kind(outer.f_code.co_filename), outer.f_code.co_name)
            outer = outer.f_back
        wanted: Sequence[int] = (GIVEN, API, TORCH, STANDARD_LIBRARY)
        return "", 0, next((names[kind] for kind in wanted if kind in names), "")


def _function_name(frame: FrameType) -> str:
    """Return the name of a frame's function or, for a comprehension, of the enclosing one."""
    outer = frame.f_back
    while outer and frame.f_code.co_name in _COMPREHENSIONS:
        frame, outer = outer, outer.f_back
    return frame.f_code.co_name


def _method_name(frame: FrameType) -> str:
    """Return ``Class.method``, or only the class's name if the method is internal to torch."""
    code = frame.f_code
    if code.co_varnames[:1] != ("self",):
        return code.co_name.removeprefix("_")
    owner = type(frame.f_locals["self"]).__name__
    return f"{owner}.{code.co_name}" if code.co_name in _PUBLIC else owner
