"""Carry the answers of the banks over to solutions that have changed.

    python tests/wrong_answers/rebase.py HEAD --rename _count=count

For each answer the old solution, the old answer and the new solution are merged, as git merges
branches; the answer's change becomes the difference that is left. Names that were only renamed are
renamed in the answers first. What cannot be merged is listed, and stays as it is: mend it by hand.
"""

import argparse
import difflib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import bank
from bank import ROOT, Answer, BankError

BANKS = (bank.OWN, *bank.INDEPENDENT)
Hunk = tuple[int, int, list[str]]  # lines start to end of the solution become these


class Conflict(Exception):
    """The solution changed where the answer differs from it."""


def rebased(old: str, new: str, change: str, renamed: Mapping[str, str]) -> str:
    """Return the change of ``new`` that does what ``change`` did to ``old``.

    Raises:
        Conflict: both changed the same lines.
        BankError: the change does not fit ``old``.
    """
    wrong = _with_new_names(bank.changed(old, change), renamed)
    merged = _merged(_with_new_names(old, renamed), wrong, new)
    try:
        if bank.changed(new, change) == merged:
            return change
    except BankError:
        pass
    return difference(new, merged)


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


def difference(text: str, wanted: str) -> str:
    """Return the change that makes ``wanted`` of ``text``, in as few lines as fit once."""
    lines, others = text.splitlines(), wanted.splitlines()
    opcodes = difflib.SequenceMatcher(None, lines, others, autojunk=False).get_opcodes()
    hunks = [(i, j, others[k:m]) for tag, i, j, k, m in opcodes if tag != "equal"]
    return "\n@@\n".join("\n".join(hunk) for hunk in _written(lines, hunks)) + "\n"


def _written(lines: list[str], hunks: list[Hunk]) -> Iterator[list[str]]:
    """Yield the lines of each hunk; those whose surroundings overlap become one."""
    together: list[Hunk] = []
    reach = -1
    for hunk in hunks:
        before, after = _surroundings(lines, hunk)
        if together and before <= reach:
            together.append(hunk)
        else:
            if together:
                yield _as_text(lines, together)
            together = [hunk]
        reach = after
    if together:
        yield _as_text(lines, together)


def _surroundings(lines: list[str], hunk: Hunk) -> tuple[int, int]:
    """Return the smallest range of lines round a hunk that stands once in the text."""
    start, end, _ = hunk
    while end == start or _occurs(lines, lines[start:end]) > 1:
        if start and (end == len(lines) or hunk[0] - start <= end - hunk[1]):
            start -= 1
        else:
            end += 1
    return start, end


def _occurs(lines: list[str], block: list[str]) -> int:
    return sum(lines[i : i + len(block)] == block for i in range(len(lines)))


def _as_text(lines: list[str], hunks: list[Hunk]) -> list[str]:
    start = min(_surroundings(lines, hunk)[0] for hunk in hunks)
    end = max(_surroundings(lines, hunk)[1] for hunk in hunks)
    text = []
    for first, last, new in hunks:
        text += [f" {line}" for line in lines[start:first]]
        text += [f"-{line}" for line in lines[first:last]] + [f"+{line}" for line in new]
        start = last
    return [line.rstrip() if line == " " else line for line in (*text, *_kept(lines, start, end))]


def _kept(lines: list[str], start: int, end: int) -> list[str]:
    return [f" {line}" for line in lines[start:end]]


def old_solution(answer: Answer, commit: str) -> str:
    """Return the solution of an answer's task as it was."""
    command = ["git", "show", f"{commit}:{answer.task.solution.as_posix()}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def rebase(answer: Answer, file: Path, commit: str, renamed: Mapping[str, str]) -> str:
    """Rewrite an answer in its file; return what hinders it, "" if nothing."""
    text = file.read_text(encoding="utf-8")
    if answer.whole:
        now = _with_new_names(answer.whole, renamed)
        file.write_text(text.replace(answer.whole, now), encoding="utf-8")
        return ""
    new = (ROOT / answer.task.solution).read_text(encoding="utf-8")
    try:
        now = rebased(old_solution(answer, commit), new, answer.change, renamed)
    except (Conflict, BankError) as error:
        return str(error) or "conflict"
    if answer.change not in text:
        return "its change is not written as it is read"
    file.write_text(text.replace(answer.change, now), encoding="utf-8")
    return ""


def main() -> None:
    """Rebase all banks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="of the solutions that the answers are changes of")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    arguments = parser.parse_args()
    renamed = dict(entry.split("=") for entry in arguments.rename)
    for folder in BANKS:
        for answer in bank.load(folder):
            phase, task = (
                f"phase{answer.task.id.partition('.')[0]}",
                answer.task.id.replace(".", "_"),
            )
            problem = rebase(answer, folder / phase / f"{task}.toml", arguments.commit, renamed)
            if problem:
                print(f"{folder.name}  {answer.id}: {problem.splitlines()[0]}")
    for answer in bank.load_equivalents():
        if problem := rebase(answer, bank.EQUIVALENTS, arguments.commit, renamed):
            print(f"{bank.EQUIVALENTS.name}  {answer.id}: {problem.splitlines()[0]}")


if __name__ == "__main__":
    main()
