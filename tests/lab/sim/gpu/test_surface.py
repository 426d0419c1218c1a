"""Parts of ``torch.cuda`` that scripts use beside their computations."""

import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_gpus import ones, refusal, run
from torch import nn
from torch.profiler import ProfilerActivity, profile

from distlab.sim import Options, simulate


def test_sleep_keeps_the_stream_busy_for_its_cycles() -> None:
    def main() -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        side = torch.cuda.Stream()
        start.record(side)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_980_000)  # type: ignore[attr-defined]
        end.record(side)
        torch.cuda.synchronize()
        clock_rate = torch.cuda.get_device_properties(0).clock_rate  # in kHz
        return start.elapsed_time(end), 1_980_000 / clock_rate

    for elapsed, wanted in run(main):
        assert elapsed == pytest.approx(wanted, rel=0.01)
        assert wanted == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("dgx-a100", (8, 0, 108, 40, 1410)),
        ("dgx-h100", (9, 0, 132, 50, 1980)),
        ("hgx-b200", (10, 0, 148, 126, 1965)),
    ],
)
def test_properties_fit_the_gpu(cluster: str, expected: tuple[int, ...]) -> None:
    def main() -> tuple[Any, ...]:
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        assert repr(p).startswith(f"_CudaDeviceProperties(name='{p.name}', major={p.major}, ")
        assert (p.warp_size, p.max_threads_per_multi_processor) == (32, 2048)
        assert (p.regs_per_multiprocessor, p.is_integrated) == (65536, 0)
        assert p.shared_memory_per_multiprocessor > p.shared_memory_per_block_optin > 2**16
        numbers = p.major, p.minor, p.multi_processor_count, p.L2_cache_size >> 20
        return str(p.uuid), (*numbers, p.clock_rate // 1000)

    results = run(main, cluster=cluster)
    assert [numbers for _, numbers in results] == [expected] * 2
    assert results[0][0] != results[1][0]


def test_gpus_of_two_nodes_have_other_uuids_and_those_of_one_keep_theirs() -> None:
    def main() -> None:
        rank, node = dist.get_rank(), socket.gethostname()
        own = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
        known: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(known, (node, own))
        assert len({uuid for _, uuids in known for uuid in uuids}) == 16
        assert len({(node, *uuids) for node, uuids in known}) == 2, rank

    def on_two_nodes() -> None:
        torch.cuda.set_device(dist.get_rank() % 8)
        main()

    simulate(on_two_nodes, 16, cluster="dgx-h100", options=Options(semantics="nccl"))


def test_profilers_of_the_driver_do_nothing() -> None:
    def main() -> None:
        cudart: Any = torch.cuda.cudart()
        cudart.cudaProfilerStart()
        torch.cuda.check_error(cudart.cudaProfilerStop())
        with torch.cuda.profiler.profile():
            ones()

    run(main)


def test_a_profile_of_gpus_is_one_of_the_host(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> str:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            ones() + 1
        return profiled.key_averages().table(sort_by="cuda_time_total")

    assert "aten::add" in run(main, 1)[0]
    assert "Failed to record CUDA event" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*history of allocations")
def test_answers_about_the_allocator(tmp_path: Path) -> None:
    def main() -> list[int]:
        torch.cuda.memory._record_memory_history()
        x = ones(1000)
        file = tmp_path / f"{dist.get_rank()}.pickle"
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
        assert torch.cuda.get_allocator_backend() == "native"
        [segment] = torch.cuda.memory_snapshot()
        assert pickle.loads(file.read_bytes())["segments"] == [segment]
        with torch.accelerator.device_index(1):
            assert torch.cuda.current_device() == 1
        free, total = torch.accelerator.get_memory_info()
        assert x.is_cuda
        accelerator = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
        return [segment["allocated_size"], *accelerator, total - free]

    assert run(main) == [[4000] * 4] * 2


def test_pools_of_memory_hold_what_the_gpu_holds() -> None:
    def main() -> tuple[Any, ...]:
        pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            x = ones()
        dist.all_reduce(x)
        assert pool.id != other.id
        return x.item(), torch.cuda.memory_allocated()

    assert run(main) == [(2.0, 4)] * 2


def test_one_process_with_several_gpus_is_refused_in_one_line() -> None:
    def reduces() -> None:
        torch.cuda.nccl.all_reduce([torch.ones(4, device=f"cuda:{i}") for i in range(2)])

    def replicates() -> None:
        nn.DataParallel(nn.Linear(4, 4).cuda(0))(torch.ones(4, 4, device="cuda:0"))

    def wraps_two() -> None:
        nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 4).to("cuda:1"))
        )

    assert "a module on cuda:0 and cuda:1 is not simulated: give each" in refusal(wraps_two)
    text = refusal(reduces)
    assert "torch.cuda.nccl.all_reduce" in text
    assert "torch.distributed.all_reduce" in text
    text = refusal(replicates)
    assert "several GPUs" in text
    assert "DistributedDataParallel" in text


def test_what_a_collective_has_yet_to_fill_is_printed_right() -> None:
    def main() -> list[str]:
        x = ones(2) * 0
        dist.all_gather([x[:1], x[1:]], torch.full((1,), 0.37, device="cuda"))
        return [str(x[:1]), f"{x[1:]}", repr(x)]

    for rank, shown in enumerate(run(main)):
        on = f"device='cuda:{rank}')"
        assert shown == [f"tensor([0.3700], {on}"] * 2 + [f"tensor([0.3700, 0.3700], {on}"]


def test_a_number_is_gathered_into_tensors_of_one_element_as_on_nccl() -> None:
    def main() -> list[float]:
        parts = [ones(1), ones(1)]
        dist.all_gather(parts, torch.tensor(float(dist.get_rank()), device="cuda"))
        return [part.item() for part in parts]

    assert run(main) == [[0.0, 1.0]] * 2


def test_data_parallel_on_one_gpu_runs_the_module() -> None:
    def main() -> tuple[int, ...]:
        rank = dist.get_rank()
        model = nn.DataParallel(nn.Linear(4, 4).cuda(), device_ids=[rank])
        return tuple(model(ones(16).view(4, 4)).shape)

    assert run(main) == [(4, 4)] * 2
