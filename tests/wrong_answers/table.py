"""Write the table of docs/grading.md: what the bank says of the grader.

python tests/wrong_answers/table.py > table.md
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from distlab.grade.outcomes import Outcome  # noqa: E402
from wrong_answers.test_bank import ANSWERS, COURSE, Answer, verdicts  # noqa: E402


def is_rejected(answer: Answer) -> bool:
    """Whether a test of its task rejects it."""
    with tempfile.TemporaryDirectory() as folder:
        found = list(verdicts(answer, Path(folder)))
        return any(verdict.outcome is not Outcome.PASSED for _, verdict in found)


def main() -> None:
    """Grade the whole bank; a row per task."""
    print("| task | wrong answers | rejected | right answers | rejected | seconds |")
    print("|---|---|---|---|---|---|")
    totals = [0, 0, 0, 0, 0.0]
    for task in COURSE.tasks:
        answers, start = [a for a in ANSWERS if a.task is task], time.monotonic()
        rejected = {answer: is_rejected(answer) for answer in answers}
        wrong = [rejected[a] for a in answers if not a.is_right]
        right = [rejected[a] for a in answers if a.is_right]
        row = [len(wrong), sum(wrong), len(right), sum(right), time.monotonic() - start]
        totals = [a + b for a, b in zip(totals, row, strict=True)]
        print(f"| {task.id} {task.function} | {_cells(row)} |", flush=True)
    print(f"| all | {_cells(totals)} |")


def _cells(row: list[float]) -> str:
    return " | ".join([*(f"{count:.0f}" for count in row[:4]), f"{row[4]:.1f}"])


if __name__ == "__main__":
    main()
