"""How a cell has failed on a real rank."""

import os
import traceback
from collections.abc import Collection
from typing import NamedTuple

from distlab.launch.stacks import is_of_program
from distlab.util.tracebacks import headline, is_message_enough, keep_frames


class Failure(NamedTuple):
    """An error that has ended a cell on one rank.

    Attributes:
        headline: Its type and text.
        text: Traceback of the program's lines.
        where: Innermost line of the program, such as ``cell 3:2 in <module>``.
        is_of_torch: True if torch.distributed raised it, so that its groups may be unusable.
    """

    headline: str
    text: str
    where: str
    is_of_torch: bool

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an error."""
        shown = traceback.TracebackException.from_exception(error)
        in_torch = any("torch/distributed" in frame.filename for frame in shown.stack)
        is_of_torch = in_torch and isinstance(error, RuntimeError)  # not for a wrong argument
        keep_frames(shown, _of_program)
        last = shown.stack[-1] if shown.stack else None
        where = f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}" if last else ""
        if is_message_enough(error):
            return cls(f"{type(error).__name__}: {error}", "", where, is_of_torch)
        return cls(headline(error), "".join(shown.format()).rstrip(), where, is_of_torch)


def _of_program(files: Collection[str]) -> Collection[str]:
    return {file for file in files if is_of_program(file)}
