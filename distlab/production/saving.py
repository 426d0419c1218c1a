"""Checkpoints of a run: all ranks provide their state, which is written in the background."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from distlab.launch.launchers import speaks_for_its_machine
from distlab.production.checkpoint_files import InShards, Whole, of_another_run
from distlab.production.config import Config
from distlab.production.errors import CannotSaveError, ConfigError
from distlab.production.lessons import Lessons
from distlab.production.states import Own, PerRank
from distlab.production.types import HasState
from distlab.util import files


class Checkpoints:
    """Saves and loads the whole state of a run: ``run_dir``/checkpoints/step-….

    Attributes:
        failed_saves: Number of failed saves, on rank 0; training continues after them.
        last_s: Seconds by which the last save delayed training, on rank 0.
    """

    def __init__(self, parts: Mapping[str, HasState], config: Config, lessons: Lessons) -> None:
        self.config, self.folder = config, config.run_dir / "checkpoints"
        is_sharded = any(isinstance(part, Own) for part in parts.values())
        self.files = (InShards if is_sharded else Whole)(parts, config, lessons)
        own = {name: p.part if isinstance(p, PerRank | Own) else p for name, p in parts.items()}
        self.own_state = lessons("training_state").TrainingState(own)
        has_threads = not is_sharded or dist.get_backend() in ("gloo", "nccl")
        saver = lessons("checkpoint").AsyncCheckpointer if has_threads else _Now
        self.saver = saver(self._write)
        self.failed_saves, self.last_s = 0, 0.0
        # On ranks that write, durable_step <= given_step: a step is given to the saver first, and
        # becomes durable when its write succeeds. After a failed write the two differ.
        self.given_step = self.durable_step = -1

    def _write(self, snapshot: dict[str, Any], step: int) -> None:
        self.files.write(snapshot, step)
        self.durable_step = step

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the whole state at the end of the block; called on all ranks.

        The copy is on the CPU, because a model may fill more than half of a GPU.
        """
        state = self.own_state.state_dict()
        before = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), state)
        yield
        self.own_state.load_state_dict(before)

    # loading

    def resume(self) -> None:
        """Continue from the newest undamaged checkpoint, if there is one; called on all ranks.

        Rank 0 decides, because on a network file system, the other ranks may see an older directory
        listing.

        Raises:
            ConfigError: There are checkpoints although ``resume`` is ``never``; they come from a
                run with different shards, model or data; or another rank sees checkpoints that
                rank 0 does not.
        """
        if not self._check_folders():
            return
        found = self.files.find()
        if found is None:
            return
        for path, reason in found.skipped.items():
            say(f"skipped {Path(path).name}: {reason}")
        try:
            self.files.state.load_state_dict(found.state)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, KeyError, RuntimeError) as error:
            raise of_another_run(self.config, error) from error
        self.given_step = self.durable_step = found.step
        say(f"goes on after step {found.step:,}")

    def _check_folders(self) -> bool:
        """Return whether rank 0 sees checkpoints.

        Raises:
            ConfigError: There are any, and ``resume`` is never; or only another node sees the
                newest, while rank 0 may restart on another node.
        """
        newest = max((path.name for path in self.folder.glob("step-*")), default="")
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, newest)
        if seen[0] and self.config.resume == "never":
            raise ConfigError(f"{self.folder} has checkpoints, and resume is never")
        if max(seen) > seen[0]:
            rank = seen.index(max(seen))
            raise ConfigError(
                f"rank {rank} sees {seen[rank]} in {self.folder}, and rank 0 sees "
                f"{seen[0] or 'no checkpoint'}: put run_dir where all nodes see the same files"
            )
        return bool(seen[0])

    # saving

    def save(self, step: int) -> None:
        """Save the state after a step; called on all ranks.

        If the write fails, training continues, and earlier checkpoints stay; with the next save,
        the failure is counted, and rank 0 reports it.
        """
        snapshot = self.files.snapshot()
        if self.files.is_writer and step != self.given_step:
            self._start(snapshot, step)

    def _start(self, snapshot: dict[str, Any], step: int) -> None:
        self._settle()
        self.given_step = step
        self.saver.save(snapshot, step)
        self.last_s = self.saver.snapshot_s
        if not self.config.async_save:
            self._settle()
            self.last_s += self.saver.write_s

    def _settle(self) -> str:
        """Wait for the previous write; return why it failed, or ""."""
        try:
            self.saver.wait()
        except RuntimeError as error:
            self.failed_saves += 1
            say(f"warning: {error}. Training goes on; the checkpoints before it stay")
            return str(error)
        return ""

    def finish(self, step: int) -> None:
        """Make the state after a step durable before returning; called on all ranks.

        Raises:
            CannotSaveError: The write failed; raised on all ranks, with the reason.
        """
        snapshot = self.files.snapshot()
        reason = [self._finished(snapshot, step) if self.files.is_writer else ""]
        dist.broadcast_object_list(reason, src=0)
        if reason[0]:
            raise CannotSaveError(reason[0])

    def _finished(self, snapshot: dict[str, Any], step: int) -> str:
        """Write a snapshot unless it is durable; return why that failed, or ""."""
        self._settle()
        if self.durable_step == step:
            return ""
        self.saver.save(snapshot, step)
        return self._settle()


class _Now:
    """Writes at once: ranks that are threads, or MPI's, have no second thread for messages."""

    snapshot_s = write_s = 0.0

    def __init__(self, write: Callable[[dict[str, Any], int], None]) -> None:
        self.write, self.failure = write, ""

    def save(self, snapshot: dict[str, Any], step: int) -> None:
        try:
            self.write(snapshot, step)
        except OSError as error:
            self.failure = f"step {step} is not saved: {error}"

    def wait(self) -> None:
        failure, self.failure = self.failure, ""
        if failure:
            raise RuntimeError(failure)


last_line = deque([""], maxlen=1)  # of this rank's log, for the evidence of a hang


def say(text: str) -> None:
    """Print a line for the user, on rank 0, or on one process per machine before ranks join."""
    if dist.get_rank() == 0 if dist.is_initialized() else speaks_for_its_machine():
        print(text, file=sys.stderr, flush=True)


def leave_code(run_dir: Path, code: int) -> None:
    """Write a rank's exit code to ``run_dir``/exit_code, unless a more specific one is there.

    torchrun exits with 1 whatever its workers return, so the file holds the code. When a rank ends
    for a specific reason, the others lose their connections and end with 1, which must not replace
    the first rank's code.
    """
    path = run_dir / "exit_code"
    with suppress(OSError):  # a full disk
        if "RANK" in os.environ:  # the launcher reads this file
            run_dir.mkdir(parents=True, exist_ok=True)
        if code != 1 or not path.exists():
            files.write_whole(path, f"{code}\n".encode())
