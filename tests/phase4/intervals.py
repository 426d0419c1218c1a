"""Bodies for task 4.8: the learner's figures."""

from collections.abc import Sequence
from typing import Any

from judging.calls import case_told, typed


def seconds(lesson: Any, function: str, calls: Sequence[Sequence[float]]) -> list[float]:
    """Call a function with all arguments by position; the last one is the number of nodes."""
    results = []
    for call in calls:
        arguments = call[:-1] if call[-1] == 1 else call  # 1 is the default
        with case_told("with the arguments " + ", ".join(f"{number:g}" for number in arguments)):
            results.append(float(typed(function, getattr(lesson, function)(*arguments), float)))
    return results
