"""Judges tasks 1.9 to 1.11: models, gradients and steps that are those of one process."""

from typing import Any

import pytest

from distlab.grade import Grade, check, task
from phase1 import gradients as b
from phase1 import models, reference
from phase1.groups import OUTER_WORLD_SIZE, inside_group
from phase1.judging import (
    is_close,
    of_members,
    same_loss,
    short,
)

# 1.9 broadcast_parameters


@task("1.9", real=True)
@pytest.mark.parametrize(("n", "src"), [(1, 0), (3, 0), (4, 2)])
def test_all_ranks_have_the_model_of_src(grade: Grade, n: int, src: int) -> None:
    _check_models(grade.run(b.broadcast_odd, n, src).results, src)


def _check_models(by_rank: list[Any], src: int) -> None:
    expected = reference.odd_state(src + 1)
    for rank, model in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}"
        check(
            not model["replaced"],
            f"{here}: there are new tensors in place of {', '.join(model['replaced'])}, which the "
            "optimizer holds. Write into the tensors that are there.",
        )
        check(
            not model["moved"],
            f"{here}: {', '.join(model['moved'])} should be overwritten in place, and now lie in "
            "other memory, as after t.data = …: views of the old memory keep the old values. "
            "Use copy_.",
        )
        wrong = [name for name, values in expected.items() if model["state"].get(name) != values]
        check(
            not wrong,
            f"{here}: after a broadcast from rank {src}, {', '.join(wrong)} should be those of "
            f"rank {src}. Parameters, frozen ones too, and buffers: all are part of the model.",
        )
        check(model["trainable"].count(False) == 1, f"{here}: requires_grad was changed.")


@task("1.9")
def test_each_tensor_travels_once(grade: Grade) -> None:
    run, sizes = grade.run(b.broadcast_odd, 4, 0), models.sizes_of_odd()
    sent, needed = int(sum(run.bytes_sent)), 3 * sum(sizes)
    check(
        sent <= 1.05 * needed,
        f"4 ranks need {needed} bytes, each tensor once to each of 3 ranks; {sent} were sent. "
        "A weight that two layers share counts once.",
    )
    messages = 3 * len(sizes)
    check(
        sum(run.messages) <= messages,
        f"{len(sizes)} tensors for 3 ranks are {messages} messages, a broadcast each; "
        f"{sum(run.messages)} were sent. Each message costs α, however small it is.",
    )


@task("1.9")
def test_models_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.broadcast_odd, 1)
    _check_models(of_members(run), 1)


# 1.10 average_gradients, average_gradients_flat


@task("1.10", real=True)
@pytest.mark.parametrize("function", ["average_gradients", "average_gradients_flat"])
def test_gradients_become_their_mean(grade: Grade, function: str) -> None:
    for n in (1, 2, 5) if grade.is_simulated else (3,):
        results = grade.run(b.average_odd, n, function).results
        _check_means(results, function)
        _check_in_place(results, function)


def _check_means(by_rank: list[Any], function: str) -> None:
    n = len(by_rank)
    gradients = [models.gradients_of(rank) for rank in range(n)]
    for rank, result in enumerate(by_rank):
        # That which not all ranks have comes last: there, a sum can be a rank's own.
        for name in sorted(gradients[0], key=lambda name: name == "sometimes"):
            got = result["means"].get(name)
            parts = [g[name].flatten().tolist() for g in gradients if g[name] is not None]
            mean = [sum(column) / n for column in zip(*parts, strict=True)] or None
            check(
                is_close(mean, got),
                f"{function}, rank {rank} of {n}: the gradient of {name} should be {short(mean)}, "
                f"it is {short(got)}. {_why_no_mean(n, mean, got, gradients[rank][name])}",
            )


def _why_no_mean(n: int, mean: Any, got: Any, own: Any) -> str:
    if got is None:
        return "A rank that has no gradient takes part with zeros."
    if own is not None and is_close(own.flatten().tolist(), got):
        return "That is this rank's own, as it was before."
    total = [n * number for number in mean or []]
    return "That is the sum: divide by N." if is_close(total, got) else ""


def _check_in_place(by_rank: list[Any], function: str) -> None:
    for rank, result in enumerate(by_rank):
        check(
            not result["moved"],
            f"{function}, rank {rank}: the gradients of {', '.join(result['moved'])} should be "
            "overwritten in place, and are other tensors now, or lie in other memory. Copy the "
            "means back into p.grad: who holds it would go on with the old values.",
        )


@task("1.10")
def test_the_number_of_all_reduces(grade: Grade) -> None:
    sizes = sorted(p.numel() for p in models.Odd(0).parameters() if p.requires_grad)
    for function, expected in (
        ("average_gradients", sizes),
        ("average_gradients_flat", [sum(sizes)]),
    ):
        run = grade.run(b.average_odd, 3, function)
        for rank, result in enumerate(run.results):
            calls = sorted(result["calls"])
            check(
                calls == expected,
                f"{function}, rank {rank}: the all-reduce it was given should be called with "
                f"{expected} elements, it was with {calls}. Trainable parameters only, shared "
                "ones once; flat means one bucket.",
            )
        check(
            run.collectives == [len(expected)] * 3,
            f"{function}: the all-reduce it was given is all it needs, {len(expected)} "
            f"collectives on each rank; they were {run.collectives}.",
        )


@task("1.10")
def test_gradients_inside_a_group(grade: Grade) -> None:
    for function in ("average_gradients", "average_gradients_flat"):
        run = grade.run(inside_group, OUTER_WORLD_SIZE, b.average_odd, function)
        _check_means(of_members(run), function)


# 1.11 train_step


@task("1.11", real=True)
@pytest.mark.parametrize("sizes", [[4], [3, 1], [5, 0, 2], [4, 4, 4, 4]], ids=str)
def test_steps_are_those_of_one_process(grade: Grade, sizes: list[int]) -> None:
    _check_steps(grade.run(b.train_steps, len(sizes), sizes, 3).results, sizes)


def _check_steps(by_rank: list[Any], sizes: list[int], length: int = 0) -> None:
    alone = reference.steps_alone(tuple(sizes), 3, length)
    for rank, result in enumerate(by_rank):
        here = f"batches of {sizes}, rank {rank}"
        check(
            same_loss(alone["losses"][:1], result["losses"][:1]),
            f"{here}: the first loss of one process on all of them is {alone['losses'][0]:.6f}, "
            f"train_step returned {result['losses'][0]:.6f}. It is the mean over all targets of "
            "all ranks, before the step.",
        )
        check(
            is_close(alone["state"], result["state"])
            and same_loss(alone["losses"], result["losses"]),
            f"{here}: after 3 steps the weights differ from those of one process, losses are "
            f"{short(result['losses'])} and should be {short(alone['losses'])}. Does each target "
            "weigh 1/B in the gradient, and is the last step's gradient gone?",
        )
        check(
            not result["changed"],
            f"{here}: train_step has changed the {' and '.join(result['changed'])} of its batch. "
            "They belong to the caller, who may show them again: compute in tensors of your own.",
        )


@task("1.11")
def test_sequences_count_every_position(grade: Grade) -> None:
    sizes = [2, 3]
    _check_steps(grade.run(b.train_steps, 2, sizes, 3, 4).results, sizes, 4)


@task("1.11")
def test_a_step_uses_what_it_is_given(grade: Grade) -> None:
    for rank, used in enumerate(grade.run(b.step_with_arguments, 2).results):
        check(
            used["average"] == [True],
            f"rank {rank}: average should be called once, with the all-reduce given; it was "
            f"called {len(used['average'])} times.",
        )
        check(
            used["all_reduce"] == 1,
            f"rank {rank}: loss and number of targets should go through the all-reduce given in "
            f"one call; it was called {used['all_reduce']} times.",
        )


@task("1.11")
def test_a_step_without_any_target_is_refused_on_every_rank(grade: Grade) -> None:
    for rank, text in enumerate(grade.run(b.step_without_data, 3).results):
        check(text, f"no rank has a target: rank {rank} should raise a ValueError, it does not.")


@task("1.11")
def test_steps_inside_a_group(grade: Grade) -> None:
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.train_steps, [3, 1, 2], 3, 0)
    _check_steps(of_members(run), [3, 1, 2])
