"""Tensors that a rank puts on the GPU of another rank."""

import inspect
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.sim import Options, simulate

LOCAL = "LOCAL_RANK"
Program = Callable[[], object]


def wrong(program: Program, num_ranks: int = 3) -> list[str]:
    ran = simulate(program, num_ranks, cluster="dgx-h100", options=Options(semantics="nccl"))
    assert ran.gpu_time is not None
    return ran.gpu_time.wrong


def line_of(program: Program, text: str) -> str:
    """Return the place of a program's first line with a text."""
    lines, first = inspect.getsourcelines(program)
    number = first + next(k for k, line in enumerate(lines) if text in line)
    return f"test_strays.py:{number} in {program.__name__}"


def resume(map_location: str) -> None:
    torch.cuda.set_device(int(os.environ[LOCAL]))
    model, file = torch.nn.Linear(4, 4, device="cuda"), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, map_location=map_location))
    model(torch.ones(2, 4, device="cuda"))


def test_a_checkpoint_that_all_ranks_load_on_the_first_gpu() -> None:
    (line,) = wrong(lambda: resume("cuda:0"))
    place, _, text = line.partition(": ")
    assert place == f"ranks 1 and 2  {line_of(resume, 'torch.load')}"
    assert text == (
        "puts tensors on cuda:0, the GPU of rank 0, which loses memory to them: give torch.load "
        'map_location=f"cuda:{local_rank}" or "cpu"'
    )
    assert text in (Path(__file__).parents[4] / "docs/simulator.md").read_text()


def keeps_what_others_pickled() -> list[object]:
    torch.cuda.set_device(int(os.environ[LOCAL]))
    x = torch.ones(4, device="cuda") + 1
    kept: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(kept, x)
    return kept


def test_pickled_tensors_arrive_on_the_senders_gpu() -> None:
    for line in wrong(keeps_what_others_pickled, 2):
        assert "puts tensors on cuda:" in line
        assert line.endswith("to the CPU before, or send them by a collective of tensors")


@pytest.mark.parametrize("map_location", ["cpu", "cuda"])
def test_a_checkpoint_that_each_rank_loads_on_its_own_gpu(map_location: str) -> None:
    assert wrong(lambda: resume(map_location)) == []


def begins_on_the_first() -> None:
    total = torch.zeros(4, device="cuda")
    torch.cuda.set_device(int(os.environ[LOCAL]))
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        x.add_(1)
    del total


def test_a_tensor_that_is_made_before_the_rank_has_chosen_its_gpu() -> None:
    (line,) = wrong(begins_on_the_first)
    assert line.startswith(f"ranks 1 and 2  {line_of(begins_on_the_first, 'zeros')}: puts tensors")
    assert line.endswith('name the rank\'s own GPU, f"cuda:{local_rank}"')


def two_gpus_each() -> None:
    first = 2 * int(os.environ[LOCAL])
    torch.cuda.set_device(first)
    x = torch.ones(4, device="cuda")
    (x.to(f"cuda:{first + 1}") + 1).sum()


def a_gpu_for_all() -> None:
    (torch.ones(4, device="cuda:0") + 1).sum()


def own_gpu_by_environment() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[LOCAL]
    (torch.ones(4, device="cuda:0") + 1).sum()


def last_rank_also_uses_the_second() -> None:
    torch.cuda.set_device(int(os.environ[LOCAL]))
    (torch.ones(4, device="cuda") + 1).sum()
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        torch.ones(4, device="cuda:1")


@pytest.mark.parametrize("program", [two_gpus_each, a_gpu_for_all, own_gpu_by_environment])
def test_gpus_that_are_no_other_ranks_or_shared_on_purpose(program: Program) -> None:
    assert wrong(program) == []


def test_another_node_has_other_gpus() -> None:
    (line,) = wrong(last_rank_also_uses_the_second, 8)
    assert line.startswith("rank 7  ")
    assert "the GPU of rank 1" in line
    assert wrong(last_rank_also_uses_the_second, 9) == []  # the ninth is alone on its node
