"""Checkpoints on a disk that is really full or read-only: a small one in memory, of the test's own.

What is mounted is seen by one child process alone, and gone with it.
"""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRELUDE = """
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

    save_checkpoint(state(1), folder, 1)
    save_checkpoint(state(2), folder, 2)
    before = content()
"""
FULL = """
    try:
        save_checkpoint(state(3), folder, 3)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    else:
        raise AssertionError("a third MiB of state found room")
    assert content() == before
    check(2)
    os.unlink(folder / "step-00000001" / "state.pt")  # someone makes room
    save_checkpoint(state(3), folder, 3)
    check(3)
    print("as promised")
"""
READ_ONLY = """
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        save_checkpoint(state(3), folder, 3)
    except OSError as error:
        assert error.errno == errno.EROFS, error
    else:
        raise AssertionError("a read-only disk took a checkpoint")
    assert content() == before
    check(2)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    save_checkpoint(state(3), folder, 3)
    check(3)
    print("as promised")
"""


def on_a_disk(tmp_path: Path, mebibytes: int, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command that alone sees a disk of that size at ``tmp_path``."""
    mount = f'mount -t tmpfs -o size={mebibytes}m none "$0" && exec "$@"'
    unshare = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path), *command]
    return subprocess.run(unshare, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("mebibytes", "program"), [(3, FULL), (8, READ_ONLY)], ids=["full", "read-only"]
)
def test_a_real_disk_that_fails_loses_nothing(tmp_path: Path, mebibytes: int, program: str) -> None:
    if not shutil.which("unshare"):
        pytest.skip("no unshare here: only Linux has namespaces")
    if (tried := on_a_disk(tmp_path, mebibytes, "true")).returncode:
        pytest.skip(f"this user may not mount a disk: {tried.stderr.strip()}")
    script = textwrap.dedent(PRELUDE) + textwrap.dedent(program)
    found = on_a_disk(tmp_path, mebibytes, sys.executable, "-c", script, str(tmp_path))
    assert (found.stdout, found.returncode) == ("as promised\n", 0), found.stderr
    assert list(tmp_path.iterdir()) == []  # what was mounted was seen by that process alone
