"""Sizes of the mesh of ranks: replicas of the model, stages of a replica, shards of a stage."""

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(ge=1, strict=True)]
EXAMPLE = "dp=2,pp=2,tp=2"
FLAT_SIZES = {"pipeline_parallelism": "pp", "tensor_parallelism": "tp"}  # other keys for two sizes


class Parallelism(BaseModel):
    """Sizes of the mesh of ranks, also written as one text, ``dp=2,pp=2,tp=2``.

    An omitted size is 1, or for ``dp`` all the ranks that are left.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp: Size | Literal["auto"] = "auto"  # replicas
    pp: Size = 1  # stages of each replica
    tp: Size = 1  # shards of each stage

    @model_validator(mode="before")
    @classmethod
    def _reads_text(cls, value: Any) -> Any:
        return _parsed(value) if isinstance(value, str) else value

    def __str__(self) -> str:
        usual = Parallelism.model_fields
        sizes = [f"{name}={size}" for name, size in self if size != usual[name].default]
        return ",".join(sizes) or "dp=auto"

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks, or None if as many are used as are there."""
        return None if self.dp == "auto" else prod((self.dp, self.pp, self.tp))


def _parsed(text: str) -> dict[str, int | str]:
    """Parse ``dp=2,pp=2,tp=2``, in any order."""
    sizes: dict[str, int | str] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if not (name in Parallelism.model_fields and (size.isdecimal() or size == "auto")):
            raise ValueError(f"{item.strip()!r} is no dp, pp or tp with a size: write {EXAMPLE}")
        if name in sizes:
            raise ValueError(f"{name} is there twice: write {EXAMPLE}")
        sizes[name] = int(size) if size.isdecimal() else size
    return sizes


def with_sizes(parallelism: Any, sizes: Mapping[str, Any]) -> Any:
    """Return a value of ``parallelism``, in any of its forms, with some sizes replaced."""
    if isinstance(parallelism, Parallelism):
        parallelism = parallelism.model_dump()
    known = _parsed(parallelism) if isinstance(parallelism, str) else parallelism or {}
    return {**known, **sizes} if isinstance(known, Mapping) else parallelism
