"""distlab as installed by ``pip install .``, without pytest and started from any folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
NO_PYTEST = "import sys; sys.modules['pytest'] = None; "  # makes imports of pytest fail


def distlab(folder: Path, *arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    code = f"{before}from distlab.cli import main; main({list(arguments)})"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["check 1.3", "grade"])
def test_without_pytest_a_grading_says_what_to_install(command: str) -> None:
    done = distlab(ROOT, *command.split(), before=NO_PYTEST)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "grading needs pytest, which is not installed here: pip install pytest\n"


WHEEL = """
import sys
sys.modules["solutions"] = sys.modules["phase1_data_parallel"] = None  # a wheel has neither
sys.path.insert(0, sys.argv.pop(1))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that a wheel contains."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "distlab", folder / "distlab")
    return folder


def distlab_of(wheel: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    code = f"{WHEEL}from distlab.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(wheel), *arguments]
    return subprocess.run(command, cwd=wheel, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["train", "bench all_reduce"])
def test_without_the_course_a_training_says_where_its_trainer_is(wheel: Path, command: str) -> None:
    done = distlab_of(wheel, *command.split())
    assert (done.returncode, done.stdout) == (78 if command == "train" else 1, "")
    assert done.stderr.removeprefix("error: ") == (
        "distlab is installed without the course, whose trainer this runs: in a copy of the "
        "course, pip install --editable .\n"
    )


def test_without_the_course_the_simulator_works(wheel: Path) -> None:
    script = wheel / "program.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "x = torch.ones(2)\n"
        "dist.all_reduce(x)\n"
        "print(x.tolist())\n"
    )
    done = distlab_of(wheel, "sim", "--ranks", "2", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2.0, 2.0]\n") == 2
