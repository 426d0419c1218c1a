"""Schedules as text: one row per stage, one column per time step; a dot marks a stage that waits.

F0 F1 .  B0 B1
.  F0 B0 F1 B1
"""

import re
from collections.abc import Mapping, Sequence
from random import Random

from distlab.util.text import counted
from phase2_advanced.given import Action, Schedule, grid, timeline

CELL = re.compile(r"([FB])(\d+)(?:\.(\d+))?")

GPIPE_3_4 = """
F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
.  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
.  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .
"""
GPIPE_4_2 = """
F0 F1 .  .  .  .  .  .  B1 B0
.  F0 F1 .  .  .  .  B1 B0 .
.  .  F0 F1 .  .  B1 B0 .  .
.  .  .  F0 F1 B1 B0 .  .  .
"""
ONE_F_ONE_B_3_4 = """
F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
.  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
.  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""
ONE_F_ONE_B_4_8 = """
F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
.  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7 .
.  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7 .  .
.  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .  .  .
"""
ONE_F_ONE_B_4_2 = """
F0 F1 .  .  .  .  .  B0 .  B1
.  F0 F1 .  .  .  B0 .  B1 .
.  .  F0 F1 .  B0 .  B1 .  .
.  .  .  F0 B0 F1 B1 .  .  .
"""
INTERLEAVED_2_4_2 = """
F0   F1   F0.1 F1.1 F2   B0.1 F3   B1.1 F2.1 B0   F3.1 B1   .    B2.1 .    B3.1 B2   B3
.    F0   F1   F0.1 B0.1 F1.1 B1.1 F2   B0   F3   B1   F2.1 B2.1 F3.1 B3.1 B2   B3   .
"""


ANY_ORDER_2_4 = """
F1 F2 F3 F0 B1 .  .  .  B0 B2 B3
.  F1 B1 F2 F3 F0 B2 B0 B3 .  .
"""


def drawn(text: str) -> Schedule:
    """Return the schedule in a drawing; only the order of actions in each row counts."""
    return [
        [Action(kind, int(i), int(chunk or 0)) for kind, i, chunk in CELL.findall(row)]
        for row in text.strip().splitlines()
    ]


def written(schedule: Schedule) -> str:
    """Return a schedule as text that ``drawn`` can read."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def redrawn(text: str) -> str:
    """Return a drawing in the format of ``grid``: no blank lines around it, no trailing spaces."""
    return "\n".join(row.rstrip() for row in text.strip("\n").splitlines())


def size_text(p: int, m: int) -> str:
    """Return the size of a schedule in words: its numbers of stages and micro-batches."""
    return f"{counted(p, 'stage')}, {counted(m, 'micro-batch', 'micro-batches')}"


def length(schedule: Schedule, backward_time: int) -> int:
    """Return how long a schedule takes, if a forward pass takes 1 unit of time."""
    return max((event.time for event in timeline(schedule, backward_time)), default=0)


def in_flight(actions: Sequence[Action]) -> int:
    """Return the largest number of micro-batches that are in flight at the same time.

    A micro-batch is in flight from its forward pass until its backward pass.
    """
    now = most = 0
    for action in actions:
        now += 1 if action.kind == "F" else -1
        most = max(most, now)
    return most


def picture(schedule: Schedule) -> str:
    """Return a drawing of the schedule to append to a message; long rows are cut off."""
    rows = grid(schedule).splitlines()
    return "".join(f"\n    {row if len(row) <= 110 else row[:108] + ' …'}" for row in rows)


def shuffled(random: Random, p: int, m: int, v: int) -> Schedule:
    """Return a valid schedule with its actions in random order."""
    left = {
        (block, Action(kind, i, block // p))
        for block in range(v * p)
        for kind in "FB"
        for i in range(m)
    }
    rows: Schedule = [[] for _ in range(p)]
    while left:
        ready = [one for one in sorted(left) if not left & _before(*one, v * p, p)]
        chosen = random.choice(ready)
        left.remove(chosen)
        rows[chosen[0] % p].append(chosen[1])
    return rows


def why_stopped(schedule: Schedule) -> str:
    """Explain why the schedule comes to a stop; return "" if it does not."""
    waits = _waits(schedule)
    if not waits:
        return ""
    stage = _root(waits)
    action, where, needed = waits[stage]
    if where == stage:
        why = f"{action} of stage {stage} needs {needed}, which comes later in the same row."
    else:
        first = waits[where][0]
        why = (
            f"{action} of stage {stage} needs {needed} of stage {where}, which comes after {first} "
            f"in that row, and {first} never starts either."
        )
    is_one = len(waits) == 1
    marks = "The question mark follows the action" if is_one else "Question marks follow actions"
    return f"{why} {marks} that never {'starts' if is_one else 'start'}."


# For each stuck stage: the action that waits, and the stage and action that it waits for.
Waits = Mapping[int, tuple[Action, int, Action]]


def _waits(schedule: Schedule) -> Waits:
    """Return, for each stage that gets stuck, its first action that never starts, and a reason.

    The reason is an action that has to come first but never starts either, with its stage.
    """
    p = len(schedule)
    num_blocks = p * (1 + max(action.chunk for actions in schedule for action in actions))
    done = {(event.stage, event.action) for event in timeline(schedule)}
    waits: dict[int, tuple[Action, int, Action]] = {}
    for stage, actions in enumerate(schedule):
        left = [action for action in actions if (stage, action) not in done]
        if left:
            before = _before(left[0].chunk * p + stage, left[0], num_blocks, p)
            needs = {(block % p, need) for block, need in before if block >= 0} - done
            waits[stage] = left[0], *min(needs, key=lambda need: (need[0] != stage, need))
    return waits


def _root(waits: Waits) -> int:
    """Return a stage that waits for itself, or else one from a cycle of waiting stages."""
    own = [stage for stage, (_, where, _) in waits.items() if where == stage]
    if own:
        return own[-1]  # prefer the last stage, where backward passes start
    seen, stage = list[int](), min(waits)
    while stage not in seen:
        seen.append(stage)
        stage = waits[stage][1]
    circle = seen[seen.index(stage) :]
    # Find a stage that needs a later action of its partner than the one that blocks the partner.
    return next(stage for stage in circle if waits[waits[stage][1]][0] != waits[stage][2])


def _before(block: int, action: Action, num_blocks: int, p: int) -> set[tuple[int, Action]]:
    """Return the actions that must come before an action of a block, each with its own block."""
    kind, i, _ = action
    if kind == "F":
        return {(block - 1, Action("F", i, (block - 1) // p))}
    own, after = (block, Action("F", i, block // p)), block + 1
    return {own} | ({(after, Action("B", i, after // p))} if after < num_blocks else set())
