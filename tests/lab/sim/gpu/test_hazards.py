"""Which uses of memory are reported as wrong, and at which lines.

Each case is a program of two ranks. If its source marks two lines with ``# !``, these have to be
reported as not ordered with each other, and nothing else; without marks, nothing may be reported.
"""

import inspect
import re
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sim import Options, SimulationError, simulate

Case = Callable[[], object]
CASES: list[Case] = []
ones = partial(torch.ones, device="cuda")  # no frame of its own in reports


def case(program: Case) -> Case:
    CASES.append(program)
    return program


def pinned() -> Tensor:
    return torch.ones(4, pin_memory=True)


def marked_lines(program: Case) -> list[int]:
    lines, first = inspect.getsourcelines(program)
    return [first + k for k, line in enumerate(lines) if line.rstrip().endswith("# !")]


def found_in(program: Case) -> list[str]:
    def on_gpu() -> None:
        torch.cuda.set_device(dist.get_rank())
        program()

    ran = simulate(on_gpu, 2, cluster="dgx-h100", options=Options(semantics="nccl"))
    assert ran.gpu_time is not None
    return ran.gpu_time.wrong


# The same stream, other streams, events


@case
def one_stream_is_in_order() -> None:
    x = ones(4)
    x.add_(1)
    x.mul_(2)


@case
def another_stream_writes() -> None:
    x = ones(4)  # !
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)  # !


@case
def another_stream_reads() -> None:
    x = ones(4)  # !
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.relu(x)  # !


@case
def another_stream_overwrites_what_is_read() -> None:
    x, side = ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.relu(x)  # !
    x.zero_()  # !
    torch.cuda.current_stream().wait_stream(side)
    del y


@case
def the_default_stream_is_not_special() -> None:
    x, side = ones(4), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)  # !
    x.add_(1)  # !


@case
def reads_do_not_conflict() -> None:
    x, kept = ones(4), []
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            kept.append(torch.relu(x))
    torch.cuda.synchronize()


@case
def wait_stream_orders() -> None:
    x, side = ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    x.add_(1)


@case
def an_event_orders() -> None:
    x, side = ones(4), torch.cuda.Stream()
    event = torch.cuda.current_stream().record_event()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)


@case
def an_event_orders_only_what_came_before_it() -> None:
    x, side, event = ones(4), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    x.add_(1)  # !
    event.wait(side)
    with torch.cuda.stream(side):
        x.add_(1)  # !


@case
def an_event_that_is_recorded_again_counts_from_there() -> None:
    x, side, event = ones(4), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    x.add_(1)
    event.record()
    event.wait(side)
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.synchronize()


@case
def an_event_that_was_never_recorded_orders_nothing() -> None:
    x, side = ones(4), torch.cuda.Stream()  # !
    torch.cuda.Event().wait(side)
    with torch.cuda.stream(side):
        x.add_(1)  # !


@case
def an_event_recorded_on_the_stream_that_waits() -> None:
    x, side, event = ones(4), torch.cuda.Stream(), torch.cuda.Event()
    x.add_(1)  # !
    event.record(side)
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.add_(1)  # !


@case
def order_is_transitive() -> None:
    x, one, other = ones(4), torch.cuda.Stream(), torch.cuda.Stream()
    one.wait_stream(torch.cuda.current_stream())
    other.wait_stream(one)
    with torch.cuda.stream(other):
        x.add_(1)
    torch.cuda.synchronize()


@case
def a_write_has_to_come_after_all_reads() -> None:
    x, one, other = ones(4), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        y = torch.relu(x)  # !
    with torch.cuda.stream(other):
        z = torch.relu(x)
    torch.cuda.current_stream().wait_stream(other)
    x.zero_()  # !
    torch.cuda.synchronize()
    del y, z


@case
def a_later_read_elsewhere_does_not_hide_an_earlier_one() -> None:
    x, one, other = ones(4), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        y = torch.relu(x)
    other.wait_stream(one)
    with torch.cuda.stream(other):
        z = torch.relu(x)
    torch.cuda.current_stream().wait_stream(other)  # and so for the first
    x.zero_()
    torch.cuda.synchronize()
    del y, z


@case
def synchronizing_the_device_orders() -> None:
    x = ones(4)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.synchronize()
    x.add_(1)


@case
def synchronizing_the_device_orders_only_what_came_before() -> None:
    side, x = torch.cuda.Stream(), ones(4)
    torch.cuda.synchronize()
    x.add_(1)  # !
    with torch.cuda.stream(side):
        x.add_(1)  # !


@case
def synchronizing_another_stream_orders_nothing() -> None:
    side, x = torch.cuda.Stream(), ones(4)  # !
    side.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)  # !


@case
def synchronizing_a_stream_or_an_event_orders() -> None:
    one, other, x = torch.cuda.Stream(), torch.cuda.Stream(), ones(4)
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(one):
        x.add_(1)
        event = one.record_event()
    event.synchronize()
    with torch.cuda.stream(other):
        x.add_(1)
    other.synchronize()


@case
def a_query_that_succeeds_orders() -> None:
    side, x = torch.cuda.Stream(), ones(4)
    event = torch.cuda.current_stream().record_event()
    while not event.query():
        pass
    with torch.cuda.stream(side):
        x.add_(1)
    side.synchronize()


@case
def a_value_that_the_host_reads_orders() -> None:
    side, x = torch.cuda.Stream(), ones(4)
    x.sum().item()
    with torch.cuda.stream(side):
        x.add_(1)
    side.synchronize()


@case
def a_new_stream_comes_after_what_the_host_has_waited_for() -> None:
    x = ones(4)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
    torch.cuda.synchronize()


@case
def streams_are_those_of_a_thread() -> None:
    side, x = torch.cuda.Stream(), ones(4)
    torch.cuda.synchronize()

    def use() -> None:
        torch.cuda.set_device(dist.get_rank())
        torch.relu(x)  # on the default stream, which is the same in all threads

    with torch.cuda.stream(side):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    x.add_(1)


@case
def another_thread_uses_another_stream() -> None:
    side, x = torch.cuda.Stream(), ones(4)
    torch.cuda.synchronize()
    x.add_(1)  # !

    def use() -> None:
        with torch.cuda.stream(side):
            x.mul_(2)  # !

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()


# Which bytes an operation uses


@case
def views_and_data_share_memory() -> None:
    x, side = ones(4, 4), torch.cuda.Stream()
    torch.cuda.synchronize()
    x.view(-1)[2:].data.add_(1)  # !
    with torch.cuda.stream(side):
        x.t().add_(1)  # !


@case
def streams_may_use_slices_of_one_buffer() -> None:
    flat, streams = ones(64), [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(2):
        for stream, part in zip(streams, flat.split(16), strict=True):
            with torch.cuda.stream(stream):
                part.add_(1)
    torch.cuda.synchronize()


@case
def streams_may_use_columns_of_one_matrix() -> None:
    x, side = ones(4, 4), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[:, 0].add_(1)
    with torch.cuda.stream(side):
        x[:, 1].add_(1)
    torch.cuda.synchronize()


@case
def one_column_and_the_matrix_share_memory() -> None:
    x, side = ones(4, 4), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[:, 1].add_(1)  # !
    with torch.cuda.stream(side):
        x.zero_()  # !


@case
def one_column_on_two_streams() -> None:
    x, side = ones(4, 4), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[:, 1].add_(1)  # !
    with torch.cuda.stream(side):
        x[:, 1].add_(1)  # !


@case
def an_argument_out_is_written() -> None:
    x, y, side = ones(4), ones(4), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.add(x, 1, out=y)  # !
    with torch.cuda.stream(side):
        torch.relu(y)  # !
    torch.cuda.synchronize()


@case
def a_list_of_tensors_is_used() -> None:
    xs, side = [ones(4), ones(4)], torch.cuda.Stream()
    torch.cuda.synchronize()
    torch._foreach_add_(xs, 1)  # !
    with torch.cuda.stream(side):
        torch.stack([ones(4), xs[1]])  # !
    torch.cuda.synchronize()


@case
def an_assignment_by_index_writes() -> None:
    x, side, where = ones(4), torch.cuda.Stream(), torch.tensor([0, 1], device="cuda")
    torch.cuda.synchronize()
    x[where] = ones(2)  # !
    with torch.cuda.stream(side):
        torch.relu(x)  # !
    torch.cuda.synchronize()


@case
def an_assignment_to_a_slice_writes() -> None:
    x, side = ones(4), torch.cuda.Stream()
    torch.cuda.synchronize()
    x[1:3] = 2.0  # !
    with torch.cuda.stream(side):
        torch.relu(x)  # !
    torch.cuda.synchronize()


# Copies between the host and a GPU


@case
def the_host_reads_a_copy_too_early() -> None:
    y = ones(4).to("cpu", non_blocking=True)  # !
    y.sum()  # !


@case
def the_host_reads_a_copy_as_a_list_too_early() -> None:
    y = ones(4).to("cpu", non_blocking=True)  # !
    y.tolist()  # !


@case
def the_host_reads_a_copy_in_pinned_memory_too_early() -> None:
    y = pinned()
    y.copy_(ones(4), non_blocking=True)  # !
    y[0].item()  # !


@case
def the_host_synchronizes_before_it_reads_a_copy() -> None:
    y = ones(4).to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    y.sum()


@case
def the_host_overwrites_what_is_still_copied() -> None:
    x, y = pinned(), ones(4)
    y.copy_(x, non_blocking=True)  # !
    x.zero_()  # !


@case
def the_host_reads_what_is_still_copied_to_the_gpu() -> None:
    x = pinned()
    y = x.to("cuda", non_blocking=True)
    x.sum()
    y.add_(1)


@case
def the_host_waits_for_the_event_of_a_copy() -> None:
    x = pinned()
    y = x.cuda(non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    y.add_(1)
    event.synchronize()
    x.zero_()


@case
def the_host_waits_for_an_event_before_a_copy() -> None:
    x, target, event = ones(4), pinned(), torch.cuda.Event()
    event.record()
    target.copy_(x, non_blocking=True)  # !
    event.synchronize()
    target.sum()  # !


@case
def the_host_waits_for_copies_that_block_or_are_not_pinned() -> None:
    x, y = ones(4), torch.ones(4)
    for host, non_blocking in ((y, False), (y, True), (pinned(), False)):
        host.copy_(x, non_blocking=non_blocking)
        host.add_(1)
        x.copy_(host, non_blocking=non_blocking)
        host.add_(1)


@case
def what_the_host_writes_is_ready_for_a_later_copy() -> None:
    x = pinned()
    for _ in range(2):
        x.add_(1)
        y = x.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    y.add_(1)


@case
def a_batch_is_copied_on_a_stream_of_its_own() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = pinned().to("cuda", non_blocking=True)  # !
    x.add_(1)  # !


# Communication


@case
def a_collective_without_a_handle_is_in_order() -> None:
    x = ones(4)
    dist.all_reduce(x)
    x.add_(1)
    dist.broadcast(x, 0)
    torch.relu(x)


@case
def read_before_wait() -> None:
    x = ones(4)
    work = dist.all_reduce(x, async_op=True)  # !
    torch.relu(x)  # !
    work.wait()


@case
def read_as_a_list_before_wait() -> None:
    x = ones(4)
    work = dist.all_reduce(x, async_op=True)  # !
    x.tolist()  # !
    work.wait()


@case
def a_column_is_read_before_wait() -> None:
    x = ones(4, 4)
    work = dist.all_reduce(x, async_op=True)  # !
    x[:, 2].sum()  # !
    work.wait()


@case
def the_input_is_overwritten_before_wait() -> None:
    x, parts = ones(4), [ones(4), ones(4)]
    work = dist.all_gather(parts, x, async_op=True)  # !
    x.zero_()  # !
    work.wait()


@case
def the_input_is_read_before_wait() -> None:
    x, parts = ones(4), [ones(4), ones(4)]
    work = dist.all_gather(parts, x, async_op=True)
    torch.relu(x)
    work.wait()
    x.zero_()


@case
def another_part_of_the_buffer_is_used_before_wait() -> None:
    flat = ones(64)
    work = dist.all_reduce(flat[:32], async_op=True)
    flat[32:].add_(1)
    work.wait()
    flat.add_(1)


@case
def wait_is_for_the_stream_on_which_it_is_called() -> None:
    x, side = ones(4), torch.cuda.Stream()
    work = dist.all_reduce(x, async_op=True)  # !
    with torch.cuda.stream(side):
        work.wait()
    x.add_(1)  # !


@case
def a_collective_comes_after_the_current_stream_only() -> None:
    x, side = ones(4), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)  # !
    dist.all_reduce(x)  # !


@case
def a_handle_that_is_completed_orders() -> None:
    x = ones(4)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    x.add_(1)


@case
def synchronize_is_as_good_as_wait() -> None:
    x = ones(4)
    work = dist.all_reduce(x, async_op=True)
    torch.cuda.synchronize()
    x.add_(1)
    work.wait()


@case
def a_batch_of_messages_is_used_before_wait() -> None:
    peer, x, y = 1 - dist.get_rank(), ones(4), ones(4)
    dist.all_reduce(y)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
    works = dist.batch_isend_irecv(ops)  # !
    torch.relu(y)  # !
    for work in works:
        work.wait()


# Gloo, which takes memory of the host as it is


@case
def a_batch_sends_and_receives_in_parts_of_a_buffer() -> None:
    x, peer = ones(2, 4), 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x[0], peer), dist.P2POp(dist.irecv, x[1], peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


@case
def gloo_sums_a_copy_too_early() -> None:
    group, y = dist.new_group(backend="gloo"), pinned()
    y.copy_(ones(4), non_blocking=True)  # !
    dist.all_reduce(y, group=group)  # !
    y.sum()


@case
def gloo_sums_a_copy_that_has_arrived() -> None:
    group, y = dist.new_group(backend="gloo"), pinned()
    y.copy_(ones(4), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    dist.all_reduce(y, group=group)


@case
def gloo_overwrites_what_is_still_copied_to_the_gpu() -> None:
    group, x = dist.new_group(backend="gloo"), pinned()
    y = x.to("cuda", non_blocking=True)  # !
    dist.all_gather([x, torch.ones(4)], torch.ones(4), group=group)  # !
    y.add_(1)


@case
def gloo_only_reads_what_is_still_copied_to_the_gpu() -> None:
    group, x = dist.new_group(backend="gloo"), pinned()
    y = x.to("cuda", non_blocking=True)
    dist.all_gather([torch.ones(4), torch.ones(4)], x, group=group)
    y.add_(1)


@case
def gloo_sends_a_copy_too_early() -> None:
    group, y = dist.new_group(backend="gloo"), pinned()
    if dist.get_rank() == 0:
        y.copy_(ones(4), non_blocking=True)  # !
        dist.isend(y, 1, group=group).wait()  # !
    else:
        dist.recv(y, 0, group=group)


@case
def gloo_receives_over_a_copy_too_early() -> None:
    group, y = dist.new_group(backend="gloo"), pinned()
    if dist.get_rank() == 0:
        dist.send(y, 1, group=group)
    else:
        y.copy_(ones(4), non_blocking=True)  # !
        dist.irecv(y, 0, group=group).wait()  # !


@case
def gloo_copies_tensors_of_the_gpu_by_itself() -> None:
    group, x = dist.new_group(backend="gloo"), ones(4)
    dist.all_reduce(x, group=group)
    x.add_(1)


# Memory that is freed


@case
def freed_memory_is_given_away_too_early() -> None:
    x, side = ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.relu(x)  # !
    del x
    ones(4)  # !
    torch.cuda.synchronize()
    del y


@case
def freed_memory_is_not_given_away_while_a_recorded_stream_uses_it() -> None:
    x, side = ones(4), torch.cuda.Stream()
    x.record_stream(side)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.relu(x)
    del x
    ones(4)
    torch.cuda.synchronize()
    del y


@case
def record_stream_is_for_one_stream() -> None:
    x, side, other = ones(4), torch.cuda.Stream(), torch.cuda.Stream()
    x.record_stream(other)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.relu(x)  # !
    del x
    ones(4)  # !
    torch.cuda.synchronize()
    del y


@case
def freed_memory_is_free_once_its_stream_has_waited() -> None:
    x, side = ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.relu(x)
    del x
    torch.cuda.current_stream().wait_stream(side)
    ones(4)
    torch.cuda.synchronize()
    del y


@case
def a_tensor_freed_while_it_is_sent_is_kept_by_torch() -> None:
    x = ones(4)
    work = dist.all_reduce(x, async_op=True)
    del x
    ones(4)
    work.wait()


@case
def an_event_recorded_on_the_stream_that_calls_nccl() -> None:
    x, side, event = ones(4), torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x += 1  # !
    event.record()
    event.wait()
    dist.all_reduce(x)  # !


@case
def gathers_into_a_buffer_that_is_still_to_be_read() -> None:
    out = ones(4)
    dist.all_gather_single(out, ones(2))
    work = dist.all_gather_single(out, ones(2), async_op=True)  # !
    y = out * 2  # !
    work.wait()
    del y


@pytest.mark.parametrize("program", CASES, ids=[program.__name__ for program in CASES])
def test_exactly_the_marked_lines_are_reported(program: Case) -> None:
    wrong, marked = found_in(program), marked_lines(program)
    places = [re.findall(r"test_hazards\.py:(\d+)", line) for line in wrong]
    lines = [sorted(map(int, both[:2])) for both in places]  # the remedy may name more
    assert lines == ([marked] if marked else []), "\n".join(wrong)


def test_the_report_names_both_uses_and_the_remedy() -> None:
    (line,) = found_in(read_before_wait)
    call = "all_reduce (call 1 of ranks 0 and 1)"
    assert re.sub(r"[^ (]*test_hazards.py:\d+ in read_before_wait", "LINE", line) == (
        f"ranks 0 and 1  LINE: relu reads what {call} writes, and nothing orders the two (LINE): "
        "call wait() on its handle first"
    )


@pytest.mark.parametrize(
    ("program", "remedy"),
    [
        (an_event_orders_only_what_came_before_it, "stream 1 / recorded (LINE) before that"),
        (an_event_that_was_never_recorded_orders_nothing, "stream 1 / not recorded yet"),
        (
            an_event_recorded_on_the_stream_that_waits,
            "stream 1 / recorded on itself (LINE)",
        ),
        (the_host_waits_for_an_event_before_a_copy, "the host / recorded (LINE) before that"),
        (
            an_event_recorded_on_the_stream_that_calls_nccl,
            "the current stream / recorded on itself (LINE): record it on stream 1",
        ),
        (gathers_into_a_buffer_that_is_still_to_be_read, "or let it write elsewhere, if what was"),
    ],
)
def test_the_remedy_says_why_the_event_orders_nothing(program: Case, remedy: str) -> None:
    (line,) = found_in(program)
    line = re.sub(r"[^ (]*test_hazards.py:\d+ in \w+", "LINE", line)
    assert remedy.replace(" / ", " waits (LINE) for an event that was ") in line


def receives_what_it_sends() -> None:
    x, peer = ones(4), 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def test_messages_of_one_batch_run_at_the_same_time() -> None:
    lines = found_in(receives_what_it_sends)
    for rank, line in enumerate(lines):
        peer = 1 - rank
        assert line.endswith(
            f": isend to rank {peer} and irecv from rank {peer} of one batch use the same memory "
            "at the same time: receive into another tensor"
        )
    assert len(lines) == 2


def test_what_is_received_is_read_after_wait_also_by_column() -> None:
    def program() -> list[float]:
        torch.cuda.set_device(dist.get_rank())
        x = ones(4, 4)
        dist.all_reduce(x)
        return (x[:, 1] * 2).tolist()

    ran = simulate(program, 2, cluster="dgx-h100", options=Options(semantics="nccl"))
    assert ran.results == [[4.0] * 4] * 2


# Runs that fail


def reads_sizes_in_flight(*, fails: bool) -> None:
    x = ones(4)
    work = dist.all_reduce(x, async_op=True)
    x.tolist()
    if fails:
        raise ValueError("negative size")
    if dist.get_rank() == 0:
        dist.barrier()
    work.wait()


@pytest.mark.filterwarnings("ignore:barrier")
@pytest.mark.parametrize("fails", [True, False])
def test_what_was_wrong_until_an_error_or_a_deadlock_is_told_below_it(fails: bool) -> None:
    with pytest.raises(SimulationError) as caught:
        found_in(lambda: reads_sizes_in_flight(fails=fails))
    error, below = str(caught.value).split("\nwrong on GPUs until then:\n")
    assert ("negative size" if fails else "deadlock") in error
    assert "  ranks 0 and 1  test_hazards.py:" in below or "  rank 0  test_hazards.py:" in below
    assert ".tolist() reads what all_reduce (call 1 of ranks 0 and 1) writes" in below


def uses_no_gpu_and_fails() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    raise ValueError(f"not yet moved: {(weight @ weight).device}")


def reads_a_copy_when_its_wait_is_cut_short() -> None:
    y = ones(4).to("cpu", non_blocking=True)
    dist.all_reduce(ones(4))
    try:
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            dist.barrier()
    finally:
        y.tolist()


@pytest.mark.filterwarnings("ignore:barrier")
@pytest.mark.parametrize(
    "program", [uses_no_gpu_and_fails, reads_a_copy_when_its_wait_is_cut_short]
)
def test_what_a_run_that_fails_did_not_come_to_is_not_held_against_it(program: Case) -> None:
    with pytest.raises(SimulationError) as caught:
        found_in(program)
    assert "wrong on GPUs" not in str(caught.value)
