"""Find the fewest wrong answers of our own bank that prove all that the bank proves.

python tests/wrong_answers/minimal.py --only 1.3 --jobs 2         # prints answers that can go
python tests/wrong_answers/minimal.py --jobs 2 --write            # also removes them from the bank

An answer proves that its test can fail, that a judge's line is reached, and that a sentence of
advice is given. Answers are chosen greedily until everything is proved: the next one is always the
answer that proves most of the rest, or the shortest of several that prove equally much. Answers
that were not chosen can go.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from wrong_answers import bank  # noqa: E402
from wrong_answers.bank import Answer  # noqa: E402
from wrong_answers.grading import find_tests, pool, rejections  # noqa: E402

_VALUE = re.compile(r"\[.*?\]|\(.*?\)|'.*?'|[-+]?\d[\d.,e+-]*")
_SENTENCE = re.compile(r"(?<=[.?!:;])\s+(?=[A-Z])")


def main() -> None:
    """Choose the answers to keep, task by task."""
    options = _options()
    answers = [
        answer
        for answer in bank.load(bank.OWN)
        if not answer.is_right and options.only in ("", answer.task.id)
    ]
    superfluous: list[Answer] = []
    with pool(options.jobs) as processes:
        proved = processes.map(proofs_of, answers)
        for task, group in groupby(zip(answers, proved, strict=True), lambda pair: pair[0].task):
            proofs = dict(group)
            stay = chosen(proofs)
            superfluous += (others := [answer for answer in proofs if answer not in stay])
            names = ", ".join(answer.name for answer in others)
            print(f"{task.id}: {len(stay)} of {len(proofs)} stay; may go: {names}", flush=True)
    print(f"{len(answers) - len(superfluous)} of {len(answers)} answers stay")
    if options.write:
        _remove(superfluous)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TASK", default="", help="one task, such as 1.3")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="remove the others from the bank")
    return parser.parse_args()


def proofs_of(answer: Answer) -> frozenset[str]:
    """Return what an answer proves: its test, the judge's line that is reached, and the advice.

    Raises:
        LookupError: The test does not reject the answer as the bank says.
    """
    tests = [test for test in find_tests(answer.task) if test.name == answer.rejected_by]
    with tempfile.TemporaryDirectory() as folder:
        submission = bank.hand_in(answer.task, answer.lesson(), Path(folder))
        for rejection in rejections(submission, answer.task, tests):
            message = rejection.verdict.message
            if answer.phrase in message:
                # Leave out the first sentence: its values vary, and the judge's line identifies it.
                _, *advice = _SENTENCE.split(_VALUE.sub("#", message))
                return frozenset({answer.rejected_by, rejection.place, *advice})
    raise LookupError(f"{answer.id}: {answer.rejected_by} does not say {answer.phrase!r}")


def chosen(proofs: Mapping[Answer, frozenset[str]]) -> set[Answer]:
    """Return a small set of answers, chosen greedily, that proves as much as all of them."""
    missing = frozenset[str]().union(*proofs.values())
    stay: set[Answer] = set()
    while missing:
        best = max(proofs, key=lambda a: (len(proofs[a] & missing), -len(a.change + a.whole)))
        stay.add(best)
        missing -= proofs[best]
    return stay


def _remove(answers: Sequence[Answer]) -> None:
    """Remove answers from the files of the bank."""
    for task, group in groupby(answers, key=attrgetter("task")):
        path = bank.path_of(bank.OWN, task)
        text = path.read_text(encoding="utf-8")
        for answer in group:
            table = rf"^\[wrong\.{re.escape(answer.name)}\]\n.*?(?=^\[(?:wrong|right)\.|\Z)"
            text = re.sub(table, "", text, count=1, flags=re.MULTILINE | re.DOTALL)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
