"""Text for messages: numbers, ranks, times, sizes, lists and unknown names."""

import difflib
import functools
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized

SECONDS = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
BYTES = (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
MAX_RUNS = 6  # if there are more runs of ranks, only the first three and the last are shown
MAX_DIGITS = 17  # significant digits of a float

Units = Sequence[tuple[str, float]]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as in ``1,024 ranks``; ``plural`` is an irregular plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or f'{noun}s'}"


def verb(subjects: Sized, plural: str, singular: str = "") -> str:
    """Return a verb's form: ``wait`` for several subjects, ``waits`` or ``singular`` for one."""
    return plural if len(subjects) > 1 else singular or f"{plural}s"


def joined(items: Sequence[str], last: str = " and ") -> str:
    """Join items, as in ``a``, ``a and b`` or ``a, b and c``; return "" if there are none."""
    return last.join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def some_of(names: Sequence[str], limit: int = 4) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - limit
    return joined([*names[:limit], f"{more} more"] if more > 0 else [*names])


def clauses(items: Sequence[str]) -> str:
    """Join clauses, as in ``a``, ``a, and b`` or ``a, b, and c``."""
    return joined(items, ", and ")


def sentence(text: str) -> str:
    """Add a full stop to a text that lacks a final punctuation mark."""
    text = text.rstrip()
    return text if text.endswith((".", "?", "!", ":", "…")) else f"{text}."


def clipped(text: str, limit: int) -> str:
    """Shorten a line to ``limit`` characters by cutting folders in paths, then the middle."""
    if len(text) > limit:
        text = re.sub(r"/(?:[^/\s:'\"]+/)+", "…/", text)
    end = limit // 2
    return text if len(text) <= limit else f"{text[: limit - end - 1]}…{text[-end:]}"


def without_repeats(output: str) -> str:
    """Return output in which each of Python's warnings comes once, with its line of source.

    Python repeats a warning whenever a program has changed its filters, as torch does.
    """
    seen = set[str]()

    def first(match: re.Match[str]) -> str:
        is_new = match[1] not in seen
        seen.add(match[1])
        return match[0] if is_new else ""

    return re.sub(
        r"^.+:\d+: (\w*Warning: .*)\n(?:  .*(?:\n|$))?", first, output, flags=re.MULTILINE
    )


def lowered(text: str) -> str:
    """Lower-case the first letter of a sentence, for use after a colon; names keep capitals."""
    first = text.split(" ", 1)[0]
    is_name = first[1:] != first[1:].lower()
    return text if is_name else f"{text[:1].lower()}{text[1:]}"


def rank_names(ranks: Iterable[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0-5 and 9``, or ``ranks 0, 2, 4, …, 254 (128 ranks)``."""
    return _rank_names(tuple(sorted(ranks)))


@functools.lru_cache
def _rank_names(ordered: tuple[int, ...]) -> str:
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs = list(_runs(ordered))
    if len(runs) > MAX_RUNS:
        return f"ranks {', '.join(runs[:3])}, …, {runs[-1]} ({len(ordered)} ranks)"
    return f"ranks {joined(runs)}"


def _runs(ordered: Sequence[int]) -> Iterator[str]:
    """Yield ``0-5`` for three or more consecutive numbers, and ``7`` for a number on its own."""
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
            first, last = ordered[start], ordered[end - 1]
            if last - first < 2:
                yield from map(str, ordered[start:end])
            else:
                yield f"{first}-{last}"
            start = end


def seconds_text(seconds: float) -> str:
    """Return a time with its unit: "38.4 µs"."""
    return _with_unit(seconds, SECONDS)


def bytes_text(num_bytes: float) -> str:
    """Return a size with its unit: "6.00 MiB"."""
    return _with_unit(num_bytes, BYTES)


def unit_of(largest: float, units: Units) -> tuple[str, float]:
    """Choose the unit in which a number has one to three digits before the decimal point."""
    fitting = [unit for unit in units if largest >= 0.9995 * unit[1]]
    return fitting[-1] if fitting else units[0]


def _with_unit(value: float, units: Units) -> str:
    if not value:
        return f"0 {next(unit for unit, size in units if size == 1)}"
    unit, size = unit_of(value, units)
    return f"{value:.0f} B" if unit == "B" else f"{_digits(value / size)} {unit}"


def _digits(value: float) -> str:
    """Return a number with three significant digits."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def told_apart(numbers: Sequence[float], digits: int) -> list[str]:
    """Return numbers with so many significant digits, or more if they look equal otherwise."""
    texts = [f"{number:.{digits}g}" for number in numbers]
    if digits < MAX_DIGITS and len({*texts}) < len({*numbers}):
        return told_apart(numbers, digits + 1)
    return texts


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a hint such as ``Did you mean 'digits'?``, or "" if no known name is similar."""
    by_lower = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(wrong.lower(), by_lower, n=1)
    return f"Did you mean {by_lower[nearest[0]]!r}?" if nearest else ""


def unknown_name(kind: str, wrong: str, valid: Collection[str]) -> ValueError:
    """Return the error for a wrong name: one line with the valid names and the nearest one.

    >>> unknown_name("dataset", "digit", ("digits", "mnist"))
    ValueError("unknown dataset 'digit'; valid: digits, mnist. Did you mean 'digits'?")
    """
    message = f"unknown {kind} {wrong!r}; valid: {', '.join(valid)}. {did_you_mean(wrong, valid)}"
    return ValueError(message.rstrip())


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGKILL``, or ``signal 40`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
