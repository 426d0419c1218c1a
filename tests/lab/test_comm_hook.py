"""Task 4.13's hook gives the same losses in Task 3.11's DistributedDataParallel as in torch's."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from distlab import launch

sys.path[:0] = [str(Path(__file__).parents[2])]

from solutions.phase3_multi_node.ddp import DistributedDataParallel  # noqa: E402
from solutions.phase4_production.comm_hook import CompressionHook  # noqa: E402
from solutions.phase4_production.power_sgd import PowerSGD  # noqa: E402

STEPS = 12


def train(is_torchs: bool) -> list[float]:
    """Train a small model with PowerSGD; return the loss of each step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 12))
    hook = CompressionHook(module, PowerSGD(2))
    torch.manual_seed(1 + torch.distributed.get_rank())
    x, y = torch.randn(16, 20), torch.randn(16, 12)
    if is_torchs:
        ddp: nn.Module = nn.parallel.DistributedDataParallel(module)
        ddp.register_comm_hook(None, hook)
    else:
        ddp = DistributedDataParallel(module, all_reduce=hook.all_reduce)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss: Tensor = (ddp(x) - y).square().mean()
        loss.backward()
        if isinstance(ddp, DistributedDataParallel):
            ddp.finish_gradient_synchronization()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_both_data_parallelisms_train_the_same() -> None:
    of_torchs, of_ours = (
        launch.run(train, 2, is_torchs, backend="gloo") for is_torchs in (True, False)
    )
    torch.testing.assert_close(torch.tensor(of_ours), torch.tensor(of_torchs))
    for losses in of_torchs:
        assert losses[-1] < 0.9 * losses[0]
