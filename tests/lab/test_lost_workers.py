"""Task 3.19 on real processes: one worker is killed, the other trains to the end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = """
import os, signal, sys
import torch, torch.distributed as dist
from phase3_multi_node.given import pair_groups
from solutions.phase3_multi_node.parameter_server import push_pull, serve_survivors

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
pairs, shard = pair_groups([0], [1, 2]), torch.zeros(3)
if rank == 0:
    survivors = serve_survivors(shard, torch.optim.SGD([shard], lr=1.0), pairs, 4, 1, 60.0)
    print(survivors, shard.tolist(), flush=True)
for step in range(4 if rank else 0):
    if (rank, step) == (2, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    push_pull({0: -torch.ones(3)}, {0: shard}, pairs[0])
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="gloo listens on lo")
def test_a_worker_trains_to_the_end_after_another_is_killed(tmp_path: Path, forked: None) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert printed[0] == "[1] [6.0, 6.0, 6.0]\n"
    assert [rank.returncode for rank in ranks] == [0, 0, -signal.SIGKILL]
