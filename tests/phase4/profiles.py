"""Bodies (functions that ranks run) for task 4.18: profiled steps, and made-up traces."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.grade import WrongResult
from judging.calls import error_of, typed
from judging.expect import floats
from judging.folders import own_folder, working_in
from judging.tensors import given_group, is_simulated, own_device

Event = dict[str, Any]
NAME = "made-up.json"


def profile(lesson: Any, counts: dict[str, int], group: Any = None) -> dict[str, Any]:
    """Profile some steps on every rank; return facts about the calls and the trace."""
    calls: list[int] = []
    is_on: list[bool] = []
    with _folder(group) as folder:
        path = None
        for _ in _turns(group):
            step = _step(calls, is_on, group)
            path = lesson.profile_steps(step, folder, **counts, **given_group(group))
            is_on.append(_is_on())
        path = typed("profile_steps", path, Path)
        dist.barrier(group)
        if not path.is_file():
            raise WrongResult(
                f"profile_steps returned {path.name}, but there is no such file. The profiler's "
                "step() tells it where a step ends; after the last one it hands over the trace."
            )
        files = sorted(file.name for file in folder.iterdir())
        place = path.relative_to(folder).as_posix()
        return {"calls": calls, "is_on": is_on, "path": place, "files": files, **_content(path)}


def profile_alone(lesson: Any) -> list[int]:
    """Profile on rank 0 only; return the steps that were called."""
    calls: list[int] = []
    if dist.get_rank() == 0:
        with own_folder() as folder:
            lesson.profile_steps(_step(calls, [], None), folder)
    return calls


def profile_and_read(lesson: Any) -> list[float]:
    """Profile, and return the times that are read from the trace."""
    with _folder(None) as folder:
        times_s: list[float] = []
        for _ in _turns(None):
            path = lesson.profile_steps(_step([], [], None), folder)
            times_s = _taken(lesson.exposed_communication(path))
        dist.barrier()
        return times_s


def _step(calls: list[int], is_on: list[bool], group: Any) -> Callable[[int], None]:
    """Return a step that computes and, with real processes, communicates."""
    weights = torch.ones(64, 64, device=own_device(group))

    def step(index: int) -> None:
        calls.append(index)
        is_on.append(_is_on())
        product = weights @ weights
        if not is_simulated():
            work = dist.all_reduce(product, group=group, async_op=True)
            _ = weights @ weights
            work.wait()
            product[0, 0].item()  # wait until a GPU has done its work

    return step


def _is_on() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _turns(group: Any) -> Iterator[None]:
    """Make simulated ranks take turns, since a process has only one profiler."""
    if not is_simulated():
        yield
        return
    for rank in range(dist.get_world_size(group)):
        if rank == dist.get_rank(group):
            yield
        dist.barrier(group)


@contextmanager
def _folder(group: Any) -> Iterator[Path]:
    """Yield the path of a folder that all ranks share and that does not exist yet."""
    with tempfile.TemporaryDirectory() as outer:
        paths = [outer]
        dist.broadcast_object_list(paths, group=group, group_src=0)
        with working_in(Path(paths[0])):
            yield Path(paths[0]) / "traces" / "run"
            dist.barrier(group)


def _content(path: Path) -> dict[str, Any]:
    """Count a rank's calls in its trace, ignoring copies of annotations in the GPU's rows."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    names = [str(event["name"]) for event in events if event.get("cat") != "gpu_user_annotation"]
    return {
        "steps": sum(name.startswith("ProfilerStep#") for name in names),
        "matrix products": names.count("aten::mm"),
        "all-reduces": names.count("gloo:all_reduce") + names.count("nccl:all_reduce"),
    }


def measure_all(lesson: Any, traces: Sequence[Sequence[Event]]) -> list[list[float]]:
    """Return the three times that the lesson reads from each trace."""
    with own_folder() as folder:
        return [_taken(lesson.exposed_communication(_written(folder, trace))) for trace in traces]


def _taken(exposed: Any) -> list[float]:
    fields = (exposed.step_s, exposed.communication_s, exposed.exposed_s)
    return [*floats("exposed_communication", fields)]


def refuse(lesson: Any, events: Sequence[Event]) -> str:
    """Return the ValueError for a trace that cannot be measured, as text."""
    with own_folder() as folder:
        path = _written(folder, events)
        return error_of(lambda: lesson.exposed_communication(path))


def _written(folder: Path, events: Sequence[Event]) -> Path:
    path = folder / NAME
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path
