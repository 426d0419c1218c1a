"""The `distlab` command and how it ends: results on standard output, one line for bad input."""

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from distlab.cli import bench, demo, doctor, learn, sim, trace, train, watch
from distlab.course import CourseError
from distlab.learner.folder import LearnerError

# typer brings its own click or uses the installed one; either way this is its UsageError.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="distlab",
    help="Learn how distributed training works by building it.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("-", "_"),  # --num-workers works too
    },
)
app.command("status")(learn.show_status)
app.command("check")(learn.check)
app.command("grade")(learn.grade)
app.command("watch")(watch.watch)
app.command("trace")(trace.trace)
app.command("hint")(learn.hint)
app.command("diff")(learn.diff)
app.command("reset")(learn.reset)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("sim", context_settings={"allow_interspersed_args": False})(sim.sim)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"distlab {metadata.version('distributed-training-from-scratch')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Learn how distributed training works by building it."""
    if context.invoked_subcommand is None:
        learn.summary()


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
        sys.exit(_complain(str(error), 2 if _is_about_options(error) else 1))
    if code == 130:  # typer has dealt with ctrl-C itself
        sys.exit(_complain("interrupted", 130))
    sys.exit(code if isinstance(code, int) else 0)


def _is_about_options(error: Exception) -> bool:
    """Whether other options would have worked, as far as can be known."""
    if isinstance(error, CourseError | LearnerError):
        return True
    from distlab.launch import SetupError  # an error of distlab's: torch is loaded anyhow
    from distlab.training import ConfigError

    return isinstance(error, ConfigError | SetupError)


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
    message = " ".join(message.split())
    if "o such " in message and not message.endswith((".", "?")):
        message += "."
    line = f"{context.command_path if context else 'distlab'}: {message}"
    if context and "o such option" in message:
        options = [option for param in context.command.params for option in param.opts[:1]]
        line += _valid("options", [option for option in options if option.startswith("--")])
    elif context and "o such command" in message:
        line += _valid("commands", sorted(context.command.commands))
    return line


def _valid(what: str, names: Sequence[str]) -> str:
    return f" Valid {what}: {', '.join(names)}" if names else ""
