"""The whole state of a run, from which the run can resume bit for bit.

Task 4.2. The docstring says what a function promises, its TODO gives an example, and guidelines.md
explains why and how. To grade it: ``distlab check 4.2``.
"""

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
        # TODO 4.2: keep the arguments, and where the run is: at the beginning of epoch 0.
        #   Example: 10 samples, global batches of 4: epoch 0, position 0.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.2: ResumableSampler.__init__, see guidelines.md#42-go-on-bit-for-bit"
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's share of each global batch that is left in the epoch.

        The order of an epoch depends only on the seed and the epoch: it is the same on all ranks,
        for any number of them, and differs from epoch to epoch. Each sample occurs once. The last
        batch may be shorter than the others, and a rank's share may be empty.

        Iterating does not move the position, because a DataLoader requests batches before they are
        trained on. The random generators of the process are neither used nor changed.
        """
        # TODO 4.2: yield this rank's part of each batch, from the position on.
        #   Example: position 4, the rest is 4 1 8 3 5 6, on 3 ranks: rank 0 gets [4, 1] and [5],
        #     rank 2 [3] and [].
        #   About 6 lines.
        raise NotImplementedError(
            "Task 4.2: ResumableSampler.__iter__, see guidelines.md#42-go-on-bit-for-bit"
        )

    def __len__(self) -> int:
        """Return how many global batches are left in the epoch."""
        # TODO 4.2: count the global batches that are left, a shorter last one too.
        #   Example: 10 samples, global batches of 4, position 4: 2.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.2: ResumableSampler.__len__, see guidelines.md#42-go-on-bit-for-bit"
        )

    def advance(self) -> None:
        """Record that a global batch was trained on; after the last one, the next epoch begins."""
        # TODO 4.2: move the position by a global batch; after the last one, begin an epoch.
        #   Example: 10 samples, global batches of 4, position 8 in epoch 0: epoch 1, position 0.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.2: ResumableSampler.advance, see guidelines.md#42-go-on-bit-for-bit"
        )

    def state_dict(self) -> dict[str, int]:
        """Return the state of the sampler, which can be loaded on any number of ranks.

        Returns:
            ``epoch``; ``position``, the number of samples of the epoch that all ranks together have
            trained on; ``seed`` and ``num_samples``.
        """
        # TODO 4.2: return the four numbers by their names.
        #   Example: {"epoch": 0, "position": 4, "seed": 0, "num_samples": 10}.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.2: ResumableSampler.state_dict, see guidelines.md#42-go-on-bit-for-bit"
        )

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from another sampler's position, in the same order of samples.

        Args:
            state: state of a sampler with any number of ranks, global batch and seed. Not changed.

        Raises:
            ValueError: the number of samples differs; the message names both numbers.
        """
        # TODO 4.2: refuse the state of another number of samples; take over the rest.
        #   Example: a state of 10 samples where there are 12: the error names 10 and 12.
        #   About 7 lines.
        raise NotImplementedError(
            "Task 4.2: ResumableSampler.load_state_dict, see guidelines.md#42-go-on-bit-for-bit"
        )


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
        # TODO 4.2: keep the arguments.
        #   Example: 2 parts, "model" and "sampler": both are kept by name.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.2: TrainingState.__init__, see guidelines.md#42-go-on-bit-for-bit"
        )

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
        # TODO 4.2: gather all ranks' generators, and return them with the states of the parts.
        #   Example: 6 parts on 3 ranks: 6 states of parts, and 3 of generators, on all ranks.
        #   About 16 lines, with helpers.
        raise NotImplementedError(
            "Task 4.2: TrainingState.state_dict, see guidelines.md#42-go-on-bit-for-bit"
        )

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
        # TODO 4.2: compare the names, load copies of the parts, then set this rank's generators.
        #   Example: saved on 3 ranks: on 3, rank 2 gets the third; on 2, both are seeded anew.
        #   About 24 lines, with helpers.
        raise NotImplementedError(
            "Task 4.2: TrainingState.load_state_dict, see guidelines.md#42-go-on-bit-for-bit"
        )
