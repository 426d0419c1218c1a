"""Torch's own analyzer reads the dumps that a watchdog writes, and names what is wrong."""

import gc
import logging
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.flight_recorder import fr_trace

from distlab.cli import main
from distlab.sim import Options, SimulationError, simulate

Program = Callable[[int], object]


def ones(size: int = 4) -> Tensor:
    return torch.ones(size, device="cuda")


def on_gpus(program: Program) -> None:
    torch.cuda.set_device(dist.get_rank())
    x = ones()
    dist.all_reduce(x)
    program(dist.get_rank())
    torch.cuda.synchronize()


def report(program: Program, folder: Path, num_ranks: int = 3) -> str:
    options = Options(semantics="nccl", watchdog=str(folder))
    with pytest.raises(SimulationError) as caught:
        simulate(on_gpus, num_ranks, program, cluster="dgx-h100", options=options)
    return str(caught.value)


def entries(folder: Path, rank: int) -> list[dict[str, Any]]:
    dump = pickle.loads((folder / f"nccl_trace_rank_{rank}").read_bytes())
    made: list[dict[str, Any]] = dump["entries"]
    return made


def skipped_call(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(ones())
    dist.broadcast(ones(), 0)


def other_collective(rank: int) -> None:
    if rank == 2:
        dist.all_gather([ones() for _ in range(3)], ones())
    else:
        dist.all_reduce(ones())


def other_shape(rank: int) -> None:
    dist.all_reduce(ones(5 if rank == 1 else 4))


def other_order_of_groups(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if rank != 2 else groups[::-1]:
        x = ones()
        dist.all_reduce(x, group=group)
        x.sum().item()


def early_return(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(ones())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (skipped_call, "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH"),
        (other_collective, "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH"),
        (other_shape, "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH"),
        (other_order_of_groups, "missing ranks: {2}"),
        (early_return, "missed FR dumps from ranks ({1})"),
    ],
)
def test_torch_reads_the_dumps_and_names_the_rank(
    program: Program, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = report(program, tmp_path)
    assert "the ranks waited for 600 s, until the watchdog fired at 600.0000" in text
    command = text.partition(": torchfrtrace ")[2].splitlines()[0].split()
    caplog.set_level(logging.INFO)
    fr_trace.main(command)
    gc.enable()  # torch's analyzer turns it off
    assert words in caplog.text


def test_a_dump_says_how_far_the_gpu_got_and_which_line_called(tmp_path: Path) -> None:
    report(other_order_of_groups, tmp_path)
    first, second = entries(tmp_path, 0)
    assert (first["state"], second["state"]) == ("completed", "started")
    assert second["profiling_name"] == "nccl:all_reduce"
    assert second["process_group"] == ("1", "undefined")
    assert second["input_sizes"] == second["output_sizes"] == [[4]]
    assert second["input_dtypes"] == ["Float"]
    assert second["frames"][0]["name"] == "other_order_of_groups"
    assert entries(tmp_path, 2)[-1]["process_group"] == ("2", "undefined")


def messages_in_a_batch(rank: int) -> None:
    other = 1 - rank
    dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), other)])
    dist.isend(ones(), other)
    dist.irecv(ones(), other)


def test_messages_of_a_batch_share_a_number_and_those_behind_others_are_scheduled(
    tmp_path: Path,
) -> None:
    report(messages_in_a_batch, tmp_path, 2)
    kept = [(e["profiling_name"], e["p2p_seq_id"], e["state"]) for e in entries(tmp_path, 1)[1:]]
    assert kept == [
        ("nccl:send 1->0", 1, "started"),
        ("nccl:coalesced", 1, "started"),
        ("nccl:send 1->0", 2, "started"),
        ("nccl:recv 1<-0", 3, "scheduled"),
    ]


def test_ranks_that_have_ended_have_no_dump_and_old_dumps_are_removed(tmp_path: Path) -> None:
    report(skipped_call, tmp_path)
    text = report(early_return, tmp_path)
    assert "Rank 1 had ended before, and has no dump" in text
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["0", "2"]


def test_a_limit_of_the_program_is_the_watchdogs(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=30))
        if rank == 0:
            dist.all_reduce(ones(), group=group)

    assert "the ranks waited for 30 s" in report(program, tmp_path)


def test_a_watchdog_without_nccl_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text("")
    with pytest.raises(SystemExit):
        main(["sim", "--semantics", "gloo", "--watchdog", str(tmp_path), str(script)])
    assert "needs nccl" in " ".join(capsys.readouterr().err.split())
