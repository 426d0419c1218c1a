"""A run with NCCL's semantics says where GPUs lose time, and what would be wrong on them."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import distlab

from distlab.sim import Cluster, Options, Simulated, simulate
from distlab.sim.hardware.costs import Costs
from distlab.sim.results import diagram
from distlab.sim.results.exports import chrome_trace
from distlab.sim.results.summary import gpu_totals, summary

DOCUMENT = Path(__file__).parents[4] / "docs/simulator.md"


def run(fn: Callable[[], Any], **costs: float) -> Simulated[Any]:
    options = Options(semantics="nccl", costs=Costs(**costs))
    return simulate(fn, 2, cluster=Cluster.preset("dgx-h100"), options=options)


def on_gpu(*shape: int) -> torch.Tensor:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.ones(*shape, device="cuda")


def reads_twice() -> None:
    x = on_gpu(64, 64)
    for _ in range(2):
        x = x @ x
        dist.all_reduce(x)
        x[0, 0].item()


def wrong() -> None:
    """Make each mistake of the documentation's table that does not end the run."""
    x, side = on_gpu(2**18), torch.cuda.Stream()
    early = x.clone()
    work = dist.all_reduce(early, async_op=True)
    early.mul_(2)
    work.wait()
    doubled = x * 2
    with torch.cuda.stream(side):
        doubled + 1
    torch.cuda.synchronize()
    x.to("cpu", non_blocking=True).sum()
    torch.cuda.synchronize()


def test_the_table_says_where_the_time_of_hosts_and_gpus_went() -> None:
    simulated = run(reads_twice)
    heading, first = summary(simulated).splitlines()[3:5]
    times = ["time", "GPU busy", "exposed", "host late", "host waits", "idle"]
    assert re.split("  +", heading) == ["rank", *times, "sent", "messages", "peak memory"]
    assert len(heading) <= 100
    assert len(first) == len(heading)
    for row in gpu_totals(simulated):
        assert row.busy_s + row.exposed_s + row.late_s == pytest.approx(row.time_s, rel=0.05)
        assert row.waits_s > 0
        assert row.exposed_s > 0


def test_a_host_sync_is_listed_once_with_its_line_and_count() -> None:
    text = summary(run(reads_twice))
    line = reads_twice.__code__.co_firstlineno + 5
    (sync,) = [row for row in text.splitlines() if ".item()" in row]
    assert re.fullmatch(
        rf"  test_report\.py:{line} in reads_twice  \.item\(\) +2 .* µs .* ranks 0 and 1", sync
    )


def test_without_host_syncs_one_line_says_so() -> None:
    text = summary(run(lambda: dist.all_reduce(on_gpu(64) + 1)))
    assert "\n\nhost syncs: none; no host has waited for its GPU\n\n" in text


def test_a_launch_bound_run_says_what_helps_and_one_with_enough_work_does_not() -> None:
    def launches() -> None:
        x = on_gpu(64)
        for _ in range(20):
            x = x + 1

    assert "ranks 0 and 1: launch-bound" in summary(run(launches))
    assert "launch-bound" not in summary(run(launches, launch_s=1e-7))


def test_a_host_that_does_something_else_is_not_told_to_launch_less() -> None:
    def loads() -> None:
        x = on_gpu(64)
        for _ in range(3):
            time.sleep(0.01)
            x = x + 1

    text = summary(run(loads))
    assert "ranks 0 and 1: host-bound" in text
    assert "launch-bound" not in text


def test_wrong_uses_are_worded_as_in_the_documentation() -> None:
    shown = run(wrong).gpu_time
    assert shown is not None
    texts = [line.split(": ", 1)[1] for line in shown.wrong]
    assert len(texts) == 3
    document = DOCUMENT.read_text()
    for text in texts:
        assert re.sub(r" \(\w+\.py:\d+ in \w+\)", "", text) in document


def test_a_rank_that_computes_on_the_cpu_is_told_where_its_model_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "forgets.py"
    script.write_text(
        "import torch\nfrom torch import nn\nmodel = nn.Linear(4, 4)\nmodel(torch.ones(2, 4))\n"
    )
    assert distlab("sim", "--ranks", 2, "--semantics", "nccl", script) == 1
    text = capsys.readouterr().out
    assert "wrong on GPUs:\n  ranks 0 and 1  forgets.py:3 in <module>: what is made here" in text
    assert "move the model and the data to cuda:LOCAL_RANK" in text
    assert distlab("sim", "--ranks", 2, script) == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--semantics", "nccl", "--no-devices"), "--semantics nccl does not go together with"),
        (("--semantics", "nccl", "--cluster", "laptop"), "take one with GPUs"),
        (
            ("--semantics", "gloo", "--host-cost", "launch_s=1e-6"),
            "--host-cost needs --semantics nccl",
        ),
        (("--semantics", "nccl", "--host-cost", "launch=1"), "sets no cost of the host; valid:"),
        (("--semantics", "nccl", "--host-cost", "launch_s=0"), "must give a number above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text("print('ran')\n")
    assert distlab("sim", *options, script) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_assumed_costs_are_listed_and_those_set_by_hand_say_so() -> None:
    text = summary(run(reads_twice, launch_s=3e-6), has_sources=True)
    assert "  host.launch_s = 3e-06 instead of 5e-06\n" in text
    assert "  host.launch_s = 3e-06 (assumed: set by hand)\n" in text
    assert "  host.communication_launch_s = 1.5e-05 (assumed: torch's process group" in text


def test_a_trace_has_a_track_per_stream_with_kernels_and_communication_by_name() -> None:
    simulated = run(reads_twice)
    events = json.loads(json.dumps(chrome_trace(simulated)))["traceEvents"]
    tracks = {
        e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == 1
    }
    assert list(tracks) == ["host", "cuda:1 default stream", "cuda:1 NCCL"]
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    kernels = [e for e in slices if e["tid"] == tracks["cuda:1 default stream"]]
    assert [e["name"] for e in kernels][1:] == ["mm", "_local_scalar_dense"] * 2
    communication = [e for e in slices if e["tid"] == tracks["cuda:1 NCCL"]]
    assert [e["name"] for e in communication] == ["all_reduce"] * 2
    mm = kernels[1]
    assert communication[0]["ts"] >= mm["ts"] + mm["dur"] - 0.01
    assert sum(e["dur"] for e in kernels) == pytest.approx(
        1e6 * gpu_totals(simulated)[1].busy_s, abs=0.1
    )


def test_pictures_show_the_gpus() -> None:
    simulated = run(reads_twice)
    for figure, parts in (
        (diagram.space_time(simulated), {"GPU busy", "all_reduce"}),
        (diagram.gantt(simulated), {"GPU busy", "exposed communication", "host late"}),
    ):
        figure.draw_without_rendering()
        (axes,) = figure.axes
        assert parts <= {text.get_text() for text in axes.get_legend().get_texts()}
