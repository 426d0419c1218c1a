"""Checkpoints of a training: all ranks give their state, and rank 0 writes it meanwhile."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.production.config import Config
from distlab.production.errors import CannotSaveError, ConfigError
from distlab.production.lessons import Lessons
from distlab.production.types import HasState
from distlab.util import files


class Checkpoints:
    """Saves and loads the whole state of a run: ``run_dir``/checkpoints/step-….

    Attributes:
        failed_saves: Number of saves that failed, known to rank 0; training continued.
        last_s: seconds for which the last save has held up the training, on rank 0.
    """

    def __init__(self, parts: Mapping[str, HasState], config: Config, lessons: Lessons) -> None:
        self.folder, self.is_writer = config.run_dir / "checkpoints", dist.get_rank() == 0
        self.config, self.lesson = config, lessons("checkpoint")
        self.state = lessons("training_state").TrainingState(parts)
        self.saver = self.lesson.AsyncCheckpointer(self._write)
        self.failed_saves, self.last_s = 0, 0.0
        self.given_step = self.durable_step = -1  # known to rank 0

    def _write(self, state: dict[str, Any], step: int) -> None:
        self.lesson.save_checkpoint(state, self.folder, step, keep=self.config.keep)
        self.durable_step = step

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put all of the state back at the end; all ranks call it."""
        before = deepcopy(self.state.state_dict())
        yield
        self.state.load_state_dict(before)

    # loading

    def resume(self) -> None:
        """Go on from the newest undamaged checkpoint, if there is one; all ranks call it.

        Rank 0 decides, because on a network's file system others may see an older list of files.

        Raises:
            ConfigError: there are checkpoints, and ``resume`` is ``never``; or they are of other
                shards, another model or other data; or another rank sees some that rank 0 does not.
        """
        found = [self._found() if self.is_writer else None]
        dist.broadcast_object_list(found, src=0)
        self._check_folders()
        if isinstance(found[0], str):
            raise ConfigError(found[0])
        if found[0] is None:
            return
        step, state = found[0]
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

    def _found(self) -> tuple[int, Any] | str | None:
        """Return step and state, why nothing can be loaded, or None."""
        try:
            if self.config.resume == "never":
                there = any(self.folder.glob("step-*"))
                return f"{self.folder} has checkpoints, and resume is never" if there else None
            loaded = self.lesson.load_checkpoint(self.folder)
        except (RuntimeError, OSError) as error:
            return f"{error}. Move the folder away to begin anew"
        for path, reason in (loaded.skipped if loaded else {}).items():
            say(f"skipped {path.name}: {reason}")
        return None if loaded is None else (loaded.step, loaded.state)

    def _check_folders(self) -> None:
        """Refuse a folder on a disk that only one node has: a restart may number ranks anew."""
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
        """Save the state after a step; all ranks call it.

        A write that fails is reported on rank 0 with the next save, and counted; the checkpoints
        before it stay, and training goes on.
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
        """Wait for the write before; return why it has failed, "" if it has not."""
        try:
            self.saver.wait()
        except RuntimeError as error:
            self.failed_saves += 1
            say(f"warning: {error}. Training goes on; the checkpoints before it stay")
            return str(error)
        return ""

    def finish(self, step: int) -> None:
        """Let the state after a step be durable when this returns; all ranks call it.

        Raises:
            CannotSaveError: on all ranks, with the reason.
        """
        state = self.state.state_dict()
        reason = [self._finished(state, step) if self.is_writer else ""]
        dist.broadcast_object_list(reason, src=0)
        if reason[0]:
            raise CannotSaveError(reason[0])

    def _finished(self, state: dict[str, Any], step: int) -> str:
        """Write what is not written yet, also after an attempt that has failed; "": it is there."""
        self._settle()
        if self.durable_step == step:
            return ""
        self.saver.save(state, step)
        return self._settle()


def say(text: str) -> None:
    """Write a line for people, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def leave_code(run_dir: Path, code: int) -> None:
    """Leave the exit code of a rank in ``run_dir``/exit_code, unless there is a better reason.

    torchrun exits with 1 whatever its workers say. Of several ranks, those that know what is wrong
    count: when one ends, the others lose their connections, and end with 1.
    """
    path = run_dir / "exit_code"
    with suppress(OSError):  # a full disk
        if "RANK" in os.environ:  # nobody else can tell the launcher
            run_dir.mkdir(parents=True, exist_ok=True)
        if code != 1 or not path.exists():
            files.write_whole(path, f"{code}\n".encode())
