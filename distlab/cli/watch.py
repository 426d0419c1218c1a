"""`distlab watch`: a verdict on every save."""

import sys
from functools import partial
from queue import Queue

import typer

from distlab.cli.learn import Lend, SomeTask, WorldTimeout, check, choose, say
from distlab.learner import child_processes, folder, grading

CLEAR = "\x1b[2J\x1b[3J\x1b[H"


def watch(task: SomeTask = None, world_timeout: WorldTimeout = None, lend: Lend = False) -> None:
    """Grade the current task on every save; without a terminal, once."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        check([task] if task else None, world_timeout, lend)
        return
    from distlab.learner import watch as watching
    from distlab.learner.grader_server import WarmGrader
    from distlab.learner.screen import Screen

    here = folder.find()
    first = choose(here, task)
    options = [*grading.world_timeout(world_timeout), *grading.lend_option(here, lend)]
    events: watching.Events = Queue()
    grader = WarmGrader(here)
    try:
        with (
            child_processes.ended_with_us(),
            watching.saves_into(events, here),
            watching.keys_into(events, grader.stop),
        ):
            screen = Screen(say, partial(typer.echo, CLEAR, nl=False))
            watching.Watch(here, first, grader, screen, options).run(events)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        grader.close()
