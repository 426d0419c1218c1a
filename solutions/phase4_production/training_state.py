"""The whole state of a run, from which the run can resume bit for bit."""

import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phase4_production.given import Group, HasState


class ResumableSampler:
    """Decides which samples each rank trains on, and keeps track of the position in the epoch.

    For example, 3 ranks train on 10 samples in global batches of 4. The ranks' shares of a batch
    differ by at most one sample. Any such split will do; here, batches are cut as by
    ``tensor_split``:
        order of the epoch   7 2 9 0 | 4 1 8 3 | 5 6
        rank 0               7 2       4 1       5
        rank 1               9         8         6
        rank 2               0         3
        position             0         4         8

        for samples in sampler:
            train(samples)
            sampler.advance()

    Pass the sampler to a DataLoader as ``batch_sampler``, with ``generator=torch.Generator()``, so
    that the loader does not draw from the run's generators, and with a ``collate_fn`` that accepts
    an empty share.
    """

    def __init__(
        self, num_samples: int, global_batch: int, seed: int = 0, group: Group = None
    ) -> None:
        """Start with epoch 0.

        Args:
            num_samples: samples in the dataset; at least 1.
            global_batch: number of samples that all ranks together train on in a step; at least 1.
            seed: seed of the sample order; the same on all ranks.
            group: the ranks that share the samples; all ranks by default.
        """
        self.num_samples, self.global_batch = num_samples, global_batch
        self.seed, self.group = seed, group
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's share of each global batch that is left in the epoch.

        The order of an epoch depends only on the seed and the epoch: it is the same on all ranks,
        for any number of them, and differs from epoch to epoch. Each sample occurs once. The last
        batch may be shorter than the others, and a rank's share may be empty.

        Iterating does not move the position, because a DataLoader requests batches before they are
        trained on. The random generators of the process are neither used nor changed.
        """
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_samples, generator=generator)[self.position :]
        rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        for batch in order.split(self.global_batch):
            yield batch.tensor_split(num_ranks)[rank].tolist()

    def __len__(self) -> int:
        """Return how many global batches are left in the epoch."""
        return -(-(self.num_samples - self.position) // self.global_batch)

    def advance(self) -> None:
        """Record that a global batch was trained on; after the last one, the next epoch begins."""
        self.position += self.global_batch
        if self.position >= self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the state of the sampler, which can be loaded on any number of ranks.

        Returns:
            ``epoch``; ``position``, the number of samples of the epoch that all ranks together have
            trained on; ``seed`` and ``num_samples``.
        """
        names = ("epoch", "position", "seed", "num_samples")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from another sampler's position, in the same order of samples.

        Args:
            state: state of a sampler with any number of ranks, global batch and seed. Not changed.

        Raises:
            ValueError: the number of samples differs; the message names both numbers.
        """
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the state is of {state['num_samples']} samples, and here are {self.num_samples}: "
                "the order of an epoch would be another"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self.seed = state["seed"]


class TrainingState:
    """Everything that a run needs to continue bit for bit.

    Parts are objects with ``state_dict`` and ``load_state_dict``, and have the same state on all
    ranks. The random generators differ from rank to rank, so their states are gathered:
        rank 0    model optimizer scheduler scaler ema sampler    generators 0 ─┐
        rank 1    the same                                        generators 1 ─┼─ state
        rank 2    the same                                        generators 2 ─┘

        training = TrainingState({"model": model, "optimizer": optimizer, "sampler": sampler})
        if loaded := load_checkpoint(folder):
            training.load_state_dict(loaded.state)
    """

    def __init__(self, parts: Mapping[str, HasState], group: Group = None) -> None:
        """Store the arguments; nothing is read or changed.

        Args:
            parts: parts of the run, by name.
            group: the ranks that train together; all ranks by default.
        """
        self.parts, self.group = parts, group

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts, and of the generators of all ranks.

        All ranks of the group call this, between two steps. It does not affect the training that
        follows. The generators are the global ones of ``random``, of NumPy, and of torch, for the
        CPU and, if the process has used CUDA (``torch.cuda.is_initialized()``), for the current
        CUDA device.

        Returns:
            The same state on all ranks. ``torch.load(…, weights_only=True)`` can read this state if
            it can read the states of the parts. Its tensors may be the ones that training changes:
            write or copy them before the next step.

        Cost: at most three collectives, in which each rank sends the state of its generators, at
        most 40 kB, to each of the others; the parts are not sent.
        """
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        generators: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(generators, _generators(), group=self.group)
        return {"parts": parts, "generators": generators}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, so that the run continues like the one that was saved.

        On the same number of ranks as before, each rank gets its own generators back, even if parts
        draw random numbers while they are loaded. CUDA's generator is skipped where there is no
        CUDA.

        On a different number of ranks, the run can't continue bit for bit, and the generators are
        seeded again. After that, no two ranks draw the same numbers, but each rank draws the same
        numbers every time this state is loaded on that number of ranks.

        Args:
            state: state of parts with the same names. Neither this call nor training changes it, so
                it can be loaded again.

        Raises:
            ValueError: a part is missing from ``state`` or from this object; the message names it,
                and nothing is loaded.

        Cost: no communication, and a copy of one part at a time.
        """
        if other := self.parts.keys() ^ state["parts"].keys():
            raise ValueError(f"these parts are only in the state or only here: {sorted(other)}")
        for name, part in self.parts.items():
            part.load_state_dict(deepcopy(state["parts"][name]))  # optimizers keep these tensors
        rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if num_ranks == len(state["generators"]):  # last, because loading parts may draw numbers
            _set_generators(state["generators"][rank])
        else:
            _seed_generators(state["generators"][0], rank)


def _generators() -> dict[str, Any]:
    """Return the states of this rank's generators."""
    of_numpy: Any = np.random.get_state()  # a tuple
    kind, numbers, *rest = of_numpy
    found = {
        "python": random.getstate(),
        "numpy": (kind, numbers.tolist(), *rest),  # weights_only does not load arrays
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # otherwise nothing was drawn, and asking would start CUDA
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_generators(states: Mapping[str, Any]) -> None:
    """Set this rank's generators to the given states."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _seed_generators(states: Mapping[str, Any], rank: int) -> None:
    """Seed this rank's generators by its rank and by states that are the same on all ranks."""
    _set_generators(states)
    seed = int(torch.randint(2**31, ())) + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # CUDA's too
