"""Checkpoints of a training: all ranks give their state, rank 0 writes it while they go on."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distlab.production.config import Config
from distlab.production.errors import CannotSaveError, ConfigError
from distlab.production.lessons import Lessons
from phase4_production.given import HasState


class Checkpoints:
    """Saves and loads the whole state of a run: ``run_dir``/checkpoints/step-….

    Attributes:
        failed_saves: how many could not be written; training went on.
        saved_step: the last step that was given to be saved, or loaded.
        last_s: seconds for which the last save has held up the training.
    """

    def __init__(self, parts: Mapping[str, HasState], config: Config, lessons: Lessons) -> None:
        phase = "phase4_production"
        self.folder, self.is_writer = config.run_dir / "checkpoints", dist.get_rank() == 0
        self.config, self.lesson = config, lessons("checkpoint", phase)
        self.state = lessons("training_state", phase).TrainingState(parts)
        self.saver = self.lesson.AsyncCheckpointer(self._write)
        self.failed_saves, self.saved_step, self.last_s = 0, -1, 0.0

    def _write(self, state: dict[str, Any], step: int) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.lesson.save_checkpoint(state, self.folder, step, keep=self.config.keep)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put all of the state back at the end; all ranks call it."""
        before = deepcopy(self.state.state_dict())
        yield
        self.state.load_state_dict(before)

    # loading

    def resume(self) -> int:
        """Go on from the newest undamaged checkpoint, if there is one; all ranks call it.

        Rank 0 decides, because on a network's file system others may see an older list of files.

        Returns:
            Its step; 0: there is none.

        Raises:
            ConfigError: there are checkpoints, and ``resume`` is ``never``; or they are of other
                shards, another model or other data.
        """
        loaded = [self._found() if self.is_writer else None]
        dist.broadcast_object_list(loaded, src=0)
        if isinstance(loaded[0], str):
            raise ConfigError(loaded[0])
        if loaded[0] is None:
            return 0
        step, state = loaded[0]
        try:
            self.state.load_state_dict(state)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(
                f"{self.folder} holds checkpoints of another run ({error}): choose another run_dir"
            ) from error
        self.saved_step = step
        return int(step)

    def _found(self) -> tuple[int, Any] | str | None:
        """Return step and state, why nothing can be loaded, or None."""
        if self.config.resume == "never":
            there = any(self.folder.glob("step-*"))
            return f"{self.folder} has checkpoints, and resume is never" if there else None
        try:
            loaded = self.lesson.load_checkpoint(self.folder)
        except RuntimeError as error:
            return f"{error}. Move the folder away to begin anew"
        for path, reason in (loaded.skipped if loaded else {}).items():
            say(f"skipped {path.name}: {reason}")
        return None if loaded is None else (loaded.step, loaded.state)

    # saving

    def save(self, step: int) -> None:
        """Save the state after a step; all ranks call it.

        A write that fails is reported on rank 0 with the next save, and counted; the checkpoints
        before it stay, and training goes on.
        """
        if step == self.saved_step:
            return
        state = self.state.state_dict()
        if self.is_writer:
            self._start(state, step)
        self.saved_step = step

    def _start(self, state: dict[str, Any], step: int) -> None:
        self._settle()
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
        """Save after the last step, and wait until that is written; all ranks call it.

        Raises:
            CannotSaveError: on all ranks, with the reason.
        """
        self.save(step)
        reason = [self._settle() if self.is_writer else ""]
        dist.broadcast_object_list(reason, src=0)
        if reason[0]:
            raise CannotSaveError(reason[0])


def say(text: str) -> None:
    """Write a line for people, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file: whoever reads it finds the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
