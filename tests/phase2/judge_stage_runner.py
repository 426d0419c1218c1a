"""Judges task 2.9: stages on several ranks compute what one process does, and send no more."""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from judging.checks import MEASURED, check_no_collective, check_waited, distance, of_members, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import stages as b
from phase2.judge_stage_messages import check_messages, sizes_sent
from phase2.staged_model import ALL_TRAINED, NUM_BLOCKS, SOME_FROZEN, Plan, train_alone

STUCK = (
    "Each forward sends to the next rank, and each backward sends a gradient back for every tensor "
    "that requires one, and for no other: sender and receiver must agree which these are."
)
ALL_BACK = (
    "Gradients come back for all tensors that require one, add up over the steps, and come of the "
    "last forward."
)
OF_THE_GRAPH = (
    "Give the stage what forward was given, not a copy, and keep outputs that have their graph."
)
PLANS = [ALL_TRAINED, SOME_FROZEN]
ROUNDING = 1e-6  # some numbers are in float32; a gradient that is wrong is so by more


def _cuts(random: Random, n: int) -> list[int]:
    return [0, *sorted(random.sample(range(1, NUM_BLOCKS), n - 1)), NUM_BLOCKS]


@task("2.9")
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_stages_compute_what_one_process_does(grade: Grade, n: int) -> None:
    _check_training(grade, n)


@task("2.9", real=True)
def test_three_stages_do_so_in_processes_too(grade: Grade) -> None:
    _check_training(grade, 3)


def _check_training(grade: Grade, n: int) -> None:
    cuts = _cuts(grade.random, n)
    run = grade.run(b.train_all, n, PLANS, cuts, if_stuck=STUCK)
    _check_results(run.results, cuts)
    if grade.is_simulated:
        check_no_collective(run, "stages should talk to their neighbours in messages")
        check_waited(run)
        _check_edges(run, cuts)


@task("2.9")
def test_stages_inside_a_group(grade: Grade) -> None:
    cuts = _cuts(grade.random, len(MEMBERS))
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.train_all, PLANS, cuts),
        if_stuck=f"{STUCK} {STUCK_IN_GROUP}",
    )
    _check_results(of_members(run), cuts)


def _check_results(by_rank: Sequence[Any], cuts: Sequence[int]) -> None:
    for number, plan in enumerate(PLANS):
        _check_plan([results[number] for results in by_rank], plan, cuts)


def _check_plan(by_rank: Sequence[Any], plan: Plan, cuts: Sequence[int]) -> None:
    for rank, result in enumerate(by_rank):
        frozen = f"; frozen are {list(plan.frozen)}" if plan.frozen else ""
        here = (
            f"stage {rank} of {len(by_rank)}, blocks {cuts[rank]} to {cuts[rank + 1] - 1}{frozen}"
        )
        for step, found in enumerate(result["steps"]):
            is_last = rank == len(by_rank) - 1
            _check_output(f"{here}, step {step}", found, plan, step, is_last=is_last)
        _check_input_gradients(here, result, plan, is_first=rank == 0)
        _check_state(here, result["state"], train_alone(plan).state)


def _check_output(here: str, found: Any, plan: Plan, step: int, *, is_last: bool) -> None:
    if not is_last:
        check(
            found["output"] == b.kind_of(None),
            f"{here}: forward should return None, as the last rank alone returns what its stage "
            f"returns; it returned {found['output']}.",
        )
        return
    alone = train_alone(plan)
    kind = " (evaluation)" if step in plan.evaluations else ""
    check(
        distance(alone.outputs[step], found["output"]) <= ROUNDING,
        f"{here}{kind}: the output differs from that of one process, and the loss is "
        f"{found['loss']:.6f} in place of {alone.losses[step]:.6f}. If this is not step 0, the "
        "gradients of an earlier step were wrong somewhere.",
    )
    check(
        found["has_graph"] == alone.has_graph[step],
        f"{here}{kind}: whether the outputs require a gradient should be {alone.has_graph[step]}, "
        f"as in one process; it is {found['has_graph']}. An evaluation pass records no graph.",
    )


def _check_input_gradients(here: str, result: Any, plan: Plan, *, is_first: bool) -> None:
    expected = train_alone(plan).input_gradients if is_first else [None] * plan.num_steps
    for step, (wanted, found) in enumerate(zip(expected, result["steps"], strict=True)):
        got = found["input_gradient"]
        check(
            distance(wanted, got) <= ROUNDING,
            f"{here}, step {step}: the gradient of the input that requires one is {short(got)}; in "
            f"one process it is {short(wanted)}. " + (OF_THE_GRAPH if got is None else ALL_BACK),
        )


def _check_state(here: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, got in found.items():
        wanted = expected[name]
        check(
            distance(wanted, got) <= ROUNDING,
            f"{here}: after all steps, {name} of one process is {short(wanted)}, and here "
            f"{short(got)}. {ALL_BACK}",
        )


def _check_edges(run: Run, cuts: Sequence[int]) -> None:
    """Check what each rank has sent to each other one."""
    for src, dst in product(range(len(run.results)), repeat=2):
        sent = [sizes for plan in PLANS for sizes in _sent(plan, cuts, src, dst)]
        way = "activations forward" if src < dst else "gradients back"
        check_messages(
            f"{way}, rank {src} to rank {dst}, all steps", sizes_sent(run, src, dst), sent
        )


def _sent(plan: Plan, cuts: Sequence[int], src: int, dst: int) -> list[list[int]]:
    """Bytes of the tensors that go from one rank to another, call by call."""
    if abs(src - dst) != 1:
        return []
    border = [step[cuts[max(src, dst)] - 1] for step in train_alone(plan).passed]
    if src < dst:
        return [[size for size, _ in tensors] for tensors in border]
    backward = [border[step] for step in range(plan.num_steps) if step not in plan.evaluations]
    needed = [[size for size, requires_grad in tensors if requires_grad] for tensors in backward]
    return [sizes for sizes in needed if sizes]


@task("2.9")
def test_no_tensor_is_kept_for_the_next_step(grade: Grade) -> None:
    one, four = (grade.run(b.train_long, 3, steps, options=MEASURED) for steps in (1, 4))
    for rank, found in enumerate(four.results):
        of_stage = ["a Tensor", "a tuple"] * 2
        expected = of_stage if rank == 2 else [b.kind_of(None)] * 4
        for step, (kind, wanted, got) in enumerate(zip(of_stage, expected, found, strict=True)):
            check(
                got == wanted,
                f"rank {rank} of 3, step {step}, in which each stage returns {kind}: forward "
                f"should return {wanted}, and returned {got}. The last rank returns what its stage "
                "returns, a tuple only where it is one, and the others return None.",
            )
    for rank, (first, all_steps) in enumerate(zip(one.peak_bytes, four.peak_bytes, strict=True)):
        check(
            all_steps <= first,
            f"rank {rank} of 3 held at most {first:,} bytes in its first step, and {all_steps:,} "
            "in a later one. Drop what backward needed as soon as it has run: an output that is "
            "kept keeps the graph behind it.",
        )
