"""Checkpoints of a run: all ranks provide their state, and rank 0 writes it in the background."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from distlab.launch.launchers import speaks_for_its_machine
from distlab.production.config import Config
from distlab.production.errors import CannotSaveError, ConfigError
from distlab.production.lessons import Lessons
from distlab.production.types import HasState
from distlab.util import files


class Checkpoints:
    """Saves and loads the whole state of a run: ``run_dir``/checkpoints/step-….

    Attributes:
        failed_saves: Number of failed saves, on rank 0; training continues after them.
        last_s: Seconds by which the last save delayed training, on rank 0.
    """

    def __init__(self, parts: Mapping[str, HasState], config: Config, lessons: Lessons) -> None:
        self.folder, self.is_writer = config.run_dir / "checkpoints", dist.get_rank() == 0
        self.config, self.lesson = config, lessons("checkpoint")
        self.state = lessons("training_state").TrainingState(parts)
        self.saver = self.lesson.AsyncCheckpointer(self._write)
        self.failed_saves, self.last_s = 0, 0.0
        # On rank 0, durable_step <= given_step: a step is given to the saver first, and becomes
        # durable when its write succeeds. After a failed write the two differ.
        self.given_step = self.durable_step = -1

    def _write(self, state: dict[str, Any], step: int) -> None:
        self.lesson.save_checkpoint(state, self.folder, step, keep=self.config.keep)
        self.durable_step = step

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the whole state at the end of the block; called on all ranks.

        The copy is on the CPU, because a model may fill more than half of a GPU.
        """
        state = self.state.state_dict()
        before = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), state)
        yield
        self.state.load_state_dict(before)

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
        answer = [self._loaded() if self.is_writer else None]
        dist.broadcast_object_list(answer, src=0)
        self._check_folders()
        if isinstance(answer[0], str):
            raise ConfigError(answer[0])
        if answer[0] is None:
            return
        step, state = answer[0]
        try:
            self.state.load_state_dict(state)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(
                f"the checkpoints in {self.folder} are of another run ({error}): choose another "
                "run_dir, or set the keys back"
            ) from error
        self.given_step = self.durable_step = step
        say(f"goes on after step {step:,}")

    def _loaded(self) -> tuple[int, Any] | str | None:
        """Return the step and state, the reason why loading failed, or None without checkpoints."""
        try:
            if self.config.resume == "never":
                has_any = any(self.folder.glob("step-*"))
                return f"{self.folder} has checkpoints, and resume is never" if has_any else None
            loaded = self.lesson.load_checkpoint(self.folder)
        except (RuntimeError, OSError) as error:
            return f"{error}. Move the folder away to begin anew"
        for path, reason in (loaded.skipped if loaded else {}).items():
            say(f"skipped {path.name}: {reason}")
        return None if loaded is None else (loaded.step, loaded.state)

    def _check_folders(self) -> None:
        """Refuse a folder that only one node has, because rank 0 may restart on another node."""
        newest = max((path.name for path in self.folder.glob("step-*")), default="")
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, newest)
        if max(seen) > seen[0]:
            rank = seen.index(max(seen))
            raise ConfigError(
                f"rank {rank} sees {seen[rank]} in {self.folder}, and rank 0 sees "
                f"{seen[0] or 'no checkpoint'}: put run_dir where all nodes see the same files"
            )

    # saving

    def save(self, step: int) -> None:
        """Save the state after a step; called on all ranks.

        If the write fails, training continues, and earlier checkpoints stay; with the next save,
        rank 0 counts and reports the failure.
        """
        state = self.state.state_dict()
        if self.is_writer and step != self.given_step:
            self._start(state, step)

    def _start(self, state: dict[str, Any], step: int) -> None:
        self._settle()
        self.given_step = step
        self.saver.save(state, step)
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
        state = self.state.state_dict()
        reason = [self._finished(state, step) if self.is_writer else ""]
        dist.broadcast_object_list(reason, src=0)
        if reason[0]:
            raise CannotSaveError(reason[0])

    def _finished(self, state: dict[str, Any], step: int) -> str:
        """Write the state unless it is durable; return why that failed, or ""."""
        self._settle()
        if self.durable_step == step:
            return ""
        self.saver.save(state, step)
        return self._settle()


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
