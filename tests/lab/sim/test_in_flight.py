"""``--sanitize`` names tensors that the program touches between a call and its ``wait()``."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.sim import Options, simulate

Touch = Callable[[Tensor], object]


def findings(program: Callable[..., object], *args: object) -> list[str]:
    return simulate(program, 2, *args, options=Options(is_sanitized=True)).findings


def swaps(touch: Touch, before_the_wait: Touch, touches_sent: bool = True) -> None:
    """Send a tensor to the other rank, and receive one; touch one of them."""
    other = 1 - dist.get_rank()
    sent, received = torch.ones(4, 4), torch.zeros(4, 4)
    messages = [
        dist.P2POp(dist.isend, sent, other),
        dist.P2POp(dist.irecv, received, other),
    ]
    works = dist.batch_isend_irecv(messages)
    before_the_wait(sent if touches_sent else received)
    for work in works:
        work.wait()
    touch(sent if touches_sent else received)


def sums(touch: Touch, before_the_wait: Touch) -> None:
    x = torch.ones(4, 4)
    work = dist.all_reduce(x, async_op=True)
    before_the_wait(x)
    assert work is not None
    work.wait()
    touch(x)


def gathers(touch: Touch, before_the_wait: Touch) -> None:
    x = torch.ones(4, 4)
    work = dist.all_gather([torch.empty(4, 4), torch.empty(4, 4)], x, async_op=True)
    before_the_wait(x)
    assert work is not None
    work.wait()
    touch(x)


def nothing(x: Tensor) -> None:
    pass


def through_numpy(x: Tensor) -> None:
    x.numpy()[1] = 5


CHANGES: dict[str, Touch] = {
    "in place": lambda x: x.add_(1),
    "through a view": lambda x: x.t()[1].mul_(2),
    "as an output": lambda x: torch.mul(x, 2, out=x),
    "among others": lambda x: torch._foreach_add_([torch.ones(1), x], 1),
    "by numpy": through_numpy,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("program", [swaps, sums, gathers])
def test_a_tensor_changed_before_wait_is_named(program: Callable[..., None], change: Touch) -> None:
    (line,) = findings(program, nothing, change)
    assert line.startswith("ranks 0 and 1 changed the tensor of ")
    assert "before its wait() had returned" in line
    assert "was 1 at the call, and is " in line
    assert Path(__file__).name in line


@pytest.mark.parametrize("touch", [*CHANGES.values(), torch.sum])
@pytest.mark.parametrize("program", [swaps, sums, gathers])
def test_after_wait_a_tensor_is_free(program: Callable[..., None], touch: Touch) -> None:
    assert findings(program, touch, nothing) == []


def test_both_lines_are_named() -> None:
    (line,) = findings(sums, nothing, lambda x: x.mul_(2))
    assert line.count(f"{Path(__file__).name}:") == 2


def test_a_sent_tensor_may_be_read() -> None:
    for program in (swaps, gathers):
        assert findings(program, nothing, torch.sum) == []


def test_writing_what_a_sent_tensor_holds_is_no_change() -> None:
    assert findings(swaps, nothing, lambda x: x.fill_(1)) == []


@pytest.mark.parametrize("read", [torch.sum, lambda x: x[1].add(1)])
def test_a_tensor_that_is_filled_may_not_be_read(read: Touch) -> None:
    (line,) = findings(swaps, nothing, read, False)
    assert line.startswith("ranks 0 and 1 read the tensor of irecv from rank 1, (4, 4) float32")
    (line,) = findings(sums, nothing, read)
    assert "ranks 0 and 1 read the tensor of all_reduce (call 1 of ranks 0 and 1)" in line


@pytest.mark.parametrize("look", [torch.empty_like, lambda x: x[1:].t()])
def test_what_reads_no_values_is_no_finding(look: Touch) -> None:
    assert findings(sums, nothing, look) == []


def shares_memory(other_part: Callable[[Tensor], Tensor]) -> None:
    """Change another part of a buffer than the one in flight."""
    buffer = torch.ones(4, 4)
    work = dist.all_reduce(buffer[1], async_op=True)
    other_part(buffer).add_(1)
    assert work is not None
    work.wait()


@pytest.mark.parametrize("part", [lambda x: x[2:], lambda x: x[::2, 1:3]])
def test_other_parts_of_a_buffer_are_free(part: Callable[[Tensor], Tensor]) -> None:
    assert findings(shares_memory, part) == []


def test_a_column_of_a_buffer_is_not() -> None:
    (line,) = findings(shares_memory, lambda x: x[:, 2])
    assert "element 2 was 1 at the call" in line


def receives_where_it_sends() -> None:
    x, other = torch.full((4,), float(dist.get_rank())), 1 - dist.get_rank()
    work = dist.isend(x, other)
    dist.recv(x, other)
    assert work is not None
    work.wait()


def test_a_buffer_passed_to_two_operations_is_named() -> None:
    (line,) = findings(receives_where_it_sends)
    assert line.startswith("ranks 0 and 1 passed another operation the tensor of isend to rank 1")


def scatters_sums_into_their_input() -> None:
    whole = torch.full((4,), float(dist.get_rank()))
    mine = whole[2 * dist.get_rank() :][:2]
    work = dist.reduce_scatter(mine, [whole[:2], whole[2:]], async_op=True)
    dist.barrier()
    assert work is not None
    work.wait()


def test_an_operation_may_fill_its_own_input() -> None:
    assert findings(scatters_sums_into_their_input) == []


def receives_where_bytes_are_no_bools() -> None:
    """Receive into memory that holds anything, as that of ``torch.empty`` does."""
    rank = dist.get_rank()
    x = torch.full((4,), 7, dtype=torch.uint8).view(torch.bool)
    work = dist.irecv(x, 0) if rank else dist.isend(x, 1)
    assert work is not None
    work.wait()


def test_bytes_that_no_value_has_are_no_change() -> None:
    assert findings(receives_where_bytes_are_no_bools) == []


def polls() -> None:
    x, other = torch.ones(4), 1 - dist.get_rank()
    work, received = dist.isend(x, other), torch.empty(4)
    dist.recv(received, other)
    assert work is not None
    while not work.is_completed():
        pass
    x.add_(1)
    work.wait()


def test_a_completed_operation_has_given_its_tensor_back() -> None:
    assert findings(polls) == []


def overlaps(num_steps: int, waits: bool) -> None:
    """Sum gradients in hooks of the backward pass, and wait for them before the step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters())
    works: list[dist.Work] = []

    def sum_up(parameter: Tensor) -> None:
        assert parameter.grad is not None
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        works.append(work)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(sum_up)
    for step in range(num_steps):
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        net(x).square().sum().backward()
        if step == 0 or waits:
            for work in works:
                work.wait()
        optimizer.step()
    for work in works:
        work.wait()


def test_gradients_that_are_used_too_early_are_named_with_the_step() -> None:
    lines = findings(overlaps, 2, False)
    assert any(line.startswith("step 2: ranks 0 and 1 read the tensor of all") for line in lines)
    assert findings(overlaps, 2, True) == []
