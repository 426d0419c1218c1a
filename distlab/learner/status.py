"""The learner's progress, verdicts and next steps, in words."""

from collections.abc import Iterator

from distlab.course import Phase, Task, anchor, label_width
from distlab.grade import table
from distlab.grade.lending import LEND, lendable
from distlab.grade.outcomes import Outcome
from distlab.grade.results import TaskResult
from distlab.learner import source
from distlab.learner.folder import CourseFolder
from distlab.learner.grading import FULL_MARKS, NOT_FULL, NOTHING_RAN, Grading
from distlab.learner.state import Progress
from distlab.learner.trace_programs import MAX_RANKS, MIN_RANKS, PROGRAMS
from distlab.lessons import SOLUTIONS
from distlab.util.text import joined, verb

BAR_WIDTH = 24
ALL_PASSED = "All tasks have passed.  Run: distlab grade"
BUILT = "What you have built"  # title of a section in each phase's guidelines.md
NOT_FAILED = ("", Outcome.PASSED, Outcome.TODO)  # "" if the task was never graded
LAST_LINES = 20  # number of lines shown from the end of a failed grader's output
# Captions of the pictures, by kind of verdict; an endless loop has no picture.
PICTURES = {
    "deadlock": "See who waits for whom",
    "all wait": "See who waits for whom",
    "wrong": "See who sends what",
    "too dear": "See who sends what",
}


def summary(folder: CourseFolder, progress: Progress) -> Iterator[str]:
    """Yield the course's title, a line per phase, and the next step."""
    yield folder.course.title
    yield ""
    width = max(len(phase.title) for phase in folder.course.phases)
    for phase in folder.course.phases:
        yield phase_line(phase, progress, width)
        yield from built(phase, progress)
    yield ""
    yield from whats_next(folder, progress)


def overview(folder: CourseFolder, progress: Progress) -> Iterator[str]:
    """Yield a line per phase and per task, and the next step."""
    for phase in folder.course.phases:
        yield phase_line(phase, progress)
        yield from built(phase, progress)
        width = label_width(phase.tasks)
        yield from (task_line(folder, task, progress, width) for task in phase.tasks)
        yield ""
    yield from whats_next(folder, progress)


def phase_line(phase: Phase, progress: Progress, width: int = 0) -> str:
    """Return a line with the progress in a phase; ``width`` aligns the bars of several phases."""
    passed = [task for task in phase.tasks if progress.has_passed(task)]
    points = sum(map(progress.points, phase.tasks))
    full = BAR_WIDTH * len(passed) // len(phase.tasks)
    bar = "█" * full + "░" * (BAR_WIDTH - full)
    counts = f"{len(passed)}/{len(phase.tasks)} tasks  {points}/{phase.points} points"
    more = "  (more tasks to come)" if phase.unfinished else ""
    return f"Phase {phase.number}  {phase.title:<{width}}  {bar}  {counts}{more}"


def built(phase: Phase, progress: Progress) -> Iterator[str]:
    """Yield the link to the phase's section ``BUILT`` if all tasks of the phase have passed."""
    if all(progress.has_passed(task) for task in phase.tasks):
        yield f"{BUILT}, and what to do with it: {phase.folder}/guidelines.md#{anchor(BUILT)}"


def task_line(folder: CourseFolder, task: Task, progress: Progress, width: int) -> str:
    """Return a line with a task's outcome; ``width`` aligns the outcomes of several tasks."""
    sign = "✔" if progress.has_passed(task) else "·" if _is_open(progress, task) else "✘"
    return f"  {sign} {task.id:<5} {task.label:<{width}} {_state(folder, task, progress)}"


def _is_open(progress: Progress, task: Task) -> bool:
    """Return True if the grader has not judged what the learner has written for a task."""
    return progress.outcome(task) in ("", Outcome.TODO)


def _state(folder: CourseFolder, task: Task, progress: Progress) -> str:
    """Return a task's outcome, and if it was edited since; without one, what comes first."""
    if _is_open(progress, task):
        is_written = source.is_written(folder, task)
        return "not graded yet" if is_written else "not written yet"
    edited = ", edited since" if progress.is_edited(folder, task) else ""
    return f"{progress.outcome_name(task)}{edited}"


def whats_next(
    folder: CourseFolder, progress: Progress, after: Task | None = None, *, lends: bool = False
) -> Iterator[str]:
    """Yield the next task and the command to run, or the final command if all have passed.

    Args:
        folder: The course's folder.
        progress: Outcomes so far.
        after: Task that has just been graded.
        lends: True if the command should include ``--lend``, as the previous one did.
    """
    task = progress.next_task(folder, after)
    if task is None:
        yield ALL_PASSED
        return
    yield f"Next: {task.heading} ({task.minutes} minutes){remark(folder, progress, task, after)}"
    yield f"      write {task.label} in {task.template}"
    yield f"      read  {task.folder}/{task.guide}"
    watched = "" if task == progress.next_task(folder) else task.id
    check, watch = _command("check", task.id, lends), _command("watch", watched, lends)
    yield f"Run:  {check}   or: {watch}"


def remark(folder: CourseFolder, progress: Progress, task: Task, after: Task | None) -> str:
    """Return why the next task comes before the one just graded; "" if it does not."""
    tasks = folder.course.tasks
    if after is None or tasks.index(task) >= tasks.index(after):
        return ""
    has_failed = progress.outcome(task) not in NOT_FAILED
    if has_failed and progress.is_edited(folder, task):
        return ", edited since it failed"
    return ", which has not passed yet"


def _command(name: str, task_id: str, lends: bool) -> str:
    """Return a command that grades a task; an empty id means the command's default task."""
    return " ".join(filter(None, ["distlab", name, LEND if lends else "", task_id]))


# After a grading run


def verdict(result: TaskResult) -> str:
    """Return a line with the outcome of a task."""
    task = result.task
    if result.outcome is Outcome.TODO:
        return f"· {task.id} {task.label}: {_what_is_missing(result)}"
    sign = "✔" if result.outcome is Outcome.PASSED else "✘"
    parts = f": {table.parts(result)}" if table.parts(result) else ""
    score = f"{result.points}/{task.points} points{parts}, {result.seconds:.1f} s"
    lent = f", {table.lent(result)}" if result.lent else ""
    return f"{sign} {task.id} {task.label}: {result.outcome_name} ({score}{lent})"


def _what_is_missing(result: TaskResult) -> str:
    missing, function = to_write(result)
    if missing != result.task.id:
        return f"needs {missing} {function}, which is still to be written"
    is_first = function == result.task.function
    return "not written yet" if is_first else f"{function} is not written yet"


def to_write(result: TaskResult) -> tuple[str, str]:
    """Return the id of the task to write, which may be an earlier one, and its function."""
    return result.verdict.missing or (result.task.id, result.task.function)


def not_written(task: Task) -> str:
    """Return a line that says that a task is not written yet."""
    are, them = ("are", "them") if len(task.names) > 1 else ("is", "it")
    return f"{task.id} {task.label} {are} not written yet: write {them} in {task.template}"


def explanation(folder: CourseFolder, task: Task, grading: Grading) -> Iterator[str]:
    """Yield lines that explain why a task has not passed."""
    result = grading.tasks.get(task.id)
    if result is None:
        yield from failure(grading)
    elif result.outcome is Outcome.TODO:
        yield from _how_to_write(folder, result)
        if result.is_waiting:
            yield from _grade_it_first(folder, result, grading.lends)
    else:
        yield from grading.advice
        yield from _picture(result)


def fix_first(
    folder: CourseFolder, task: Task, grading: Grading, progress: Progress
) -> Iterator[str]:
    """Yield a line about the first failed task, if any, that this failed task builds on."""
    result = grading.tasks.get(task.id)
    if result is None or not result.has_failed:
        return
    for other in folder.course.builds_on(task):
        if other in result.lent:
            continue
        if progress.outcome(other) not in (*NOT_FAILED, Outcome.GRADER_ERROR):
            state = (
                f"which failed and {verb(other.names, 'were', 'was')} edited since. Grade "
                f"{other.id} again"
                if progress.is_edited(folder, other)
                else f"which {verb(other.names, 'fail')} too. Fix {other.id} first"
            )
            check = _command("check", other.id, grading.lends)
            yield f"{task.id} builds on {other.label}, {state}: {check}"
            return


def _picture(result: TaskResult) -> Iterator[str]:
    """Yield the command that draws the failure, if possible, on the same number of ranks."""
    program, kind, ranks = PROGRAMS.get(result.task.id), result.verdict.kind, result.world_size
    if program is None or kind not in PICTURES:
        return
    option = f" --ranks {ranks}" if ranks not in (0, program.ranks) else ""
    if ranks == 0 or MIN_RANKS <= ranks <= MAX_RANKS:
        yield f"{PICTURES[kind]}: distlab trace {result.task.id}{option}"


def _how_to_write(folder: CourseFolder, result: TaskResult) -> Iterator[str]:
    id, function = to_write(result)
    missing = next((other for other in folder.course.tasks if other.id == id), result.task)
    left = source.to_write(missing, source.read(folder.root / missing.template))
    names = joined(missing.names) if left.keys() >= {*missing.functions} else function
    yield f"Write {names} in {missing.template}."
    yield f"Read  {missing.folder}/{missing.guide}"


def _grade_it_first(folder: CourseFolder, result: TaskResult, lends: bool) -> Iterator[str]:
    """Yield the commands that grade a missing earlier task, or that use its solution instead."""
    missing, _ = to_write(result)
    check, watch = _command("check", missing, lends), _command("watch", missing, lends)
    yield f"Run:  {check}   or: {watch}"
    borrowed = lendable(result.task, folder.course)
    if folder.task(missing) in borrowed and not lends and (folder.root / SOLUTIONS).is_dir():
        ids = [other.id for other in borrowed if source.is_to_write(folder, other)]
        check = _command("check", result.task.id, lends=True)
        yield f"Or take {joined(ids)} from the solutions: {check}"


def failure(grading: Grading) -> Iterator[str]:
    """Yield lines about a run that the grader did not complete; none if it did."""
    if grading.code == NOTHING_RAN:
        yield "Nothing ran: the suite has no test for the tasks that were asked for."
    elif grading.code not in (FULL_MARKS, NOT_FULL):
        yield "The grader failed; this is not your fault, and nothing was scored for it."
        yield from (grading.advice or grading.output.strip().splitlines())[-LAST_LINES:]


def next_steps(
    folder: CourseFolder, task: Task, grading: Grading, progress: Progress
) -> Iterator[str]:
    """Yield the next steps after one task has been graded."""
    result = grading.tasks.get(task.id)
    if result and result.outcome is Outcome.PASSED:
        if folder.has_solution(task):
            yield f"Your code beside the solution: distlab diff {task.id}"
        yield from built(folder.phase_of(task), progress)
        yield from whats_next(folder, progress, task, lends=grading.lends)
    elif result and result.outcome is not Outcome.GRADER_ERROR and to_write(result)[0] == task.id:
        again = _command("check", task.id, grading.lends)
        yield f"Stuck? distlab hint {task.id}   Again: {again}"
