"""Files, pickles and copies of tensors on simulated GPUs."""

import copy
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distlab.sim import Options, simulate
from distlab.sim.results.simulated import Simulated

T = TypeVar("T")


def on_two_gpus(main: Callable[[], T]) -> Simulated[T]:
    """Run a function on two ranks, each with its GPU as the current one."""

    def run() -> T:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return main()

    return simulate(run, 2, cluster="dgx-h100", options=Options(semantics="nccl"))


@pytest.mark.parametrize(
    ("map_location", "devices"),
    [
        (None, ["cuda:0", "cuda:1"]),
        ("cpu", ["cpu", "cpu"]),
        ("cuda", ["cuda:0", "cuda:1"]),
        ("cuda:1", ["cuda:1", "cuda:1"]),
        (torch.device("cuda", 0), ["cuda:0", "cuda:0"]),
        ({"cuda:0": "cuda:1", "cuda:1": "cpu"}, ["cuda:1", "cpu"]),
        (lambda storage, _: storage.cuda(1), ["cuda:1", "cuda:1"]),
    ],
)
def test_a_loaded_tensor_is_where_map_location_puts_it(
    map_location: Any, devices: list[str]
) -> None:
    def main() -> tuple[str, list[float]]:
        file = io.BytesIO()
        torch.save({"x": torch.arange(3.0, device="cuda")}, file)
        file.seek(0)
        x = torch.load(file, map_location=map_location)["x"]
        return str(x.device), x.tolist()

    assert on_two_gpus(main).results == [(device, [0.0, 1.0, 2.0]) for device in devices]


def test_a_file_of_a_gpu_that_the_node_lacks_is_refused_in_torchs_words() -> None:
    def main() -> None:
        file = io.BytesIO()
        torch.save(torch.ones(2), file)
        file.seek(0)
        torch.load(file, map_location="cuda:8")

    with pytest.raises(RuntimeError, match=r"on CUDA device 8 but .* is 8"):
        on_two_gpus(main)


def test_saving_and_loading_on_a_gpu_make_the_host_wait() -> None:
    def main() -> None:
        file = io.BytesIO()
        torch.save(torch.ones(2, device="cuda"), file)
        file.seek(0)
        torch.load(file)

    time = on_two_gpus(main).gpu_time
    assert time is not None
    assert [wait.reason for wait in time.host_waits if wait.rank == 0] == [
        "a copy to the host, in save",
        "a copy to the GPU from pageable memory, in load",
    ]


def test_copies_and_pickles_of_models_and_optimizers_stay_on_their_gpu() -> None:
    def main() -> bool:
        model = nn.Linear(4, 4, device="cuda")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        states = copy.deepcopy(optimizer).state_dict()["state"]
        tensors = [*(twin.weight for twin in twins), states[0]["exp_avg"]]
        with torch.no_grad():
            model.weight.zero_()
        is_own = all(tensor.any() for tensor in tensors)
        return is_own and all(tensor.device == model.weight.device for tensor in tensors)

    world = on_two_gpus(main)
    assert world.results == [True, True]
    assert world.gpu_time is not None
    assert not world.gpu_time.wrong


def test_a_checkpoint_on_the_host_continues_on_the_gpu() -> None:
    def main() -> bool:
        torch.manual_seed(0)
        model, other = (nn.Linear(4, 4, device="cuda") for _ in range(2))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, map_location="cpu"))
        return other.weight.equal(model.weight) and other.weight.is_cuda

    assert on_two_gpus(main).results == [True, True]


def test_a_distributed_checkpoint_is_loaded_into_tensors_of_gpus(tmp_path: Path) -> None:
    def main() -> tuple[bool, list[float]]:
        save({"x": torch.arange(3.0, device="cuda")}, checkpoint_id=tmp_path)
        x = torch.zeros(3, device="cuda")
        load({"x": x}, checkpoint_id=tmp_path)
        return x.is_cuda, x.tolist()

    assert on_two_gpus(main).results == [(True, [0.0, 1.0, 2.0])] * 2
