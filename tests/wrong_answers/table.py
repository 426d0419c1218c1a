"""Grade a bank, and print how each task's tests judge its answers.

python tests/wrong_answers/table.py > table.md                 # a row for each task
python tests/wrong_answers/table.py --bank DIR -v    # another bank; -v shows rejected answers too
python tests/wrong_answers/table.py --only 1.3 --jobs 2

An answer of the course's own bank is run against every test of its task; a right answer is run on
real processes too. An answer of another bank is run only in the simulated world, until a test
rejects it.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from distlab.grade.outcomes import Outcome  # noqa: E402
from distlab.grade.results import MAX_HANGS  # noqa: E402
from distlab.grade.submission import Submission  # noqa: E402
from wrong_answers import bank  # noqa: E402
from wrong_answers.bank import Answer, BankError  # noqa: E402
from wrong_answers.grading import (  # noqa: E402
    Found,
    find_tests,
    first_rejection,
    pool,
    verdicts,
    verdicts_on_processes,
)


@dataclass(frozen=True)
class Graded:
    """The result of running the tests on an answer."""

    answer: Answer
    rejection: Found | None  # the first rejection
    grader_error: str  # the test in which the grader itself failed, and the message


def main() -> None:
    """Grade a bank; print a row per task, then the answers that are misjudged."""
    options = _options()
    answers = [answer for answer in bank.load(options.bank) if options.only in ("", answer.task.id)]
    if not answers:
        sys.exit(f"{options.bank}: no answers in it, or none to {options.only or 'any task'}")
    if problems := list(_problems(answers)):
        sys.exit("\n".join(problems))
    with pool(options.jobs) as processes:
        graded = processes.map(partial(grade, is_thorough=options.bank == bank.OWN), answers)
        everything = _print_rows(answers, graded)
    for line in chain.from_iterable(_remarks(one, options.verbose) for one in everything):
        print(line)
    sys.exit(any(one.grader_error for one in everything))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bank", metavar="DIR", type=Path, default=bank.OWN, help="another bank")
    parser.add_argument("--only", metavar="TASK", default="", help="one task, such as 1.3")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="processes")
    parser.add_argument("-v", "--verbose", action="store_true", help="also what was rejected, why")
    return parser.parse_args()


def _problems(answers: list[Answer]) -> Iterator[str]:
    for answer in answers:
        try:
            answer.lesson()
        except BankError as error:
            yield str(error)


def grade(answer: Answer, *, is_thorough: bool) -> Graded:
    """Grade an answer with all tests of its task, or only until one rejects it."""
    with tempfile.TemporaryDirectory() as folder:
        submission = bank.hand_in(answer.task, answer.lesson(), Path(folder))
        if is_thorough:
            found = list(_all_verdicts(answer, submission))
        else:
            first = first_rejection(submission, answer.task)
            found = [first] if first else []
    rejections = [one for one in found if one[1].outcome is not Outcome.PASSED]
    errors = [one for one in found if one[1].outcome is Outcome.GRADER_ERROR]
    return Graded(
        answer,
        rejections[0] if rejections else None,
        f"{errors[0][0]}: {errors[0][1].message}" if errors else "",
    )


def _all_verdicts(answer: Answer, submission: Submission) -> Iterator[Found]:
    """Run all tests until two have hung, beginning with the one that must reject the answer."""
    tests = sorted(find_tests(answer.task), key=lambda test: test.name != answer.rejected_by)
    hangs = 0
    for found in verdicts(submission, answer.task, tests):
        yield found
        hangs += found[1].outcome is Outcome.HANG
        if hangs == MAX_HANGS:
            return
    if answer.is_right:
        yield from verdicts_on_processes(submission, answer.task)


def _print_rows(answers: list[Answer], graded: Iterator[Graded]) -> list[Graded]:
    """Print a row as soon as its task is graded."""
    print("| task | wrong answers | rejected | right answers | rejected |")
    print("|---|---|---|---|---|")
    everything: list[Graded] = []
    for task in dict.fromkeys(answer.task for answer in answers):
        rows = [next(graded) for answer in answers if answer.task == task]
        print(f"| {task.id} {task.function} | {_cells(rows)} |", flush=True)
        everything += rows
    print(f"| all | {_cells(everything)} |")
    return everything


def _cells(graded: list[Graded]) -> str:
    wrong = [one.rejection is not None for one in graded if not one.answer.is_right]
    right = [one.rejection is not None for one in graded if one.answer.is_right]
    return " | ".join(map(str, [len(wrong), sum(wrong), len(right), sum(right)]))


def _remarks(one: Graded, is_verbose: bool) -> Iterator[str]:
    """Yield the lines to print about an answer."""
    if one.grader_error:
        yield f"GRADER ERROR {one.answer.id}: {one.grader_error}"
    if not one.rejection:
        if not one.answer.is_right:
            yield f"SURVIVES {one.answer.id}: {one.answer.says}"
        return
    if one.answer.is_right or is_verbose:
        test, verdict = one.rejection
        kind = "REJECTED THOUGH RIGHT" if one.answer.is_right else "rejected"
        yield f"{kind} {one.answer.id}: {one.answer.says}"
        yield f"    {test}: {verdict.outcome.value}: {verdict.message}"


if __name__ == "__main__":
    main()
