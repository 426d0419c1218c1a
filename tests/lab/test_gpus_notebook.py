"""gpus.ipynb and its installation, on hosts other than this one: other folders, other torches."""

import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from distlab import launch

ROOT = Path(__file__).parents[2]
CELLS = [
    cell
    for cell in json.loads((ROOT / "gpus.ipynb").read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]


def test_the_notebook_is_stored_without_outputs() -> None:
    assert [cell["id"] for cell in CELLS if cell["outputs"] or cell["execution_count"]] == []


# Where the course is


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder, and forget afterwards what the first cell sets."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A folder that looks like the course, and is a repository."""
    folder = tmp_path / "fork"
    folder.mkdir()
    (folder / "course.toml").write_text("")
    as_me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "All"]):
        subprocess.run(["git", *as_me, *command], cwd=folder, check=True)
    return folder


def run_first_cell(source: str) -> Path:
    """Run the first cell with a SOURCE; return the folder of the course that it chose."""
    text = "".join(CELLS[0]["source"])
    assert text.count('SOURCE = ""\n') == 1
    names: dict[str, Path] = {}
    exec(text.replace('SOURCE = ""\n', f"SOURCE = {source!r}\n"), names)
    assert Path.cwd() == names["COURSE"]
    assert str(names["COURSE"]) in sys.path
    assert os.environ["PYTHONPATH"] == str(names["COURSE"])
    return names["COURSE"]


@pytest.mark.usefixtures("elsewhere")
def test_the_notebook_finds_the_folder_that_it_is_in(
    fork: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fork / "docs").mkdir()
    monkeypatch.chdir(fork / "docs")
    assert run_first_cell("") == fork


def test_the_course_comes_from_a_repository_an_archive_or_a_folder(
    elsewhere: Path, fork: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = fork.parent / "course.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(fork, "fork-main")
    sources = {f"file://{fork}": "course", str(archive): "course/fork-main", str(fork): "course"}
    for number, (source, expected) in enumerate(sources.items()):
        folder = elsewhere / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert run_first_cell(source) == folder / expected
        monkeypatch.chdir(folder)
        assert run_first_cell(source) == folder / expected, "a cell may run twice"


@pytest.mark.usefixtures("elsewhere")
def test_without_the_course_the_first_cell_says_what_to_do() -> None:
    with pytest.raises(SystemExit, match=r"The course is not here\. Set SOURCE"):
        run_first_cell("")


# The host's torch


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("install_beside_torch")


def on_a_host_with(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only these distributions be installed."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)


def asked_of_pip(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """Run the installer; return the requirements and the constraints that pip would get."""
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        place = command.index("--constraint") + 1
        asked.append(command[place + 1 :])
        asked.append(Path(command[place]).read_text().splitlines())
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    installer.main()
    requirements, constraints = asked
    return requirements, constraints


def test_pip_may_not_change_the_hosts_torch(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_host_with({"torch": "2.11.0+cu128", "torchvision": "0.26.0+cu128"}, monkeypatch)
    requirements, constraints = asked_of_pip(installer, monkeypatch)
    assert constraints == ["torch==2.11.0+cu128", "torchvision==0.26.0+cu128"]
    assert [line for line in requirements if line.startswith("torch")] == []
    assert "numpy>=1.26" in requirements
    assert "torch 2.11.0+cu128 and torchvision 0.26.0+cu128" in capsys.readouterr().out


def test_a_missing_torchvision_must_suit_the_hosts_torch(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_host_with({"torch": "2.12.0"}, monkeypatch)
    requirements, constraints = asked_of_pip(installer, monkeypatch)
    assert constraints == ["torch==2.12.0"]
    assert [line for line in requirements if line.startswith("torch")] == ["torchvision>=0.26"]


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"torch": "2.10.0+cu128"}, r"torch 2\.10\.0\+cu128 stays .* needs torch>=2\.11\. Choose"),
        ({}, r"no torch to keep\. `make gpu` installs its own"),
    ],
)
def test_a_host_with_an_old_torch_or_none_is_told_so_in_one_line(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    message: str,
) -> None:
    on_a_host_with(installed, monkeypatch)
    with pytest.raises(SystemExit, match=message) as refusal:
        installer.main()
    assert "\n" not in str(refusal.value)


def test_a_failure_of_pip_ends_the_installation_with_its_reason(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "TOOLS", ("/no/such/folder",))
    with pytest.raises(SystemExit, match=r"pip could not install what is missing:\n.*/no/such/"):
        installer.main()


def test_measuring_on_the_hosts_python_needs_no_environment_of_the_courses_own() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "gpu", "HOST_PYTHON=python-of-the-host"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[-2:] for line in done.stdout.splitlines()] == [
        ["python-of-the-host", "scripts/install_beside_torch.py"],
        ["benchmarks/gpu.py", "out/gpu"],
    ]
    assert ".venv" not in done.stdout


# The links


def test_two_t4s_reach_at_most_the_bandwidth_of_their_slots() -> None:
    import gpu_links

    cluster = gpu_links.cluster_of("Tesla T4", 2)
    rates = launch.simulate(
        gpu_links.bus_gb_per_s, 2, "meta", (16 * gpu_links.MIB,), cluster=cluster
    ).results[0]
    assert all(14 < rate < 15.75 for rate in rates.values()), rates
