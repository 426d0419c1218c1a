"""Judges tasks 1.9 to 1.12: broadcast parameters, averaged gradients, steps and evaluation."""

from typing import Any

import pytest

from distlab.grade import Grade, check, check_cost, task
from distlab.util.text import counted
from judging.checks import (
    BYTE_S,
    LATENCY_S,
    MEASURED,
    ON_CPU,
    UNIFORM,
    check_collectives,
    check_peak,
    check_refused,
    is_close,
    of_members,
    same_loss,
    short,
)
from judging.expect import expect, expect_cost, expect_on_all_ranks, results_in_group
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.models import CLASSES, Worn
from phase1 import models, reference
from phase1 import training as b
from phase1.models import Moody

PARAMETERS = dict(models.Odd(0).named_parameters())
TRAINABLE = {name: p for name, p in PARAMETERS.items() if p.requires_grad}
ON_EVERY_RANK = "Every rank must call each broadcast, for the same tensors in the same order."

# Task 1.9: broadcast_parameters


@task("1.9", real=True)
@pytest.mark.parametrize(("n", "src"), [(1, 0), (3, None), (4, 2)])
def test_all_ranks_have_the_model_of_src(grade: Grade, n: int, src: int | None) -> None:
    _check_models(grade.run(b.broadcast_odd, n, src, if_stuck=ON_EVERY_RANK).results, src or 0)


def _check_models(by_rank: list[Any], src: int) -> None:
    expected = reference.odd_state(src + 1)
    for rank, model in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}"
        replaced = model["replaced"]
        held = "The optimizer still holds the old ones." if {*replaced} & {*PARAMETERS} else ""
        expect(f"{here}: the tensors that are replaced by others", replaced, [], held)
        moved = "as after t.data = …: views of the old memory keep the old values. Use copy_."
        expect(f"{here}: the tensors that are in other memory,", model["moved"], [], moved)
        wrong = [name for name, values in expected.items() if model["state"].get(name) != values]
        check(
            not wrong,
            f"{here}: after a broadcast from rank {src}, the values of {', '.join(wrong)} should "
            f"be equal to those on rank {src}. Broadcast all parameters, even frozen ones, and all "
            "buffers: all are part of the model.",
        )
        expect(f"{here}: what else was changed", model["changed"], [])


@task("1.9")
@pytest.mark.parametrize("n", [4, 8])
def test_each_tensor_travels_once(grade: Grade, n: int) -> None:
    run, sizes = grade.run(b.broadcast_odd, n, 0, cluster=UNIFORM), models.sizes_of_odd()
    rounds = n.bit_length() - 1
    found = [sum(run.messages), int(sum(run.bytes_sent)), run.seconds * 1e6]
    most_us = 1e6 * sum(rounds * (LATENCY_S + size * BYTE_S) for size in sizes)
    most = [(n - 1) * len(sizes), (n - 1) * sum(sizes), most_us]
    check_cost(
        all(a <= b * (1 + 1e-6) for a, b in zip(found, most, strict=True)),
        f"{len(sizes)} broadcasts on {n} ranks, of {rounds} rounds each, should take {most[0]} "
        f"messages, {most[1]} bytes and {most[2]:.1f} µs; yours took {found[0]} messages, "
        f"{found[1]} bytes and {found[2]:.1f} µs. Send each parameter and buffer once, even a "
        "weight that two layers share, in one message, and not from one rank to all others, one by "
        "one.",
    )


@task("1.9")
def test_models_inside_a_group(grade: Grade) -> None:
    src = grade.random.randrange(1, len(MEMBERS))
    _check_models(results_in_group(grade, b.broadcast_odd, src), src)


# Task 1.10: average_gradients, average_gradients_flat

FUNCTIONS = ("average_gradients", "average_gradients_flat")
WITHOUT_ONE = "Does a rank that has no gradient for a parameter make the same calls as the others?"
ONE_CALL_EACH = (
    "Send only the gradients of trainable parameters, in their own dtype, and that of a shared "
    "parameter only once; the flat version sends one bucket."
)


@task("1.10", real=True)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_become_their_mean(grade: Grade, function: str) -> None:
    sizes = [parameter.nbytes for parameter in TRAINABLE.values()]
    sizes = sizes if function == "average_gradients" else [sum(sizes)]
    for n in (2, 5, 1) if grade.is_simulated else (3,):
        run = grade.run(b.average_odd, n, function, if_stuck=WITHOUT_ONE)
        _check_means(run.results, function)
        _check_calls(run.results, function, sizes)
        if grade.is_simulated:
            check_collectives(run, [len(sizes)] * n, function)
    if grade.is_simulated:
        run = grade.run(b.average_by_default, 3, function)
        _check_means(run.results, f"{function}, given only a module")
        check_collectives(run, [len(sizes)] * 3, f"{function}, given only a module")


@task("1.10")
def test_gradients_of_many_dtypes_become_their_mean(grade: Grade) -> None:
    results = grade.run(b.average_odd, 4, FUNCTIONS[0], True).results
    _check_means(results, f"{FUNCTIONS[0]}, parameters of several dtypes")
    sizes = {name: parameter.nbytes for name, parameter in TRAINABLE.items()}
    sizes |= {name: TRAINABLE[name].numel() * dtype.itemsize for name, dtype in b.MIXED.items()}
    _check_calls(results, FUNCTIONS[0], list(sizes.values()))


def _check_means(by_rank: list[Any], what: str) -> None:
    n = len(by_rank)
    gradients = [
        {name: None if g is None else g.flatten().tolist() for name, g in of_rank.items()}
        for of_rank in map(models.gradients_of, range(n))
    ]
    for rank, result in enumerate(by_rank):
        here = f"{what}, rank {rank} of {n}"
        for name, parameter in PARAMETERS.items():
            zeros = [0.0] * parameter.numel()
            columns = zip(*(gradient[name] or zeros for gradient in gradients), strict=True)
            mean = [sum(column) / n for column in columns]
            expect(
                f"{here}: the gradient of {name}",
                result["means"].get(name),
                gradients[rank][name] if name == "frozen" else mean,
                "The mean is the sum divided by N. A rank that has no gradient takes part with "
                "zeros, and gets the mean as its gradient. A frozen one stays as it is.",
                1e-9,
            )
        expect(
            f"{here}: the gradients that are other tensors or in other memory,",
            result["moved"],
            [],
            "Copy the means back into p.grad: code that holds the old tensor would keep the old "
            "values.",
        )


def _check_calls(by_rank: list[Any], function: str, sizes: list[int]) -> None:
    for rank, result in enumerate(by_rank):
        expect_cost(
            f"{function}, rank {rank}: the bytes of the tensors that all_reduce is called with",
            sorted(result["num_bytes"]),
            sorted(sizes),
            ONE_CALL_EACH,
        )


@task("1.10")
def test_nothing_is_sent_where_nothing_is_trainable(grade: Grade) -> None:
    run = grade.run(b.average_nothing, 2)
    expect_cost("the sizes of tensors that all_reduce gets by rank", run.results, [[], []])
    check_collectives(run, [0, 0], "a module without trainable parameters")


@task("1.10")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_gradients_are_not_cut_and_need_one_bucket(grade: Grade, function: str) -> None:
    size = grade.random.randint(1100, 1200)
    run = grade.run(b.average_large, 1, function, size, options=MEASURED)
    expect_cost(
        f"{function}: the sizes of the tensors that all_reduce gets", run.results, [[size**2]]
    )
    if function == "average_gradients_flat":
        check_peak(
            *(run, [3 * 4 * size**2 + 64]),
            "average_gradients_flat needs memory for the parameters, the gradients, and one bucket "
            "as large as the gradients. Divide the bucket in place, and copy the means from views "
            "of it.",
        )


@task("1.10")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_inside_a_group(grade: Grade, function: str) -> None:
    _check_means(results_in_group(grade, b.average_odd, function, False), function)


STEPS = 3
NUM_TRAINABLE = sum(parameter.requires_grad for parameter in Worn().parameters())
AN_EMPTY_BATCH = "A rank whose batch is empty must make every call that the others make."
NOT_ON_EVERY_RANK = (
    "An error that only some ranks raise leaves the others waiting: decide by the number of "
    "targets of all ranks, which every rank knows after the all-reduce."
)


def _uneven(grade: Grade, n: int) -> list[int]:
    """Draw each rank's number of samples: most on rank 0, and none on rank 1 if n is 3 or more."""
    sizes = [grade.random.randint(5, 8), *(grade.random.randint(1, 4) for _ in range(n - 1))]
    return [0 if rank == 1 and n > 2 else size for rank, size in enumerate(sizes)]


@task("1.11", real=True)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_steps_are_those_of_one_process(grade: Grade, n: int) -> None:
    sizes = _uneven(grade, n)
    run = grade.run(
        *(b.train_steps, n, sizes, STEPS), if_stuck=AN_EMPTY_BATCH if 0 in sizes else ""
    )
    _check_steps(run.results, sizes)
    if grade.is_simulated:
        what = f"{STEPS} steps, each with one all-reduce of two numbers and one per parameter"
        check_collectives(run, [STEPS * (1 + NUM_TRAINABLE)] * n, what)


def _check_steps(by_rank: list[Any], sizes: list[int], length: int = 0) -> None:
    alone = reference.steps_alone(tuple(sizes), STEPS, length)
    cause = "Are gradients from before the step gone?"
    if len(sizes) > 1:
        cause += " Does each target weigh 1/B, even after average has divided by N?"
    for rank, result in enumerate(by_rank):
        here = f"batches of {sizes}, rank {rank}"
        _check_first_loss(here, rank, result["losses"][0], sizes, length)
        what = f"the losses of {STEPS} steps"
        expect(f"{here}: {what}", result["losses"], alone["losses"], cause, tolerance=1e-6)
        check(
            is_close(alone["state"], result["state"], 1e-6),  # the factor may be a float32
            f"{here}: after {STEPS} steps the weights differ from those of one process. {cause}",
        )
        expect(
            f"{here}: {what}, exactly as on rank 0,",
            result["losses"],
            by_rank[0]["losses"],
            "Compute them from the result of the all-reduce, which is the same on all ranks.",
        )
        _check_use(here, result, STEPS * sizes[rank])


def _check_first_loss(here: str, rank: int, got: float, sizes: list[int], length: int) -> None:
    expected = reference.steps_alone(tuple(sizes), STEPS, length)["losses"][0]
    means = reference.first_losses(tuple(sizes), length)
    known = [mean for mean in means if mean == mean]
    cause = ""
    if len(sizes) > 1 and same_loss(got, means[rank]):
        cause = "That is the mean of this rank's own batch."
    elif len(sizes) > 1 and same_loss(got, sum(known) / len(known)):
        cause = "That is the mean of the ranks' means, in which small batches count too much."
    what = "the first loss, the mean over all targets of all ranks before the step,"
    expect(f"{here}: {what}", got, expected, cause, tolerance=1e-6)


def _check_use(here: str, result: Any, num_rows: int) -> None:
    """Check that batches are used in full and left unchanged, and that losses are floats."""
    expect(
        f"{here}: what the steps have changed of batches and buffers",
        result["changed"],
        [],
        "The batch belongs to the caller, and buffers stay as the forward pass leaves them: "
        "compute in tensors of your own.",
    )
    rows = sum(result["rows"])
    expect_cost(f"{here}: the number of rows that the model sees in {STEPS} steps", rows, num_rows)
    expect(f"{here}: the types of losses other than float", result["types"], [])


@task("1.11")
def test_a_step_uses_what_it_is_given(grade: Grade) -> None:
    gradient = grade.random.uniform(1, 2)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.step_with_arguments, gradient),
        if_stuck=STUCK_IN_GROUP,
    )
    for rank, used in enumerate(of_members(run)):
        here = f"rank {rank} of {len(MEMBERS)}"
        expect(
            f"{here}: the calls of average, by whether each gets the model, all_reduce and group,",
            used["average"],
            [[True, True, True]],
        )
        expect_cost(
            f"{here}: the sizes of the tensors that all_reduce gets",
            used["sizes"],
            [2],
            "The loss and the number of targets go through it, two numbers in one call.",
        )
        _check_moved(here, used["moved"], -0.5 * gradient)
    expected = [int(rank in MEMBERS) for rank in range(OUTER_WORLD_SIZE)]
    check_collectives(run, expected, "a step with an average that sends nothing")


def _check_moved(here: str, moved: dict[str, list[float]], by: float) -> None:
    """Check how much each weight has changed.

    The factor N/B, which is 1/3 here, may be applied before or after averaging.
    """
    for name, found in moved.items():
        check(
            any(is_close(found, [one] * len(found)) for one in (by, by / 3)),
            f"{here}: after average, the gradient of {name} is {by / -0.5:.4f}, so the optimizer "
            f"should change {name} by {by:.4f}; it changed by {short(found)}. The gradients that "
            "average leaves are those of the step: do not change them afterwards.",
        )


@task("1.11")
def test_a_step_without_any_target_is_refused_on_every_rank(grade: Grade) -> None:
    results = grade.run(b.step_without_data, 3, if_stuck=NOT_ON_EVERY_RANK).results
    check_refused(results, "A step where no rank has a target", text="alike")
    expect_on_all_ranks(
        "whether a step that is refused changes parameters",
        [result["changed"] for result in results],
        False,
        "Raise the error before the optimizer's step.",
    )


@task("1.11")
def test_targets_are_counted_exactly_in_bfloat16(grade: Grade) -> None:
    # bfloat16 would round each of these sizes up by one.
    sizes = [4 * grade.random.randint(65, 124) + 3 for _ in range(2)]
    wrong = [grade.random.randint(50, 120) for _ in sizes]
    expected = 64 * sum(wrong) / sum(sizes)
    expect_on_all_ranks(
        "the loss",
        grade.run(b.step_in_bfloat16, 2, sizes, wrong).results,
        expected,
        "bfloat16 has 8 significant bits, so 303 becomes 304. Count and add up in float32 or "
        "float64.",
        1e-6 * expected,
        f", a model in bfloat16 and {sizes} targets, of which {wrong} have a loss of 64 and the "
        "others 0",
    )


@task("1.11")
def test_sequences_count_every_position_inside_a_group(grade: Grade) -> None:
    sizes, length = _uneven(grade, len(MEMBERS)), grade.random.randint(2, 5)
    _check_steps(results_in_group(grade, b.train_steps, sizes, STEPS, length), sizes, length)


# Task 1.12: evaluate


DEFAULT_BATCH_SIZE = 256
TYPES = ["Evaluation", "float", "float", "int"]


@task("1.12", real=True)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_evaluation_is_that_of_one_process(grade: Grade, n: int) -> None:
    size = {1: grade.random.randint(5, 9), 3: 3 * grade.random.randint(2, 4) + 1, 4: 3}[n]
    batch_size = grade.random.randint(1, 3)
    run = grade.run(b.evaluate, n, size, 0, {"batch_size": batch_size})
    _check_evaluated(run.results, size, batch_size=batch_size)


def _check_evaluated(
    by_rank: list[Any], size: int, length: int = 0, batch_size: int = DEFAULT_BATCH_SIZE
) -> None:
    n, alone = len(by_rank), reference.evaluate_alone(size, length)
    for rank, result in enumerate(by_rank):
        here, share = f"{counted(size, 'sample')}, rank {rank} of {n}", [*range(rank, size, n)]
        expect(
            f"{here}: the samples that it fetches",
            sorted(result["fetched"]),
            share,
            "Rank r takes samples r, r+N, r+2N, … without padding, and no rank evaluates another "
            "rank's share.",
        )
        found = result["found"]
        check(
            same_loss(alone, found) and found == by_rank[0]["found"],
            f"{here}: (loss, accuracy, targets) should be {alone} on every rank, but here they are "
            f"{found}. {_why_other_numbers(found, rank, n, size, length)}",
        )
        passes = [min(batch_size, len(share) - i) for i in range(0, len(share), batch_size)]
        expect(
            f"{here}: the samples of each forward pass, with batch_size {batch_size},",
            [rows for rows in result["rows"] if rows],  # empty forward passes are harmless
            passes,
            "The caller sets batch_size to what fits in memory.",
        )
        expect(f"{here}: the types of the result", result["types"], TYPES)


def _why_other_numbers(found: list[Any], rank: int, n: int, size: int, length: int) -> str:
    alone = reference.evaluate_alone(size, length)
    if same_loss([alone[0], alone[2]], [found[0], found[2]]):
        return (
            "The loss and the number of targets are right. An answer is right if the largest "
            "logit, along the last dim, is that of the target."
        )
    if n > 1 and rank < size and same_loss(reference.evaluate_alone(size, length, rank, n), found):
        return "Those are the results for this rank's own samples: all-reduce the sums."
    if alone[2] != size == found[2]:
        return f"A sample has {length} targets here: count targets, not samples."
    return "Add up over all samples and ranks, and divide once at the end."


@task("1.12")
def test_a_forward_pass_has_256_samples_by_default(grade: Grade) -> None:
    size = 2 * DEFAULT_BATCH_SIZE + grade.random.randint(3, 20)
    _check_evaluated(grade.run(b.evaluate, 2, size).results, size)


@task("1.12")
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_modes_are_restored(grade: Grade, mode: bool) -> None:
    """The model is in one mode, and at least one of its parts is in the other."""
    parts = len(list(Moody().modules())) - 1
    modes = [mode, not mode, *(grade.random.random() < 0.5 for _ in range(parts - 1))]
    results = grade.run(b.evaluate, 2, grade.random.randint(4, 6), 0, None, modes).results
    for rank, result in enumerate(results):
        expect(
            f"rank {rank}: the modes that the model should not be called in, but is,",
            result["noted"],
            [],
            "Evaluation needs model.eval() and torch.no_grad.",
        )
        check(
            result["restored"],
            f"rank {rank}: after evaluate, every module should be back in the mode it was in "
            "before, including a part that was frozen in evaluation mode.",
        )
        expect(f"rank {rank}: whether parameters or buffers have changed", result["changed"], False)


@task("1.12")
def test_evaluating_takes_one_small_all_reduce(grade: Grade) -> None:
    n, size = 8, grade.random.randint(20, 40)
    run = grade.run(b.evaluate, n, size, 0, {"batch_size": 2})
    sent, most = [int(number) for number in run.bytes_sent], 3 * 24  # log2(8) messages of 24 bytes
    check_cost(
        max(run.collectives) <= 1 and max(sent) <= most and min(run.bytes_received) >= 3 * 4,
        f"one all-reduce of three sums of 8 bytes is enough, in which each of {n} ranks sends at "
        f"most {most} bytes; collective calls per rank: {run.collectives}, bytes sent: {sent}. Add "
        "up on each rank, then all-reduce once; no rank evaluates the whole data set.",
    )
    _check_evaluated(run.results, size, batch_size=2)


@task("1.12")
def test_an_empty_data_set_is_refused_on_every_rank(grade: Grade) -> None:
    check_refused(grade.run(b.evaluate_nothing, 2).results, "An empty data set", text="alike")


@task("1.12")
def test_sums_are_exact_in_bfloat16(grade: Grade) -> None:
    share, num_wrong = 4 * grade.random.randint(65, 124) + 3, grade.random.randint(50, 250)
    size = 2 * share  # bfloat16 would round a share up by one
    expected = [64 * num_wrong / size, 1 - num_wrong / size, size]
    for rank, found in enumerate(grade.run(b.evaluate_in_bfloat16, 2, size, num_wrong).results):
        expect(
            f"rank {rank} of 2, a model in bfloat16 and {size} targets, of which {num_wrong} have "
            f"a wrong answer and a loss of 64: loss / {expected[0]}, accuracy / {expected[1]} and "
            f"targets / {size}",
            [got / want for got, want in zip(found, expected, strict=True)],
            [1.0] * 3,
            "bfloat16 has 8 significant bits, so 303 becomes 304. Add up in float32 or float64.",
            tolerance=1e-6,
        )


@task("1.12")
def test_everything_happens_on_the_device(grade: Grade) -> None:
    size = grade.random.randint(5, 8)
    results = grade.run(b.evaluate_there, 2, size, options=ON_CPU).results
    _check_evaluated(results, size)
    device = results[0]["device"]
    expect_on_all_ranks(
        "the devices of tensors that the model is called with, and that are sent,",
        [[result["devices"], sorted({*result["sent"]})] for result in results],
        [[device], [device]],
        "NCCL only sends tensors on GPUs.",
        where=f", with device={device!r}",
    )


@task("1.12")
def test_evaluation_counts_positions_of_sequences_inside_a_group(grade: Grade) -> None:
    """There are as many positions as classes, so even the wrong dim gives the right shape."""
    size, length = grade.random.randint(len(MEMBERS) + 1, 10), CLASSES
    _check_evaluated(results_in_group(grade, b.evaluate, size, length), size, length)
