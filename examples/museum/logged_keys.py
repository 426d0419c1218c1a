"""The ranks average their metrics, and one rank has one more.

Retold from Lightning-AI/pytorch-lightning#19106. On gloo, it hangs.

distlab sim --ranks 2 examples/museum/logged_keys.py
torchrun --nproc-per-node 2 examples/museum/logged_keys.py
"""

import torch
import torch.distributed as dist


def average(metrics: dict[str, float]) -> dict[str, float]:
    """Return the mean of every metric over the ranks."""
    means = {}
    for name in sorted(metrics):
        value = torch.tensor(metrics[name])
        dist.all_reduce(value)
        means[name] = value.item() / dist.get_world_size()
    return means


def main() -> None:
    """Average the metrics of a step, and wait for the next step."""
    dist.init_process_group()
    metrics = {"loss": 0.5}
    if dist.get_rank() == 0:
        metrics["accuracy_cats"] = 0.9  # no cats in the batch of rank 1
    print(f"rank {dist.get_rank()}: {average(metrics)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
