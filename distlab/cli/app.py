"""The command line: all commands by name, and one-line errors for bad arguments."""

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from distlab.cli import bench, challenge, completion, learn, plan, sim, tools, train
from distlab.cli.streams import INTERRUPTED, complain
from distlab.cli.whole_help import Group
from distlab.util.text import did_you_mean, sentence

# typer brings its own click or uses the installed one; either way this is its UsageError.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="distlab",
    cls=Group,
    help="Learn how distributed training works by building it.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("-", "_"),  # accept --num_workers, too
    },
)
# Passes options on, with dashes and all.
RAW = {"ignore_unknown_options": True, "allow_interspersed_args": False}
app.command("status")(learn.show_status)
app.command("check")(learn.check)
app.command("grade")(learn.grade)
app.command("watch")(learn.watch)
app.command("trace")(learn.trace)
app.command("hint")(learn.hint)
app.command("diff")(learn.diff)
app.command("reset")(learn.reset)
app.command("challenge")(challenge.challenge)
app.command("demo")(tools.demo)
app.command("train", context_settings=RAW, add_help_option=False)(train.train)
app.command("chaos")(tools.chaos)
app.command("hang")(tools.hang)
app.command("sim", context_settings={"allow_interspersed_args": False})(sim.sim)
app.command("plan")(plan.plan)
app.command("doctor")(tools.doctor)
app.command("completion")(completion.completion)
app.command("handout")(tools.handout)
app.add_typer(bench.app, name="bench")


@app.command("help")
def show_help(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", show_default=False, help="Such as sim; default: all."),
    ] = None,
) -> None:
    """Show this help, or the help of one command."""
    raise typer.Exit(run([*(command or ()), "--help"]))


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


def run(arguments: Sequence[str] | None) -> int:
    """Run the command given by ``arguments``; return the exit code.

    Raises:
        KeyboardInterrupt: The user has pressed ctrl-C.
        Exception: Any error that a command raises.
    """
    completion.prepare()
    try:
        code = app(args=arguments, prog_name="distlab", standalone_mode=False)
    except UsageError as error:
        return complain(_usage_line(error, sys.argv[1:] if arguments is None else arguments), 2)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == INTERRUPTED:  # typer has handled ctrl-C itself
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _usage_line(error: Exception, arguments: Sequence[str]) -> str:
    """Say in one line what is wrong and what is valid; if there is no command, return the help."""
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        return message
    message = " ".join(message.replace("Value error, ", "").split())  # drop pydantic's prefix
    if context and type(error).__name__ == "NoSuchOption":
        message = _no_such_option(error, context, arguments)
    commands = getattr(context.command, "commands", {}) if context else {}
    # In a group of commands, a plain UsageError means that the command is missing or unknown.
    if type(error) is UsageError and commands:
        message = f"{sentence(message)}{_valid('commands', sorted(commands))}"
    return f"{context.command_path if context else 'distlab'}: {message}"


def _no_such_option(error: Exception, context: typer.Context, arguments: Sequence[str]) -> str:
    """Return an error that shows the option as it was typed, and lists the valid options."""
    name = str(getattr(error, "option_name", ""))
    typed = (argument.partition("=")[0] for argument in arguments)
    wrong = next((t for t in typed if t.replace("-", "_") == name.replace("-", "_")), name)
    options = [option for param in context.command.params for option in param.opts[:1]]
    options = [option for option in options if option.startswith("--")]
    nearest = did_you_mean(wrong, options)
    return f"No such option: {wrong}.{f' {nearest}' * bool(nearest)}{_valid('options', options)}"


def _valid(kind: str, names: Sequence[str]) -> str:
    return f" Valid {kind}: {', '.join(names)}" if names else ""
