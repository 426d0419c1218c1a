"""A parameter server: rank 0 keeps the optimizer, the others compute gradients."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.production.errors import ConfigError
from distlab.production.optimization import optimizer_of
from distlab.production.states import Own
from distlab.production.strategies.base import Strategy
from distlab.production.types import HasState

SERVER = 0


class ParameterServer(Strategy):
    """Task 3.16: in every step, workers push gradients and pull parameters."""

    def distribute(self, model: nn.Module) -> None:
        """Lay the parameters out in one flat tensor, which the server updates."""
        num_ranks = dist.get_world_size()
        if num_ranks < 2:
            raise ConfigError(
                "communication_pattern: parameter_server needs a server and a worker at least: "
                "set num_gpus: 2 or more"
            )
        self.workers = [rank for rank in range(num_ranks) if rank != SERVER]
        self.replicas = dist.new_group(self.workers)
        self.module = self.called = model
        self.flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        dist.broadcast(self.flat, src=SERVER)
        nn.utils.vector_to_parameters(self.flat, self.module.parameters())  # now views of flat
        kind, options = optimizer_of(self.config)
        self.optimizer = kind([self.flat], **options)

    @property
    def is_server(self) -> bool:
        """True if this rank keeps the parameters."""
        return dist.get_rank() == SERVER

    @property
    def num_replicas(self) -> int:
        """Number of workers, which share a batch."""
        return len(self.workers)

    def zero_grad(self) -> None:
        """Drop the model's gradients; the optimizer has only the flat tensor."""
        self.module.zero_grad(set_to_none=True)

    def forward_backward(self, inputs: Tensor, targets: Tensor, num_samples: int) -> Tensor:
        """Compute on the workers only."""
        if self.is_server:
            return torch.zeros((), device=self.device)
        return super().forward_backward(inputs, targets, num_samples)

    def step(self) -> None:
        """Serve one step, or push gradients and pull parameters."""
        lesson = self.lessons("parameter_server")
        if self.is_server:
            lesson.serve_synchronously(self.flat, self.optimizer, self.workers, 1)
            return
        gradients = [
            p.new_zeros(p.shape) if p.grad is None else p.grad for p in self.module.parameters()
        ]
        pushed = nn.utils.parameters_to_vector(gradients)
        lesson.push_pull({SERVER: pushed}, {SERVER: self.flat})

    @property
    def computes(self) -> bool:
        """False on the server, which gets no samples."""
        return not self.is_server

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts, with two kinds of optimizers, because only the server's has a state."""
        place = "server:" if self.is_server else "worker:"
        return {**super().parts(), "optimizer": Own(self.optimizer, place, replicas=self.replicas)}
