"""How a checkpoint is stored: whole, by rank 0, or in shards, by all ranks."""

import io
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab import lessons
from distlab.production.config import Config, changed_keys
from distlab.production.errors import ConfigError
from distlab.production.lessons import Lessons
from distlab.production.states import Elements, Own, cut, tensors_of, with_tensors
from distlab.production.types import HasState
from distlab.production.world import control_group

LAYOUT, LAYOUT_BYTES = "layout", "bytes of the layout"  # names of shards


class Found(NamedTuple):
    """The newest undamaged checkpoint, whose state is loaded, and what was skipped before it."""

    step: int
    state: Any  # of a TrainingState
    skipped: Mapping[Any, str]  # path of a damaged checkpoint -> what is wrong with it


class Whole:
    """One file with the state that all ranks share, which rank 0 writes: task 4.1."""

    def __init__(self, parts: Mapping[str, HasState], config: Config, lessons: Lessons) -> None:
        self.config, self.folder = config, config.run_dir / "checkpoints"
        self.lesson = lessons("checkpoint")
        self.state = lessons("training_state").TrainingState(parts)
        self.is_writer = dist.get_rank() == 0

    def snapshot(self) -> dict[str, Any]:
        """Return what to write; called on all ranks between two steps."""
        state: dict[str, Any] = self.state.state_dict()
        return state

    def write(self, snapshot: Any, step: int) -> None:
        """Make a snapshot durable; called on the ranks that write, perhaps in another thread."""
        self.lesson.save_checkpoint(snapshot, self.folder, step, keep=self.config.keep)

    def find(self) -> Found | None:
        """Return the newest undamaged checkpoint, as rank 0 sees it; called on all ranks.

        Raises:
            ConfigError: All checkpoints are damaged, or of another run; raised on all ranks.
        """
        group = control_group()  # NCCL would need room for the state on each GPU once more
        answer: list[Any] = [self._read() if self.is_writer else None]
        dist.broadcast_object_list(answer, src=0, group=group)
        if isinstance(answer[0], ConfigError):
            raise answer[0]
        found: Found | None = answer[0]
        return found

    def _read(self) -> Found | ConfigError | None:
        try:
            loaded = self.lesson.load_checkpoint(self.folder)
        except RuntimeError as error:
            return damaged(error)
        except FileNotFoundError as error:  # other errors of a disk may pass by a restart
            return of_another_run(self.config, error)
        skipped = {str(path): reason for path, reason in loaded.skipped.items()} if loaded else {}
        return Found(loaded.step, loaded.state, skipped) if loaded else None


class InShards(Whole):
    """A file for each rank, with tensors that it alone has; rank 0's holds the rest: task 4.3."""

    def __init__(self, parts: Mapping[str, HasState], config: Config, lessons: Lessons) -> None:
        super().__init__(parts, config, lessons)
        self.own = {name: part for name, part in parts.items() if isinstance(part, Own)}
        self.is_writer = True
        # The thread that writes needs a group that nobody else uses at the same time.
        self.group = dist.new_group(backend="gloo" if dist.get_backend() == "nccl" else None)

    def snapshot(self) -> dict[str, Elements]:
        """Return this rank's tensors by name, and on rank 0, also the rest of the state."""
        layout, common = cut(self.state.state_dict())
        own = {
            part.name(path, of=name): shard
            for name, part in self.own.items()
            for path, shard in part.to_save().items()
        }
        if dist.get_rank():
            return own
        file = io.BytesIO()
        torch.save(layout, file)
        content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        rest = {**common, LAYOUT: content, LAYOUT_BYTES: torch.tensor([len(content)])}
        return {**own, **{name: _all_of(tensor) for name, tensor in rest.items()}}

    def write(self, snapshot: Any, step: int) -> None:
        """Make a snapshot durable, together with all other ranks."""
        shards = {name: lessons.given_4.Shard(*part) for name, part in snapshot.items()}
        self.lesson.save_sharded(shards, self.folder, step, self.group, keep=self.config.keep)

    def find(self) -> Found | None:
        """Return the newest undamaged checkpoint, with this rank's tensors in its parts.

        Raises:
            ConfigError: All checkpoints are damaged, or of another run; raised on all ranks.
        """
        size = torch.zeros(1, dtype=torch.int64)
        found = self._load({LAYOUT_BYTES: _all_of(size)})
        if found is None:
            return None
        content = torch.empty(int(size), dtype=torch.uint8)
        self._load({LAYOUT: _all_of(content)})
        layout = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
        common = {
            path: torch.empty(tensor.shape, dtype=tensor.dtype)
            for path, tensor in tensors_of(layout).items()
            if not path.startswith(tuple(f"['parts']['{name}']" for name in self.own))
        }
        wanted = {path: _all_of(tensor) for path, tensor in common.items()}
        if self._load({**wanted, **self._own_elements(layout)}).step != found.step:
            raise RuntimeError(f"the checkpoints in {self.folder} changed while they were loaded")
        return Found(found.step, with_tensors(layout, common), found.skipped)

    def _own_elements(self, layout: Any) -> dict[str, Elements]:
        """Return the elements of its parts that this rank needs, by name."""
        try:
            return {
                part.name(path, of=name): shard
                for name, part in self.own.items()
                for path, shard in part.to_load(layout["parts"][name]).items()
            }
        except (KeyError, ValueError) as error:
            raise of_another_run(self.config, error) from error

    def _load(self, wanted: Mapping[str, Elements]) -> Any:
        shards = {name: lessons.given_4.Shard(*part) for name, part in wanted.items()}
        try:
            return self.lesson.load_sharded(shards, self.folder, self.group)
        except ValueError as error:
            raise of_another_run(self.config, error) from error
        except OSError as error:
            if FileNotFoundError.__name__ in str(error):
                raise of_another_run(self.config, error) from error
            raise
        except RuntimeError as error:
            # A lost rank raises it too, but then a restart helps.
            if any(path.name in str(error) for path in self.folder.glob("step-*")):
                raise damaged(error) from error
            raise


def _all_of(tensor: Tensor) -> Elements:
    """Return all elements of a tensor."""
    return tensor.flatten(), 0, tensor.numel()


def damaged(error: Exception) -> ConfigError:
    """Return the error for a folder in which all checkpoints are damaged."""
    return ConfigError(f"{error}. Move the folder away to begin anew")


def of_another_run(config: Config, error: Exception) -> ConfigError:
    """Return the error for a run whose earlier checkpoints do not fit."""
    changed = ", ".join(changed_keys(config, config.run_dir / "config.yaml"))
    reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
    return ConfigError(
        f"the checkpoints in {config.run_dir / 'checkpoints'} are of another run"
        f"{f' ({changed})' if changed else ''}: choose another run_dir, or set the keys back. "
        f"{reason}"
    )
