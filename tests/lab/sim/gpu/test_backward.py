"""Backward passes on streams: gradients are computed where their forward operations were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.sim import Options, Simulated, simulate

OPTIONS = Options(semantics="nccl")


def run(program: Callable[[], object]) -> Simulated[object]:
    return simulate(program, 1, cluster="dgx-h100", options=OPTIONS)


def tracks(ran: Simulated[object], name: str) -> set[str]:
    """Return the streams that ran operations of a name."""
    assert ran.gpu_time is not None
    return {on.track for on in ran.gpu_time.tracks if on.event.name == name}


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(8, 8, device="cuda"), torch.ones(4, 8, device="cuda")


def test_a_hook_makes_tensors_of_the_host_whatever_its_file_is_called() -> None:
    code = "def hook(g):\n    made.append(torch.zeros(3).device.type)\n"
    made: list[str] = []

    def main() -> None:
        names: dict[str, Any] = {"torch": torch, "made": made}
        exec(compile(code, "/home/me/my_device.py", "exec"), names)
        x = torch.ones(3, device="cuda", requires_grad=True)
        x.register_hook(names["hook"])
        x.sum().backward()

    simulate(main, 1, cluster="dgx-h100", options=Options(semantics="nccl"))
    assert made == ["cpu"]


def forward_aside() -> None:
    model, x = model_and_input()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = model(x).tanh().sum()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    torch.cuda.current_stream().wait_stream(side)


def backward_aside() -> None:
    model, x = model_and_input()
    loss = model(x).tanh().sum()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


@pytest.mark.parametrize(
    ("program", "track"),
    [(forward_aside, "cuda:0 stream 1"), (backward_aside, "cuda:0 default stream")],
)
def test_gradients_are_computed_on_the_stream_of_the_forward_pass(
    program: Callable[[], None], track: str
) -> None:
    ran = run(program)
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
    assert tracks(ran, "tanh_backward") == {track}


def test_a_prefetched_input_leaves_the_backward_pass_where_it_is() -> None:
    def program() -> None:
        model, _ = model_and_input()
        copies = torch.cuda.Stream()
        with torch.cuda.stream(copies):
            x = torch.ones(4, 8).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        x.record_stream(torch.cuda.current_stream())
        model(x).tanh().sum().backward()

    ran = run(program)
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
    assert tracks(ran, "tanh_backward") == {"cuda:0 default stream"}


def test_gradients_read_on_a_stream_that_does_not_wait_are_a_hazard() -> None:
    def program() -> None:
        model, x = model_and_input()
        other = torch.cuda.Stream()
        model(x).tanh().sum().backward()
        with torch.cuda.stream(other):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.norm()

    ran = run(program)
    assert ran.gpu_time is not None
    assert len(ran.gpu_time.wrong) == 2
    assert "nothing orders the two" in ran.gpu_time.wrong[0]


def test_a_hook_of_a_leaf_runs_behind_its_gradient() -> None:
    """FSDP's hooks let their stream wait for the current one."""

    def program() -> None:
        weight = torch.ones(8, device="cuda", requires_grad=True)
        side, reducing = torch.cuda.Stream(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def halve(leaf: Tensor) -> None:
            assert leaf.grad is not None
            reducing.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(reducing):
                leaf.grad.div_(2)

        weight.register_post_accumulate_grad_hook(halve)
        with torch.cuda.stream(side):
            first, second = torch.split(weight, 4)
        torch.cuda.current_stream().wait_stream(side)
        (first * second).sum().backward()
        torch.cuda.current_stream().wait_stream(reducing)
        assert weight.grad is not None
        assert weight.grad.tolist() == [0.5] * 8

    ran = run(program)
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
