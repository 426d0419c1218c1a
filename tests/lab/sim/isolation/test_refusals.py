"""Calls that torch rejects raise errors that say what to change in the program."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import RankError, simulate


def nothing_is_exchanged() -> None:
    dist.batch_isend_irecv([])


def too_few_places_for_all_objects() -> None:
    dist.all_gather_object([None] * 2, 1)


def too_few_places_on_the_destination() -> None:
    dist.gather_object(1, [None] if dist.get_rank() == 0 else None, dst=0)


def places_on_all_ranks() -> None:
    dist.gather_object(1, [None] * 3, dst=0)


def too_few_objects() -> None:
    dist.scatter_object_list([None], [1, 2] if dist.get_rank() == 0 else None, src=0)


def communicates_after_the_end() -> None:
    dist.barrier()
    dist.destroy_process_group()
    dist.barrier()


def asks_for_its_size_after_the_end() -> None:
    dist.destroy_process_group()
    dist.get_world_size()


SAID: dict[Callable[[], None], str] = {
    nothing_is_exchanged: "IndexError: batch_isend_irecv got an empty list: leave the call out",
    too_few_places_for_all_objects: "IndexError: all_gather_object over 3 ranks needs a list of 3 "
    "objects, got 2",
    too_few_places_on_the_destination: "IndexError: gather_object over 3 ranks needs a list of 3 "
    "objects, got 1",
    places_on_all_ranks: "ValueError: Argument ``object_gather_list`` must NOT be specified",
    too_few_objects: "RuntimeError: scatter_object_list over 3 ranks needs a list of 3 objects, "
    "got 2",
    communicates_after_the_end: "in communicates_after_the_end. Communicate before that",
    asks_for_its_size_after_the_end: "rank 0 has destroyed its process group at test_refusals.py:",
}


@pytest.mark.parametrize("program", SAID, ids=lambda program: program.__name__)
def test_a_refusal_says_what_to_change(program: Callable[[], None]) -> None:
    with pytest.raises(RankError) as caught:
        simulate(program, 3)
    assert SAID[program] in str(caught.value)


def test_another_error_of_a_call_on_objects_stays_as_it_is() -> None:
    def program() -> str:
        try:
            dist.all_gather_object([None], lambda: 1)
        except Exception as error:
            return str(error)
        return ""

    assert all("objects, got" not in text for text in simulate(program, 2).results)


def test_a_refused_call_raises_what_gloo_raises() -> None:
    def program() -> list[str]:
        zeros, ones = torch.zeros, torch.ones
        calls: tuple[Callable[[], object], ...] = (
            lambda: dist.all_gather([zeros(2)] * 2, ones(3)),
            lambda: dist.scatter(zeros(1), [ones(1)] * (1 - dist.get_rank()), src=0),
            lambda: dist.reduce_scatter(zeros(1), [ones(1)]),
            lambda: dist.all_to_all_single(zeros(4), ones(4), [1, 1], [2, 2]),
            lambda: dist.all_reduce(ones(2), op=dist.ReduceOp.BAND),
            lambda: dist.broadcast(ones(2), 7),
        )
        errors = []
        for call in calls[: 1 if dist.get_rank() else None]:
            try:
                call()
            except RuntimeError as error:
                errors.append(type(error).__name__)
        return errors

    assert simulate(program, 2).results == [["RuntimeError"] * 6, ["RuntimeError"]]


def leaves_a_layer_out() -> None:
    layers = nn.ModuleDict({"used": nn.Linear(2, 2), "left_out": nn.Linear(2, 2)})
    layers.forward = lambda x: layers["used"](x)  # type: ignore[method-assign]
    model = DistributedDataParallel(layers)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def test_parameters_without_a_gradient_are_named_and_once() -> None:
    level = dist.get_debug_level()
    with pytest.raises(RankError) as caught:
        simulate(leaves_a_layer_out, 2)
    message = str(caught.value)
    assert message.count("left_out.weight") == message.count("left_out.bias") == 1
    assert message.count("not used in producing loss") == 1
    assert "test_refusals.py" in message.partition("Traceback")[2]
    assert dist.get_debug_level() == level


def sums_outside() -> tuple[str, int]:
    group = dist.new_group([1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce(torch.ones(1), group=group)
    return (caught[0].filename, caught[0].lineno) if caught else ("", 0)


def test_the_warning_of_a_call_that_is_left_out_names_the_programs_line() -> None:
    (file, line), _ = simulate(sums_outside, 2).results
    text = Path(file).read_text(encoding="utf-8").splitlines()[line - 1]
    assert "dist.all_reduce(torch.ones(1), group=group)" in text
