"""The solutions compute the same on GPUs as on CPUs, and rarely make the host wait."""

import os
from typing import Any

import pytest
import torch

from distlab.sim import Cluster, Options, simulate

NOT_HERE = {
    "4.18": "profiles every rank, and the threads of a world share one profiler",
}
SYNCS = {  # most host syncs of a rank in a call; 0 in the other cases
    "1.5": 4,
    "1.11": 1,
    "1.11 flat": 1,
    "1.12": 3,
    "2.1": 2,
    "2.2": 2,
    "2.4": 3,
    "2.8": 5,
    "2.10": 5,
    "4.2": 14,
    "4.4": 1,
    "4.7": 1,
    "4.10": 1,
    "4.10 threshold": 2,
    "4.12": 1,
    "4.13 in torch's": 4,
    "4.15": 2,
}


@pytest.fixture
def gpu_cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    import gpu_cases

    return gpu_cases


def run(gpu_cases: Any, names: list[str], kind: str) -> Any:
    def main() -> Any:
        local = os.environ["LOCAL_RANK"]
        if kind == "cuda":
            torch.cuda.set_device(int(local))
        return gpu_cases.run_cases(names, "cpu" if kind == "cpu" else f"cuda:{local}")

    semantics = "gloo" if kind == "cpu" else "nccl"
    cluster = Cluster.preset("dgx-h100")
    return simulate(main, 4, cluster=cluster, options=Options(semantics=semantics))


def test_solutions_on_gpus(gpu_cases: Any) -> None:
    names = [name for name in gpu_cases.CASES if name not in NOT_HERE]
    on_cpus, on_gpus = run(gpu_cases, names, "cpu"), run(gpu_cases, names, "cuda")
    assert on_gpus.gpu_time.wrong == []
    for name in names:
        syncs = []
        for cpu, gpu in zip(on_cpus.results, on_gpus.results, strict=True):
            cpu, gpu = cpu[name], gpu[name]
            assert "error" not in gpu, f"{name}: {gpu['error']}"
            equal = [torch.equal(x, y) for x, y in zip(cpu["values"], gpu["values"], strict=True)]
            assert all(equal), f"{name}: {equal}"
            syncs.append(sum(gpu["syncs"].values()))
        assert max(syncs) <= SYNCS.get(name, 0), f"{name}: {syncs}"
