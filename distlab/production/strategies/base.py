"""The base of all strategies, which is also the simplest one: one process that trains alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.production.config import Config
from distlab.production.images import BAD
from distlab.production.lessons import Lessons
from distlab.production.optimization import groups_of, optimizer_of
from distlab.production.states import Buffers
from distlab.production.types import Group, HasState

LossSum = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), targets: the sum of the losses
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy:
    """How a model is spread over the ranks, and how they do a step together.

        strategy.zero_grad()
        loss = strategy.forward_backward(images, targets, num_samples)   # adds to the gradients
        strategy.average_gradients()                                     # means over the replicas
        strategy.step()                                                  # changes the parameters

    Attributes:
        module: Part of the model that this rank holds.
        optimizer: Optimizer of what this rank updates; schedulers change its rate.
        replicas: Group of the ranks that share a batch.
    """

    module: nn.Module
    called: Any  # the module as training calls it: wrapped, compiled
    optimizer: torch.optim.Optimizer
    replicas: Group = None
    reorders_buckets = False  # True: the first step decides the order of the buckets

    def __init__(
        self, model: nn.Module, config: Config, loss_sum: LossSum, lessons: Lessons
    ) -> None:
        self.config, self.loss_sum, self.lessons = config, loss_sum, lessons
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.distribute(model)

    def distribute(self, model: nn.Module) -> None:
        """Spread the model, and make the optimizer of what this rank holds."""
        self.module = self.called = model
        self.make_optimizer()

    def make_optimizer(self) -> None:
        """Make torch's optimizer of this rank's parameters."""
        kind, options = optimizer_of(self.config)
        self.optimizer = kind(groups_of(self.module, self.config), **options)

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share a batch."""
        return dist.get_world_size(self.replicas)

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute in 16 bits, where the configuration says so."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.config.precision])

    # a step

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, images: Tensor, targets: Tensor, num_samples: int) -> Tensor:
        """Add the gradients of the mean loss of a global batch, as far as it is this rank's.

        Args:
            images: (b, 3, S, S), this rank's part; 1 image at least.
            targets: (b,) classes, or (b, classes) their shares.
            num_samples: Number of images of all ranks together.

        Returns:
            The sum of this rank's losses.
        """
        total = torch.zeros((), device=self.device)
        scale = self.num_replicas / num_samples  # the gradients become means over replicas
        micro_batches = list(self._cut(images, targets))
        for place, (x, y) in enumerate(micro_batches, start=1):
            with self.accumulating(is_last=place == len(micro_batches)):
                with self.autocast():
                    loss = self.loss_sum(self.called(x), y)
                scaled: Any = self.scaler.scale(loss * scale)
                scaled.backward()
            total += loss.detach()
        return total

    def _cut(self, images: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut into ``accumulate`` micro-batches: as many on all ranks, for each is a collective.

        Where there are too few images, others are added that do not count.
        """
        count = self.config.accumulate
        if (missing := count - len(images)) > 0:
            images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
            nothing = BAD if targets.dim() == 1 else 0
            shape = (missing, *targets.shape[1:])
            targets = torch.cat([targets, targets.new_full(shape, nothing)])
        return zip(images.tensor_split(count), targets.tensor_split(count), strict=True)

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Keep gradients on this rank until the last micro-batch has come."""
        yield

    def average_gradients(self) -> None:
        """Wait until the gradients are means over the replicas."""

    def step(self) -> None:
        """Change the parameters; the gradients are averaged before, or here."""
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    # between steps

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits of this rank's images; all ranks call it equally often."""
        logits: Tensor = self.module(images)
        return logits

    @property
    def computes(self) -> bool:
        """Whether this rank gets images at all."""
        return True

    @property
    def counts(self) -> bool:
        """Whether this rank's results count: not where others of its replica have the same."""
        return self.computes

    def warm_up(self, side: int, unchanged: Callable[[], AbstractContextManager[None]]) -> None:
        """Let gradients come once, which changes nothing but their order in the buckets.

        Otherwise a resumed run would add up its first gradients in the order of the parameters, and
        the last bits of the sums over three ranks or more would differ. Then compile, if asked to.

        Args:
            unchanged: keeps the state of the training.
        """
        if self.reorders_buckets:
            blank = torch.zeros(2, 3, side, side, device=self.device)
            nothing = torch.full((2,), BAD, device=self.device)
            with unchanged():
                self.forward_backward(blank, nothing, 1)
                self.average_gradients()
                self.module.zero_grad(set_to_none=True)  # frees the buckets of the old order
        if self.config.compile:
            self.called = torch.compile(self.called)

    def of_parameters(self, part: HasState) -> HasState:
        """Return a part that has a number for each of this rank's parameters, for checkpoints."""
        return part

    def parts(self) -> Mapping[str, HasState]:
        """Return what a checkpoint must hold, by name."""
        return {
            "model": Parameters(self.module),
            "buffers": Buffers(self.module),
            "optimizer": self.optimizer,
            "scaler": self.scaler,
        }


class Parameters:
    """The parameters of a module, the same on all ranks."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters by name; one that two layers share comes once."""
        return {name: value.detach() for name, value in self.module.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over values."""
        for name, value in self.module.named_parameters():
            value.copy_(state[name])
