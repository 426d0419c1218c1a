"""Texts from shards of tokens, and the course's own text."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from little_runs import GPT
from picture_folders import quick

from distlab.data import DataError
from distlab.production.config import Config
from distlab.production.datasets import open_data
from distlab.production.language import Texts, as_text


def config_of(**changes: Any) -> Config:
    return quick(**{**GPT, "sequence_length": 3, **changes})


def of_folder(folder: Path, **changes: Any) -> Config:
    return config_of(data="tokens", data_dir=folder, vocab_size=100, **changes)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4), length=st.integers(1, 5))
def test_texts_follow_one_another_in_each_shard(sizes: list[int], length: int) -> None:
    shards = [100 * place + np.arange(size) for place, size in enumerate(sizes)]
    texts = Texts(shards, config_of(sequence_length=length), 1000)
    samples = [texts[0, index] for index in range(len(texts))]
    expected = [
        shard[first : first + length].tolist()
        for shard in shards
        for first in range(0, len(shard) - length, length)
    ]
    assert [inputs.tolist() for inputs, _ in samples] == expected
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in samples)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place() -> None:
    texts = Texts([np.arange(9)], config_of(), 8)
    assert texts[0, 1][1].tolist() == [4, 5, 6]
    with pytest.raises(DataError, match=r"token 9 after token 6, .* is 8: raise it"):
        Texts([np.array([0] * 9 + [9])], config_of(), 8)[0, 2]


def with_header(magic: int, tokens: np.ndarray[Any, Any], claimed: int) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, claimed
    return header.tobytes() + tokens.tobytes()


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        (np.arange(8, dtype=np.uint16).tobytes(), "uint16"),
        (np.arange(8, dtype=np.uint32).tobytes(), "uint32"),
        (with_header(20240520, np.arange(8, dtype=np.uint16), 8), "uint32"),
        (with_header(20240801, np.arange(8, dtype=np.uint32), 8), "uint16"),
    ],
)
def test_shards_of_nanogpt_and_of_llm_c(tmp_path: Path, content: bytes, dtype: str) -> None:
    for name in ("fineweb_train_000001.bin", "fineweb_train_000002.bin", "val.bin"):
        (tmp_path / name).write_bytes(content)
    data = open_data(of_folder(tmp_path, token_dtype=dtype))
    assert (len(data.train), len(data.test), data.num_classes) == (4, 2, 100)
    assert data.train[0, 3][1].tolist() == [4, 5, 6]
    assert pickle.loads(pickle.dumps(data.train))[0, 3][1].tolist() == [4, 5, 6]
    assert b"memmap" not in pickle.dumps(data.train), "the loader's processes map files themselves"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no files"),
        (b"", "train.bin has 0 tokens"),
        (np.arange(3, dtype=np.uint16).tobytes(), "has 0 texts of 3 tokens for training"),
        (
            with_header(20240520, np.arange(8, dtype=np.uint16), 9),
            "has 8 tokens of the 9 in its header",
        ),
    ],
)
def test_damaged_shards_are_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    for name in ("train.bin", "val.bin") if content is not None else ():
        (tmp_path / name).write_bytes(content or b"")
    with pytest.raises(DataError, match=told):
        open_data(of_folder(tmp_path))


def test_the_guidelines_are_the_text() -> None:
    config = config_of(sequence_length=128)
    data = open_data(config)
    assert data.num_classes == 256
    assert 8.5 < len(data.train) / len(data.test) < 9.5
    beginning = as_text(data.train[0, 0][0].tolist(), config)
    assert beginning.startswith("# Phase 1")


def test_tokens_without_a_vocabulary_stay_numbers(tmp_path: Path) -> None:
    assert as_text([*b"hi\n there", 255], config_of()) == "hi there\N{REPLACEMENT CHARACTER}"
    assert as_text([104, 105], of_folder(tmp_path)) == "104 105"
