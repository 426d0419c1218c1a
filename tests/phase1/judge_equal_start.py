"""Judges task 1.9: all ranks start from the model of one."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import verb
from judging.checks import BYTE_S, LATENCY_S, UNIFORM, of_members
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase1 import gradients as b
from phase1 import models, reference

PARAMETERS = {name for name, _ in models.Odd(0).named_parameters()}
ON_EVERY_RANK = "Every rank must call each broadcast, for the same tensors in the same order."


@task("1.9", real=True)
@pytest.mark.parametrize(("n", "src"), [(1, 0), (3, None), (4, 2)])
def test_all_ranks_have_the_model_of_src(grade: Grade, n: int, src: int | None) -> None:
    _check_models(grade.run(b.broadcast_odd, n, src, if_stuck=ON_EVERY_RANK).results, src or 0)


def _check_models(by_rank: list[Any], src: int) -> None:
    expected = reference.odd_state(src + 1)
    for rank, model in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}"
        _check_in_their_place(here, model)
        wrong = [name for name, values in expected.items() if model["state"].get(name) != values]
        check(
            not wrong,
            f"{here}: after a broadcast from rank {src}, the values of {', '.join(wrong)} should "
            f"be equal to those on rank {src}. Broadcast all parameters, even frozen ones, and all "
            "buffers: all are part of the model.",
        )
        check(model["trainable"], f"{here}: requires_grad was changed: leave it as it is.")
        check(
            model["gradients"],
            f"{here}: gradients were changed: broadcast only parameters and buffers.",
        )


def _check_in_their_place(here: str, model: Any) -> None:
    replaced, moved = model["replaced"], model["moved"]
    old = verb(replaced, "the old ones", "the old one")
    held = f"; the optimizer still holds {old}" if PARAMETERS.intersection(replaced) else ""
    check(
        not replaced,
        f"{here}: {', '.join(replaced)} should be overwritten in place, but "
        f"{verb(replaced, 'were', 'was')} replaced{held}. Write into the existing tensors.",
    )
    check(
        not moved,
        f"{here}: {', '.join(moved)} should be overwritten in place, but "
        f"{verb(moved, 'are', 'is')} now in other memory, as after t.data = …: views of the old "
        "memory keep the old values. Use copy_.",
    )


@task("1.9")
@pytest.mark.parametrize("n", [4, 8])
def test_each_tensor_travels_once(grade: Grade, n: int) -> None:
    run, sizes = grade.run(b.broadcast_odd, n, 0, cluster=UNIFORM), models.sizes_of_odd()
    sent, needed = int(sum(run.bytes_sent)), (n - 1) * sum(sizes)
    check(
        sent <= needed,
        f"sending each tensor once to each of {n - 1} ranks takes {needed} bytes; {sent} were "
        "sent. Send each parameter and buffer once, even a weight that two layers share.",
    )
    messages = (n - 1) * len(sizes)
    check(
        sum(run.messages) <= messages,
        f"broadcasting {len(sizes)} tensors to {n - 1} other ranks, each tensor once, should take "
        f"{messages} messages; {sum(run.messages)} were sent. Each message costs α, however small "
        "it is.",
    )
    rounds = n.bit_length() - 1
    most_s = sum(rounds * (LATENCY_S + size * BYTE_S) for size in sizes)
    check(
        run.seconds <= most_s * (1 + 1e-6),
        f"on {n} ranks, {len(sizes)} broadcasts of {rounds} rounds each should take "
        f"{most_s * 1e6:.1f} µs; yours took {run.seconds * 1e6:.1f} µs. Does one rank send to all "
        "others, one by one?",
    )


@task("1.9")
def test_models_inside_a_group(grade: Grade) -> None:
    src = grade.random.randrange(1, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.broadcast_odd, src), if_stuck=STUCK_IN_GROUP
    )
    _check_models(of_members(run), src)
