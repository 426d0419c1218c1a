"""``grade.run``: a test's body on every rank of a fresh world, with the learner's lesson."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distlab import launch
from distlab.course import Task
from distlab.grade import diagnosis
from distlab.grade.submission import Submission
from distlab.launch import LaunchError, RankFailed
from distlab.sim import Cluster, Options, Trace

MEMORY_LIMIT_BYTES = 2 * 2**30
# Of the time limit, which a busy machine must not exceed:
COMPUTING_SHARE = 0.2  # the solutions compute a twentieth of it
IDLE_SHARE = 0.2  # where no rank computes for so long, all wait for each other
Body = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """What came back from the ranks."""

    results: list[Any]  # by rank
    trace: Trace | None = None  # in the simulated world: bytes, messages, events, memory
    seconds: float = 0.0  # of virtual time

    @property
    def messages(self) -> list[int]:
        """Messages that each rank has sent, those inside built-in collectives too."""
        return self._trace.messages

    @property
    def bytes_sent(self) -> list[float]:
        """Bytes that each rank has sent."""
        return self._trace.bytes_sent

    @property
    def bytes_received(self) -> list[float]:
        """Bytes that each rank has received."""
        return self._trace.bytes_received

    @property
    def collectives(self) -> list[int]:
        """Built-in collectives that each rank has called."""
        return self._trace.collectives

    @property
    def _trace(self) -> Trace:
        if self.trace is None:
            raise ValueError("only the simulated world counts: ask grade.is_simulated first")
        return self.trace


class Grade:
    """The fixture of a suite: runs bodies in one world with one submission.

    Attributes:
        world: "sim", "gloo" or "nccl".
        runs: how many worlds the test has started; a test that starts none has judged nothing.
    """

    def __init__(self, submission: Submission, task: Task, world: str, timeout_s: float) -> None:
        self.world = world
        self.runs = 0
        self._submission, self._task = submission, task
        self._limits: dict[str, Any] = {
            "timeout_s": timeout_s,
            "cpu_limit_s": COMPUTING_SHARE * timeout_s,
            "idle_limit_s": IDLE_SHARE * timeout_s,
            "memory_limit_bytes": MEMORY_LIMIT_BYTES,
            "plain_results": True,
        }

    @property
    def is_simulated(self) -> bool:
        """Whether there is a trace."""
        return self.world == "sim"

    def run(
        self,
        body: Body,
        world_size: int,
        *args: object,
        cluster: Cluster | str | None = None,
        options: Options | None = None,
    ) -> Run:
        """Call ``body(lesson, *args)`` on every rank of a fresh world.

        Args:
            body: a module-level function; it returns what is to be judged.
            world_size: number of ranks.
            args: the same for all ranks.
            cluster: of the simulated world, as for ``launch.simulate``.
            options: of the simulated world.

        Raises:
            LaunchError: the submission failed, crashed, did not end, or wants to be written.
        """
        self.runs += 1
        if not self.is_simulated and self._has_processes_for(world_size):
            return Run(self._on_processes(body, world_size, args))
        simulated = self._simulate(body, world_size, args, cluster, options)
        if len(simulated.results) != world_size:
            raise RuntimeError(f"{len(simulated.results)} results of {world_size} ranks")
        return Run(simulated.results, simulated.trace, simulated.seconds)

    def _has_processes_for(self, world_size: int) -> bool:
        """NCCL needs a GPU for each rank; what needs more stays in the simulated world."""
        return self.world != "nccl" or world_size <= torch.cuda.device_count()

    def call(self, body: Body, *args: object) -> Any:
        """Call ``body(lesson, *args)`` once, for what needs no other rank."""
        return self.run(body, 1, *args).results[0]

    def _simulate(
        self,
        body: Body,
        world_size: int,
        args: tuple[object, ...],
        cluster: Cluster | str | None = None,
        options: Options | None = None,
    ) -> Any:
        return launch.simulate(
            *(on_rank, world_size, self._submission, self._task, body, args),
            cluster=cluster,
            options=options,
            **self._limits,
        )

    def _on_processes(self, body: Body, world_size: int, args: tuple[object, ...]) -> list[Any]:
        try:
            return launch.run(
                *(on_rank, world_size, self._submission, self._task, body, args),
                backend=self.world,
                **self._limits,
            )
        except LaunchError as error:
            if isinstance(error, RankFailed):
                raise
            diagnosis.add_cause(error, lambda: self._simulate(body, world_size, args))
            raise


def on_rank(submission: Submission, task: Task, body: Body, args: tuple[object, ...]) -> Any:
    """Be one rank: import the lesson, call the body."""
    return body(submission.load(task.folder, task.lesson), *args)
