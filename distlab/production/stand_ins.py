"""Stand-ins for the lessons of Phase 4 that a learner has not written yet.

With them, a run is neither saved nor watched, a signal ends it at once, and only the metrics that
the terminal and the curves show are measured.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler

from distlab import lessons
from distlab.production.types import Group, HasState


class _Sampler:
    """Cuts each epoch into global batches, of which each rank gets a share."""

    def __init__(self, num_samples: int, global_batch: int, seed: int, group: Group) -> None:
        self.num_samples, self.global_batch = num_samples, global_batch
        self.seed, self.group = seed, group
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = RandomSampler(range(self.num_samples), generator=generator)
        rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        for batch in BatchSampler(order, self.global_batch, drop_last=False):
            yield batch[rank::num_ranks]

    def __len__(self) -> int:
        return -(-self.num_samples // self.global_batch)

    def advance(self) -> None:
        self.position += self.global_batch
        if self.position >= self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class _State:
    """The states of a run's parts, so that a warm-up can be undone."""

    def __init__(self, parts: Mapping[str, HasState]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class _Checkpointer:
    """Saves nothing."""

    snapshot_s = write_s = 0.0

    def __init__(self, write: Callable[[dict[str, Any], int], None]) -> None: ...

    def save(self, state: dict[str, Any], step: int) -> None: ...

    def wait(self) -> None: ...


class _Stop:
    """Is never asked to stop."""

    def __init__(self, signals: object, group: Group) -> None: ...

    def __enter__(self) -> "_Stop":
        return self

    def __exit__(self, *error: object) -> None: ...

    def agreed(self) -> bool:
        return False


class _Timer:
    """Times whole steps."""

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self.began_s = perf_counter()

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    def end_step(self) -> "lessons.StepTimes":
        began_s, self.began_s = self.began_s, perf_counter()
        return lessons.given_4.StepTimes(self.began_s - began_s, 0.0, 0.0, 0.0)


class _Stragglers:
    """Finds nobody slow."""

    group = None

    def __init__(self, group: Group, window: int) -> None: ...

    def add(self, times: object) -> list[Any]:
        return []


class _Lines:
    """Writes metrics as lines of JSON."""

    def __init__(self, path: Path, resume_after: int) -> None:
        self.file = path.open("a" if resume_after else "w", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        print(json.dumps({"step": step, **metrics}), file=self.file, flush=True)

    def close(self) -> None:
        self.file.close()


class _Nowhere:
    """Writes nothing."""

    def __init__(self, *place: object, **options: object) -> None: ...

    def write(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def _throughput(num_samples: int, seconds: float) -> float:
    """Return the samples per second of all ranks together."""
    total = torch.tensor(float(num_samples), device=lessons.given_4.group_device())
    dist.all_reduce(total)
    return float(total) / max(seconds, 1e-9)


STAND_INS: dict[str, Any] = {
    "training_state": SimpleNamespace(ResumableSampler=_Sampler, TrainingState=_State),
    "checkpoint": SimpleNamespace(
        AsyncCheckpointer=_Checkpointer,
        load_checkpoint=lambda folder: None,
        load_sharded=lambda wanted, folder, group: None,
        save_sharded=lambda shards, folder, step, group, keep: None,
    ),
    "fault_tolerance": SimpleNamespace(StopRequest=_Stop),
    "monitoring": SimpleNamespace(
        StepTimer=_Timer,
        StragglerDetector=_Stragglers,
        throughput=_throughput,
        count_flops=lambda step: 0,
        mfu=lambda flops, seconds, peak: 0.0,
        peak_memory_bytes=lambda device: 0,
    ),
    "exporters": SimpleNamespace(
        JsonlWriter=_Lines, TensorBoardWriter=_Nowhere, PrometheusExporter=_Nowhere
    ),
}
