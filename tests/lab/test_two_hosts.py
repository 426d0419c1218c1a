"""The script in docs/clusters.md runs on two hosts made of network namespaces, as on that page."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
TIMEOUT_S = 240
OWN_NAME = """unshare --uts sh -c 'hostname "$0" && exec "$@"' node$i"""


@pytest.fixture
def hosts() -> Iterator[str]:
    """The hosts' common name prefix; after the test, they and their processes are removed."""
    name = f"distlab-{uuid.uuid4().hex[:8]}-"
    tried = subprocess.run(["ip", "netns", "add", f"{name}0"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this user may not make network namespaces: {tried.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", f"{name}0"], check=True)
    yield name
    for process in processes.marked(name):
        process.kill()
    for namespace in Path("/run/netns").glob(f"{name}*"):
        subprocess.run(["ip", "netns", "delete", namespace.name], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has network namespaces")
def test_the_script_finds_both_hosts_and_the_slow_link(hosts: str, tmp_path: Path) -> None:
    """Use the solutions, because the lessons that the script imports are not written yet."""
    [script] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "two_hosts.py"
    path.write_text(script.replace("phase3_multi_node.template_", "solutions.phase3_multi_node."))
    printed = run(hosts, str(path))
    assert "node0 has ranks 0, 1\nnode1 has ranks 2, 3\n" in printed
    [ms_per_megabyte] = re.findall(r"between two hosts: \S+ ms, and (\S+) ms per MB", printed)
    assert float(ms_per_megabyte) >= 80, "100 Mbit/s"
    for name in ("ring_all_reduce", "tree_all_reduce", "hierarchical"):
        assert re.search(rf"^{name}: [\d.]+ ms$", printed, flags=re.MULTILINE), printed
    assert re.search(r"^choose_algorithm says \w+$", printed, flags=re.MULTILINE), printed


def run(hosts: str, script: str) -> str:
    """Run a script on two hosts with a slow cable, as the page does; return its output."""
    making, slowing = re.findall(r"```bash\n(for i in 0 1.*?)```", PAGE, re.DOTALL)
    cable, starts, end = re.split(r"^(?=for i in 0 1; do\n  GLOO)|^(?=wait$)", making, flags=re.M)
    assert OWN_NAME in PAGE
    commands = "\n".join(["set -e", cable, slowing, starts, end])
    for old, new in {
        "torchrun": f"{OWN_NAME} {Path(sys.executable).with_name('torchrun')}",
        "-m distlab train --epochs 1": script,
        "netns exec node": f"netns exec {hosts}",
        "-n node": f"-n {hosts}",
        "netns add node": f"netns add {hosts}",
        "netns node": f"netns {hosts}",
        "netns delete node": f"netns delete {hosts}",
    }.items():
        assert old in commands
        commands = commands.replace(old, new)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", processes.MARK: hosts}
    done = subprocess.run(
        ["bash", "-c", commands],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
