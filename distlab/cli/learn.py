"""The learner's commands, from `distlab status` to `distlab trace`."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Queue
from typing import Annotated, Any, Literal

import typer

from distlab.cli import completion
from distlab.course import Task
from distlab.grade import report_paths, submission
from distlab.grade.outcomes import Outcome
from distlab.launch import fork_server
from distlab.learner import (
    child_processes,
    compare,
    folder,
    grading,
    hints,
    source,
    state,
    status,
    templates,
    trace_programs,
)
from distlab.util.text import joined, verb

Backend = Literal["auto", "sim", "gloo", "nccl"]


def task_argument(help: str) -> Any:
    """Return the argument TASK, with shell completion of its values."""
    return typer.Argument(
        metavar="TASK", show_default=False, help=help, autocompletion=completion.tasks
    )


def impl_option(help: str) -> Any:
    """Return the option ``--impl``, which says whose functions to use."""
    return typer.Option("--impl", metavar="template|solution|DIR", help=help)


SUCH_AS = "Such as 1.4 or broadcast"
SomeTask = Annotated[str | None, task_argument(f"{SUCH_AS}; by default the next one.")]
SomeTasks = Annotated[list[str] | None, task_argument(f"{SUCH_AS}; by default the next one.")]
OneTask = Annotated[str, task_argument(f"{SUCH_AS}.")]
WorldTimeout = Annotated[
    float | None,
    typer.Option(
        "--world-timeout",
        metavar="SECONDS",
        help="Time for one world; raise it on a very slow machine.  [default: 10]",
        show_default=False,
    ),
]
Semantics = Annotated[
    Literal["gloo", "nccl"], typer.Option(help="nccl: the simulated world has GPUs.")
]
Lend = Annotated[
    bool,
    typer.Option("--lend", help="Take what it builds on from the solutions, where yours fails."),
]
COLOURS = {"✔": typer.colors.GREEN, "✘": typer.colors.RED}
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Messages in full.")]
CLEAR = "\x1b[2J\x1b[3J\x1b[H"
DIFF_COLOURS = {"+": typer.colors.GREEN, "-": typer.colors.RED, "@": typer.colors.CYAN}


def say(lines: Iterable[str]) -> None:
    """Print lines; on a terminal, colour verdicts and the lines of diffs."""
    for line in lines:
        colour = COLOURS.get(line.lstrip()[:1]) or DIFF_COLOURS.get(line[:1])
        typer.echo(typer.style(line, fg=colour) if colour else line)


def warn(progress: state.Progress) -> None:
    """Print a warning on standard error if the progress could not be saved."""
    if progress.problem:
        typer.echo(progress.problem, err=True)


def summary() -> None:
    """Print the progress per phase and the next step."""
    here = folder.find()
    templates.keep(here)
    say(status.summary(here, state.load(here)))
    say(["", "All commands: distlab --help"])


def show_status() -> None:
    """Show what has passed, what comes next, and the command to run."""
    here = folder.find()
    templates.keep(here)
    say(status.overview(here, state.load(here)))


def choose(here: folder.CourseFolder, name: str | None) -> Task:
    """Return the named task; without a name, the next task, or the last one if all have passed."""
    if name is not None:
        return here.task(name)
    return state.load(here).next_task(here) or here.course.tasks[-1]


def check(
    tasks: SomeTasks = None,
    world_timeout: WorldTimeout = None,
    lend: Lend = False,
    verbose: Verbose = False,
    semantics: Semantics = "gloo",
) -> None:
    """Grade one or more tasks, and say what to do next."""
    here = folder.find()
    chosen = list(dict.fromkeys(here.task(name) for name in tasks or ())) or [choose(here, None)]
    options = [*grading.world_timeout(world_timeout), *grading.lend_option(here, lend)]
    options += ["--semantics", semantics, *[grading.VERBOSE] * verbose]
    with _grader(here, len(chosen)) as run:
        codes = [_check(here, task, run, options, is_alone=len(chosen) == 1) for task in chosen]
    if len(chosen) > 1:
        say(status.whats_next(here, state.load(here), lends=lend))
    raise typer.Exit(max(codes))


def _check(
    here: folder.CourseFolder,
    task: Task,
    run: grading.RunPytest,
    options: Sequence[str],
    *,
    is_alone: bool,
) -> int:
    """Grade one task and print the outcome; return the exit code."""
    with waiting(f"grading {task.id} {task.label} …"):
        graded = grading.grade(here, [*grading.for_task(here, task), *options], run)
    progress = grading.remember(here, graded)
    say(map(status.verdict, graded.tasks.values()))
    if graded.code != grading.FULL_MARKS:
        say(status.fix_first(here, task, graded, progress))
        say(status.explanation(here, task, graded))
    say(status.next_steps(here, task, graded, progress) if is_alone else [""])
    warn(progress)
    return graded.code


@contextmanager
def _grader(here: folder.CourseFolder, num_tasks: int) -> Iterator[grading.RunPytest]:
    """Yield a function that calls pytest; for several tasks, it loads torch only once."""
    if num_tasks == 1:
        yield grading.captured_in(here)
        return
    from distlab.learner.grader_server import WarmGrader

    grader = WarmGrader(here)
    try:
        with child_processes.ended_with_us():
            yield grader
    finally:
        grader.close()


def grade(
    phase: Annotated[int | None, typer.Option(help="Which one.  [default: all]")] = None,
    impl: Annotated[str, impl_option("What to grade.")] = "template",
    backend: Annotated[
        Backend, typer.Option(help="auto: simulated, and real where a test says so.")
    ] = "auto",
    semantics: Semantics = "gloo",
    report: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT=PATH", help=f"{', '.join(report_paths.HEADS)}; repeatable."),
    ] = None,
    world_timeout: WorldTimeout = None,
    lend: Lend = False,
    verbose: Verbose = False,
) -> None:
    """Grade everything: exit code 0 full marks, 1 less, 2 usage, 3 grader failed, 4 nothing ran."""
    here = folder.find()
    phases = here.course.phases if phase is None else (here.course.phase(phase),)
    arguments = grading.suites(here, phases) + grading.world_timeout(world_timeout)
    arguments += grading.lend_option(here, lend)
    arguments += ["--impl", str(submission.find(impl, here.root).root), "--backend", backend]
    arguments += ["--semantics", semantics]
    arguments += grading.find_reports(report or ())
    graded = grading.grade(here, arguments + [grading.VERBOSE] * verbose, grading.shown_in(here))
    if impl == "template":
        warn(grading.remember(here, graded))
    raise typer.Exit(graded.code)


def watch(
    task: SomeTask = None,
    world_timeout: WorldTimeout = None,
    lend: Lend = False,
    semantics: Semantics = "gloo",
) -> None:
    """Grade the current task on every save, or only once if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        check([task] if task else None, world_timeout, lend, semantics=semantics)
        return
    from distlab.learner import watch as watching
    from distlab.learner.grader_server import WarmGrader

    here = folder.find()
    first = choose(here, task)
    options = [*grading.world_timeout(world_timeout), *grading.lend_option(here, lend)]
    options += ["--semantics", semantics]
    events: watching.Events = Queue()
    grader = WarmGrader(here)
    try:
        with (
            child_processes.ended_with_us(),
            watching.saves_into(events, here),
            watching.keys_into(events, grader.stop),
        ):
            screen = watching.Screen(say, partial(typer.echo, CLEAR, nl=False))
            watching.Watch(here, first, grader, screen, options).run(events)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        grader.close()


def hint(
    task: SomeTask = None,
    level: Annotated[int | None, typer.Option(help="1: a question, 2: the idea, 3: names.")] = None,
) -> None:
    """Show one more hint each time, by default for the next task."""
    here = folder.find()
    listed = choose(here, task)
    progress = state.load(here)
    taken = hints.take(here, listed, progress, level)
    typer.secho(f"{listed.heading}\n{taken.title}\n", bold=True)
    _print_markdown(taken.text)
    typer.echo(f"\n{hints.footer(taken, listed)}")
    warn(progress)


def diff(
    task: Annotated[str | None, task_argument("By default the last one that has passed.")] = None,
    spoil: Annotated[bool, typer.Option("--spoil", help="Show it even before that.")] = False,
) -> None:
    """Compare your code with the solution, once your code has passed."""
    here = folder.find()
    listed = here.task(task) if task else _last_passed(here)
    if not spoil and not state.load(here).has_passed(listed):
        anyway = ", or --spoil shows it anyway" if here.has_solution(listed) else ""
        raise folder.LearnerError(
            f"{listed.id} has not passed yet: distlab check {listed.id}{anyway}"
        )
    lines = compare.diff(here, listed).splitlines()
    are = verb(listed.names, "are", "is")
    say(lines or [f"{listed.label} {are} the same as the solution's."])


def _last_passed(here: folder.CourseFolder) -> Task:
    task = state.load(here).last_passed(here)
    if task is None:
        raise folder.LearnerError("no task has passed yet: name one, with --spoil")
    return task


def reset(
    task: OneTask,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Reset the functions of one task to the template; the old file is kept."""
    here = folder.find()
    listed = here.task(task)
    if not yes and not sys.stdin.isatty():
        raise folder.LearnerError(
            f"cannot ask for confirmation here: use distlab reset {listed.id} --yes"
        )
    planned = templates.plan_reset(here, listed)
    replaced = f"{joined([*listed.functions])} in {listed.template}"
    if planned.is_whole:
        replaced = f"all of {listed.template}, where {listed.label} cannot be replaced alone,"
    if not yes and not typer.confirm(f"Replace {replaced} with the template?"):
        typer.echo("Nothing was changed.")
        raise typer.Exit(1)
    old = templates.reset(here, listed, planned)
    progress = state.load(here)
    in_file = [task for task in here.course.tasks if task.template == listed.template]
    for emptied in in_file if planned.is_whole else [listed]:
        progress.records.pop(emptied.id, None)
    progress.save()
    warn(progress)
    names = str(listed.template) if planned.is_whole else joined([*listed.functions])
    typer.echo(f"{names}: back to the start. Your old file: {old.relative_to(here.root)}")


def trace(
    task: Annotated[
        str | None, task_argument("By default the last one graded, or the next one.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="From 2 to 8.  [default: 4 or 8, by task]")
    ] = None,
    impl: Annotated[str, impl_option("Whose function to run.")] = "template",
) -> None:
    """Run a function of Phase 1 on simulated ranks; draw its messages, or report a deadlock."""
    here = folder.find()
    listed, why = (here.task(task), "") if task else trace_programs.choose(here, state.load(here))
    handed_in = submission.find(impl, here.root)
    count = trace_programs.count(listed.id, ranks)  # reports errors before torch is loaded
    if impl == "template" and source.is_to_write(here, listed):
        typer.echo(status.not_written(listed))
        raise typer.Exit(1)
    if why:
        typer.echo(f"{listed.id} {listed.label}, {why}:")
    with waiting(f"running {listed.label} …"):
        fork_server.start_ahead()
        from distlab.learner import trace as tracing

        traced = tracing.trace(here, listed, handed_in, count)
    typer.echo(traced.text)
    if traced.picture is None:
        raise typer.Exit(1)
    if state.load(here).outcome(listed) == Outcome.HANG:
        typer.echo("It does not hang here, on any rank: the tests hang in another case.")
    typer.echo(f"\n{traced.picture.relative_to(here.root)}: who did what when")


def _print_markdown(text: str) -> None:
    """Print Markdown, formatted on a terminal."""
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


@contextmanager
def waiting(activity: str) -> Iterator[None]:
    """Show a spinner inside the block, if standard output is a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():  # stdout is None if it is closed
        yield
        return
    from rich.console import Console

    with Console().status(activity):
        yield
