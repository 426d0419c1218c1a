"""Shards of an epoch, loaders over them, and batches that one rank hands out."""

import random
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import (
    MEMBERS,
    WORLD_SIZES,
    on_members,
    on_ranks,
    recorded,
    refusal,
    sent,
)
from torch import Tensor
from torch.utils.data import Dataset

from solutions.phase1_data_parallel.data_loader import (
    Batch,
    Sample,
    build_loader,
    scatter_batch,
    shard_indices,
)

# --- shard_indices -------------------------------------------------------------------------------

num_samples_ = st.integers(1, 150)
world_size_ = st.integers(1, 12)
seed_ = st.integers(0, 2**40)
epoch_ = st.integers(0, 1000)


def shards(num_samples: int, world_size: int, **settings: Any) -> list[list[int]]:
    return [shard_indices(num_samples, rank, world_size, **settings) for rank in range(world_size)]


def in_turns(lists: list[list[int]]) -> list[int]:
    """0th of every list, 1st of every list, …"""
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


def test_table_of_the_docstring() -> None:
    assert shards(7, 3, shuffle=False) == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert shards(7, 3, shuffle=False, drop_last=True) == [[0, 3], [1, 4], [2, 5]]


def test_with_fewer_samples_than_ranks_samples_repeat_or_nobody_gets_any() -> None:
    assert shards(2, 5, shuffle=False) == [[0], [1], [0], [1], [0]]
    assert shards(2, 5, drop_last=True) == [[], [], [], [], []]


def test_order_is_a_function_of_seed_and_epoch_and_of_nothing_else() -> None:
    orders = {}
    for seed in range(4):
        for epoch in range(4):
            orders[seed, epoch] = shard_indices(100, 0, 1, seed=seed, epoch=epoch)
            random.seed(seed)
            np.random.seed(epoch)
            torch.manual_seed(epoch)
            assert shard_indices(100, 0, 1, seed=seed, epoch=epoch) == orders[seed, epoch]
    assert len({tuple(order) for order in orders.values()}) == 16  # seed 0, epoch 1 is not 1, 0


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


# --- build_loader --------------------------------------------------------------------------------


class Numbered(Dataset[Sample]):
    """Sample k is the image [k, k] and the label k."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        return torch.full((2,), float(index)), index


class Noisy(Numbered):
    """Images are noise: one number each from torch, numpy and ``random``."""

    def __getitem__(self, index: int) -> Sample:
        noise = [float(torch.rand((), dtype=torch.float64)), np.random.rand(), random.random()]
        return torch.tensor(noise, dtype=torch.float64), torch.tensor(index)


Labels = list[list[int]]  # of the steps of an epoch


def loads(
    num_samples: int,
    global_batch_size: int,
    epochs: tuple[int, ...],
    shuffle: bool = True,
    group: dist.ProcessGroup | None = None,
) -> list[Labels]:
    loader = build_loader(
        Numbered(num_samples), global_batch_size, seed=5, shuffle=shuffle, group=group
    )
    history = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        history.append([labels.tolist() for _, labels in loader])
    return history


EPOCHS = (0, 1, 2, 0)
BATCH = 120  # every world size divides it
LOADED = [(num_samples, shuffle) for num_samples in (120, 250) for shuffle in (True, False)]


def loads_all() -> list[list[Labels]]:
    return [loads(num_samples, BATCH, EPOCHS, shuffle) for num_samples, shuffle in LOADED]


@cache
def loaded(world_size: int) -> list[list[list[Labels]]]:
    """Labels by rank, case, epoch and step."""
    return on_ranks(loads_all, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", range(len(LOADED)), ids=lambda case: str(LOADED[case]))
def test_batches_of_a_step_are_together_one_slice_of_the_order_of_one_process(
    world_size: int, case: int
) -> None:
    num_samples, shuffle = LOADED[case]
    by_rank = [rank[case] for rank in loaded(world_size)]
    for position, epoch in enumerate(EPOCHS):
        order = shard_indices(num_samples, 0, 1, seed=5, epoch=epoch, shuffle=shuffle)
        steps = list(zip(*(rank[position] for rank in by_rank), strict=True))
        assert len(steps) == num_samples // BATCH
        for step, parts in enumerate(steps):
            assert [len(part) for part in parts] == [BATCH // world_size] * world_size
            assert sorted(chain(*parts)) == sorted(order[step * BATCH : (step + 1) * BATCH])


@pytest.mark.parametrize(
    ("num_samples", "world_size", "batch"), [(3, 2, 2), (14, 5, 5), (47, 8, 24)]
)
def test_last_incomplete_global_batch_is_left_out_also_where_padding_would_fill_it(
    num_samples: int, world_size: int, batch: int
) -> None:
    by_rank = on_ranks(loads, world_size, num_samples, batch, (0,))
    assert [len(epochs[0]) for epochs in by_rank] == [num_samples // batch] * world_size


def test_loader_shares_among_the_ranks_of_its_group_only() -> None:
    case = (14, 6, EPOCHS)
    assert on_members(loads, *case) == on_ranks(loads, len(MEMBERS), *case)


def loads_noise(seed: int, num_loader_workers: int) -> list[list[list[float]]]:
    """Noise of three epochs, the third of which is the first again; (samples, 3 generators)."""
    loader = build_loader(Noisy(16), 8, seed=seed, num_loader_workers=num_loader_workers)
    history = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        history.append(list(chain(*(images.tolist() for images, _ in draws_besides(loader)))))
    return history


def draws_besides(loader: Iterable[Batch]) -> Iterator[Batch]:
    """What the training itself draws must not matter; in a new world it draws something else."""
    for batch in loader:
        torch.rand(3), np.random.rand(), random.random()
        yield batch


@pytest.mark.parametrize("num_loader_workers", [0, 1, 2])
def test_noise_of_loaders_differs_by_rank_epoch_and_batch_and_repeats(
    num_loader_workers: int,
) -> None:
    first, again, reseeded = (
        on_ranks(loads_noise, 2, seed, num_loader_workers) for seed in (3, 3, 4)
    )
    assert first == again
    for generator in range(3):
        drawn = [
            [sample[generator] for rank in run for sample in rank[epoch]]
            for run in (first, reseeded)
            for epoch in range(3)
        ]
        assert drawn[0] == drawn[2]  # epoch 0 again
        numbers = drawn[0] + drawn[1] + drawn[3] + drawn[4]  # 2 seeds, 2 epochs, all ranks
        assert len(numbers) == 4 * 16
        assert len(set(numbers)) == len(numbers)


def test_noise_is_the_same_on_the_simulated_cluster() -> None:
    assert on_ranks(loads_noise, 2, 3, 0, backend="sim") == on_ranks(loads_noise, 2, 3, 0)


def draws_of_training(loads: bool) -> list[float]:
    """Numbers that the training draws between its batches."""
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    loader = build_loader(Noisy(16), 8)
    drawn = []
    for _ in loader if loads else range(2):
        drawn += [float(torch.rand(())), np.random.rand(), random.random()]
    return drawn


def test_loading_in_this_process_draws_nothing_from_the_generators_of_the_training() -> None:
    assert on_ranks(draws_of_training, 2, True) == on_ranks(draws_of_training, 2, False)


class Broken(Noisy):
    def __getitem__(self, index: int) -> Sample:
        super().__getitem__(index)
        raise ValueError(f"sample {index} cannot be read")


def draws_after_a_broken_sample() -> tuple[str, list[float]]:
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    text = refusal(lambda: list(build_loader(Broken(4), 4, shuffle=False)))
    return text, [float(torch.rand(())), np.random.rand(), random.random()]


def test_a_sample_that_cannot_be_read_leaves_the_generators_as_they_were() -> None:
    (text, drawn), *_ = on_ranks(draws_after_a_broken_sample, 2)
    assert text == "sample 0 cannot be read"
    assert drawn == on_ranks(draws_of_training, 1, False)[0][:3]


def errors_of_build_loader(num_samples: int, global_batch_size: int) -> str:
    return refusal(lambda: build_loader(Numbered(num_samples), global_batch_size))


@pytest.mark.parametrize(
    ("num_samples", "batch", "says"),
    [
        (100, 64, "a global batch of 64 cannot be shared equally by 3 ranks: use 63 or 66"),
        (100, 2, "a global batch of 2 cannot be shared equally by 3 ranks: use 3"),
        (100, 0, "a global batch of 0 cannot be shared equally by 3 ranks: use 3"),
        (100, 102, "a global batch of 102 needs more than the 100 samples there are"),
    ],
)
def test_global_batch_that_cannot_be_is_refused_with_what_would_do(
    num_samples: int, batch: int, says: str
) -> None:
    texts = on_ranks(errors_of_build_loader, 3, num_samples, batch)
    assert [text.startswith(says) for text in texts] == [True] * 3, texts


# --- scatter_batch -------------------------------------------------------------------------------

SHAPES = [  # of one sample: image, its dtype, label, its dtype
    ((1, 4, 4), torch.float32, (), torch.int64),
    ((3,), torch.uint8, (2,), torch.float64),
    ((), torch.bfloat16, (), torch.bool),
]
NUM_ROWS = (0, 1, 2, 3, 10, 16)


def batch_of(num_rows: int, case: int) -> Batch:
    generator = torch.Generator().manual_seed(num_rows + 100 * case)
    image, image_dtype, label, label_dtype = SHAPES[case]
    images = torch.randint(0, 200, (num_rows, *image), generator=generator).to(image_dtype)
    labels = torch.randint(0, 2, (num_rows, *label), generator=generator).to(label_dtype)
    return images, labels


def scatters(group: dist.ProcessGroup | None = None) -> list[Batch]:
    """Every batch, from the first rank and from the last."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    return [
        scatter_batch(batch_of(num_rows, case) if rank == src else None, src, group=group)
        for src in (0, last)
        for case in range(len(SHAPES))
        for num_rows in NUM_ROWS
    ]


def check_scattered(by_rank: list[list[Batch]]) -> None:
    expected = [batch_of(num_rows, case) for case in range(len(SHAPES)) for num_rows in NUM_ROWS]
    for batch, *parts in zip(expected * 2, *by_rank, strict=True):
        num_rows = [len(labels) for _, labels in parts]
        assert num_rows == sorted(num_rows, reverse=True)
        assert num_rows[0] - num_rows[-1] <= 1
        for whole, of_ranks in zip(batch, zip(*parts, strict=True), strict=True):
            assert {part.dtype for part in of_ranks} == {whole.dtype}
            assert torch.equal(torch.cat(of_ranks), whole)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parts_put_together_are_the_batch_in_values_dtypes_and_order(world_size: int) -> None:
    check_scattered(on_ranks(scatters, world_size))


def test_source_is_counted_inside_the_group() -> None:
    check_scattered(on_members(scatters))


def scatters_ten() -> tuple[int, bool, list[tuple[int, int]]]:
    """Rows of mine, whether they are views of the batch, and what I sent: (to, bytes)."""
    images = torch.rand(3, 10).t()  # its rows are not contiguous
    batch = (images, torch.arange(10)) if dist.get_rank() == 1 else None
    with recorded() as steps:
        parts = scatter_batch(batch, 1)
    are_views = [same_memory(part, whole) for part, whole in zip(parts, batch or (), strict=False)]
    return len(parts[0]), are_views == [True, True], [(m.peer, m.num_bytes) for m in sent(steps)]


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_source_keeps_views_and_sends_each_other_rank_its_rows_only() -> None:
    num_rows, are_views, messages = zip(*on_ranks(scatters_ten, 4), strict=True)
    assert num_rows == (3, 3, 2, 2)
    assert are_views == (False, True, False, False)
    image_bytes, label_bytes = 3 * 4, 8
    assert messages[1] == [
        (to, num_rows[to] * size) for to in (0, 2, 3) for size in (image_bytes, label_bytes)
    ]
    assert (messages[0], messages[2], messages[3]) == ([], [], [])


def errors_of_scatter_batch(src: int) -> list[str]:
    """Texts of two failures; the world works on afterwards."""
    uneven = (torch.zeros(4, 2), torch.zeros(3)) if dist.get_rank() == src else None
    texts = [refusal(lambda: scatter_batch(None, src)), refusal(lambda: scatter_batch(uneven, src))]
    dist.barrier()
    return texts


@pytest.mark.parametrize("src", [0, 2])
def test_wrong_batch_of_the_source_is_an_error_on_every_rank(src: int) -> None:
    for no_batch, lengths in on_ranks(errors_of_scatter_batch, 3, src):
        assert no_batch.startswith(f"scatter_batch from rank {src}: it passed None")
        assert lengths == f"scatter_batch from rank {src}: it passed images (4, 2) and labels (3,)"
