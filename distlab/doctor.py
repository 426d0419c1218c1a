"""Checks of this machine. Each check tries the real thing; if it fails, it says what to do."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distlab import data, launch
from distlab.data.download import data_root
from distlab.launch.external_launchers import MPI_FIX
from distlab.launch.launchers import check_is_alone
from distlab.torchvision_repair import import_torchvision
from distlab.util.text import bytes_text

OK, ABSENT, BROKEN = "ok", "no", "broken"
TESTED_TORCH = ("2.13",)


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``ABSENT`` is no error, as the course runs without the subject."""

    subject: str
    status: str
    detail: str
    fix: str = ""


def print_report() -> bool:
    """Print all findings; return True if nothing is broken.

    Raises:
        SetupError: mpirun or torchrun has started this process as one of several. Worlds would
            then behave differently, and the advice would be wrong.
    """
    check_is_alone()
    findings = [_guarded(check) for check in CHECKS]
    table = Table(title="distlab doctor", title_justify="left")
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")  # a long path is wrapped, not cut
    marks = {OK: "[green]ok[/]", ABSENT: "[yellow]no[/]", BROKEN: "[red]broken[/]"}
    for finding in findings:
        texts = (escape(text) for text in (finding.subject, finding.detail, finding.fix))
        table.add_row(marks[finding.status], *texts)
    Console().print(table)
    return all(finding.status != BROKEN for finding in findings)


def _guarded(check: Callable[[], Finding]) -> Finding:
    """Run a check; turn an unexpected exception into a finding."""
    try:
        return check()
    except Exception as error:
        subject = check.__name__.removeprefix("check_").replace("_", " ")
        return Finding(subject, BROKEN, f"{type(error).__name__}: {error}", "please report this")


def check_machine() -> Finding:
    """Report cores and memory."""
    memory = psutil.virtual_memory()
    detail = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{bytes_text(memory.available)} of {bytes_text(memory.total)} free"
    )
    return Finding("machine", OK, detail)


def check_python() -> Finding:
    """Report Python's version and location."""
    return Finding("python", OK, f"{platform.python_version()} in {sys.prefix}")


def check_torch() -> Finding:
    """Report the version of torch, and whether the course was tested with it."""
    version = torch.__version__
    if version.startswith(TESTED_TORCH):
        return Finding("torch", OK, version)
    fix = "make setup installs the version in constraints.txt"
    return Finding("torch", ABSENT, f"{version}, tested with {', '.join(TESTED_TORCH)}", fix)


def torch_build() -> str:
    """Return a description of the installed torch, such as ``torch 2.13.0 (CPU build)``."""
    built = torch.version
    kind = f"CUDA {built.cuda}" if built.cuda else f"ROCm {built.hip}" if built.hip else "CPU"
    return f"torch {torch.__version__.partition('+')[0]} ({kind} build)"


def check_torchvision() -> Finding:
    """Import torchvision, declaring any operators that are missing with this build of torch."""
    version = importlib.metadata.version("torchvision")
    try:
        import_torchvision()
    except Exception as error:
        fix = "install the torchvision that belongs to this torch: see docs/install.md"
        return Finding("torchvision", BROKEN, f"{version} does not import: {error}", fix)
    return Finding("torchvision", OK, version)


def check_gpus() -> Finding:
    """Report the CUDA or ROCm devices that torch sees."""
    count = torch.cuda.device_count()
    if count:
        names = {torch.cuda.get_device_name(index) for index in range(count)}
        return Finding("GPUs", OK, f"{count} x {', '.join(sorted(names))}")
    built_for = torch.version.cuda or torch.version.hip
    fix = (
        "torch is built for GPUs but sees none: check nvidia-smi or rocm-smi"
        if built_for
        else "none needed; with a GPU, install torch's CUDA or ROCm build: see docs/install.md"
    )
    return Finding("GPUs", ABSENT, "none", fix)


def check_world_gloo() -> Finding:
    """Start two ranks and add their numbers."""
    fix = "if gloo finds no interface, set GLOO_SOCKET_IFNAME to one that `ip link` lists"
    return _try_world("gloo", 2, "processes", fix, device="cpu", timeout_s=60)


def _try_world(backend: str, count: int, ranks: str, fix: str, **options: Any) -> Finding:
    """Have the ranks of a world add their numbers; if they fail, ``fix`` is the advice."""
    try:
        sums = launch.run(_sum_of_ones, count, backend=backend, **options)
    except launch.LaunchError as error:
        return Finding(f"world {backend}", BROKEN, str(error).splitlines()[0], fix)
    return Finding(f"world {backend}", OK, f"{count} {ranks} added their ones: {sums[0]:.0f}")


def check_world_nccl() -> Finding:
    """Start a rank per GPU and add their numbers."""
    count = torch.cuda.device_count()
    if not count or not dist.is_nccl_available():
        return Finding("world nccl", ABSENT, "needs a GPU per rank", "nothing: gloo is used")
    fix = "run it again with NCCL_DEBUG=INFO in the environment"
    return _try_world("nccl", count, "processes", fix, timeout_s=120)


def check_world_mpi() -> Finding:
    """Have mpirun start two ranks that add their numbers."""
    command = find_mpirun()
    if command is None or not importlib.util.find_spec("mpi4py"):
        return Finding("world mpi", ABSENT, "needs mpirun and mpi4py", MPI_FIX)
    program = "from distlab import doctor; doctor.add_ones_under_mpirun()"
    done = subprocess.run(
        [command, "-np", "2", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode or "the sum is 2" not in done.stdout:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        detail = f"{command}: {lines[-1] if lines else f'exit code {done.returncode}'}"
        return Finding("world mpi", BROKEN, detail, f"mpirun and mpi4py must match: {MPI_FIX}")
    return Finding("world mpi", OK, f"2 processes added their ones: 2 ({command})")


def check_world_sim() -> Finding:
    """Simulate eight GPUs that add their numbers."""
    fix = "please report this, with the whole output of distlab train --backend sim"
    return _try_world("sim", 8, "simulated GPUs", fix, cluster="dgx-h100", timeout_s=60)


def find_mpirun() -> str | None:
    """Return the mpirun in this Python's environment or, if there is none, the one on the path."""
    beside_python = Path(sys.executable).with_name("mpirun")
    return str(beside_python) if beside_python.exists() else shutil.which("mpirun")


def add_ones_under_mpirun() -> None:
    """Act as one of the ranks that ``check_world_mpi`` starts."""
    sums = launch.run(_sum_of_ones, 2, backend="mpi", timeout_s=30)
    print(f"the sum is {sums[0]:.0f}", flush=True)


def _sum_of_ones() -> float:
    ones = torch.ones(1, device=launch.context().device)
    dist.all_reduce(ones)
    return float(ones)


def check_data() -> Finding:
    """Report the bundled images and the downloaded data."""
    images = len(data.load("digits").train)
    root = data_root()
    entries = sorted(root.iterdir()) if root.is_dir() else []
    folders = [entry.name for entry in entries if any(p.is_file() for p in entry.rglob("*"))]
    also = f"; in {root}: {', '.join(folders)}" if folders else f"; nothing in {root}"
    fix = "" if folders else "MNIST and CIFAR-10 come at first use, with internet"
    return Finding("data", OK, f"digits bundled ({images:,} training images){also}", fix)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_machine,
    check_python,
    check_torch,
    check_torchvision,
    check_gpus,
    check_world_gloo,
    check_world_nccl,
    check_world_mpi,
    check_world_sim,
    check_data,
)
