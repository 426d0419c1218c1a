"""The sizes of a training's mesh of ranks, and their limits by model, batch and world."""

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
    """The sizes of the mesh of ranks; ``str`` writes them as ``parse`` reads them, without 1s."""

    dp: int = 1  # replicas
    pp: int = 1  # stages of a replica
    tp: int = 1  # shards of a stage

    @classmethod
    def parse(cls, text: str) -> "Parallelism":
        """Read ``dp=2,pp=2,tp=2``, in any order; a size that is left out is 1.

        Raises:
            ValueError: The text has another form; the message names the wrong item.
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
        """Number of ranks of all replicas together."""
        return self.dp * self.pp * self.tp

    @property
    def splits_model(self) -> bool:
        """True if a rank holds less than the whole model."""
        return self.pp * self.tp > 1

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions of Phase 2 that split a model this way."""
        return (*(_PIPELINE if self.pp > 1 else ()), *(_SHARDS if self.tp > 1 else ()))

    def check_world(self, num_ranks: int, who: str, advice: str) -> None:
        """Refuse a world of another size.

        Args:
            num_ranks: Number of ranks of the world.
            who: Beginning of a clause that ends with that number, such as "torchrun started".
            advice: Advice for the user, such as "start 8".

        Raises:
            ValueError: The world has another size; the message has both.
        """
        if num_ranks != self.num_ranks:
            product = " x ".join(str(size) for size in asdict(self).values())
            raise ValueError(
                f"{product} = {counted(self.num_ranks, 'rank')}, but {who} {num_ranks}: {advice}"
            )

    def check_model(self, num_blocks: int, num_heads: int) -> None:
        """Refuse to split a model into more stages or shards than it has parts for.

        Raises:
            ValueError: The model has too few parts; the message names sizes that fit.
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
        """Refuse a batch that gives a replica fewer samples than it has stages to keep busy.

        Args:
            batch_size: Number of samples of all replicas, which share them equally.

        Raises:
            ValueError: The batch is too small; the message names the smallest that fits.
        """
        share = batch_size // self.dp
        if share < self.pp:
            raise ValueError(
                f"--batch-size {batch_size} gives each replica {counted(share, 'sample')}, fewer "
                f"than its {self.pp} stages: use --batch-size {self.dp * self.pp} or more"
            )
