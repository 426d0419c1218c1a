"""Each rank takes a block, not every N-th sample, and stacks its batches itself.

right
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from solutions.phase1_data_parallel.collectives import Group
from solutions.phase1_data_parallel.data_loader import Sample
from solutions.phase1_data_parallel.trainer import Evaluation


def evaluate(
    model: nn.Module,
    dataset: Dataset[Sample],
    *,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> Evaluation:
    if len(dataset) == 0:
        raise ValueError("nothing to evaluate")
    modes = [(part, part.training) for part in model.modules()]
    mine = torch.arange(len(dataset)).tensor_split(dist.get_world_size(group))
    block, sums = mine[dist.get_rank(group)].tolist(), [0.0, 0.0, 0.0]
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(block), batch_size):
            samples = [dataset[index] for index in block[start : start + batch_size]]
            logits = model(torch.stack([image for image, _ in samples]).to(device))
            labels = torch.stack([torch.as_tensor(label) for _, label in samples]).to(device)
            flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
            sums[0] += float(cross_entropy(flat, labels, reduction="sum"))
            sums[1] += int((flat.argmax(1) == labels).sum())
            sums[2] += labels.numel()
    for part, mode in modes:
        part.training = mode
    totals = torch.tensor(sums, dtype=torch.float64, device=device)
    dist.all_reduce(totals, group=group)
    return Evaluation(float(totals[0] / totals[2]), float(totals[1] / totals[2]), int(totals[2]))
