"""Calls that torch makes by itself, and advice on what its functions require of a program.

Tensor.backward's all_reduce                     gradients of DistributedDataParallel
ScheduleGPipe.step's send                        activations of a pipeline
broadcast_object_list's broadcast                sizes, before the objects
"""

import re
from collections.abc import Iterable

import torch.distributed.distributed_c10d as c10d

_ADVICE = (  # (pattern of a function's name, advice); the first match counts
    (
        r"\.backward$",
        "torch makes this call for the gradients, in backward(): all ranks have to run the same "
        "backward passes, with gradients for the same parameters. Is one left out, in no_sync(), "
        "frozen, or not used on every rank (find_unused_parameters=True)? Ranks with fewer batches "
        "need join().",
    ),
    (
        r"^DistributedDataParallel\.forward$",
        "DistributedDataParallel makes this call in forward(), for buffers or buckets: all ranks "
        "have to run it equally often. To run the model on one rank alone, call its .module.",
    ),
    (
        r"^DistributedDataParallel",
        "DistributedDataParallel makes this call: all ranks have to wrap the same models, in the "
        "same order.",
    ),
    (
        r"^(FSDP|FullyShard|RegisterPostBackward)",
        "FSDP makes this call, for the parameters or gradients of one layer: all ranks have to run "
        "the same layers in the same order, and the same of them frozen.",
    ),
    (
        r"^\w*(Schedule|Pipeline)\w*\.",
        "The schedule makes this call: all ranks need the same kind of schedule and as many "
        "micro-batches, and the stage of each rank has its own index.",
    ),
    (
        r"^DTensor",
        "{} makes this call: all ranks of the mesh have to come there. Call it on every rank, and "
        "let one of them alone use the result.",
    ),
    (
        r"^Join$",
        "Join makes this call on ranks that have no inputs left. It stands in for the calls of "
        "what it was given, say DistributedDataParallel's, and for no others: none of your own may "
        "be inside.",
    ),
    (
        r"_object",
        "{} sends sizes first, then the objects: all ranks have to call it, with lists of the same "
        "length.",
    ),
    (r"coalesc", "{} is one call for several tensors: all ranks have to make it, with as many."),
    (
        r".",
        "torch makes this call by itself in {}: all ranks have to come there equally often, with "
        "the same settings.",
    ),
)
# Functions of torch.distributed that communicate through other functions of the module.
INDIRECT = frozenset(name for name in dir(c10d) if re.search("_object|coalesc", name))


def advice_for(makers: Iterable[str]) -> str:
    """Return advice on calls that torch's functions made, or "" if the program made all of them.

    Args:
        makers: For each call, the name of the torch function that made it; "" for the program.
    """
    names = dict.fromkeys(filter(None, makers))
    fitting = (
        text.format(name) for name in names for pattern, text in _ADVICE if re.search(pattern, name)
    )
    return next(fitting, "")
