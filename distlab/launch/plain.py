"""Encode plain data: numbers, strings, bytes, None and containers of them, not classes or code.

The format is JSON, with a tag for each type that JSON lacks, then a newline and the contents of
all bytes objects:

    (1, b"ab")  ->  {"t":[1,{"b":2}]}\\nab

Data from an untrusted program is safe to read: the text is a tree, so decoding takes time and
memory in proportion to its length, and nothing in it is ever called.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from distlab.util.text import bytes_text

MAX_REPORT_BYTES = 64 * 2**20  # one process's report, including a simulation's trace
MAX_RESULT_BYTES = 16 * 2**20  # one rank's result; suites need up to 64 KiB
MAX_DEPTH = 50  # with deeper data, a judge might run out of stack
MAX_ITEMS = 2_000_000  # total number of items; a container that appears twice counts twice
MAX_INT_BITS = 1000  # such an int still fits into a float, and can be printed
MAX_SAME_HASHES = 100  # looking up n keys with the same hash takes n² steps

_WANTED = "which is not plain data: numbers, strings, and lists, tuples and dicts of them are"
_SCALARS = frozenset({type(None), bool, int, float, str})
_SIZED = frozenset({int, str, bytes})
_TAGS: dict[type, str] = {tuple: "t", set: "s", frozenset: "f", dict: "d"}
_BYTES, _REFUSED = "b", "refused"
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class NotPlainError(ValueError):
    """A value is not plain data, or exceeds a limit; the message says which."""


def dumps(value: object) -> bytes:
    """Encode plain data, which must not be nested too deeply for recursion.

    Raises:
        NotPlainError: The value contains something that is not plain data.
    """
    blobs: list[bytes] = []
    text = _encode(_tagged(value, blobs)).encode("utf-8", "surrogatepass")
    return b"".join([text, b"\n", *blobs])


def loads(data: bytes) -> object:
    """Decode the output of ``dumps``, or untrusted data that claims to be such output.

    Raises:
        NotPlainError: The data is malformed, would take too much memory or time, or is a refusal
            from ``dumps_result``.
    """
    end = data.find(b"\n")
    text = data[: end if end >= 0 else len(data)]
    if text.count(b"[") + text.count(b"{") > MAX_ITEMS:
        raise NotPlainError(f"too many items; the limit is {MAX_ITEMS:,}")
    reader = _Reader(memoryview(data)[len(text) + 1 :])
    try:
        return json.loads(text.decode("utf-8", "surrogatepass"), object_hook=reader.untagged)
    except NotPlainError:
        raise
    except Exception as error:
        raise NotPlainError(f"what cannot be read ({type(error).__name__}: {error})") from None


def dumps_result(result: object) -> bytes:
    """Encode a result, or the reason why it cannot be judged, which ``loads_result`` raises."""
    try:
        check(result)
        data = dumps(result)
        _check_size(len(data), f"a {type(result).__name__} of ")
    except NotPlainError as error:
        return _encode({_REFUSED: str(error)}).encode("utf-8", "surrogatepass")
    return data


def loads_result(data: bytes) -> object:
    """Decode a result, and check that a judge can walk, compare and print it.

    Raises:
        NotPlainError: The result is not plain, or exceeds one of the limits above.
    """
    _check_size(len(data))
    result = loads(data)
    check(result)
    return result


def check(result: object) -> None:
    """Refuse a result that a judge cannot walk, compare or print.

    Raises:
        NotPlainError: Part of the result exceeds a limit; the message names the part and the limit.
    """
    num_items, level = 0, [result]
    for _ in range(MAX_DEPTH + 1):
        for value in level:
            if type(value) in _SIZED:
                _check_scalar(value)
        num_items += len(level)
        room = MAX_ITEMS - num_items
        level = list(islice(_within(level), room + 1))
        if len(level) > room:
            raise NotPlainError(f"too many items; the limit is {MAX_ITEMS:,}")
        if not level:
            return
    raise NotPlainError(
        f"containers inside of each other, or of themselves, without end; the limit is {MAX_DEPTH}"
    )


def _check_scalar(value: Any) -> None:
    if not isinstance(value, int):
        _check_size(len(value), f"a {type(value).__name__} of ")
    elif value.bit_length() > MAX_INT_BITS:
        raise NotPlainError(f"an int of {value.bit_length()} bits; the limit is {MAX_INT_BITS}")


def _check_size(num_bytes: int, of_what: str = "") -> None:
    if num_bytes > MAX_RESULT_BYTES:
        limit = bytes_text(MAX_RESULT_BYTES)
        raise NotPlainError(f"{of_what}{bytes_text(num_bytes)}; the limit is {limit}")


def _within(values: Iterable[Any]) -> Iterator[object]:
    for value in values:
        if type(value) is dict:
            yield from chain(value, value.values())
        elif type(value) in (list, tuple, set, frozenset):
            yield from value


def _tagged(value: Any, blobs: list[bytes]) -> object:
    """Return the value in a form that JSON can hold; append any bytes to ``blobs``."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is bytes:
        blobs.append(value)
        return {_BYTES: len(value)}
    if kind is not list and kind not in _TAGS:
        raise NotPlainError(f"{_name(value)}, {_WANTED}")
    items = chain.from_iterable(value.items()) if kind is dict else value
    tagged = [item if type(item) in _SCALARS else _tagged(item, blobs) for item in items]
    return tagged if kind is list else {_TAGS[kind]: tagged}


def _name(value: Any) -> str:
    """Return the qualified name of a class or function; for any other value, that of its type."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


class _Reader:
    """Turns tagged objects back into the values they stand for.

    Args:
        contents: Contents of all bytes objects in the text, concatenated.
    """

    def __init__(self, contents: memoryview) -> None:
        self._contents = contents

    def untagged(self, tagged: dict[str, Any]) -> object:
        ((tag, content),) = tagged.items()
        if tag == _REFUSED:
            raise NotPlainError(content)
        if tag == _BYTES:
            return self._next_bytes(content)
        if tag == "t":
            return tuple(content)
        keys = content[::2] if tag == "d" else content
        _check_hashes(keys)
        if tag == "d":
            return dict(zip(keys, content[1::2], strict=True))
        return {"s": set, "f": frozenset}[tag](keys)

    def _next_bytes(self, length: int) -> bytes:
        if not 0 <= length <= len(self._contents):
            raise ValueError(f"{length} bytes where {len(self._contents)} are left")
        taken, self._contents = self._contents[:length], self._contents[length:]
        return bytes(taken)


def _check_hashes(keys: Sequence[object]) -> None:
    if len(keys) > MAX_SAME_HASHES:
        most = max(Counter(map(hash, keys)).values())
        if most > MAX_SAME_HASHES:
            raise NotPlainError(f"{most} keys with the same hash; the limit is {MAX_SAME_HASHES}")
