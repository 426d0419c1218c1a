"""The optimizer of Phase 2's references against torch's."""

import pytest
import torch
from phase2.sgd_by_hand import SGD
from phase2.worn import FEATURES, FLAG, Worn, state_of


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.01)])
def test_steps_are_those_of_torch(momentum: float, weight_decay: float) -> None:
    ours, torchs = Worn(), Worn()
    trainable = [p for p in torchs.parameters() if p.requires_grad]
    reference = torch.optim.SGD(trainable, lr=0.5, momentum=momentum, weight_decay=weight_decay)
    by_hand = SGD(ours, 0.5, momentum, weight_decay)
    for step in range(4):
        x = torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(step)).double()
        x[:1, :1] = FLAG if step % 2 else 0.0  # every other step one parameter has no gradient
        for model, optimizer in ((ours, by_hand), (torchs, reference)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for name, values in state_of(torchs).items():
        assert state_of(ours)[name] == pytest.approx(values, rel=1e-12, abs=1e-12)
