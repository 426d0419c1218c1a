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
    "srun": """
case "$*" in
  *--standalone*) shift; for node in $FAKE_NODES; do SLURMD_NODENAME=$node "$@"; done ;;
  *preflight*) shift; "$@" ;;
  *) echo "$@" > srun.txt; exit "$FAKE_CODE" ;;
esac""",
    "torchrun": """
echo "$@" >> checks.txt
case "$*" in
  *--standalone*) [[ " $FAKE_BAD " != *" $SLURMD_NODENAME "* ]] ;;
  *) echo "$FAKE_BETWEEN"; exit "$FAKE_LINKS" ;;
esac""",
    "scontrol": """
case "$*" in
  "show hostnames"*) printf "%s\\n" $FAKE_NODES ;;
  "show job"*) echo "   ReqNodeList=(null) ExcNodeList=$FAKE_EXCLUDED" ;;
  *) echo "$@" >> requeued.txt ;;
esac""",
}
WELL = {"FAKE_NODES": "node7 node8", "FAKE_BAD": "", "FAKE_BETWEEN": "", "FAKE_LINKS": "0"}


def run_slurm(folder: Path, code: int = 0, **fakes: str) -> "subprocess.CompletedProcess[str]":
    """Run the Slurm script with a fake srun that exits with this code."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    for name, body in FAKES.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[7-8]"}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    given = {**WELL, "FAKE_EXCLUDED": "(null)", **fakes}
    number = str(len(given["FAKE_NODES"].split()))
    environment = {"PATH": path, "FAKE_CODE": str(code), "SLURM_JOB_NUM_NODES": number, **given}
    command = ["bash", str(DEPLOYMENT / "slurm.sh")]
    return subprocess.run(
        command, cwd=folder, env={**slurm, **environment}, capture_output=True, text=True
    )


@pytest.mark.parametrize("code", [0, 1, 69, 74, 75, 78])
def test_slurm_queues_the_job_again_only_if_that_helps(tmp_path: Path, code: int) -> None:
    ended = run_slurm(tmp_path, code)
    assert (ended.returncode, ended.stderr) == (code, "")
    requeued = tmp_path / "requeued.txt"
    assert requeued.exists() == (code in (69, 75))
    assert not requeued.exists() or requeued.read_text() == "requeue 17\n"
    assert "--rdzv-endpoint=node7:29400 --rdzv-id=17-0 " in (tmp_path / "srun.txt").read_text()


# --- the check of the nodes ----------------------------------------------------------------------


def left_out(folder: Path) -> list[str]:
    """Return the commands that Slurm got after a bad node; there was no training."""
    assert not (folder / "srun.txt").exists()
    return (folder / "requeued.txt").read_text().splitlines()


def requeued_without(nodes: str) -> list[str]:
    return ["requeuehold 17", f"update JobId=17 ExcNodeList={nodes}", "release 17"]


def test_nodes_are_checked_alone_and_then_together(tmp_path: Path) -> None:
    assert run_slurm(tmp_path, CLUSTER="dgx-h100").returncode == 0
    *alone, together = (tmp_path / "checks.txt").read_text().splitlines()
    assert len(alone) == 2
    assert alone[0].endswith("production.preflight dgx-h100")
    assert "--rdzv-endpoint=node7:29400 --rdzv-id=check-17-0 " in together


def test_a_node_that_fails_alone_is_left_out(tmp_path: Path) -> None:
    ended = run_slurm(tmp_path, FAKE_BAD="node8")
    assert (ended.returncode, ended.stdout) == (75, "bad nodes, left out from now on: node8\n")
    assert left_out(tmp_path) == requeued_without("node8")


def test_nodes_that_neighbours_are_slow_with_are_left_out_beside_earlier_ones(
    tmp_path: Path,
) -> None:
    nodes = "node4 node5 node6 node7"
    slow = {"FAKE_NODES": nodes, "FAKE_BETWEEN": "node5\nnode6", "FAKE_LINKS": "1"}
    assert run_slurm(tmp_path, FAKE_EXCLUDED="node[1-3]", **slow).returncode == 75
    assert left_out(tmp_path) == requeued_without("node5,node6,node[1-3]")


def test_if_all_nodes_fail_it_is_the_check_that_is_doubted(tmp_path: Path) -> None:
    ended = run_slurm(tmp_path, FAKE_BAD="node7 node8")
    assert (ended.returncode, "all nodes are bad" in ended.stdout) == (1, True)
    assert {path.name for path in tmp_path.glob("*.txt")} == {"checks.txt"}


def test_a_slow_link_that_no_node_can_be_blamed_for_stops_the_job(tmp_path: Path) -> None:
    ended = run_slurm(tmp_path, FAKE_LINKS="1")
    assert (ended.returncode, "a link between the nodes is bad" in ended.stdout) == (1, True)
    assert {path.name for path in tmp_path.glob("*.txt")} == {"checks.txt"}


def test_of_a_single_node_the_links_to_others_are_not_checked(tmp_path: Path) -> None:
    assert run_slurm(tmp_path, FAKE_NODES="node7").returncode == 0
    assert len((tmp_path / "checks.txt").read_text().splitlines()) == 1
