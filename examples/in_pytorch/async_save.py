"""Compare your AsyncCheckpointer with torch.distributed.checkpoint's async_save.

distlab sim --ranks 2 examples/in_pytorch/async_save.py
torchrun --nproc-per-node 2 examples/in_pytorch/async_save.py
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load  # dcp.load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save


def main() -> None:
    """Save a tensor, and change it at once: what was saved must not change."""
    dist.init_process_group()
    checkpoint = lesson.load("checkpoint", "4.4")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    x, file = torch.arange(1000.0), Path(folders[0]) / f"rank-{dist.get_rank()}.pt"

    def write(state: dict[str, Any], step: int) -> None:
        torch.save(state, file)

    with checkpoint.AsyncCheckpointer(write) as mine:
        mine.save({"x": x}, step=1)
        x.add_(1)
    torchs = async_save({"x": x}, checkpoint_id=Path(folders[0]) / "torch's")
    x.add_(1)
    done = torchs.upload_completion if isinstance(torchs, AsyncSaveResponse) else torchs
    done.result()

    ours, theirs = torch.load(file, weights_only=True)["x"], torch.zeros(1000)
    load({"x": theirs}, checkpoint_id=Path(folders[0]) / "torch's")
    lesson.compare("yours and x before the changes", [ours], [x - 2])
    lesson.compare("torch's and x before the second change", [theirs], [x - 1])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
