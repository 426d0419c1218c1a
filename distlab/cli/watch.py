"""`distlab watch`: a verdict on every save."""

import sys
from collections.abc import Iterable
from queue import Queue

import typer

from distlab.cli.learn import SomeTask, check, choose, say
from distlab.learner import folder

CLEAR = "\x1b[2J\x1b[3J\x1b[H"


def watch(task: SomeTask = None) -> None:
    """Grade the current task on every save; without a terminal, once."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        check(task)
        return
    from distlab.learner import watch as watching
    from distlab.learner.warm import WarmGrader

    here = folder.find()
    first = choose(here, task)
    events: watching.Events = Queue()
    grader = WarmGrader(here)
    try:
        with watching.saves_into(events, here), watching.keys_into(events):
            watching.Watch(here, first, grader, say, _say_on_empty_screen).run(events)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        grader.close()


def _say_on_empty_screen(lines: Iterable[str]) -> None:
    typer.echo(CLEAR, nl=False)
    say(lines)
