"""Carry the bank's answers over to solutions that have changed.

    python tests/wrong_answers/rebase.py HEAD --rename _count=count

For each answer, the old solution, the old answer and the new solution are merged as git merges
branches. The answer's new change is the difference between the result and the new solution. Names
that ``--rename`` lists are renamed in the answers first. Answers that cannot be merged are listed
and stay as they are, for you to mend by hand.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from wrong_answers import bank  # noqa: E402
from wrong_answers.bank import ROOT, Answer  # noqa: E402
from wrong_answers.changes import BankError, change_between, changed  # noqa: E402


class Conflict(Exception):
    """The solution has changed in the lines that the answer changes, or now equals the answer."""


def rebased(old: str, new: str, change: str, renamed: Mapping[str, str]) -> str:
    """Return the change to ``new`` that does what ``change`` did to ``old``.

    Raises:
        Conflict: ``new`` and ``change`` differ from ``old`` in the same lines, or ``new`` already
            does what ``change`` did.
        BankError: The change does not fit ``old``.
    """
    wrong = _with_new_names(changed(old, change), renamed)
    merged = _merged(_with_new_names(old, renamed), wrong, new)
    if merged == new:
        raise Conflict("the solution is now what the change made of it")
    try:
        if changed(new, change) == merged:
            return change
    except BankError:
        pass
    return change_between(new, merged)


def _with_new_names(text: str, renamed: Mapping[str, str]) -> str:
    for name, now in renamed.items():
        text = re.sub(rf"(?<![\w.]){re.escape(name)}\b", now, text)
    return text


def _merged(base: str, ours: str, theirs: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text, encoding="utf-8")
        done = subprocess.run(["git", "merge-file", "-p", *paths], capture_output=True, text=True)
    if done.returncode:
        raise Conflict
    return done.stdout


def old_solution(answer: Answer, commit: str) -> str:
    """Return the solution of an answer's task at ``commit``."""
    command = ["git", "show", f"{commit}:{answer.task.solution.as_posix()}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def rebase(answer: Answer, file: Path, commit: str, renamed: Mapping[str, str]) -> str:
    """Rewrite an answer in its file; return the problem if that is impossible, else ""."""
    text = file.read_text(encoding="utf-8")
    if answer.whole:
        now = _with_new_names(answer.whole, renamed)
        file.write_text(replaced(text, answer.name, answer.whole, now), encoding="utf-8")
        return ""
    new = (ROOT / answer.task.solution).read_text(encoding="utf-8")
    try:
        now = rebased(old_solution(answer, commit), new, answer.change, renamed)
    except (Conflict, BankError) as error:
        return str(error) or "conflict"
    try:
        file.write_text(replaced(text, answer.name, answer.change, now), encoding="utf-8")
    except ValueError:
        return "its change is not written as it is read"
    return ""


def replaced(text: str, name: str, old: str, new: str) -> str:
    """Return a bank's text with the change in one answer's table replaced.

    Raises:
        ValueError: The table does not hold ``old``.
    """
    header = re.search(rf"^\[[^\]\n]*\.{re.escape(name)}\]$", text, re.MULTILINE)
    start = text.index(old, header.end() if header else 0)
    return text[:start] + new + text[start + len(old) :]


def main() -> None:
    """Rebase the bank and the equivalent mutants, and list the answers that cannot be merged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="of the solutions that the answers are changes of")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    arguments = parser.parse_args()
    renamed = dict(entry.split("=") for entry in arguments.rename)
    files = [(answer, bank.path_of(bank.OWN, answer.task)) for answer in bank.load(bank.OWN)]
    files += [(answer, bank.EQUIVALENTS) for answer in bank.load_equivalents()]
    for answer, file in files:
        if problem := rebase(answer, file, arguments.commit, renamed):
            print(f"{file.name}  {answer.id}: {problem.splitlines()[0]}")


if __name__ == "__main__":
    main()
