"""A pytest plugin for ``--backend nccl`` that pretends to have ``PRETENDED_GPUS`` GPUs.

A world for which there are enough GPUs is simulated, and its ranks may send only tensors that are
on a pretended GPU. Tests that never run on real processes are left out.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.grade import Run
from distlab.grade.running import Body, Grade
from distlab.grade.submission import Submission
from distlab.grade.suites import is_real_too
from distlab.launch import Limits
from distlab.sim import Options
from judging.pretend_device import PretendDevice, devices_sent

NUM_GPUS = "PRETENDED_GPUS"
GPU = "cuda:0"


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    torch.cuda.device_count = lambda: int(os.environ[NUM_GPUS])
    Grade._on_processes = on_pretended_gpus  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = [item.get_closest_marker("task") for item in items]
    pairs = zip(items, marks, strict=True)
    items[:] = [item for item, mark in pairs if mark is not None and is_real_too(mark)]


def on_pretended_gpus(
    grade: Grade,
    body: Body,
    world_size: int,
    args: tuple[object, ...],
    submission: Submission,
    limits: Limits,
) -> Run:
    """Simulate a world instead of running it on processes, and drop the trace."""
    given = (body, *args)
    run = grade._simulate(on_gpu, world_size, given, None, Options(), submission, limits)
    return replace(run, trace=None)


def on_gpu(lesson: Any, body: Callable[..., Any], *args: object) -> Any:
    """Call a body, and check that all tensors that it sends are on the GPU."""
    dist.get_backend = lambda group=None: "nccl"  # not restored: the process serves only this world
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    with PretendDevice(GPU), devices_sent() as sent:
        result = body(lesson, *args)
    assert {*sent} <= {GPU}, f"No backend type associated with device type cpu: {sent}"
    return result
