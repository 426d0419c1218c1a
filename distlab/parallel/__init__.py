"""One training, split in three ways at once with the functions of the course's tasks.

sizes = Parallelism.parse("dp=2,pp=2,tp=2")
part = split(gpt, sizes, lesson)      # on each of 8 ranks: this rank's part of the model

replica   a whole copy of the model; dp of them train on different samples
stage     consecutive blocks of a replica; pp of them are a pipeline
shard     the slice of each layer of a stage that a rank holds; tp of them make it whole
part      share of one rank: one shard of one stage of one replica
"""

from distlab.parallel.part import Part, check, split
from distlab.parallel.sizes import Parallelism

__all__ = ["Parallelism", "Part", "check", "split"]
