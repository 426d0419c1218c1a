"""The deployment's shell scripts: shellcheck accepts them, and slurm.sh handles exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import deployment_files as files
import pytest
from deployment_files import DEPLOYMENT, ROOT


def scripts() -> dict[str, str]:
    [sky] = files.documents("skypilot.yaml")
    found = {f"skypilot.yaml {part}": f"#!/bin/bash\n{sky[part]}" for part in ("setup", "run")}
    paths = [ROOT / ".ci/run", *ROOT.glob("scripts/*.sh"), *DEPLOYMENT.glob("*.sh")]
    return {**found, **{str(path.relative_to(ROOT)): path.read_text() for path in paths}}


@pytest.mark.parametrize("script", scripts().values(), ids=scripts())
def test_shellcheck_finds_nothing(script: str) -> None:
    """SC1091 is excluded: skypilot.yaml's setup activates an environment that is missing here."""
    command = [str(Path(sys.executable).with_name("shellcheck")), "--exclude=SC1091", "-"]
    ended = subprocess.run(command, input=script, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "")


FAKES = {
    "srun": 'echo "$@" > srun.txt; exit $FAKE_CODE',
    "scontrol": '[[ $1 == show ]] && printf "node7\\nnode8\\n" || echo "$@" > requeued.txt',
}


def run_slurm(folder: Path, code: int) -> "subprocess.CompletedProcess[str]":
    """Run the Slurm script with a fake srun that exits with this code."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    for name, body in FAKES.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE_CODE": str(code)}
    command = ["bash", str(DEPLOYMENT / "slurm.sh")]
    return subprocess.run(
        command, cwd=folder, env={**slurm, **environment}, capture_output=True, text=True
    )


@pytest.mark.parametrize("code", [0, 1, 74, 75, 78])
def test_slurm_queues_the_job_again_only_if_it_was_stopped(tmp_path: Path, code: int) -> None:
    ended = run_slurm(tmp_path, code)
    assert (ended.returncode, ended.stderr) == (code, "")
    requeued = tmp_path / "requeued.txt"
    assert requeued.exists() == (code == 75)
    assert not requeued.exists() or requeued.read_text() == "requeue 17\n"
    assert "--rdzv-endpoint=node7:29400 --rdzv-id=17-0 " in (tmp_path / "srun.txt").read_text()
