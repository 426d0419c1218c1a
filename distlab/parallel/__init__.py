"""Train one model, split in three ways at once, with the functions of the course's tasks.

sizes = Parallelism.parse("dp=2,pp=2,tp=2")
part = split(gpt, sizes, lesson)      # on each of 8 ranks: this rank's part of the model

replica   a whole copy of the model; dp of them train on different samples
stage     consecutive blocks of a replica; pp of them form a pipeline
shard     a rank's slice of every layer of a stage; tp of them make up the stage
part      one rank's share: one shard of one stage of one replica
"""

from distlab.parallel.part import Part, check, split
from distlab.parallel.sizes import Parallelism

__all__ = ["Parallelism", "Part", "check", "split"]
