"""Locate every rank: read faulthandler's dumps and summarise them in one sentence."""

import ast
import contextlib
import linecache
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distlab.util import files
from distlab.util.text import rank_names, verb

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")
_MAIN = re.compile(r"^main (?P<ident>0x[0-9a-f]+)$", re.MULTILINE)
_ASKS = re.compile(r"get_|is_")  # functions such as get_rank never wait
_WAITS = re.compile(r"\.wait\(|\.synchronize\(|\.join\(")

_OURS = str(Path(__file__).parents[1])
_LIBRARY_FOLDERS = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    _OURS,
)


def is_of_program(file: str, given: Sequence[str] = ()) -> bool:
    """Return True if a file belongs to the program, not to a library, distlab or ``given``."""
    folders = (f"{folder}{os.sep}" for folder in (*_LIBRARY_FOLDERS, *given))
    return not file.startswith(("<frozen", *folders)) and file not in given


@dataclass(frozen=True)
class Frame:
    """One line of a stack; ``line`` is 0 if it is unknown."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        linecache.checkcache(self.file)  # the learner may have edited the file
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_users(self) -> bool:
        """True if the line belongs to the program that was launched."""
        return is_of_program(self.file)

    def __str__(self) -> str:
        name = Path(self.file).name
        return f"{name}:{self.line}" if self.line else name


@dataclass(frozen=True)
class Place:
    """The line of the user's program where a rank is, and the call in which it waits, if any."""

    operation: str  # "recv", "all_reduce", "wait()"; "" if it is not waiting for communication
    frame: Frame | None  # None if no line is known
    without_frame: str = "at an unknown place: it did not answer"

    def __str__(self) -> str:
        if not self.frame:
            waiting = f"in {self.operation} " if self.operation else ""
            return f"{waiting}{self.without_frame}"
        where = f"at {self.frame} in {self.frame.function}"
        return f"in {self.operation} {where}" if self.operation else where


FORK_SERVER = ("<string>", "<module>")  # outermost frame of every rank, outside the program
SUSPENDED = Place("", None, "suspended (by SIGSTOP or ctrl-Z)")
STARTING = Place("", None, "still starting, and not in the process group yet")
READY = Place("", None, "ready, and waiting for the others to start")


def read_place(dump: str, ident: int | None = None, given: Sequence[str] = ()) -> Place:
    """Return what a thread (by default, the main one) is doing, according to its process's dump.

    The innermost frame of the user's program is the place; the ``torch.distributed`` function that
    it called, if any, is the operation. Files in the ``given`` folders are the caller's machinery:
    their lines are never the place.
    """
    return _place([f for f in _thread(dump, ident) if (f.file, f.function) != FORK_SERVER], given)


def place_of(frame: FrameType | None) -> Place:
    """Return what a thread of this process is doing, whose innermost frame this is."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return _place(frames)


def _place(frames: Sequence[Frame], given: Sequence[str] = ()) -> Place:
    machinery = None
    for depth, frame in enumerate(frames):  # innermost first
        if is_of_program(frame.file, given):
            return Place(_operation(frames[:depth], frame), frame)
        if frame.is_users and machinery is None:
            what = f"in given code ({frame.function}), not in a line of yours"
            machinery = Place(_operation(frames[:depth], frame), None, what)
    return machinery or Place("", frames[0] if frames else None)


def _thread(dump: str, ident: int | None) -> list[Frame]:
    main = _MAIN.search(dump)
    if ident is None and main:
        ident = int(main["ident"], 16)
    stacks: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in dump.splitlines():
        if thread := _THREAD.match(line):
            current = stacks.setdefault(int(thread["ident"], 16), [])
        elif frame := _FRAME.match(line):
            current.append(_frame(frame["file"], frame["line"], frame["function"]))
    return stacks.get(ident, []) if ident is not None else []


def _frame(file: str, line: str, function: str) -> Frame:
    """Return a frame; an instruction without a line counts as its function's first line."""
    return Frame(file, int(line) if line.isdecimal() else _first_line(file, function), function)


def _first_line(file: str, function: str) -> int:
    """Return the line where a function is defined; 0 if no function or several have this name."""
    with contextlib.suppress(Exception):  # the program may have replaced its file with anything
        source = files.read_regular(Path(file), files.MAX_SOURCE_BYTES)
        nodes = ast.walk(ast.parse(source))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        lines = [node.lineno for node in nodes if isinstance(node, kinds) and node.name == function]
        return lines[0] if len(lines) == 1 else 0
    return 0


def _operation(callees: Sequence[Frame], caller: Frame) -> str:
    for frame in reversed(callees):  # outermost first, to find the function that the user called
        if frame.file.endswith("distributed_c10d.py"):
            return "" if _ASKS.match(frame.function) else frame.function
    # The trainer replaces ``wait`` with a function that measures it and then calls the real one.
    is_innermost = all(frame.file.startswith(_OURS) for frame in callees)
    return "wait()" if is_innermost and _WAITS.search(caller.source) else ""


def roll_call(places: Mapping[int, Place], world_size: int) -> str:
    """Say where all ranks are, grouped by place: one sentence, then the source lines.

    3 of 4 wait in recv at ring.py:41 in exchange; rank 1 is at trainer.py:88 in step
      ranks 0, 2 and 3  ring.py:41     dist.recv(inbox, left)
      rank 1            trainer.py:88  while True:
    """
    groups: dict[Place, list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault(place, []).append(rank)
    largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    sentence = "; ".join(_clause(place, ranks, world_size) for place, ranks in largest_first)
    lines = [
        f"  {rank_names(ranks):<16}  {place.frame}  {place.frame.source}"
        for place, ranks in largest_first
        if place.frame
    ]
    return "\n".join([sentence, *lines])


def _clause(place: Place, ranks: list[int], world_size: int) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} of {world_size}"
    does = verb(ranks, "wait") if place.operation else verb(ranks, "are", "is")
    return f"{who} {does} {place}"
