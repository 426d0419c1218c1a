"""Command groups whose help shows the whole first paragraph of each command."""

import inspect
from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """A group that lists each command with the first paragraph of its help, wrapped and not cut.

    In its list of commands, click shortens help texts, but prints an explicit short help in full.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for command in self.commands.values():
            paragraph = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            command.short_help = " ".join(paragraph.split())
