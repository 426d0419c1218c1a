"""Unpickle what somebody else's program has sent, without running anything of theirs.

Pickles are programs: one can import modules and call what is in them. Here only numbers, strings,
bytes, None and lists, tuples, sets and dicts of them come out; of a result, only what a judge can
walk, compare and print.
"""

import contextlib
import io
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

WANTED = "which is not plain data: numbers, strings, and lists, tuples and dicts of them are"
MAX_REPORT_BYTES = 64 * 2**20  # of a process, what a simulation has counted included
MAX_RESULT_BYTES = 16 * 2**20  # of a rank, of a simulation all; suites need up to 64 KiB
MAX_DEPTH = 50  # a judge that walks deeper would run out of stack
MAX_ITEMS = 2_000_000  # counted as often as a judge would meet them
MAX_INT_BITS = 1000  # all of these fit into a float, and can be printed
MAX_UNPICKLING_BYTES = 2**30  # of memory: a few bytes of a pickle can ask for any amount
FEW_BYTES = 50_000  # of a pickle: Python's own unpickler takes as long as a process to start
MAX_KEY_ITEMS = 1000  # of a key of a dict, or an item of a set: what holds it is hashed in C
TRIAL_TIMEOUT_S = 10.0  # the process starts in 0.3 s on a busy machine
_TRIAL = """
import runpy, sys, threading
load, data = runpy.run_path(sys.argv[1])["_load"], sys.stdin.buffer.read()
threading.stack_size(2**22)  # half of what there is here: what fits there fits here
thread = threading.Thread(target=load, args=[data])
thread.start()
thread.join()
"""


class NotPlainError(ValueError):
    """Something else than plain data was sent, or too much; the message names it."""


def loads(data: bytes) -> object:
    """Unpickle plain data.

    Raises:
        NotPlainError: there is something else in it, or it is no pickle.
    """
    if len(data) > FEW_BYTES:
        _try_elsewhere(data)
        return _load(data)
    with _refusing_what_cannot_be_read():
        return _CarefulUnpickler(io.BytesIO(data)).load()


def _try_elsewhere(data: bytes) -> None:
    """Unpickle in a process of its own first: a hash can overflow the stack, or never end.

    A key of tuples in tuples ends the process that unpickles it by SIGSEGV, which nothing can
    catch; one that holds the same tuple twice, and so on, keeps it busy in C forever.
    """
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, __file__]
    try:
        trial = subprocess.run(
            command, input=data, capture_output=True, check=False, timeout=TRIAL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NotPlainError(f"what is not read within {TRIAL_TIMEOUT_S:g} s") from None
    if trial.returncode < 0:
        raise NotPlainError(f"what ends Python by signal {-trial.returncode} where it is read")


def _load(data: bytes) -> object:
    with _refusing_what_cannot_be_read():
        return _Unpickler(io.BytesIO(data)).load()


@contextlib.contextmanager
def _refusing_what_cannot_be_read() -> Iterator[None]:
    try:
        with _limited_memory():
            yield
    except NotPlainError:
        raise
    except Exception as error:  # what a broken pickle raises can be anything
        raise NotPlainError(f"what cannot be read ({type(error).__name__}: {error})") from None


def loads_result(data: bytes) -> object:
    """Unpickle a result that a judge can walk, compare and print.

    Raises:
        NotPlainError: it is not plain, or larger, deeper or longer than the limits above.
    """
    check_size(len(data))
    result = loads(data)
    check(result)
    return result


def check_size(num_bytes: int) -> None:
    """Refuse a result of too many bytes.

    Raises:
        NotPlainError: names the size and the limit.
    """
    from distlab.util.text import (
        bytes_text,  # not above: _TRIAL runs this file where it is not found
    )

    if num_bytes > MAX_RESULT_BYTES:
        raise NotPlainError(f"{bytes_text(num_bytes)}; the limit is {bytes_text(MAX_RESULT_BYTES)}")


def check(result: object) -> None:
    """Refuse what a judge cannot walk, compare or print.

    Raises:
        NotPlainError: names what it is and the limit.
    """
    num_items, level = 0, [result]
    for _ in range(MAX_DEPTH + 1):
        for value in level:
            _check_number(value)
        num_items += len(level)
        level = list(_limited(_within(level), MAX_ITEMS - num_items))
        if not level:
            return
    raise NotPlainError(
        f"containers inside of each other, or of themselves, without end; the limit is {MAX_DEPTH}"
    )


def _check_number(value: object) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise NotPlainError(f"an int of {value.bit_length()} bits; the limit is {MAX_INT_BITS}")


def _within(values: list[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, dict):
            yield from value.keys()
            yield from value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            yield from value


def _limited(values: Iterable[object], limit: int) -> Iterator[object]:
    for place, value in enumerate(values):
        if place >= limit:
            raise NotPlainError(f"too many items; the limit is {MAX_ITEMS:,}")
        yield value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> object:
        """Refuse every name: even an innocent class can be changed by what follows in a pickle."""
        raise NotPlainError(f"{module_name}.{name}, {WANTED}")


_InPython: Any = pickle._Unpickler  # what can be overridden there has no types


class _CarefulUnpickler(_InPython):  # type: ignore[misc]
    """Python's own unpickler, which looks at what is about to be hashed."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)
    find_class = _Unpickler.find_class

    def _load_setitem(self) -> None:
        _check_key(self.stack[-2])
        self.load_setitem()

    def _load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        self.load_setitems()

    def _load_dict(self) -> None:
        _check_keys(self.stack[::2])
        self.load_dict()

    def _load_items(self) -> None:
        _check_keys(self.stack)
        self.load_additems()

    def _load_frozenset(self) -> None:
        _check_keys(self.stack)
        self.load_frozenset()

    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems
    dispatch[pickle.DICT[0]] = _load_dict
    dispatch[pickle.ADDITEMS[0]] = _load_items
    dispatch[pickle.FROZENSET[0]] = _load_frozenset


def _check_keys(keys: Iterable[object]) -> None:
    for key in keys:
        _check_key(key)


def _check_key(key: object) -> None:
    """Refuse a key that takes long to hash; what is in it twice counts twice, as it does there."""
    level, num_items = [key], 1
    while level and num_items <= MAX_KEY_ITEMS:
        level = list(_within(level))
        num_items += len(level)
    if level:
        raise NotPlainError(f"a key of more than {MAX_KEY_ITEMS} items")


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Let this process grow by so much only; where the system cannot, nothing changes."""
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_UNPICKLING_BYTES
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [value for value in (soft, hard, limit) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
