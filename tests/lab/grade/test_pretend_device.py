"""The pretend device behaves like a real torch device, as far as the judges need it to."""

import copy

import pytest
import torch
import torch.distributed as dist
from phase1.models import classifier
from torch import nn
from torch.nn.functional import cross_entropy

from distlab import launch
from judging.models import FEATURES
from judging.pretend_device import CPU, PretendDevice, device_of, devices_sent

TOGETHER = "Expected all tensors to be on the same device"


def test_what_is_made_there_or_moved_there_says_so_and_so_does_what_comes_of_it() -> None:
    with PretendDevice() as device:
        x = torch.randn(4, 3, device="xpu:0")
        made = [x, torch.ones(2).to(device), x + 1, x[0], x.view(-1), 2 * x, torch.zeros_like(x)]
        made += [
            torch.stack([x, x]),
            x.double().sum(),
            x.new_zeros(2),
            nn.Parameter(x),
            *x.split(1),
        ]
        assert {str(tensor.device) for tensor in made} == {"xpu:0"}
        assert not x.is_cpu
        assert x.tolist() == x.cpu().tolist()
        assert x.cpu().device == torch.ones(2).device == CPU
        with pytest.raises(TypeError, match="to numpy"):
            x.numpy()
    assert str(device_of(x)) == "xpu:0"


def test_tensors_of_two_devices_must_not_meet_but_numbers_may() -> None:
    with PretendDevice() as device:
        there, here = torch.ones(2, device=device), torch.ones(2)
        with pytest.raises(RuntimeError, match=TOGETHER):
            there + here
        with pytest.raises(RuntimeError, match=TOGETHER):
            here += there
        with pytest.raises(RuntimeError, match=TOGETHER):
            torch.stack([there.sum(), here.sum()])
        with pytest.raises(RuntimeError, match=TOGETHER):
            torch.zeros(()).add_(there.sum())
        assert (there * torch.tensor(2.0)).device == device
        assert there[torch.tensor([0])].device == device


def test_a_model_trains_there_and_only_there() -> None:
    with PretendDevice() as device:
        model, inputs, targets = (
            classifier(7),
            torch.randn(5, FEATURES).double(),
            torch.arange(5) % 3,
        )
        alone = copy.deepcopy(model)
        model.to(device)
        for trained, where in ((model, device), (alone, CPU)):
            optimizer = torch.optim.Adam(trained.parameters())
            loss = cross_entropy(trained(inputs.to(where)), targets.to(where))
            loss.backward()
            optimizer.step()
            assert {p.device for p in trained.parameters()} == {where}
            assert {p.grad.device for p in trained.parameters() if p.grad is not None} == {where}
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            assert a.tolist() == b.tolist()
        assert copy.deepcopy(model)[0].weight.device == device
        with pytest.raises(RuntimeError, match=TOGETHER):
            model(inputs)


def test_hooks_of_a_backward_pass_make_tensors_there() -> None:
    with PretendDevice() as device:
        x, made = torch.ones(2, device=device, requires_grad=True), list[torch.Tensor]()
        x.register_post_accumulate_grad_hook(
            lambda leaf: made.append(torch.ones(2, device=leaf.device))
        )
        x.sum().backward()
    assert [device_of(tensor) for tensor in made] == [device]


def _sums() -> list[str]:
    with PretendDevice() as device, devices_sent() as sent:
        x = torch.ones(2, device=device)
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(1))
        assert x.device == device
        assert x.tolist() == [2, 2]
        with pytest.raises(RuntimeError, match=TOGETHER):
            nn.Linear(2, 2).to(device)(torch.ones(2))
    dist.all_reduce(torch.ones(1))
    return sent


def test_ranks_send_tensors_of_the_device_and_it_is_told_where_these_were() -> None:
    assert launch.simulate(_sums, 2).results == [["xpu:0", "cpu"]] * 2
