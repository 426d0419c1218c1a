"""The programs of examples/in_pytorch for Phases 3 and 4 print what the guidelines say."""

import re
from pathlib import Path

import pytest

from distlab.course import load
from distlab.sim import Cluster, Options
from distlab.sim.script import run_script

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.torch.jit"),  # in torch.distributed.optim
]

ROOT = Path(__file__).parents[3]
COURSE = load(ROOT)
FOLDER = "examples/in_pytorch"
EQUAL = r"equal( up to rounding)?"

PRINTED = {
    "ring": rf"reduce-scatter: {EQUAL}\nall-gather: {EQUAL}\nall-reduce: {EQUAL}\n",
    "mesh": (
        r"inside: ranks \[0, 1\] of the mesh, \[0, 1\] of node_groups\n"
        r"across: ranks \[0, 2\] of the mesh, \[0, 2\] of node_groups\n"
        rf"all-reduce: {EQUAL}\n"
    ),
    "ddp_overlap": (
        r"(buckets, yours: \[772, 771, 513\] KiB\n"
        r"buckets, torch's: \[(2056|1028, 1028)\] KiB\n){2}"
        rf"gradients: {EQUAL}\n"
    ),
    "zero_optimizer": (
        r"numbers of state by rank, yours: \[502, 502, 502, 502\]\n"
        r"numbers of state by rank, torch's: \[1600, 200, 200, 2\]\n"
        rf"parameters: {EQUAL}\n"
    ),
    "fully_shard": (
        r"yours: 272 numbers after forward, 272 after backward\n"
        r"reshard_after_forward=True: 272 numbers after forward, 272 after backward\n"
        rf"parameters: {EQUAL}\n"
        r"reshard_after_forward=False: 1088 numbers after forward, 272 after backward\n"
        rf"parameters: {EQUAL}\n"
    ),
    "dcp": (
        r"loaded: equal\n"
        r"yours: manifest.json (rank-0000\d.bin ){4}slices.json\n"
        r"torch's: .metadata( __\d_0.distcp){4}\n"
    ),
    "async_save": (
        r"yours and x before the changes: equal\n"
        r"torch's and x before the second change: equal\n"
    ),
    "comm_hook": (
        r"yours: 0\.9\d% off in one step, 0\.05% in the mean of 20\n"
        r"fp16_compress_hook: 0\.04% off in one step, 0\.04% in the mean of 20\n"
    ),
    "power_sgd": (
        r"yours: 9\d% off in one step, 3\d% in the mean of 20\n"
        r"torch's: 9\d% off in one step, 3\d% in the mean of 20\n"
    ),
}

QUOTED = [  # task, program, and what its section quotes from the program's output
    ("3.2", "ring", []),
    ("3.7", "mesh", []),
    ("3.11", "ddp_overlap", ["772, 771", "513", "2056", "1028"]),
    ("3.12", "zero_optimizer", ["502", "1600"]),
    ("3.13", "fully_shard", ["1088", "272"]),
    ("3.14", "fully_shard", []),
    ("4.3", "dcp", [".metadata"]),
    ("4.4", "async_save", []),
    ("4.12", "power_sgd", ["37%"]),
    ("4.13", "comm_hook", ["0.98%", "0.05%", "0.04%"]),
]


def printed(program: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a program on four ranks; return its lines without those that name what was loaded."""
    run_script(ROOT / FOLDER / f"{program}.py", [], 4, Cluster.preset("laptop", 1), Options())
    return re.sub(r"^\w+: (yours|the solution)\n", "", capfd.readouterr().out, flags=re.MULTILINE)


def box_of(task_id: str) -> str:
    """Return the paragraph on PyTorch of a task's section."""
    task = COURSE.task(task_id)
    text = (ROOT / task.folder / "guidelines.md").read_text(encoding="utf-8")
    _, section = text.split(f"\n## {task.heading}\n")
    boxes: list[str] = re.findall(
        r"^\*\*In PyTorch today\.\*\* .*?(?=\n\n\*\*Further)",
        section.split("\n## ")[0],
        flags=re.MULTILINE | re.DOTALL,
    )
    return boxes[0]


@pytest.mark.parametrize("program", PRINTED)
def test_program_compares_the_solution_with_torch(
    program: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    out = printed(program, capfd)
    assert re.fullmatch(PRINTED[program], out)
    for _, name, quoted in QUOTED:
        if name == program:
            assert [words for words in quoted if words not in out] == []


@pytest.mark.parametrize(("task_id", "program", "quoted"), QUOTED)
def test_section_names_the_program_and_quotes_it(
    task_id: str, program: str, quoted: list[str]
) -> None:
    box = box_of(task_id)
    assert f"{FOLDER}/{program}.py`" in box
    plain = box.replace(" %", "%").replace(",", "").replace("\n", " ")
    assert [words for words in quoted if words.replace(",", "") not in plain] == []


def test_each_program_is_run_and_named() -> None:
    assert {program for _, program, _ in QUOTED} == set(PRINTED)
