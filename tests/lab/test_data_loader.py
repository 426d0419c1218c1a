"""Shards of all sizes, and loader errors; the suite judges what the tasks load and send."""

import gc
import multiprocessing
import random
import warnings
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks, refusal
from torch.utils.data import Dataset, TensorDataset

from solutions.phase1_data_parallel.data_loader import (
    Sample,
    build_loader,
    scatter_batch,
    shard_indices,
)

num_samples_ = st.integers(1, 150)
world_size_ = st.integers(1, 12)
seed_ = st.integers(0, 2**40)
epoch_ = st.integers(0, 1000)


def shards(num_samples: int, world_size: int, **settings: Any) -> list[list[int]]:
    return [shard_indices(num_samples, rank, world_size, **settings) for rank in range(world_size)]


def in_turns(lists: list[list[int]]) -> list[int]:
    """Interleave the lists: return the 0th item of each, then the 1st of each, and so on."""
    return [index for turn in zip_longest(*lists, fillvalue=-1) for index in turn]


@given(num_samples_, world_size_, epoch_, seed_, st.booleans())
def test_ranks_take_turns_in_the_order_of_one_process_and_wrap_round(
    num_samples: int, world_size: int, epoch: int, seed: int, shuffle: bool
) -> None:
    settings: dict[str, Any] = {"epoch": epoch, "seed": seed, "shuffle": shuffle}
    order = shard_indices(num_samples, 0, 1, **settings)
    assert sorted(order) == list(range(num_samples))
    assert shuffle or order == sorted(order)

    padded = in_turns(shards(num_samples, world_size, **settings))
    cut = in_turns(shards(num_samples, world_size, **settings, drop_last=True))
    assert len(padded) == -(-num_samples // world_size) * world_size
    assert padded == [order[k % num_samples] for k in range(len(padded))]
    assert cut == order[: num_samples // world_size * world_size]


@pytest.mark.parametrize(
    ("num_samples", "rank", "world_size", "says"),
    [
        (10, -1, 4, "rank -1 is not in 0 … 3"),
        (10, 4, 4, "rank 4 is not in 0 … 3"),
        (10, 0, 0, "rank 0 is not in"),
        (0, 0, 4, "a data set of 0 samples cannot be sharded"),
    ],
)
def test_shard_that_cannot_be_is_refused(
    num_samples: int, rank: int, world_size: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        shard_indices(num_samples, rank, world_size)


class Broken(Dataset[Sample]):
    """A data set that, for each sample, draws from the global generators and then fails."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        torch.rand(()), np.random.rand(), random.random()
        raise ValueError(f"sample {index} cannot be read")


def draws(*, loads: bool) -> tuple[str, list[float]]:
    """Return the loading error, if any, and the random numbers that training would draw next."""
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    text = refusal(lambda: list(build_loader(Broken(), 4, shuffle=False))) if loads else ""
    return text, [float(torch.rand(())), np.random.rand(), random.random()]


def draws_with_and_without_loading() -> list[tuple[str, list[float]]]:
    return [draws(loads=True), draws(loads=False)]


def test_a_sample_that_cannot_be_read_leaves_the_generators_as_they_were() -> None:
    [((text, after_it), (_, undisturbed))] = on_ranks(draws_with_and_without_loading, 1)
    assert text == "sample 0 cannot be read"
    assert after_it == undisturbed


class Noisy(Dataset[Sample]):
    """A data set that fetches whole batches, whose images are random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [(torch.rand(()) + np.random.rand() + random.random(), k) for k in indices]


def images_after(epochs: list[int], settings: dict[str, Any]) -> list[list[float]]:
    """Return the batches of the last epoch; of each epoch before it, load only the first batch."""
    warnings.simplefilter("error")  # such as torch's, if there is no GPU to pin memory for
    loader, batches = build_loader(Noisy(), 2, pin_memory=True, **settings), []
    for epoch in epochs:
        loader.set_epoch(epoch)
        count = len(loader) if epoch == epochs[-1] else 1
        batches = [images.tolist() for images, _ in islice(loader, count)]
    return batches


def test_an_epoch_does_not_depend_on_who_loads_it_and_what_they_loaded_before() -> None:
    stay = {"num_loader_workers": 2, "persistent_workers": True}
    [expected] = on_ranks(images_after, 1, [3], {})
    assert len({tuple(batch) for batch in expected}) == 6
    for epochs, settings in (([3], stay), ([0, 1, 3], stay), ([0, 1, 3], {})):
        assert on_ranks(images_after, 1, epochs, settings) == [expected]


def processes_end_with_their_loader() -> bool:
    gc.disable()  # which would take 5 s for each process
    loader = build_loader(Noisy(), 4, num_loader_workers=1, persistent_workers=True)
    list(loader)
    [process] = multiprocessing.active_children()
    del loader
    return not process.is_alive()


def test_a_loader_that_is_dropped_ends_its_processes_at_once() -> None:
    assert on_ranks(processes_end_with_their_loader, 1) == [True]


def errors_of_build_loader(sizes: list[tuple[int, int]]) -> list[str]:
    texts = []
    for size, batch in sizes:
        data = TensorDataset(torch.zeros(size), torch.zeros(size))
        texts.append(refusal(partial(build_loader, data, batch)))
    return texts


def test_global_batch_that_cannot_be_is_refused_with_what_would_do() -> None:
    refused = {
        (100, 64): "a global batch of 64 cannot be shared equally by 3 ranks: use 63 or 66",
        (100, 2): "a global batch of 2 cannot be shared equally by 3 ranks: use 3",
        (100, 0): "a global batch of 0 cannot be shared equally by 3 ranks: use 3",
        (100, 102): "a global batch of 102 needs more than the 100 samples there are",
    }
    for texts in on_ranks(errors_of_build_loader, 3, [*refused], backend="sim"):
        assert [text[: len(says)] for text, says in zip(texts, refused.values(), strict=True)] == [
            *refused.values()
        ]


def errors_of_scatter_batch(src: int) -> list[str]:
    """Return the texts of two errors, after which the world still has to work."""
    uneven = (torch.zeros(4, 2), torch.zeros(3)) if dist.get_rank() == src else None
    texts = [refusal(lambda: scatter_batch(None, src)), refusal(lambda: scatter_batch(uneven, src))]
    dist.barrier()
    return texts


def test_wrong_batch_of_the_source_is_an_error_on_every_rank() -> None:
    for no_batch, lengths in on_ranks(errors_of_scatter_batch, 3, 2):
        assert no_batch.startswith("scatter_batch from rank 2: it passed None")
        assert lengths == "scatter_batch from rank 2: it passed images (4, 2) and labels (3,)"
