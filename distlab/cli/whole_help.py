"""Groups of commands whose help shows the whole first sentence of each command."""

import inspect
from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """Lists its commands with the first paragraph of their help, wrapped and not cut.

    click cuts what it takes from a help text, and leaves a short help as it is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for command in self.commands.values():
            paragraph = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            command.short_help = " ".join(paragraph.split())
