"""Tools of Phase 4's judges: ``Meetings`` between threads, and the contents of a watched file."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from phase4.interleaved import Meetings, watched


class Pair:
    """Two numbers that should always be read as equal."""

    def __init__(self) -> None:
        self.numbers, self.lock = [1, 1], threading.Lock()

    def add_1(self) -> None:
        """Add 1 to each number without the lock."""
        self.numbers[0] += 1
        self.numbers[1] += 1

    def add_1_in_a_line(self) -> None:
        """Add 1 to each number without the lock, in a single line."""
        any(self.numbers.__setitem__(i, old + 1) for i, old in enumerate(self.numbers))

    def add_1_locked(self) -> None:
        """Add 1 to each number while holding the lock."""
        with self.lock:
            self.add_1()

    def read(self) -> tuple[int, ...]:
        """Return both numbers, read while holding the lock."""
        with self.lock:
            return tuple(self.numbers)


def test_threads_meet_between_two_lines() -> None:
    pair, found = Pair(), list[list[int]]()
    meetings = Meetings(__file__, lambda: found.append([*pair.numbers]))
    with meetings.in_this_thread():
        pair.add_1()
    assert [2, 1] in found
    assert meetings.line(found.index([2, 1])).endswith("'self.numbers[1] += 1'")
    assert pair.numbers == [2, 2]


def test_threads_meet_within_a_line() -> None:
    pair, found = Pair(), list[list[int]]()
    meetings = Meetings(__file__, lambda: found.append([*pair.numbers]))
    with meetings.in_this_thread():
        pair.add_1_in_a_line()
    assert [2, 1] in found
    assert pair.numbers == [2, 2]


def test_a_lock_is_not_waited_for() -> None:
    pair, found = Pair(), list[tuple[int, ...]]()
    meetings = Meetings(__file__, lambda: found.append(pair.read()))
    with meetings.in_this_thread():
        pair.add_1_locked()
    assert {*found} == {(1, 1), (2, 2)} or {*found} == {(2, 2)}


def test_new_threads_are_met_when_they_should_be() -> None:
    pair, found = Pair(), list[tuple[int, ...]]()
    meetings = Meetings(__file__, pair.add_1_locked)

    def read() -> None:
        found.append((pair.numbers[0], pair.numbers[0]))
        first = pair.numbers[0]
        found.append((first, pair.numbers[1]))

    with meetings.in_new_threads():
        _in_a_thread(read)
        with meetings.now():
            _in_a_thread(read)
    assert found[:2] == [(1, 1), (1, 1)]
    assert found[3][0] != found[3][1]


def _in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4])


def _rewrite_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        kept = file.read(4)
        file.seek(0)
        file.truncate()
        file.write(kept)


def _remove_first(path: Path) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(b"abcd")
    path.unlink()
    beside.rename(path)


@pytest.mark.parametrize("cut", [_rewrite, _rewrite_in_place, _remove_first])
def test_a_file_that_is_empty_for_a_moment(cut: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    with watched(path) as contents:
        cut(path)
    assert contents == [b"abcdef", b"", b"abcd"]


def test_a_file_that_is_cut_in_place_or_replaced(tmp_path: Path) -> None:
    path, beside = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"abcdef")
    beside.write_bytes(b"abcd")
    with watched(path) as contents:
        beside.replace(path)
        with path.open("ab") as opened:
            opened.truncate(2)
    assert contents == [b"abcdef", b"abcd", b"ab"]
