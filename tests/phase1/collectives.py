"""Bodies (functions that ranks run) for tasks 1.3, 1.5 and 1.8, and one for task 1.4."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from judging.calls import numbers, pair, refusal_of, refused, returned
from judging.pretend_device import PretendDevice, device_of, devices_sent
from judging.tensors import KINDS, exact, given_device, given_group, own_device, plain

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """The size, shapes, dtypes, layout and seed of a batch that is filled with random bits."""

    rows: int
    image_dtype: str = "float32"
    image_shape: Shape = (2, 25)
    label_dtype: str = "int64"
    label_shape: Shape = ()
    is_strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """Return a description to use in the test's name."""
        strided = ", strided" if self.is_strided else ""
        return f"{self.rows} rows of {self.image_dtype} and {self.label_dtype}{strided}"

    def batch(self) -> tuple[Tensor, Tensor]:
        """Make a batch of this kind; return its images and labels."""
        images = _tensor(self.image_dtype, (self.rows, *self.image_shape), self.seed)
        labels = _tensor(self.label_dtype, (self.rows, *self.label_shape), self.seed + 1)
        if self.is_strided:
            columns_first = images.transpose(0, -1).contiguous().transpose(0, -1)
            return columns_first, torch.stack([labels, labels], dim=1)[:, 0]
        return images, labels


def _tensor(dtype: str, shape: Shape, seed: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = torch.Size(shape).numel() * kind.itemsize
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if kind == torch.bool else 256
    raw = torch.randint(0, highest, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).view(shape)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the values of a tensor as raw bytes."""
    return tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def scatter(lesson: Any, kind: Kind, src: int | None, group: Any = None) -> dict[str, Any]:
    """Scatter a batch, and describe the rows that this rank gets.

    ``src`` and ``group`` are passed to the lesson only if they are not None.
    """
    holds_it = dist.get_rank(group) == (src or 0)
    batch = kind.batch() if holds_it else None
    given = given_device(group) | given_group(group) | ({"src": src} if src is not None else {})
    parts = lesson.scatter_batch(batch, **given)
    images, labels = pair("scatter_batch", parts, "images and labels")
    return {
        "type": type(parts).__name__,
        "images": _description_of(images),
        "labels": _description_of(labels),
        "is_view": batch is None
        or [_is_view(*both) for both in zip((images, labels), batch, strict=True)],
    }


def _description_of(part: Any) -> tuple[list[int], str, str, bytes]:
    if not isinstance(part, Tensor):
        raise WrongResult(f"scatter_batch should return tensors; it returned {part!r:.50}")
    is_here = part.device == own_device()
    device = "cpu" if is_here else str(part.device)  # ranks with GPUs have rows on their own
    return list(part.shape), str(part.dtype), device, bytes_of(part)


def _is_view(part: Tensor, whole: Tensor) -> bool:
    """Return whether ``part`` is empty or shares the memory of ``whole``."""
    same = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return same or not part.numel()


WRONG_BATCHES = {
    "no batch": None,
    "6 images and 5 labels": (6, 5),
    "0 images and 4 labels": (0, 4),
    "4 images and 0 labels": (4, 0),
}


def scatter_what_is_wrong(lesson: Any, what: str, src: int, group: Any = None) -> dict[str, str]:
    """Return the error that this rank raises when the source has no batch or an invalid one."""
    lengths = WRONG_BATCHES[what]
    holds_it = dist.get_rank(group) == src and lengths
    batch = (torch.zeros(lengths[0], 2), torch.zeros(lengths[1])) if holds_it else None
    return refusal_of(lambda: lesson.scatter_batch(batch, src, **given_device(), group=group))


def scatter_on_device(lesson: Any, kind: Kind, src: int, is_text: bool) -> dict[str, Any]:
    """Scatter to a pretend device; return this rank's rows.

    Also return the devices of the rows, and of the messages by which they travelled.
    """
    with PretendDevice() as device:
        batch = None
        if dist.get_rank() == src:
            images, labels = kind.batch()
            batch = images.to(device), labels.to(device)
        with devices_sent() as devices:
            parts = lesson.scatter_batch(batch, src, device=str(device) if is_text else device)
    images, labels = pair("scatter_batch", parts, "images and labels")
    with torch._C.DisableTorchFunction():  # read the pretend device's tensors as CPU tensors
        numbers = [bytes_of(images), bytes_of(labels)]
    return {
        "devices": [str(device_of(images)), str(device_of(labels))],
        "travelled": devices,
        "numbers": numbers,
        "device": str(device),
    }


# Task 1.3: exchange


def exchange_all_kinds(
    lesson: Any, dsts: Sequence[int], are_alike: bool, group: Any = None
) -> dict[str, list[Any]]:
    """Exchange every kind of tensor, sending to ``dsts[rank]``; return all tensors' final values.

    If ``are_alike``, all ranks send the same kind of tensor in each step. Otherwise, rank r sends
    kind i + r in step i, so that a rank may send one kind while it receives another.
    """
    rank, num_kinds = dist.get_rank(group), len(KINDS)
    src, mine = dsts.index(rank), [exact(kind, rank) for kind in KINDS]
    others = [torch.zeros_like(tensor) for tensor in mine]
    memory = [tensor.detach() for tensor in others]
    for i in range(num_kinds):
        out, into = (i if are_alike else (i + r) % num_kinds for r in (rank, src))
        lesson.exchange(mine[out], dsts[rank], others[into], src, **given_group(group))
    return {"incoming": plain(memory), "outgoing": plain(mine)}


def exchange_once(lesson: Any, dsts: Sequence[int], lengths: Sequence[int]) -> None:
    """Exchange once, with rank r sending ``lengths[r]`` elements to ``dsts[r]``."""
    rank = dist.get_rank()
    src = dsts.index(rank)
    outgoing, incoming = torch.zeros(lengths[rank]), torch.zeros(lengths[src])
    lesson.exchange(outgoing, dsts[rank], incoming, src)


def exchange_then_write(lesson: Any) -> list[float]:
    """Overwrite ``outgoing`` as soon as exchange returns; the last rank calls exchange late.

    Returns:
        The mean of ``incoming``, first when exchange returns, then after a barrier.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.full((4,), float(rank)), torch.full((4,), -1.0)
    if rank == size - 1:
        time.sleep(0.01)
    lesson.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
    at_once = float(incoming.mean())
    outgoing.fill_(-99.0)
    dist.barrier()
    return [at_once, float(incoming.mean())]


# Tasks 1.4 and 1.8: broadcast, and measurements


def broadcast_twice(lesson: Any, late: int, srcs: Sequence[int]) -> list[float]:
    """Broadcast once from each of ``srcs``; return this rank's value after each call.

    Rank ``late`` starts 10 ms after the other ranks.
    """
    rank = dist.get_rank()
    if rank == late:
        time.sleep(0.01)
    held = []
    for i, src in enumerate(srcs):
        x = torch.tensor(float(10 * i + rank))
        lesson.broadcast(x, src)
        held.append(float(x))
    return held


Strategy = Callable[[Tensor, Any], None]
Strategies = Callable[[Any], Mapping[str, Strategy]]  # makes a lesson's strategies, by name
Schedule = Sequence[Sequence[Sequence[float]]]  # seconds to sleep, by size, rank and run


def measure(
    lesson: Any,
    strategies: Strategies,
    sizes: Sequence[int],
    arguments: Mapping[str, Any],
    group: Any = None,
) -> dict[str, Any]:
    """Measure strategies, and return the table as plain data."""
    given = {**given_device(group), **arguments, **given_group(group)}
    return _as_dict(lesson.measure_all_reduce(strategies(lesson), sizes, **given))


def _as_dict(times: Any) -> dict[str, Any]:
    """Return a table as plain data.

    Raises:
        WrongResult: The table, or a value in it, has the wrong type.
    """
    kind = type(returned("measure_all_reduce", times)).__name__
    if kind != "AllReduceTimes":
        raise WrongResult(f"measure_all_reduce should return AllReduceTimes; it returned a {kind}")
    for name, column in times.seconds.items():
        _check_floats(f"seconds[{name!r}]", column)
    _check_floats("α and 1/β", (times.alpha_s, times.bandwidth_bytes_per_s))
    return {
        "sizes": [int(size) for size in times.sizes_bytes],
        "seconds": {str(k): [float(t) for t in v] for k, v in times.seconds.items()},
        "alpha_s": float(times.alpha_s),
        "bandwidth": float(times.bandwidth_bytes_per_s),
    }


def _check_floats(what: str, values: Any) -> None:
    is_sequence = isinstance(values, Sequence)
    if not is_sequence or not all(isinstance(value, float) for value in values):
        raise WrongResult(f"{what} should be floats, not {values!r:.70}")


def its_own(functions: Mapping[str, str], lesson: Any) -> dict[str, Strategy]:
    """Look up lesson functions by the names in ``functions``; return them under the same keys."""
    return {name: getattr(lesson, function) for name, function in functions.items()}


def sleepers(
    schedules: Mapping[str, Schedule], sizes: Sequence[int], _: Any
) -> dict[str, Strategy]:
    """Make strategies that sleep for the virtual seconds in their schedules."""
    return {name: _sleeper(schedule, sizes) for name, schedule in schedules.items()}


def _sleeper(schedule: Schedule, sizes: Sequence[int]) -> Strategy:
    runs = [0] * len(sizes)

    def sleep(x: Tensor, group: Any) -> None:
        cell = sizes.index(4 * x.numel())
        mine = schedule[cell][dist.get_rank(group)]
        time.sleep(mine[min(runs[cell], len(mine) - 1)])
        runs[cell] += 1

    return sleep


def chains(orders: Mapping[str, Sequence[int]], seconds: float, _: Any) -> dict[str, Strategy]:
    """Make strategies that pass x from rank to rank; each rank sleeps before it sends x on."""
    return {name: _chain(order, seconds) for name, order in orders.items()}


def _chain(order: Sequence[int], seconds: float) -> Strategy:
    def pass_on(x: Tensor, group: Any) -> None:
        place = order.index(dist.get_rank(group))
        if place:
            dist.recv(x, group=group, group_src=order[place - 1])
        if place < len(order) - 1:
            time.sleep(seconds)
            dist.send(x, group=group, group_dst=order[place + 1])

    return pass_on


def measure_counting(
    lesson: Any,
    names: Sequence[str],
    sizes: Sequence[int],
    arguments: Mapping[str, Any],
    group: Any = None,
) -> dict[str, list[list[Any]]]:
    """Measure strategies that only record their calls, and return the records by strategy.

    A record holds the tensor's size in bytes, its dtype and device, and the group's number of
    ranks.
    """
    calls: dict[str, list[list[Any]]] = {name: [] for name in names}

    def counting(name: str) -> Strategy:
        def count(x: Tensor, given: Any) -> None:
            dtype, num_ranks = str(x.dtype).removeprefix("torch."), dist.get_world_size(given)
            calls[name].append([x.numel() * x.element_size(), dtype, str(x.device), num_ranks])

        return count

    strategies = {name: counting(name) for name in names}
    table = measure(lesson, lambda _: strategies, sizes, arguments, group)
    if list(strategies) != list(names):
        raise ValueError(
            f"the caller's strategies should stay {names}; now they are {list(strategies)}"
        )
    if table["sizes"] != list(sizes):
        raise ValueError(f"sizes_bytes of the table should be {sizes}, not {table['sizes']}")
    return calls


def measure_elsewhere(lesson: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """Measure on a pretend device; return the strategy's calls and the devices of tensors sent."""
    with PretendDevice() as device, devices_sent() as sent:
        calls = measure_counting(lesson, ["a"], sizes, {"device": device, "repeats": 2})
    return {"calls": calls["a"], "sent": sorted(set(sent)), "device": str(device)}


_WORK_S: dict[int, float] = {}  # seconds of work left on each rank's pretend GPU


def _synchronize(device: Any = None) -> None:
    time.sleep(_WORK_S.pop(dist.get_rank(), 0.0))


def measure_unfinished(lesson: Any, seconds: float) -> list[float]:
    """Measure a strategy that returns immediately, while the pretend GPU works for ``seconds``."""

    def start_work(x: Tensor, group: Any) -> None:
        _WORK_S[dist.get_rank()] = seconds

    torch.cuda.synchronize = _synchronize  # stays replaced, since this process runs no other world
    with PretendDevice("cuda:0") as device:
        more = {"repeats": 2, "device": device}
        return measure(lesson, lambda _: {"a": start_work}, (4, 8), more)["seconds"]["a"]  # type: ignore[no-any-return]


def measure_nonsense(lesson: Any, group: Any = None) -> dict[str, dict[str, str]]:
    """Try measurements that cannot be made or fitted; return how the lesson refuses each one."""
    naive = {"naive": lesson.all_reduce_naive}
    calls: dict[str, tuple[Any, Any, int]] = {
        "no size": (naive, (), 1),
        "one size": (naive, (4,), 1),
        "the same size twice": (naive, (8, 8), 1),
        "6 bytes": (naive, (4, 6), 1),
        "no repeat": (naive, (4, 8), 0),
        "-1 repeats": (naive, (4, 8), -1),
        "a strategy called exchange": ({"exchange": lesson.all_reduce_naive}, (4, 8), 1),
    }
    if dist.get_world_size(group) < 2:
        calls = {"one rank": (naive, (4, 8), 1)}
    given = given_group(group)
    return {
        what: refused(lesson, "measure_all_reduce", *args, repeats=repeats, **given)
        for what, (*args, repeats) in calls.items()
    }


def measure_alone(lesson: Any) -> dict[str, dict[str, str]]:
    """Try to measure in a group of one rank, within a larger world; return the refusal."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return measure_nonsense(lesson, groups[dist.get_rank()])


def fit(lesson: Any, points: list[tuple[list[int], list[float]]]) -> list[list[float]]:
    """Return α and β of the line fitted to each list of points."""
    lines = []
    for sizes, seconds in points:
        line = lesson.fit_alpha_beta(sizes, seconds)
        lines.append(numbers("fit_alpha_beta", line, ("α", "β")))
        _check_floats("α and β", tuple(line))
    return lines
