"""Language: the course's own text as bytes, or shards of tokens, and what a model writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from distlab import lessons
from distlab.data import DataError
from distlab.production.config import Config
from distlab.production.samples import Key

if TYPE_CHECKING:  # the loader's processes need no strategies
    from distlab.production.strategies import Strategy

BYTES = 256  # size of the vocabulary of text
TEST_SHARE = 0.1  # share of each guideline, at its end, that is tested
HEADER_BYTES = 256 * 4
HEADERS = {20240520: "uint16", 20240801: "uint32"}  # llm.c's magic numbers: GPT-2's, Llama 3's
PROMPT = 32  # tokens of the test set that a model continues
WRITTEN = 96  # tokens that it adds
TEMPERATURE = 0.8


class Shard:
    """Tokens in a file, which each process maps into its memory; pickled, it is only its place."""

    def __init__(self, path: Path, dtype: str, offset: int, count: int) -> None:
        self.place = path, dtype, offset, count

    def __len__(self) -> int:
        return self.place[-1]

    def __getitem__(self, part: slice) -> NDArray[Any]:
        return self.tokens[part]

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, self.place

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, which are read only when they are used."""
        path, dtype, offset, count = self.place
        return np.memmap(path, dtype, "r", offset, (count,))


Tokens = NDArray[Any] | Shard


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of T tokens, and for each token the one that follows it; indexed by ``Key``.

    With T = 3, two texts come from a shard of eight tokens, and the last one is only a target or
    left out:
        shard      0 1 2 3 4 5 6 7
        inputs     0 1 2 | 3 4 5
        targets    1 2 3 | 4 5 6
    """

    def __init__(self, shards: Sequence[Tokens], config: Config, vocab_size: int) -> None:
        self.shards, self.length, self.vocab_size = shards, config.sequence_length, vocab_size
        counts = [max(len(shard) - 1, 0) // self.length for shard in shards]
        self.ends = np.cumsum(counts)  # number of texts up to the end of each shard

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        _, index = key
        place = int(np.searchsorted(self.ends, index, side="right"))
        first = (index - (int(self.ends[place - 1]) if place else 0)) * self.length
        values = self.shards[place][first : first + self.length + 1].astype(np.int64)
        if values.max() >= self.vocab_size:
            raise DataError(
                f"shard {place} has the token {values.max()} after token {first:,}, and vocab_size "
                f"is {self.vocab_size}: raise it"
            )
        tokens = torch.from_numpy(values)
        return tokens[:-1], tokens[1:]


def open_texts(config: Config) -> tuple[Texts, Texts, int]:
    """Open the training and the test texts, and return them with the size of the vocabulary.

    Raises:
        DataError: A file is missing, damaged, or too short for one text; or distlab is installed
            without the course, whose guidelines are the text.
    """
    vocab_size = BYTES if config.data == "text" else config.vocab_size
    halves = _guidelines() if config.data == "text" else _shards(config)
    train, test = (Texts(half, config, vocab_size) for half in halves)
    if not len(train) or not len(test):
        raise DataError(
            f"the data has {len(train)} texts of {config.sequence_length} tokens for training, and "
            f"{len(test)} for tests: lower sequence_length"
        )
    return train, test, vocab_size


def _guidelines() -> Sequence[Sequence[Tokens]]:
    paths = sorted(lessons.COURSE.glob("phase*/guidelines.md"))
    if not paths:
        raise DataError("data: text reads the course's guidelines, and this distlab has none")
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    cuts = [round(len(file) * (1 - TEST_SHARE)) for file in files]
    pairs = list(zip(files, cuts, strict=True))
    return [[file[:cut] for file, cut in pairs], [file[cut:] for file, cut in pairs]]


def _shards(config: Config) -> Sequence[Sequence[Tokens]]:
    """Open all shards of ``data_dir``: for training those with "train" in their names, then "val".

    Raises:
        DataError: There are none, or one of them is damaged.
    """
    folder, halves = Path(config.data_dir or ""), []
    for half in ("train", "val"):
        paths = sorted(folder.glob(f"*{half}*.bin"))
        if not paths:
            raise DataError(
                f"data_dir: {folder} has no files *{half}*.bin: expected shards of tokens such as "
                "train.bin and val.bin"
            )
        halves.append([_opened(path, config.token_dtype) for path in paths])
    return halves


def _opened(path: Path, dtype: str) -> Shard:
    """Open a shard: raw tokens as nanoGPT writes them, or after the header of llm.c.

    The header has 256 int32 numbers: a magic number, a version, and the number of tokens.

    Source: Karpathy's nanoGPT (data/openwebtext/prepare.py) and llm.c (dev/data/data_common.py).
    """
    header = np.fromfile(path, np.int32, 3).tolist()
    has_header = len(header) == 3 and header[0] in HEADERS
    dtype, offset = (HEADERS[header[0]], HEADER_BYTES) if has_header else (dtype, 0)
    present = (path.stat().st_size - offset) // np.dtype(dtype).itemsize
    promised = header[2] if has_header else present
    if not promised or present < promised:
        of = f" of the {promised:,} in its header" if promised else ""
        raise DataError(f"{path} has {present:,} tokens{of}")
    return Shard(path, dtype, offset, promised)


@torch.no_grad()
def continued(strategy: Strategy, texts: Texts) -> tuple[list[int], list[int]]:
    """Return the first tokens of the test set, and how the model goes on; called on all ranks.

    Cost: as many forward passes of one text as tokens are written.
    """
    prompt = texts[0, 0][0][:PROMPT]
    tokens, random = prompt, torch.Generator().manual_seed(0)
    for _ in range(WRITTEN):
        inputs = tokens[-texts.length :].to(strategy.device)
        with strategy.autocast():
            logits = strategy.predict(inputs[None])
        drawn = torch.zeros(1, dtype=torch.int64)
        if logits is not None:
            chances = (logits[0, -1].float().cpu() / TEMPERATURE).softmax(0)
            drawn = torch.multinomial(chances, 1, generator=random)
        drawn = drawn.to(strategy.device)
        dist.broadcast(drawn, src=dist.get_world_size() - 1)  # it has logits, also of a pipeline
        tokens = torch.cat([tokens, drawn.cpu()])
    return prompt.tolist(), tokens[len(prompt) :].tolist()


def as_text(tokens: Sequence[int], config: Config) -> str:
    """Return tokens as text on one line, or as numbers if their vocabulary is not known."""
    if config.data == "tokens":
        return " ".join(map(str, tokens))
    return " ".join(bytes(tokens).decode(errors="replace").split())
