"""Command groups whose help shows the whole first paragraph of each command."""

import inspect
from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """Lists its commands with the first paragraph of their help, wrapped instead of cut.

    click shortens the help texts in its list of commands, but prints an explicit short help in
    full.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for command in self.commands.values():
            paragraph = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            command.short_help = " ".join(paragraph.split())
