"""Pages of the students' version: nothing in them sends a reader to what was left out.

    | `solutions/` | the lessons, solved |                  a row of a table goes
    A pair swaps. Drawn with `scripts/phase1.py pair`.      a paragraph ends before such a sentence:
    A pair swaps.                                           what follows it may refer to it

    $ distlab sim scripts/phase2.py x                        a command goes, what it prints stays
    $ python solutions/phase2_advanced/a.py                  the reader's own file is run
    $ distlab diff 1.1                                       a remark below says what it needs

All other code in fences stays as it is.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_FENCES = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([^`]+)`|\]\(([^()\s]+)\)")  # code, or where a link leads
_CONSOLE = re.compile(r" *```console\n")
_COMMANDS = re.compile(r"^\S*\$ (?:.*\\\n)*.*\n", re.MULTILINE)  # with continued lines
_OF_SOLUTIONS = re.compile(r"distlab diff\b|--impl solution\b")
_SOLVED = re.compile(r"\bsolutions/(\w+)/(\w+\.py)\b")
_ITEMS = re.compile(r"\n(?=[ \t]*(?:[-*]|\d+\.) )")  # of lists
_ENDS = re.compile(r"[.!?]\*{0,2}\s+(?=[A-Z`*\[])")  # of sentences
NEEDS_SOLUTIONS = "*This command needs the solutions, and your copy of the course comes without.*"
_LEAD = re.compile(r"(\*\*[^*]+\*\*)?")  # "**Read.**" alone says nothing


@dataclass(frozen=True)
class Page:
    """A page for readers who have not got some files.

    Attributes:
        path: where it lies, from the root of the course.
        left_out: files and folders, from there.
        may_name: it may name them, as long as no link leads there.
    """

    path: PurePosixPath
    left_out: Sequence[str]
    may_name: bool = False

    def edited(self, text: str) -> str:
        """Return the page's text without what leads to files that are not there."""
        pieces = _FENCES.split(text)
        edits = (self._prose, self._code)
        return "".join(edits[k % 2](piece) for k, piece in enumerate(pieces))

    def _code(self, fence: str) -> str:
        """Edit the commands of a console."""
        if not _CONSOLE.match(fence):
            return fence
        commands = _COMMANDS.findall(fence)
        needs_them = self._is_left_out("solutions") and any(map(_OF_SOLUTIONS.search, commands))
        kept = _COMMANDS.sub(lambda found: self._command(found[0]), fence)
        return f"{kept}\n\n{NEEDS_SOLUTIONS}" if needs_them else kept

    def _command(self, command: str) -> str:
        """Return a command, a solved lesson's with the reader's own file; "" if it cannot run."""
        own = _SOLVED.sub(r"\1/template_\2", command) if self._leads_out(command) else command
        return "" if self._leads_out(own) else own

    def _prose(self, text: str) -> str:
        inner = text.strip("\n")
        if not inner:
            return text
        before, _, after = text.partition(inner)
        blocks = ("\n".join(self._kept(block)) for block in re.split(r"\n\n+", inner))
        return before + "\n\n".join(filter(None, blocks)) + after

    def _kept(self, block: str) -> Iterator[str]:
        """Yield the rows of a table, or the items of a list, or the only paragraph."""
        lines = block.splitlines()
        is_table = all(line.startswith("|") for line in lines)
        for part in lines if is_table else _ITEMS.split(block):
            first = next(filter(self._is_gone, _NAMED.finditer(part)), None)
            if first is None:
                yield part
            elif not is_table and (rest := _before(part, first.start())):
                yield rest

    def _is_gone(self, named: re.Match[str]) -> bool:
        code, target = named.groups()
        if target:
            linked = posixpath.normpath(self.path.parent / target.partition("#")[0])
            return "://" not in target and self._is_left_out(linked)
        return not self.may_name and self._leads_out(code)

    def _leads_out(self, code: str) -> bool:
        """Whether code names what was left out."""
        return any(map(self._is_left_out, re.findall(r"[\w./-]+", code)))

    def _is_left_out(self, path: str) -> bool:
        return any(PurePosixPath(path).is_relative_to(place) for place in self.left_out)


def _before(paragraph: str, place: int) -> str:
    """Return the sentences before the one at a place; "" if they say nothing."""
    ends = [end.end() for end in _ENDS.finditer(paragraph) if end.end() <= place]
    kept = paragraph[: ends[-1]].rstrip() if ends else ""
    if _LEAD.fullmatch(kept):
        return ""
    return f"{kept}*" if kept.count("*") % 2 else kept  # a caption in italics
