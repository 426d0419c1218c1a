"""Checkpoints on a small in-memory disk that is actually full, and later read-only.

Only a child process sees the disk, which disappears when that process ends.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import errno, os, subprocess, sys
from pathlib import Path
import torch
from solutions.phase4_production.checkpoint import load_checkpoint, save_checkpoint

disk = Path(sys.argv[1])
folder = disk / "run"

def state(step):  # 1 MiB
    return {"weight": torch.full((2**18,), float(step))}

def check(newest):
    loaded = load_checkpoint(folder)
    assert loaded.step == newest and not loaded.skipped, loaded
    assert torch.equal(loaded.state["weight"], state(newest)["weight"])

def content():
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

def remount(mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)

def check_refused(number):
    try:
        save_checkpoint(state(3), folder, 3)
    except OSError as error:
        assert error.errno == number, error
    else:
        raise AssertionError("the disk took a checkpoint")
    assert content() == before
    check(2)

save_checkpoint(state(1), folder, 1)
save_checkpoint(state(2), folder, 2)
before = content()
check_refused(errno.ENOSPC)
remount("ro")
check_refused(errno.EROFS)
remount("rw")
os.unlink(folder / "step-00000001" / "state.pt")  # makes room
save_checkpoint(state(3), folder, 3)
check(3)
print("as promised")
"""


def on_a_disk(tmp_path: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that sees a 3 MiB disk at ``tmp_path``, which no other process sees."""
    mount = 'mount -t tmpfs -o size=3m none "$0" && exec "$@"'
    unshare = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path), *command]
    return subprocess.run(unshare, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_real_disk_that_fails_loses_nothing(tmp_path: Path) -> None:
    if not shutil.which("unshare"):
        pytest.skip("no unshare here: only Linux has namespaces")
    if (mounted := on_a_disk(tmp_path, "true")).returncode:
        pytest.skip(f"this user may not mount a disk: {mounted.stderr.strip()}")
    done = on_a_disk(tmp_path, sys.executable, "-c", PROGRAM, str(tmp_path))
    assert (done.stdout, done.returncode) == ("as promised\n", 0), done.stderr
    assert list(tmp_path.iterdir()) == []  # only that process saw the disk
