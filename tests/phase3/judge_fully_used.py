"""Judges task 3.20: the order of messages, everyday use, and what states hold."""

from collections.abc import Sequence
from typing import Any

from distlab.grade import Grade, Run, check, task
from distlab.util.text import joined
from judging.checks import MEASURED, short
from phase3 import fully_sharded as b
from phase3.judge_fully_sharded import STUCK
from phase3.judge_zero_optimizers import SLOW

# Order


def parts_of(run: Run, rank: int) -> list[list[b.Mark]]:
    """When a rank's gathers set out, in each part of the body, which its barriers separate."""
    words = b.words_by_bytes(len(run.results))
    parts: list[list[b.Mark]] = [[]]
    for event in sorted(run.trace.events if run.trace else [], key=lambda event: event.start_s):
        if event.rank == rank and event.name == "barrier" and event.kind == "collective":
            parts.append([])
        elif event.rank == rank and event.name == "all_gather" and event.kind == "collective":
            word = words.get(event.num_bytes, f"an all-gather of {event.num_bytes} bytes")
            parts[-1].append((event.start_s, word))
    return parts


def drawn(gathers: Sequence[b.Mark], marks: Sequence[b.Mark]) -> list[str]:
    """Write down what came after what; messages that set out together share an entry."""
    found: dict[tuple[float, bool], list[str]] = {}
    for at_s, word in sorted([*gathers, *marks]):
        found.setdefault((at_s, word.startswith("gather")), []).append(word)
    return [" + ".join(found[when]) for when in sorted(found)]


def check_drawn(here: str, expected: list[str], got: list[str], why: str) -> None:
    """Check that a pass runs as it is drawn, and show where it first does not."""
    pairs = zip([*expected, "the end"], [*got, "the end"], strict=False)
    wanted, came = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    check(
        got == expected,
        f"{here}: it should run as [{', '.join(expected)}], and runs as [{', '.join(got)}]; "
        f"{wanted} should come where {came} does. A message stands where it sets out, computing "
        f"where it ends. A unit waits for its own parameters alone; then it starts the next "
        f"unit's, which travel while it computes.{why}",
    )


@task("3.20")
def test_units_come_in_the_order_of_the_figure(grade: Grade) -> None:
    n = 2
    run = grade.run(b.draw, n, cluster=SLOW, options=MEASURED, if_stuck=STUCK)
    for rank, by_drawing in enumerate(run.results):
        parts = iter(parts_of(run, rank))
        for marks, (what, drawing) in zip(by_drawing, b.DRAWINGS.items(), strict=True):
            _, forward, backward = (next(parts) for _ in range(3))
            here, num = f"rank {rank} of {n}, {what}", len(drawing.uses)
            for direction, wanted, got, why in (
                ("forward", drawing.forward, drawn(forward, marks[:num]), ""),
                ("backward", drawing.backward, drawn(backward, marks[num:]), f" {drawing.why}"),
            ):
                check_drawn(f"{here}, {direction} pass", wanted.split(", "), got, why)


# Everyday use


@task("3.20")
def test_a_model_is_used_as_ever(grade: Grade) -> None:
    n = 2
    for rank, found in enumerate(grade.run(b.use_every_day, n, if_stuck=STUCK).results):
        here = f"rank {rank} of {n}, a model that computes in bfloat16"
        check_dict(
            f"{here}, the dtypes that its forward sees",
            *(b.SEEN, found["seen"]),
            "Cast floating-point tensors, in args and kwargs, in tuples and dicts too, and no "
            "others: labels and token ids would be rounded.",
        )
        check_dict(f"{here}, what it returns", b.RETURNED, found["result"], "Pass it on as it is.")
        check(
            found["calls of the hook"] == 1,
            f"{here}: a forward hook of the module should be called once in a pass; it was called "
            f"{found['calls of the hook']} times. Call the module, not its forward, which skips "
            "hooks.",
        )
        check(
            all(found["has gradient"]),
            f"{here}: what was computed before the model, and went into it by args and in kwargs, "
            "should get gradients; has it got them? "
            f"{joined([str(one) for one in found['has gradient']])}. Casting belongs to the graph: "
            "detach nothing.",
        )
        check_dict(
            f"{here}, its buffers",
            *(b.buffers_on(rank), found["buffers"]),
            "Buffers stay as they are on each rank: they are neither sent nor cast.",
        )


def check_dict(here: str, expected: dict[str, Any], got: dict[str, Any], cause: str) -> None:
    """Check values by name, and name those that differ."""
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    check(
        not names,
        f"{here}: {joined(names)} should be {joined([short(expected.get(n)) for n in names])}; "
        f"found {joined([short(got.get(n)) for n in names])}. {cause}",
    )


# States


@task("3.20")
def test_a_state_is_whole_and_costs_one_gather(grade: Grade) -> None:
    n = 3
    run = grade.run(b.store, n, if_stuck=STUCK)
    for rank, found in enumerate(run.results):
        here, sent = f"rank {rank} of {n}, full_state_dict", bytes_of_state(run, rank)
        check_dict(
            *(f"{here}, dtypes", b.STORED, found["dtypes"]),
            "Gather the shards in their own dtype: a checkpoint in bfloat16 has lost digits.",
        )
        check(
            sent <= found["bytes"],
            f"{here} of {len(b.STORED)} parameters: this rank's shards, {found['bytes']} bytes, "
            f"should be in one all-gather each; it brings {sent} bytes into collectives. An "
            "all-gather of a flat returns all of its parameters.",
        )
        check_loaded(f"rank {rank} of {n}, after load_full_state_dict", found)


def bytes_of_state(run: Run, rank: int) -> int:
    """The bytes of a rank's collectives in the second part of the body, as barriers separate it."""
    parts = [0]
    for event in sorted(run.trace.events if run.trace else [], key=lambda event: event.start_s):
        if event.rank == rank and event.kind == "collective":
            parts[-1] += event.num_bytes
            parts += [0] * (event.name == "barrier")
    return parts[1]


def check_loaded(here: str, found: dict[str, Any]) -> None:
    """Check shards after other numbers, in float16, were loaded, and an incomplete state."""
    check_dict(
        here, b.stored_numbers(), found["loaded"], "Copy this rank's part of each parameter."
    )
    check(
        (found["shards"], found["held"]) == (b.SHARDS, found["bytes"]),
        f"{here} of float16: the shards should be in {joined(b.SHARDS)} and hold "
        f"{found['bytes']} bytes; they are in {joined(found['shards'])} and hold {found['held']}. "
        "Copy into the shard's own memory: a view keeps the whole parameters, and their dtype.",
    )
    check(
        b.MISSING in found["error"],
        f"{here} without {b.MISSING}: a KeyError should name it; there is {found['error']}. Who "
        "restarts from a checkpoint that does not fit must not train from other numbers.",
    )
