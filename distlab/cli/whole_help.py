"""Groups of commands whose help shows the whole first sentence of each command."""

import inspect
from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """Lists its commands with the first paragraph of their help, wrapped instead of cut.

    click cuts an excerpt of a help text, but prints an explicit short help whole.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for command in self.commands.values():
            paragraph = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            command.short_help = " ".join(paragraph.split())
