"""Calls that torch makes by itself, and advice on what its functions require of a program.

Tensor.backward's all_reduce                     gradients of DistributedDataParallel
ScheduleGPipe.step's send                        activations of a pipeline
broadcast_object_list's broadcast                sizes, before the objects
"""

import re
from collections.abc import Collection, Mapping

import torch.distributed.distributed_c10d as c10d

from distlab.util.text import rank_names, verb

_BACKWARD, _FORWARD = r"\.backward$", r"^DistributedDataParallel\.forward$"
_FSDP = r"^(FSDP|FullyShard|RegisterPostBackward)"
_DTENSOR = r"^DTensor"
_OTHERS = r"."  # functions without advice of their own
_ADVICE = (  # (pattern of a function's name, advice); the first match counts
    (
        _BACKWARD,
        "torch makes this call for the gradients, in backward(): all ranks have to run the same "
        "backward passes, with gradients for the same parameters. Is one left out, in no_sync(), "
        "frozen, or not used on every rank (find_unused_parameters=True)?",
    ),
    (
        _FORWARD,
        "DistributedDataParallel makes this call in forward(), for buffers or buckets: all ranks "
        "have to run it equally often. To run the model on one rank alone, call its .module.",
    ),
    (
        r"^DistributedDataParallel",
        "DistributedDataParallel makes this call: all ranks have to wrap the same models, in the "
        "same order.",
    ),
    (
        _FSDP,
        "FSDP makes this call, for the parameters or gradients of one layer: all ranks have to run "
        "the same layers in the same order, and the same of them frozen.",
    ),
    (
        r"^\w*(Schedule|Pipeline)\w*\.",
        "The schedule makes this call: all ranks need the same kind of schedule and as many "
        "micro-batches, and the stage of each rank has its own index.",
    ),
    (
        _DTENSOR,
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
        _OTHERS,
        "torch makes this call by itself in {}: all ranks have to come there equally often, with "
        "the same settings.",
    ),
)
# Functions of torch.distributed that communicate through other functions of the module.
INDIRECT = frozenset(name for name in dir(c10d) if re.search("_object|coalesc", name))


def advice_for(makers: Mapping[int, str]) -> str:
    """Return advice on calls that torch's functions made, or "" if the program made all of them.

    Args:
        makers: For each rank, the name of the torch function that made its call; "" for the
            program.
    """
    if name := called_on_some_only(makers):
        here = [rank for rank, maker in makers.items() if maker == name]
        there = [rank for rank, maker in makers.items() if maker != name]
        return (
            f"{rank_names(here).capitalize()} {verb(here, 'have', 'has')} come to {name}, and "
            f"{rank_names(there)} {verb(there, 'have', 'has')} not. Is it under an `if` on the "
            "rank? All ranks have to call it, even if one of them alone uses the result. Or do "
            "they take unequal numbers of steps?"
        )
    names = dict.fromkeys(filter(None, makers.values()))
    past = [rank for rank, maker in makers.items() if not maker or maker in INDIRECT]
    if past and any(re.search(_BACKWARD, name) for name in names):
        return f"{_are_past(past)} Or {_have_left_out(past)}"
    if past and (forward := next((n for n in names if re.search(_FORWARD, n)), "")):
        return f"{_are_past(past)} If not: {_advice_on(forward)}"
    return next(filter(None, map(_advice_on, names)), "")


def _are_past(ranks: Collection[int]) -> str:
    return (
        f"{verb(ranks, 'Are', 'Is')} {rank_names(ranks)} past these steps, with fewer batches "
        "(use Join, or as many batches on each rank), or by a decision to stop that each rank "
        "makes alone (all-reduce or broadcast it)?"
    )


def _have_left_out(ranks: Collection[int]) -> str:
    return (
        f"{verb(ranks, 'do', 'does')} {verb(ranks, 'they', 'it')} make a call that the others "
        "leave out, or have no gradients in this step (no_sync(), frozen or unused parameters)?"
    )


def called_on_some_only(makers: Mapping[int, str]) -> str:
    """Return torch's function to which only some ranks have come, while others take a step; or "".

    For example, rank 0 takes a state dict, and rank 1 is in its next backward pass.
    """
    names = {*makers.values()}
    steps = {name for name in names if re.search(f"{_BACKWARD}|{_FORWARD}|{_FSDP}", name)}
    others = [name for name in names - steps if _pattern(name) in (_OTHERS, _DTENSOR)]
    return others[0] if steps and len(steps) == len(names) - 1 and others else ""


def _pattern(maker: str) -> str:
    return next((pattern for pattern, _ in _ADVICE if re.search(pattern, maker)), "")


def _advice_on(maker: str) -> str:
    return next(text.format(maker) for pattern, text in _ADVICE if re.search(pattern, maker))


def advice_if_ended(maker: str, ended: Collection[int]) -> str:
    """Return advice on a call of torch's, for which ranks that have ended would be needed."""
    if re.search(_BACKWARD, maker):
        return past_the_steps(ended)
    if re.search(_FORWARD, maker):
        return f"{past_the_steps(ended)} If not: {_advice_on(maker)}"
    return (
        f"{_advice_on(maker)} Why did {rank_names(ended)} return before: with fewer batches, or by "
        "a decision to stop that each rank makes alone (all-reduce or broadcast it)?"
    )


def past_the_steps(ranks: Collection[int]) -> str:
    """Ask why ranks take no more steps, though others do."""
    return (
        f"{rank_names(ranks).capitalize()} {verb(ranks, 'are', 'is')} past these steps: "
        f"{verb(ranks, 'have they', 'has it')} fewer batches (use Join, or as many batches on each "
        "rank), or does each rank decide alone when to stop (all-reduce or broadcast the decision)?"
    )
