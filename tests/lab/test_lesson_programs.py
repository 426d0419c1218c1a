"""The lessons of Phase 2, run as programs in the simulator: their output, and how they end."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import distlab

from phase2_advanced import programs

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "solutions/phase2_advanced"
SLOW = 10_000  # slows computation until the time of messages is negligible
Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a lesson in the simulator and returns its output or errors."""

    def simulated(lesson: str, ranks: int, *options: str, slow: int = 1) -> str:
        faults = [f"--fault=slow_rank {rank} {slow}" for rank in range(ranks)]
        code = distlab("sim", "--ranks", str(ranks), *faults, str(LESSONS / lesson), *options)
        printed = capfd.readouterr()
        return printed.err if code else printed.out.partition("\nsimulated, ")[0]

    return simulated


def numbers(output: str, name: str) -> list[float]:
    """Return the numbers in the last line with this name."""
    line = re.findall(rf"^{name}: +(.*)$", output, re.MULTILINE)[-1]
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


def test_model_parallel_trains_as_one_process_does(run: Run) -> None:
    output = run("model_parallel.py", 2)
    assert len(numbers(output, "parameters by stage")) == 2
    first, last = numbers(output, "loss")
    assert last < first / 2
    assert output.rstrip().endswith("and the weights of one process")
    assert output.count("\n") == 5, "one rank prints, and each line once"


GROUP = """
import {module}, torch, torch.distributed as dist, weakref
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
dist.destroy_process_group()
assert group() is None
"""


@pytest.mark.parametrize(
    "module", ["phase2_advanced.programs", "distlab.launch.external_launchers"]
)
def test_a_process_group_ends_when_it_is_destroyed(module: str) -> None:
    """Otherwise, gloo's threads may free tensors while Python exits, which aborts the process."""
    code = GROUP.format(module=module)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=LESSONS.parents[1])


GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "chosen"),
    [(0, 1, ["gloo"]), (1, 2, ["gloo"]), (2, 2, [GPU, "nccl", GPU]), (8, 2, [GPU, "nccl", GPU])],
)
def test_ranks_use_gpus_if_there_is_one_for_each(
    num_gpus: int, num_ranks: int, chosen: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **options: taken.extend([name, *options.values()])
    )
    for name, number in {"RANK": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": num_ranks}.items():
        monkeypatch.setenv(name, str(number))
    programs.join()
    assert taken == chosen


def test_a_pipeline_waits_as_long_as_its_schedule_says(run: Run) -> None:
    options = ["--micro-batches", "4", "--steps", "1"]
    waited = {}
    for schedule in ("gpipe", "interleaved"):
        output = run("pipeline_parallel.py", 4, "--schedule", schedule, *options, slow=SLOW)
        bubble = numbers(output, "bubble")[0]
        waited[schedule] = numbers(output, "waited or sent")
        assert len(waited[schedule]) == 4
        for percent in waited[schedule]:
            assert bubble <= percent <= bubble + 10
    assert max(waited["interleaved"]) < min(waited["gpipe"])


def test_a_pipeline_prints_its_schedule_and_what_one_f_one_b_saves(run: Run) -> None:
    options = ["--micro-batches", "6", "--steps", "1"]
    gpipe = run("pipeline_parallel.py", 2, "--schedule", "gpipe", *options)
    one_f_one_b = run("pipeline_parallel.py", 2, *options)
    assert "\nF0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5\n" in one_f_one_b
    of_gpipe, of_one = (numbers(out, "kept for backward") for out in (gpipe, one_f_one_b))
    assert of_one[0] < of_gpipe[0] / 2, "2 of 6 micro-batches are in flight"
    assert of_one[1] < of_gpipe[1] / 4, "1 of 6"


@pytest.mark.parametrize("lesson", ["model_parallel.py", "pipeline_parallel.py"])
def test_checkpointing_keeps_less_on_every_stage(run: Run, lesson: str) -> None:
    output = run(lesson, 2, "--checkpointing", "--steps", "2")
    without, with_it = output.split("\nwith it:\n")
    pairs = zip(*(numbers(o, "kept for backward") for o in (without, with_it)), strict=True)
    assert all(less < 0.8 * more for more, less in pairs)
    assert output.rstrip().endswith("and the weights of one process")


def test_tensor_parallel_halves_the_mlp_and_counts_its_collectives(run: Run) -> None:
    output = run("tensor_parallel.py", 2)
    whole, halves = (numbers(output, f"parameters{which}") for which in ("", " by rank"))
    assert halves == [(whole[0] + 64 * 65 + 10 * 65 + 64) / 2] * 2, "ends and one bias stay whole"
    for direction in ("forward", "backward"):
        assert numbers(output, direction) == [1, 512 * 64 * 8]
    first, last = numbers(output, "loss")
    assert last < first / 2


@pytest.mark.parametrize(
    ("lesson", "ranks", "options", "line"),
    [
        ("model_parallel", 7, "", "cannot cut 6 layers into 7 stages"),
        ("pipeline_parallel", 4, "--micro-batches 3", "3 is too few to keep 4 stages"),
        (
            "pipeline_parallel",
            4,
            "--schedule interleaved --micro-batches 6",
            "6 micro-batches are not a multiple of 4 stages",
        ),
        ("pipeline_parallel", 2, "--micro-batches 513", "the data has 512 rows, take 512 or fewer"),
        (
            "tensor_parallel",
            2,
            "--hidden 255",
            "--hidden 255: 255 output features .* over 2 ranks",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_numbers(
    run: Run, lesson: str, ranks: int, options: str, line: str
) -> None:
    assert re.fullmatch(
        rf"{lesson}\.py: .*{line}.*\n", run(f"{lesson}.py", ranks, *options.split())
    )


@pytest.mark.parametrize(
    ("lesson", "needs"),
    [
        ("model_parallel", "2.7 partition_layers"),
        ("pipeline_parallel", "2.7 partition_layers"),
        ("tensor_parallel", "2.12 copy_to_tensor_region"),
    ],
)
def test_a_todo_is_one_line_that_names_its_task(run: Run, lesson: str, needs: str) -> None:
    template = LESSONS.parents[1] / f"phase2_advanced/template_{lesson}.py"
    task = needs.split()[0]
    what = f"this needs {needs}, which is not written yet: distlab check {task}"
    assert run(str(template), 2) == f"template_{lesson}.py: {what}\n"


def test_weights_that_are_not_those_of_one_process_end_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The training in one process now leaves the weights as they are.
    monkeypatch.setattr("phase2_advanced.programs.train", lambda model, num_steps: [])
    errors = run("model_parallel.py", 2, "--steps", "1")
    assert "weights of ranks [0, 1] are not those of one process" in errors.splitlines()[0]
