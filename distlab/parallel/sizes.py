"""Sizes of a training run's mesh of ranks, and the limits set by model, batch and world."""

import re
from dataclasses import asdict, dataclass

from distlab.util.text import counted

EXAMPLE = "dp=2,pp=2,tp=2"
_SIZE = re.compile(r"\s*(dp|pp|tp)=([1-9][0-9]{0,8})\s*")
_PIPELINE = (
    "split_micro_batches",
    "partition_layers",
    "StageRunner.forward",
    "one_f_one_b_schedule",
    "run_schedule",
)
_SHARDS = ("parallelize_mlp",)


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the mesh of ranks; ``str`` formats them for ``parse``, leaving out sizes of 1."""

    dp: int = 1  # number of replicas
    pp: int = 1  # stages per replica
    tp: int = 1  # shards per stage

    @classmethod
    def parse(cls, text: str) -> "Parallelism":
        """Parse ``dp=2,pp=2,tp=2``, in any order; an omitted size is 1.

        Raises:
            ValueError: The text does not have this form; the message names the invalid item.
        """
        sizes: dict[str, int] = {}
        for item in text.split(","):
            match = _SIZE.fullmatch(item)
            if not match:
                raise ValueError(
                    f"{item!r} is not dp, pp or tp with a size, 1 or more: write {EXAMPLE}"
                )
            name, size = match.groups()
            if name in sizes:
                raise ValueError(f"{name} is there twice: write {EXAMPLE}")
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in asdict(self).items() if size > 1]
        return ",".join(sizes) or "dp=1"

    @property
    def num_ranks(self) -> int:
        """Total number of ranks in all replicas."""
        return self.dp * self.pp * self.tp

    @property
    def splits_model(self) -> bool:
        """True if a rank holds less than the whole model."""
        return self.pp * self.tp > 1

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the Phase 2 functions that split a model this way."""
        return (*(_PIPELINE if self.pp > 1 else ()), *(_SHARDS if self.tp > 1 else ()))

    def check_world(self, num_ranks: int, who: str, advice: str) -> None:
        """Check that the world has as many ranks as the mesh.

        Args:
            num_ranks: Number of ranks of the world.
            who: Beginning of a clause that ends with that number, such as "torchrun started".
            advice: Advice for the user, such as "start 8".

        Raises:
            ValueError: The world has a different size; the message contains both sizes.
        """
        if num_ranks != self.num_ranks:
            product = " x ".join(str(size) for size in asdict(self).values())
            raise ValueError(
                f"{product} = {counted(self.num_ranks, 'rank')}, but {who} {num_ranks}: {advice}"
            )

    def check_model(self, num_blocks: int, num_heads: int) -> None:
        """Check that a model has a block for each stage, and heads that shards can share equally.

        Raises:
            ValueError: A size does not fit the model; the message names sizes that do.
        """
        if self.pp > num_blocks:
            raise ValueError(
                f"each of {self.pp} stages needs a block, and the model has {num_blocks}: "
                f"use pp={num_blocks} or less"
            )
        if num_heads % self.tp:
            fitting = [f"tp={size}" for size in range(1, num_heads + 1) if num_heads % size == 0]
            raise ValueError(
                f"{num_heads} attention heads cannot be shared equally by {self.tp} ranks: "
                f"use {', '.join(fitting[:-1])} or {fitting[-1]}"
            )

    def check_batch(self, batch_size: int) -> None:
        """Check that a batch gives each replica at least one sample for each of its stages.

        Args:
            batch_size: Number of samples, which all replicas share equally.

        Raises:
            ValueError: The batch is too small; the message names the smallest that fits.
        """
        share = batch_size // self.dp
        if share < self.pp:
            raise ValueError(
                f"--batch-size {batch_size} gives each replica {counted(share, 'sample')}, fewer "
                f"than its {self.pp} stages: use --batch-size {self.dp * self.pp} or more"
            )
