"""Compare your sharded checkpoint with torch.distributed.checkpoint, saved and loaded differently.

distlab sim --ranks 4 examples/in_pytorch/dcp.py
torchrun --nproc-per-node 2 examples/in_pytorch/dcp.py
"""

import shutil
import tempfile
from pathlib import Path

import lesson
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load  # dcp.load
from torch.distributed.checkpoint.state_dict_saver import save  # dcp.save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from phase4_production.given import Shard as OwnShard

ROWS, COLUMNS = 10, 3


def main() -> None:
    """Save a matrix by rows; load it by columns with torch, and whole with yours."""
    dist.init_process_group()
    checkpoint = lesson.load("checkpoint", "4.3")
    rank, size = dist.get_rank(), dist.get_world_size()
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])

    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    mine = whole.flatten().tensor_split(size)
    start = sum(len(part) for part in mine[:rank])
    checkpoint.save_sharded({"w": OwnShard(mine[rank], start, whole.numel())}, folder / "yours", 1)
    ours = torch.zeros(whole.numel())
    checkpoint.load_sharded({"w": OwnShard(ours, 0, whole.numel())}, folder / "yours")

    mesh = init_device_mesh("cpu", (size,))
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    save({"w": rows}, checkpoint_id=folder / "torch's")
    theirs = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(1)])
    load({"w": theirs}, checkpoint_id=folder / "torch's")
    lesson.compare("loaded", [ours.view(ROWS, COLUMNS)], [theirs.full_tensor()])
    for whose in ("yours", "torch's"):
        files = sorted(p.name for p in (folder / whose).rglob("*") if p.is_file())
        lesson.say(f"{whose}: {' '.join(files)}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
