"""The base of all strategies, which is also the simplest one: a single process trains alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.production.config import Config
from distlab.production.lessons import Lessons
from distlab.production.optimization import TensorMean, groups_of, optimizer_of
from distlab.production.samples import blank
from distlab.production.states import Buffers, local
from distlab.production.strategies.mesh import Mesh
from distlab.production.types import Group, HasState

LossSum = Callable[[Tensor, Tensor], Tensor]  # logits, targets -> sum of the samples' losses
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class Strategy:
    """A way to spread a model over the ranks, and to take steps together.

        strategy.zero_grad()
        loss = strategy.forward_backward(inputs, targets, num_samples)   # adds to the gradients
        strategy.average_gradients()                                     # means over the replicas
        strategy.step()                                                  # changes the parameters

    Attributes:
        module: Part of the model that this rank holds.
        optimizer: Optimizer of the parameters that this rank updates.
        replicas: Group of the ranks that share a batch.
        waiting: Function that returns a context for blocks that wait for other ranks other than by
            ``Work.wait``. All ranks enter it equally often in a step.
    """

    module: nn.Module
    called: Any  # the module that training calls, perhaps wrapped
    optimizer: torch.optim.Optimizer
    replicas: Group
    reorders_buckets = False  # True if the first step determines the bucket order

    def __init__(
        self, model: nn.Module, config: Config, loss_sum: LossSum, lessons: Lessons, mesh: Mesh
    ) -> None:
        self.config, self.loss_sum, self.lessons = config, loss_sum, lessons
        self.mesh, self.replicas = mesh, mesh.replicas
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.distribute(model)

    def distribute(self, model: nn.Module) -> None:
        """Spread the model, and create the optimizer for this rank's part."""
        self.module = self.called = model
        self.make_optimizer()

    def make_optimizer(self) -> None:
        """Create torch's optimizer for this rank's parameters."""
        kind, options = optimizer_of(self.config)
        self.optimizer = kind(groups_of(self.module, self.config), **options)

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share a batch."""
        return dist.get_world_size(self.replicas)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in 16 bits if configured."""
        dtype, is_half = DTYPES[self.config.precision], self.config.is_half
        return torch.autocast(self.device.type, dtype) if is_half else nullcontext()

    # a step

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, inputs: Tensor, targets: Tensor, num_samples: int) -> Tensor:
        """Add the gradients of this rank's share of the global batch's mean loss.

        Args:
            inputs: (b, 3, S, S) images or (b, T) tokens, this rank's part; at least one sample.
            targets: (b,) classes, (b, classes) class probabilities, or (b, T) tokens.
            num_samples: Number of samples on all ranks together.

        Returns:
            The sum of this rank's losses.
        """
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        scale = self.num_replicas / num_samples  # the gradients become means over replicas
        micro_batches = list(self._cut(inputs, targets))
        for place, (x, y) in enumerate(micro_batches, start=1):
            with self.accumulating(is_last=place == len(micro_batches)):
                with self.autocast():
                    loss = self.loss_sum(_first(self.called(x), len(y)), y)
                self.backward(self.scaler.scale(loss * scale))
            total += loss.detach()
        return total

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _cut(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut a batch into ``accumulate`` micro-batches on every rank, so that collectives match.

        A micro-batch of fewer samples than ``_least_samples`` repeats them, as blank images would
        change BatchNorm's means. The repeated samples have no targets, and so no losses.
        """
        count, least = self.config.accumulate, self._least_samples()
        parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for x, y in parts:
            yield _repeated(x if len(x) else inputs[:1], least), y

    def _least_samples(self) -> int:
        """Return the lowest number of samples in a micro-batch.

        With ``compile``, all micro-batches have as many, so that nothing is compiled again.
        """
        if not self.config.compile:
            return 1
        share = -(-self.config.batch_size // self.num_replicas)
        return -(-share // self.config.accumulate)

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Keep gradients on this rank until the last micro-batch."""
        yield

    def average_gradients(self) -> None:
        """Wait until the gradients are means over the replicas."""

    def step(self) -> None:
        """Update the parameters; some strategies average the gradients here."""
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            self.clip_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip_gradients(self) -> None:
        """Scale the gradients so that the norm of all together is at most ``clip_norm``."""
        nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)

    # between steps

    def predict(self, inputs: Tensor) -> Tensor | None:
        """Return the logits of this rank's inputs; called the same number of times on all ranks.

        Only the last stage of a pipeline has them; the other ranks get None.
        """
        logits: Tensor = self.module(inputs)
        return logits

    @property
    def computes(self) -> bool:
        """True if this rank gets samples."""
        return True

    @property
    def counts(self) -> bool:
        """True if this rank's results count; others in its replica may have the same results."""
        return self.computes

    def warm_up(self, unchanged: Callable[[], AbstractContextManager[None]]) -> None:
        """Compute gradients once to fix their order in the buckets, and to compile if configured.

        Without this, a resumed run would sum its first gradients in parameter order, which changes
        the last bits of sums over three or more ranks; and the ranks would compile while others
        watch whether they are alive.

        Args:
            unchanged: Context that restores the training state at its end.
        """
        is_compiled = self.config.compile
        if self.reorders_buckets or is_compiled:
            others = self.config.progressive_resize.values() if is_compiled else ()
            with unchanged():
                for side in sorted({self.config.image_size, *others}):
                    self._compute_blank(side)

    def _compute_blank(self, side: int) -> None:
        """Compute gradients of 0 from blank samples, and drop them."""
        with self.device:
            inputs, targets = blank(self.config, 2, side)
        self.forward_backward(inputs, targets, 1)
        self.average_gradients()
        self.module.zero_grad(set_to_none=True)  # frees buckets in the order of the parameters

    def of_mean(self, mean: TensorMean) -> HasState:
        """Return the means of this rank's parameters as a part of a checkpoint."""
        return mean

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts of a checkpoint by name."""
        return {
            "model": Parameters(self.module),
            "buffers": Buffers(self.module),
            "optimizer": self.optimizer,
            "scaler": self.scaler,
        }


def _first(logits: Tensor, count: int) -> Tensor:
    """Return the first logits; a slice's gradient is one more tensor of the size of all logits."""
    return logits if len(logits) == count else logits[:count]


def _repeated(inputs: Tensor, least: int) -> Tensor:
    """Return inputs, repeated from the first on if there are fewer than ``least``."""
    if len(inputs) >= least:
        return inputs
    return torch.cat([inputs] * -(-least // len(inputs)))[:least]


class Parameters:
    """The parameters of a module, or this rank's shards of them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters by name; a parameter that two layers share is listed once."""
        named = self.module.named_parameters()
        return {name: local(value.detach()) for name, value in named}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values into the parameters."""
        for name, value in self.module.named_parameters():
            local(value).copy_(state[name])
