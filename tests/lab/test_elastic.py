"""scripts/elastic.py under torchrun: as nodes leave and join, no sample is lost or repeated."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import free_port, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo listens on lo"),
    pytest.mark.usefixtures("forked"),
]

ROOT = Path(__file__).parents[2]
NUM_SAMPLES, GLOBAL_BATCH, NUM_EPOCHS = 1437, 96, 10
STEPS_PER_EPOCH = 15
SAVED = 6  # steps; by then a checkpoint exists, since every fifth step is saved
TIMEOUT_S = 120
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
SCRIPT = "scripts/elastic.py"
Line = dict[str, Any]


def set_pace(folder: Path, step_s: float) -> None:
    """Make steps take this much longer from now on."""
    new = folder.with_suffix(".new")
    new.write_text(f"{step_s}")
    new.replace(folder.with_suffix(".pace"))


# --- the workers' ledger -------------------------------------------------------------------------


def lines_of(folder: Path) -> list[Line]:
    ledger = folder.with_suffix(".jsonl")
    written = ledger.read_bytes() if ledger.exists() else b""
    return [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith(b"\n")]


def has_trained(folder: Path, world_size: int, more_steps: int) -> Callable[[], bool]:
    """Return a check for a new start with this many workers and over ``more_steps`` steps."""
    known = {line["start"] for line in lines_of(folder)}

    def is_so() -> bool:
        steps = defaultdict(set)
        for line in lines_of(folder):
            if line["start"] not in known and line["world_size"] == world_size:
                steps[line["start"]].add(line["step"])
        return any(len(found) > more_steps for found in steps.values())

    return is_so


def counting_steps(lines: list[Line]) -> dict[int, list[Line]]:
    """Return each step's lines, without those that a later start has superseded."""
    by_start = defaultdict(list)
    for line in lines:
        by_start[line["start"]].append(line)
    steps: dict[int, list[Line]] = {}
    for start in sorted(by_start):
        first = min(line["step"] for line in by_start[start])
        steps = {step: found for step, found in steps.items() if step < first}
        for line in by_start[start]:
            steps.setdefault(line["step"], []).append(line)
    return steps


def check_ledger(folder: Path) -> list[int]:
    """Check that every epoch has every sample once; return the successive world sizes."""
    steps = counting_steps(lines_of(folder))
    assert sorted(steps) == [*range(1, NUM_EPOCHS * STEPS_PER_EPOCH + 1)]
    for epoch in range(NUM_EPOCHS):
        first = epoch * STEPS_PER_EPOCH + 1
        lines = [line for s in range(first, first + STEPS_PER_EPOCH) for line in steps[s]]
        assert {line["epoch"] for line in lines} == {epoch}
        assert sorted(s for line in lines for s in line["samples"]) == [*range(NUM_SAMPLES)]
    for step, lines in steps.items():
        is_short = step % STEPS_PER_EPOCH == 0
        expected = NUM_SAMPLES % GLOBAL_BATCH if is_short else GLOBAL_BATCH
        assert sum(len(line["samples"]) for line in lines) == expected
    sizes = [steps[step][0]["world_size"] for step in sorted(steps)]
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]


def accuracy_of(printed: str) -> float:
    # A restart after the last step prints the same line again.
    (accuracy,) = {*re.findall(r"after step 150: ([\d.]+)% of the test images", printed)}
    return float(accuracy)


# --- torchrun ------------------------------------------------------------------------------------


class Agents:
    """torchrun agents, one per node, all on this machine."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder, self.logs = folder, logs
        self.port = free_port()
        self.agents: list[subprocess.Popen[bytes]] = []
        self.killed: set[int] = set()

    def start(self) -> None:
        """Add a node; the first one hosts the rendezvous, because it is never killed."""
        is_host = not self.agents  # by default, the host is the agent that binds the port first
        options = (
            "--nnodes=2:3",
            "--nproc-per-node=1",
            "--max-restarts=20",
            "--monitor-interval=0.1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=elastic",
            "--local-addr=127.0.0.1",
            # An agent that is silent for ten seconds counts as dead. On a busy machine, less may
            # drop a living one from a new round, and the others wait for its address in vain.
            "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10,"
            f"is_host={is_host}",
        )
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        name = f"{len(self.agents)}"
        with (
            open(self.logs / f"{name}.out", "wb") as out,
            open(self.logs / f"{name}.err", "wb") as e,
        ):
            self.agents.append(
                subprocess.Popen(
                    [*command, SCRIPT, str(self.folder)],
                    cwd=ROOT,
                    env={**os.environ, **VARIABLES},
                    stdout=out,
                    stderr=e,
                )
            )

    def wait_for(self, world_size: int, more_steps: int, trained: Callable[[], bool]) -> None:
        """Wait until a new start with this many workers has done some steps, or an agent ends."""

        def otherwise() -> str:
            codes = [agent.poll() for agent in self.agents]
            return f"no {world_size} workers with {more_steps} steps: {codes}\n{self.told()}"

        wait_until(lambda: self.has_lost_one() or trained(), otherwise)
        assert not self.has_lost_one(), otherwise()

    def has_lost_one(self) -> bool:
        """Return whether an agent has ended that was not killed."""
        return any(
            index not in self.killed and agent.poll() is not None
            for index, agent in enumerate(self.agents)
        )

    def kill(self, index: int) -> None:
        """Kill a node's agent and worker, as a power failure would."""
        self.killed.add(index)
        agent = psutil.Process(self.agents[index].pid)
        gone = [agent, *agent.children(recursive=True)]
        for process in gone:
            process.kill()

    def told(self) -> str:
        """Return what all agents and workers have printed, below the names of the files."""
        return "".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.logs.iterdir()))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Agents]:
    """Agents; any still running after a failed test are killed, with their workers."""
    (tmp_path / "logs").mkdir()
    agents = Agents(tmp_path / "run", tmp_path / "logs")
    yield agents
    for index, agent in enumerate(agents.agents):
        if agent.poll() is None:
            agents.kill(index)
            agent.wait()


@pytest.mark.slow
def test_torchrun_loses_a_node_and_gets_another(nodes: Agents) -> None:
    folder = nodes.folder
    set_pace(folder, 0.8)  # so that the run is still going when a slow node has started
    have_trained = has_trained(folder, 3, SAVED)
    for _ in range(3):
        nodes.start()
    nodes.wait_for(3, SAVED, have_trained)
    have_trained = has_trained(folder, 2, SAVED)
    nodes.kill(2)
    nodes.wait_for(2, SAVED, have_trained)
    have_trained = has_trained(folder, 3, 1)
    nodes.start()
    nodes.wait_for(3, 1, have_trained)
    set_pace(folder, 0)
    codes = [nodes.agents[i].wait(TIMEOUT_S) for i in (0, 1, 3)]
    assert codes == [0, 0, 0], nodes.told()
    assert nodes.agents[2].wait(TIMEOUT_S) == -signal.SIGKILL
    assert check_ledger(folder)[-3:] == [3, 2, 3]  # a slow node may come after two have begun
    assert accuracy_of(nodes.told()) > 90
