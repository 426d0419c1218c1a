"""Host times, streams and events of small programs, computed by hand."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sim import Deadlock, Options, Simulated, simulate
from distlab.sim.gpu.streams import Mark, Moment, Stream
from distlab.sim.hardware.costs import Costs

KERNEL_US = 100  # all kernels of these programs are small, so they take as long as the shortest
COSTS = Costs(launch_s=5e-6, communication_launch_s=15e-6, shortest_kernel_s=KERNEL_US * 1e-6)


def run(program: Callable[[], Any], num_ranks: int = 1, costs: Costs = COSTS) -> Simulated[Any]:
    def on_gpu() -> Any:
        torch.cuda.set_device(dist.get_rank())
        return program()

    return simulate(
        on_gpu, num_ranks, cluster="dgx-h100", options=Options(semantics="nccl", costs=costs)
    )


class Watch:
    """Microseconds of the host since it was made, or since the last look."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()

    def us(self) -> float:
        before_s, self.start_s = self.start_s, time.perf_counter()
        return round((self.start_s - before_s) * 1e6, 2)


def small() -> Tensor:
    return torch.ones(4, device="cuda")


class Reduction:
    """Communication under way, as far as moments use it."""

    def __init__(self) -> None:
        self.is_done, self.done_s = False, 0.0
        self.actions: list[Callable[[], None]] = []

    def then(self, action: Callable[[], None]) -> None:
        self.actions.append(action)

    def finish(self, at_s: float) -> None:
        self.is_done, self.done_s = True, at_s
        for action in self.actions:
            action()


def test_a_moment_is_the_latest_of_the_host_and_of_each_communication() -> None:
    one, other = Reduction(), Reduction()
    moment = Moment(1.0, {one: 0.0})
    moment.put(host_s=2.0, seconds=3.0)
    moment.join(Moment(4.0, {one: 1.0, other: 7.0}))
    moment.put(host_s=0.0, seconds=1.0)
    times: list[float] = []
    moment.copy().when_known(times.append)
    one.finish(10.0)
    assert not times
    assert moment.fold() == 14.0 - 6.0  # 5 + 1 without it; 3 + 1 after its end
    other.finish(3.0)
    assert times == [14.0]
    assert (moment.fold(), moment.known_s) == (0.0, 14.0)


def test_a_copied_moment_is_a_moment_of_its_own() -> None:
    moment = Moment(0.0, {Reduction(): 0.0})
    copied = moment.copy()
    moment.put(0.0, 5.0)
    assert [*copied.after.values()] == [0.0]


def test_a_mark_orders_what_came_before_it_also_of_third_streams() -> None:
    first, second, third = (Stream(name, 0) for name in "abc")
    first.next_number()
    Mark.of(first, 0.0).hold([second])
    second.next_number()
    mark = Mark.of(second, 0.0)
    first.next_number()
    mark.hold([third])
    assert third.has_reached(first, 1)
    assert third.has_reached(second, 1)
    assert not third.has_reached(first, 2)


def test_a_launch_costs_the_host_5_us_and_it_runs_ahead_until_it_synchronizes() -> None:
    def program() -> list[float]:
        x = small()
        torch.cuda.synchronize()
        watch, times = Watch(), []
        for action in (
            lambda: x.mul_(2),
            lambda: x.view(2, 2).t(),
            lambda: x.mul_(2),
            torch.cuda.synchronize,
            torch.cuda.synchronize,
        ):
            action()
            times.append(watch.us())
        return times

    assert run(program).results[0] == [5, 0, 5, 2 * KERNEL_US - 5, 0]


def test_wait_costs_the_host_nothing_and_what_follows_waits_on_the_stream() -> None:
    def program() -> list[float]:
        x = small()
        dist.all_reduce(x)  # makes ranks equal
        torch.cuda.synchronize()
        watch, times = Watch(), []
        work = dist.all_reduce(x, async_op=True)
        times.append(watch.us())
        work.wait()
        times.append(watch.us())
        x.add_(1)
        times.append(watch.us())
        torch.cuda.synchronize()
        times.append(watch.us())
        return [*times, x.sum().item()]

    for post, wait, launch, sync, value in run(program, 2).results:
        assert (post, wait, launch) == (15, 0, 5)
        assert sync > KERNEL_US
        assert value == 4 * (2 * 2 + 1)


def test_a_barrier_and_a_collective_of_a_late_rank_hold_the_host_and_the_stream() -> None:
    def program() -> list[float]:
        x = small()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        watch = Watch()
        if dist.get_rank():
            time.sleep(1e-3)
        dist.all_reduce(x)
        times = [watch.us()]
        dist.barrier(device_ids=[dist.get_rank()])
        return [*times, watch.us()]

    early, late = run(program, 2).results
    assert (early[0], late[0]) == (15, 1015)
    assert sum(early) == pytest.approx(sum(late), abs=1)
    assert early[1] > 1000


def test_streams_overlap_until_one_waits_for_an_event_of_the_other() -> None:
    def program() -> list[float]:
        x, y = small(), small()
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        watch, times = Watch(), []
        for waits in (False, True):
            x.add_(1)
            event = torch.cuda.current_stream().record_event()
            with torch.cuda.stream(side):
                if waits:
                    event.wait()
                y.add_(1)
            torch.cuda.synchronize()
            times.append(watch.us())
        return times

    assert run(program).results[0] == [10 + KERNEL_US, 5 + 2 * KERNEL_US]


def query_after(work: Callable[[], object]) -> None:
    work()
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        pass


def test_a_long_kernel_ends_while_its_event_is_queried() -> None:
    costs = Costs(launch_s=5e-6, shortest_kernel_s=0.02)  # 20,000 queries
    assert run(lambda: query_after(small), costs=costs).seconds == pytest.approx(0.02, rel=0.01)


def test_queries_for_a_message_that_never_comes_are_a_deadlock() -> None:
    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 to send"):
        run(lambda: query_after(lambda: dist.recv(small(), 1 - dist.get_rank())), num_ranks=2)


def test_stream_and_event_synchronize_wait_for_the_work_before_them_only() -> None:
    def program() -> list[object]:
        x, y = small(), small()
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        watch, seen = Watch(), []
        x.add_(1)  # from 5 to 105
        event = torch.cuda.Event()
        seen.append(event.query())  # nothing was recorded
        event.record()
        x.add_(1)  # from 105 to 205
        with torch.cuda.stream(side):
            y.add_(1)  # from 15 to 115
        seen += [event.query(), side.query()]
        event.synchronize()
        seen += [event.query(), side.query(), torch.cuda.current_stream().query()]
        side.synchronize()
        seen += [side.query(), torch.cuda.current_stream().query()]
        torch.cuda.current_stream().synchronize()
        return [*seen, torch.cuda.current_stream().query(), round(watch.us())]

    *seen, us = run(program).results[0]
    assert seen == [True, False, False, True, False, False, True, False, True]
    assert us == pytest.approx(5 + 2 * KERNEL_US, abs=1)  # each query takes a bit of time


def test_elapsed_time_is_that_of_the_stream_not_of_the_host() -> None:
    def program() -> list[object]:
        x = small()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        x.add_(1)
        begin.record()
        x.add_(1)
        x.add_(1)
        end.record()
        with pytest.raises(RuntimeError, match="device not ready"):
            begin.elapsed_time(end)
        end.synchronize()
        return [round(begin.elapsed_time(end), 6)]

    assert run(program).results[0] == [2 * KERNEL_US / 1e3]


def test_an_event_recorded_on_an_idle_stream_has_the_time_of_the_host() -> None:
    def program() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        time.sleep(1e-3)
        end.record()
        return round(begin.elapsed_time(end), 6)

    assert run(program).results[0] == 1


def test_a_handle_makes_the_stream_of_its_own_gpu_wait() -> None:
    def program() -> float:
        x = torch.ones(4, device=f"cuda:{dist.get_rank() + 1}")  # not the current one
        dist.all_reduce(x)
        return (x * 2).sum().item()

    ran = run(program, 2)
    assert ran.results == [16, 16]
    assert not ran.gpu_time.wrong


def test_a_copy_between_gpus_is_behind_the_work_of_both() -> None:
    def program() -> list[float]:
        x = torch.ones(4, device="cuda:0")
        y = torch.zeros(4, device="cuda:1")
        torch.cuda.synchronize()
        watch = Watch()
        x.add_(1)
        y.copy_(x)
        y.add_(1)
        times = [watch.us()]
        torch.cuda.synchronize(1)
        return [*times, watch.us(), y.sum().item()]

    ran = run(program)
    assert ran.results == [[15, 3 * KERNEL_US - 10, 12]]
    assert not ran.gpu_time.wrong


@pytest.mark.parametrize("context", [lambda stream: stream, torch.cuda.stream])
def test_a_stream_of_another_gpu_makes_that_one_current(context: Callable[[Any], Any]) -> None:
    def program() -> list[object]:
        side, before = torch.cuda.Stream(1), torch.cuda.current_stream(1)
        with context(side):
            inside = small().device.index, torch.cuda.current_stream() == side
        outside = torch.cuda.current_device(), torch.cuda.current_stream(1) == before
        torch.cuda.set_stream(side)
        return [inside, outside, torch.cuda.current_device()]

    assert run(program).results == [[(1, True), (0, True), 1]]


# Where the time of the GPU goes


def waits(program: Callable[[], Any], kernel_us: float) -> dict[str, tuple[int, float, float]]:
    """Return for each reason how often the host waited, and for how long, and the idle time."""
    costs = Costs(launch_s=5e-6, shortest_kernel_s=kernel_us * 1e-6)
    gpu_time = run(program, costs=costs).gpu_time
    return {
        wait.reason: (wait.count, round(wait.waited_s * 1e6, 3), round(wait.idle_s * 1e6, 3))
        for wait in gpu_time.host_waits
    }


def test_the_idle_time_that_a_sync_causes_is_that_of_its_line() -> None:
    def program() -> None:
        x = small()
        for _ in range(10):
            x.add_(1)
        x[0].item()
        x.add_(1)
        torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()  # which has nothing to wait for
        time.sleep(3e-3)  # the host's work, of which its lead would have hidden a part
        x.add_(1)

    found = waits(program, KERNEL_US)
    # The host has launched 12 kernels by 60 µs; the GPU is done with them at 1,205 µs.
    assert found[".item()"] == (1, 1145, 5)
    assert found["Stream.synchronize()"] == (1, KERNEL_US, 1145 + KERNEL_US - 5)
    assert found["torch.cuda.synchronize()"] == (1, 0, 0)


def test_the_idle_time_of_a_program_that_is_launch_bound_anyway_is_no_syncs() -> None:
    def program() -> None:
        x = small()
        for _ in range(5):
            for _ in range(20):
                x.add_(1)
            x[0].item()

    (count, waited_us, idle_us) = waits(program, kernel_us=2)[".item()"]
    assert (count, waited_us) == (5, 5 * 2)
    assert idle_us == pytest.approx(4 * 2)  # each wait delays the next launch by itself


def test_synchronize_waits_for_one_gpu() -> None:
    def main() -> tuple[bool, bool]:
        ends = []
        for index in (0, 1):
            x = torch.ones(512, 512, device=f"cuda:{index}")
            for _ in range(20 + 40 * index):
                x = x @ x
            with torch.cuda.device(index):
                ends.append(torch.cuda.current_stream().record_event())
        torch.cuda.synchronize(0)
        return ends[0].query(), ends[1].query()

    options = Options(semantics="nccl", costs=Costs(launch_s=1e-9))
    assert simulate(main, 1, cluster="dgx-h100", options=options).results == [(True, False)]
