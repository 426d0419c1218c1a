"""Calls that torch makes by itself, and advice on what its functions require of a program.

Tensor.backward's all_reduce                     gradients of DistributedDataParallel
ScheduleGPipe.step's send                        activations of a pipeline
broadcast_object_list's broadcast                sizes, before the objects
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch.distributed.distributed_c10d as c10d

from distlab.util.text import rank_names, verb


class _Advice(NamedTuple):
    """Advice on the calls of some of torch's functions.

    Attributes:
        names: Pattern of the functions' names.
        text: Advice, with {} for the name of the function.
        is_step: True if the functions belong to a step of training.
        has_result: True if a program may want what they return on one rank alone.
    """

    names: str
    text: str
    is_step: bool = False
    has_result: bool = False


_BACKWARD, _FORWARD = r"\.backward$", r"^DistributedDataParallel\.forward$"
_ADVICE = (  # the first whose pattern matches counts
    _Advice(
        _BACKWARD,
        "torch makes this call for the gradients, in backward(): all ranks have to run the same "
        "backward passes, with gradients for the same parameters. Is one left out, in no_sync(), "
        "frozen, or not used on every rank (find_unused_parameters=True)?",
        is_step=True,
    ),
    _Advice(
        _FORWARD,
        "DistributedDataParallel makes this call in forward(), for buffers or buckets: all ranks "
        "have to run it equally often. To run the model on one rank alone, call its .module.",
        is_step=True,
    ),
    _Advice(
        r"^DistributedDataParallel",
        "DistributedDataParallel makes this call: all ranks have to wrap the same models, in the "
        "same order.",
    ),
    _Advice(
        r"^(FSDP|FullyShard|RegisterPostBackward)",
        "FSDP makes this call, for the parameters or gradients of one layer: all ranks have to run "
        "the same layers in the same order, and the same of them frozen.",
        is_step=True,
    ),
    _Advice(
        r"^\w*(Schedule|Pipeline)\w*\.",
        "The schedule makes this call: all ranks need the same kind of schedule and as many "
        "micro-batches, and the stage of each rank has its own index.",
    ),
    _Advice(
        r"^DTensor",
        "{} makes this call: all ranks of the mesh have to come there. Call it on every rank, and "
        "let one of them alone use the result.",
        has_result=True,
    ),
    _Advice(
        r"^Join$",
        "Join makes this call on ranks that have no inputs left. It stands in for the calls of "
        "what it was given, say DistributedDataParallel's, and for no others: none of your own may "
        "be inside.",
    ),
    _Advice(
        r"_object",
        "{} sends sizes first, then the objects: all ranks have to call it, with lists of the same "
        "length.",
    ),
    _Advice(
        r"coalesc", "{} is one call for several tensors: all ranks have to make it, with as many."
    ),
    _Advice(
        r".",
        "torch makes this call by itself in {}: all ranks have to come there equally often, with "
        "the same settings.",
        has_result=True,
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
    return next(map(_advice_on, names), "")


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
    steps = {name for name in names if name and _advice(name).is_step}
    others = [name for name in names - steps if name and _advice(name).has_result]
    return others[0] if steps and len(steps) == len(names) - 1 and others else ""


def _advice(maker: str) -> _Advice:
    return next(advice for advice in _ADVICE if re.search(advice.names, maker))


def _advice_on(maker: str) -> str:
    return _advice(maker).text.format(maker)


def advice_if_ended(maker: str, ended: Collection[int]) -> str:
    """Return advice on a call of torch's, for which ranks that have ended would be needed."""
    if re.search(_BACKWARD, maker):
        return _are_past(ended)
    if re.search(_FORWARD, maker):
        return f"{_are_past(ended)} If not: {_advice_on(maker)}"
    return (
        f"{_advice_on(maker)} Why did {rank_names(ended)} return before: with fewer batches, or by "
        "a decision to stop that each rank makes alone (all-reduce or broadcast it)?"
    )
