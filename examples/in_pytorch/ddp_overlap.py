"""Compare the buckets and gradients of your DistributedDataParallel with those of torch's.

distlab sim --ranks 4 examples/in_pytorch/ddp_overlap.py
torchrun --nproc-per-node 2 examples/in_pytorch/ddp_overlap.py
"""

import lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from phase3_multi_node.given import Group, Started, start_all_reduce

MIB, KIB = 2**20, 2**10
sent: dict[str, list[int]] = {"yours": [], "torch's": []}  # on this rank, in KiB


def all_reduce(flat: Tensor, group: Group = None) -> Started:
    """Start to sum a bucket of yours, and note its size."""
    sent["yours"].append(flat.nbytes // KIB)
    return start_all_reduce(flat, group)


def hook(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Start to average a bucket of torch's, and note its size."""
    sent["torch's"].append(bucket.buffer().nbytes // KIB)
    return allreduce_hook(group, bucket)


def main() -> None:
    """Run two backward passes: after the first one, both order the buckets anew."""
    dist.init_process_group()
    course = lesson.load("ddp", "3.11")
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    mine = course.DistributedDataParallel(
        ours, bucket_bytes=MIB, first_bucket_bytes=MIB, all_reduce=all_reduce
    )
    ddp = DistributedDataParallel(theirs, bucket_cap_mb=1)
    ddp.register_comm_hook(dist.group.WORLD, hook)
    torch.manual_seed(dist.get_rank())
    for inputs in torch.randn(2, 4, 256):
        for model in (mine, ddp):
            model.zero_grad()
            model(inputs).square().mean().backward()
        mine.finish_gradient_synchronization()  # torch has waited at the end of backward
        for whose, kib in sent.items():
            lesson.say(f"buckets, {whose}: {kib} KiB")
            kib.clear()
    lesson.compare("gradients", lesson.gradients(ours), lesson.gradients(theirs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
