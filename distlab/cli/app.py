"""The `distlab` command and how it ends: results on standard output, one line for bad input."""

import sys
from collections.abc import Sequence

import typer

from distlab.cli import bench, demo, doctor, sim, train

# typer brings its own click or uses the installed one; either way this is its UsageError.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="distlab",
    help="Learn how distributed training works by building it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("-", "_"),  # --num-workers works too
    },
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("sim", context_settings={"allow_interspersed_args": False})(sim.sim)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


@app.callback()
def _root() -> None:
    """Learn how distributed training works by building it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 it failed, 2 bad options, 130 ctrl-C."""
    try:
        code = app(args=arguments, prog_name="distlab", standalone_mode=False)
    except UsageError as error:
        sys.exit(_complain(_usage_line(error), 2))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_complain("interrupted", 130))
    except Exception as error:
        if not type(error).__module__.startswith("distlab."):
            raise  # not an error made for people to read: keep the traceback
        sys.exit(_complain(str(error), 1))
    if code == 130:  # typer has dealt with ctrl-C itself
        sys.exit(_complain("interrupted", 130))
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, code: int) -> int:
    erase_bar = "\r\x1b[K" if sys.stderr.isatty() else ""  # a progress bar may stand there
    print(erase_bar + message, file=sys.stderr)
    return code


def _usage_line(error: Exception) -> str:
    """What is wrong, and the valid names, in one line; for no command at all, the help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return error.format_message() if hasattr(error, "format_message") else str(error)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = message.replace("Value error, ", "")  # pydantic's word for it
    line = f"{context.command_path if context else 'distlab'}: {' '.join(message.split())}"
    if context and "o such option" in message:
        options = [option for param in context.command.params for option in param.opts[:1]]
        line += f" Valid: {', '.join(option for option in options if option.startswith('--'))}"
    elif context and "o such command" in message:
        line += f" Valid: {', '.join(sorted(context.command.commands))}"
    return line
