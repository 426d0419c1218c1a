"""Bodies for task 1.8."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from judging.calls import numbers, refused, returned
from judging.pretend_device import PretendDevice, devices_sent
from judging.tensors import given_group

Strategy = Callable[[Tensor, Any], None]
Strategies = Callable[[Any], Mapping[str, Strategy]]  # makes them on a rank, for a lesson
Schedule = Sequence[Sequence[Sequence[float]]]  # cell, rank, run: seconds


def measure(
    lesson: Any,
    strategies: Strategies,
    sizes: Sequence[int],
    arguments: Mapping[str, Any],
    group: Any = None,
) -> dict[str, Any]:
    """Measure strategies, and return the table as plain data."""
    given = {**arguments, **given_group(group)}
    return _as_dict(lesson.measure_all_reduce(strategies(lesson), sizes, **given))


def _as_dict(times: Any) -> dict[str, Any]:
    """Return a table as plain data.

    Raises:
        WrongResult: The table, or a value in it, is of a wrong type.
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
    """Return functions of the lesson, each under another name."""
    return {name: getattr(lesson, function) for name, function in functions.items()}


def sleepers(
    schedules: Mapping[str, Schedule], sizes: Sequence[int], _: Any
) -> dict[str, Strategy]:
    """Make strategies that sleep as long as their schedule says, in virtual seconds."""
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
    """Make strategies whose ranks take turns: each waits for the one before it, then sleeps."""
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
    """Return each strategy's calls: bytes, dtype and device of the tensor, size of the group."""
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
    """Measure on a pretended device; return the devices of what was run and sent."""
    with PretendDevice() as device, devices_sent() as sent:
        calls = measure_counting(lesson, ["a"], sizes, {"device": device, "repeats": 2})
    return {"calls": calls["a"], "sent": sorted(set(sent)), "device": str(device)}


_WORK_S: dict[int, float] = {}  # remaining work of each rank's pretended GPU


def _synchronize(device: Any = None) -> None:
    time.sleep(_WORK_S.pop(dist.get_rank(), 0.0))


def measure_unfinished(lesson: Any, seconds: float) -> list[float]:
    """Measure a strategy that returns at once, while the pretended GPU works for ``seconds``."""

    def start_work(x: Tensor, group: Any) -> None:
        _WORK_S[dist.get_rank()] = seconds

    torch.cuda.synchronize = _synchronize  # this process belongs to the world alone
    with PretendDevice("cuda:0") as device:
        more = {"repeats": 2, "device": device}
        return measure(lesson, lambda _: {"a": start_work}, (4, 8), more)["seconds"]["a"]  # type: ignore[no-any-return]


def measure_nonsense(lesson: Any, group: Any = None) -> dict[str, dict[str, str]]:
    """Return the refusal of each call that cannot be measured."""
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
    """Measure in a group of one rank, in a world of more."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return measure_nonsense(lesson, groups[dist.get_rank()])


def fit(lesson: Any, points: list[tuple[list[int], list[float]]]) -> list[list[float]]:
    """Return α and β of the line through each list of points."""
    lines = []
    for sizes, seconds in points:
        line = lesson.fit_alpha_beta(sizes, seconds)
        lines.append(numbers("fit_alpha_beta", line, ("α", "β")))
        _check_floats("α and β", tuple(line))
    return lines
