"""``grade.run``: run a test's body on every rank of a fresh world, with the learner's lesson."""

import inspect
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import distlab
from distlab import launch
from distlab.course import Challenge, Task
from distlab.grade.called import Lesson
from distlab.grade.gpus import OnGpus
from distlab.grade.limits import REFERENCE_TIMEOUT_S, limits_of, raised_to, scaled_by, work
from distlab.grade.outcomes import OUTSIDE
from distlab.grade.submission import GIVEN, Submission
from distlab.launch import LaunchError, Limits, RankExited, RankFailed, RankHung, SetupError
from distlab.launch.fork_server import load_ahead
from distlab.launch.limits import metered
from distlab.launch.stacks import is_of_program
from distlab.lessons import COURSE
from distlab.sim import Cluster, Options, Trace

CERTAIN = ("deadlock", "suspended")  # kinds of hangs that more time would not resolve
# Kinds of hangs in which ranks wait for messages that never arrive, or in which they compute.
WAITING = ("deadlock", "all wait", RankExited.KIND, "returned")
COMPUTING = ("endless loop", RankHung.KIND)
# Kinds of errors that a simulation would not explain: either the line is already known, and the
# simulation would hang there, too, or the program's messages are not the cause.
KNOWN = ("endless loop", "blocked", "suspended", RankFailed.KIND, SetupError.KIND)
SUCCEEDS = (
    "The same program succeeds in the simulated world, so look for what differs on real processes: "
    "a send that is still under way when the function returns, a work that is waited for twice, "
    "timing, the file system, or state that the ranks of one process share."
)
_FRAME = re.compile(
    r'^  File "(?P<file>[^"\n]+)", line \d+, in .*\n(?:(?:    .*|  \[Previous line .*)\n)*',
    re.MULTILINE,
)
_OUTSIDE = re.compile(rf"^{OUTSIDE}:\n(.*)$", re.MULTILINE)
IF_NOT = "If that is not it: "  # introduces further advice, after the cause that the test names
_EMPTY = re.compile(r"^Traceback \(most recent call last\):\n(?!  File)", re.MULTILINE)
Body = Callable[..., Any]
World = Callable[[Submission, Limits], "Run"]  # runs a test's body with a submission


def _counted(name: str) -> Any:
    """Return a property of ``Run`` that reads one of the trace's per-rank counts."""
    return property(lambda run: getattr(run._trace, name))


@dataclass(frozen=True)
class Run:
    """Results and costs of one world.

    Attributes:
        results: Return values by rank.
        trace: Bytes, messages, events and memory; only in the simulated world.
        seconds: Virtual time; only in the simulated world.
        host_syncs: Number of times that the submission's lines made each rank's host wait for its
            GPU; empty without simulated GPUs.
        hazards: Lines on what would be wrong on GPUs; empty without simulated GPUs.
    """

    results: list[Any]
    trace: Trace | None = None
    seconds: float = 0.0
    host_syncs: list[int] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)

    messages = _counted("messages")  # number sent, including those inside built-in collectives
    bytes_sent = _counted("bytes_sent")
    bytes_received = _counted("bytes_received")
    collectives = _counted("collectives")  # number of calls to built-in collectives
    peak_bytes = _counted("peak_bytes")  # peak tensor memory; needs ``Options(has_devices=True)``

    @property
    def is_simulated(self) -> bool:
        """True if this world was simulated; with nccl, so is any world of more ranks than GPUs."""
        return self.trace is not None

    @property
    def _trace(self) -> Trace:
        if self.trace is None:
            raise ValueError("only the simulated world counts: ask grade.is_simulated first")
        return self.trace


class Grade:
    """The fixture with which a test runs bodies, in one kind of world and with one submission.

    Attributes:
        world: "sim", "gloo" or "nccl".
        gpus: What the simulated GPUs of all worlds reported so far.
        runs: Number of worlds that the test has started; a test that starts none judges nothing.
        world_size: Number of ranks in the last world.
        random: Source of values that a submission must not know in advance, such as link speeds,
            sizes and names. Each run of pytest draws a new seed; ``--grade-seed`` sets it.
    """

    def __init__(
        self,
        submission: Submission,
        task: Task,
        world: str,
        timeout_s: float,
        *,
        seed: int = 0,
        reference: Submission | None = None,
        semantics: str = "gloo",
    ) -> None:
        """Store the settings; no world is started yet.

        Args:
            submission: Files to grade.
            task: Task whose lesson is loaded.
            world: "sim", "gloo" or "nccl".
            timeout_s: Wall-clock limit of one world; the other limits are derived from it.
            seed: Seed of ``random``.
            reference: Solutions, which are run for comparison if a world seems to hang, because the
                machine may just be slow. Without them, the speed of the machine is measured.
            semantics: "nccl" to simulate GPUs, except in worlds whose cluster or ``has_devices``
                the test sets, because it then judges what gloo's semantics define, such as times.
        """
        self.world, self.gpus = world, OnGpus(submission.root)
        self.runs = 0
        self.world_size = 0
        self.random = random.Random(seed)
        self._submission, self._task, self._reference = submission, task, reference
        self._limits, self._semantics = limits_of(timeout_s), semantics

    @property
    def is_simulated(self) -> bool:
        """True if worlds are simulated and have a trace."""
        return self.world == "sim"

    def run(
        self,
        body: Body,
        world_size: int,
        *args: object,
        cluster: Cluster | str | None = None,
        options: Options | None = None,
        if_stuck: str = "",
        if_slow: str = "",
    ) -> Run:
        """Call ``body(lesson, *args)`` on every rank of a fresh world.

        Args:
            body: Module-level function that returns the values to judge.
            world_size: Number of ranks.
            args: Arguments, the same on all ranks.
            cluster: Cluster of the simulated world, as for ``launch.simulate``.
            options: Options of the simulated world. With "nccl" as semantics, the tensors that the
                body makes and gets are on its rank's GPU.
            if_stuck: Likely cause if ranks wait forever, or if one leaves the others waiting. This
                sentence is shown before the table of waiting ranks.
            if_slow: Likely cause if ranks compute forever.

        Raises:
            LaunchError: The submission failed, crashed, did not end, or is still to be written.
        """
        self.runs, self.world_size = self.runs + 1, world_size
        is_real = not self.is_simulated
        if self.world == "nccl" and world_size > torch.cuda.device_count():
            is_real = False  # simulated, because there are fewer GPUs than ranks
        world = partial(self._on_processes if is_real else self._simulate, body, world_size, args)
        if not is_real:
            world = partial(world, cluster, options or Options())
        __tracebackhide__ = True  # after ctrl-C, pytest shows the line of the test
        try:
            load_ahead(self._task.preload)
            given = given_with(body, self._submission, *args)
            with _without_frames_of(given), _explained(if_stuck, if_slow):
                return self._patiently(world)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    def call(self, body: Body, *args: object) -> Any:
        """Call ``body(lesson, *args)`` on a single rank, and return its result."""
        __tracebackhide__ = True
        return self.run(body, 1, *args).results[0]

    def _patiently(self, world: World) -> Run:
        """Run a world; if it hangs and the reference is slow here too, rerun it with more time.

        That way, nobody loses points because a machine is slow or busy, or reads its libraries from
        a cold disk. A hang that is certain is reported immediately.
        """
        try:
            return world(self._submission, self._limits)
        except RankHung as hung:
            limits = None if hung.kind in CERTAIN else self._limits_by_reference(world)
            if limits is None:
                raise
        return world(self._submission, limits)

    def _limits_by_reference(self, world: World) -> Limits | None:
        """Return limits that suit the reference in this world; None if the current limits do."""
        with suppress(LaunchError), metered() as used:
            if self._reference is None:
                launch.run(work, 1, backend="sim", timeout_s=REFERENCE_TIMEOUT_S)
            else:
                world(self._reference, limits_of(REFERENCE_TIMEOUT_S))
        larger = scaled_by if self._reference is None else raised_to
        return larger(self._limits, used)

    def _simulate(
        self,
        body: Body,
        world_size: int,
        args: tuple[object, ...],
        cluster: Cluster | str | None,
        options: Options,
        submission: Submission,
        limits: Limits,
    ) -> Run:
        if self._semantics == "nccl" and cluster is None and options.has_devices is None:
            options = replace(options, semantics="nccl", p2p_order="free")  # has NCCL's order
        has_gpus = options.semantics == "nccl"
        simulated = launch.simulate(
            *(on_gpu if has_gpus else on_rank, world_size, submission, self._task, body, args),
            cluster=cluster or ("dgx-h100" if has_gpus else None),
            options=replace(options, given=given_with(body, submission, *args), is_strict=True),
            limits=limits,
            plain_results=True,
        )
        if len(simulated.results) != world_size:
            raise RuntimeError(f"{len(simulated.results)} results of {world_size} ranks")
        on_gpus = simulated.gpu_time
        syncs = self.gpus.note(on_gpus) if on_gpus else []
        hazards = on_gpus.wrong if on_gpus else []
        return Run(simulated.results, simulated.trace, simulated.seconds, syncs, hazards)

    def _on_processes(
        self,
        body: Body,
        world_size: int,
        args: tuple[object, ...],
        submission: Submission,
        limits: Limits,
    ) -> Run:
        try:
            results: list[Any] = launch.run(
                *(on_rank, world_size, submission, self._task, body, args),
                backend=self.world,
                given=given_with(body, submission, *args),
                limits=limits,
                plain_results=True,
            )
        except LaunchError as error:
            same = partial(self._simulate, body, world_size, args, None, Options())
            _add_cause(error, lambda: same(submission, self._limits))
            raise
        return Run(results)


def _add_cause(error: LaunchError, simulate: Callable[[], object]) -> None:
    """Simulate the program that raised ``error``, and append the simulation's exact report.

    The verdict remains that of the real processes. If all of them wait, and the program also
    deadlocks in the simulation, the hang is certain and is not retried with more time.
    """
    if error.kind in KNOWN:
        return
    try:
        simulate()
    except LaunchError as simulated:
        if (error.kind, simulated.kind) == ("all wait", "deadlock"):
            error.kind, error.advice = "deadlock", simulated.advice
        explanation = f"The same program in the simulated world: {simulated}"
    else:
        explanation = SUCCEEDS
    error.args = (f"{error}\n\n{explanation}", *error.args[1:])


def given_with(body: Body, submission: Submission, *args: object) -> tuple[str, ...]:
    """Return the files and folders of code that is not the learner's: bodies, distlab, given.py.

    Arguments count too, because a body may be an argument of another body, which calls it.
    """
    bodies = [value for value in (body, *args) if inspect.isfunction(value)]
    folders = dict.fromkeys(str(Path(entry.__code__.co_filename).parent) for entry in bodies)
    given = [str(file) for name in GIVEN for file in COURSE.glob(f"phase*/{name}.py")]
    return *folders, str(Path(distlab.__file__).parent), *submission.lenders, *given


@contextmanager
def _without_frames_of(given: tuple[str, ...]) -> Iterator[None]:
    """Remove all frames but the learner's from tracebacks, even if no frame remains.

    An error in a loss's ``backward``, or in the check of a result, may involve none of the
    learner's lines.
    """
    try:
        yield
    except LaunchError as error:
        text = _FRAME.sub(
            lambda frame: frame[0] if is_of_program(frame["file"], given) else "", f"{error}"
        )
        error.args = (_without_repetition(_EMPTY.sub(f"{OUTSIDE}:\n", text)), *error.args[1:])
        raise


def _without_repetition(text: str) -> str:
    """Remove the line under ``OUTSIDE`` if it repeats the headline."""
    headline = text.partition("\n")[0]
    return _OUTSIDE.sub(
        lambda match: f"{OUTSIDE}." if match[1].rstrip(".") in headline else match[0], text
    )


@contextmanager
def _explained(if_stuck: str, if_slow: str) -> Iterator[None]:
    """If a world does not finish, show the likely cause, which the test names, above the report."""
    try:
        yield
    except (RankHung, RankExited) as error:
        waits, computes = error.kind in WAITING, error.kind in COMPUTING
        if cause := if_stuck if waits else if_slow if computes else "":
            report = f"{error}"
            if advice := error.advice:
                report = report.replace(advice, f"{IF_NOT}{advice[:1].lower()}{advice[1:]}", 1)
            error.args = (f"{cause.rstrip()} {report[:1].upper()}{report[1:]}", *error.args[1:])
        raise


def on_rank(
    submission: Submission, task: Task | Challenge, body: Body, args: tuple[object, ...]
) -> Any:
    """Import the lesson and call the body, on one rank."""
    return body(Lesson(submission.load(task.folder, task.lesson)), *args)


def on_gpu(
    submission: Submission, task: Task | Challenge, body: Body, args: tuple[object, ...]
) -> Any:
    """Do the same on a simulated GPU, which is where the body's tensors are made and copied to."""
    lesson = Lesson(submission.load(task.folder, task.lesson))
    device = launch.context().device
    with device:
        return body(lesson, *tree_map_only(torch.Tensor, lambda x: x.to(device), args))
