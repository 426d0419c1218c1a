"""Grade mutants of the solutions, to find changes that the tests do not notice.

python tests/wrong_answers/mutants.py --only 1.7 --jobs 2

A mutant is a solution with one small change (see ``mutation.py``). It is run against the tests of
its task in the simulated world, until one rejects it. A survivor calls for a new test, or for an
entry in equivalent_mutants.toml that says why no test may reject it. For that purpose, its change
is printed in the format of that file.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from distlab.course import Task  # noqa: E402
from distlab.grade.outcomes import Outcome  # noqa: E402
from wrong_answers.bank import COURSE, hand_in, load_equivalents  # noqa: E402
from wrong_answers.grading import Found, first_rejection, pool  # noqa: E402
from wrong_answers.mutation import Mutant, mutants_of  # noqa: E402


@dataclass(frozen=True)
class Graded:
    """The result of running the tests on a mutant."""

    mutant: Mutant
    rejection: Found | None  # the first rejection
    is_equivalent: bool  # according to equivalent_mutants.toml

    @property
    def survives(self) -> bool:
        """True if no test rejects the mutant, and it is not listed as equivalent."""
        return self.rejection is None and not self.is_equivalent


def main() -> None:
    """Grade the mutants; print a row per task, then the mutants to look at."""
    options = _options()
    tasks = [task for task in COURSE.tasks if options.only in ("", task.id)]
    equivalents = {answer.lesson(): answer.id for answer in load_equivalents()}
    print("| task | mutants | rejected | equivalent | survive |")
    print("|---|---|---|---|---|")
    everything: list[Graded] = []
    with pool(options.jobs) as processes:
        for task in tasks:
            mutants = list(mutants_of(task))
            found = processes.map(reject, mutants)
            graded = [
                Graded(mutant, rejection, mutant.lesson in equivalents)
                for mutant, rejection in zip(mutants, found, strict=True)
            ]
            print(f"| {task.id} {task.function} | {_cells(graded)} |", flush=True)
            everything += graded
    print(f"| all | {_cells(everything)} |")
    for line in chain.from_iterable(_remarks(one, options.verbose) for one in everything):
        print(line)
    for line in _unmade(tasks, equivalents, {one.mutant.lesson for one in everything}):
        print(line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TASK", default="", help="one task, such as 1.7")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="processes")
    parser.add_argument("-v", "--verbose", action="store_true", help="also what was rejected, why")
    return parser.parse_args()


def reject(mutant: Mutant) -> Found | None:
    """Return the first rejection of a mutant by a test."""
    with tempfile.TemporaryDirectory() as folder:
        return first_rejection(hand_in(mutant.task, mutant.lesson, Path(folder)), mutant.task)


def _cells(graded: list[Graded]) -> str:
    rejected = sum(one.rejection is not None for one in graded)
    equivalent = sum(one.is_equivalent for one in graded)
    counts = [len(graded), rejected, equivalent, sum(one.survives for one in graded)]
    return " | ".join(map(str, counts))


def _remarks(one: Graded, is_verbose: bool) -> Iterator[str]:
    """Yield the lines to print about a mutant."""
    where = f"{one.mutant.task.id} {one.mutant.function}\n{one.mutant.change}"
    if one.survives:
        yield f"\nSURVIVES {where}"
    if one.rejection is None:
        return
    test, verdict = one.rejection
    if one.is_equivalent:
        yield f"\nREJECTED THOUGH LISTED AS EQUIVALENT {where}    {test}: {verdict.message}"
    elif verdict.outcome is Outcome.GRADER_ERROR:
        yield f"\nGRADER ERROR {where}    {test}: {verdict.message}"
    elif is_verbose:
        yield f"\nrejected {where}    {test}: {verdict.outcome.value}: {verdict.message}"


def _unmade(tasks: list[Task], equivalents: dict[str, str], made: set[str]) -> Iterator[str]:
    """Yield a line for each mutant that is listed as equivalent but is no longer made."""
    for lesson, name in equivalents.items():
        if lesson not in made and name.split()[0] in [task.id for task in tasks]:
            yield f"\nLISTED AS EQUIVALENT, BUT NOT MADE: {name}"


if __name__ == "__main__":
    main()
