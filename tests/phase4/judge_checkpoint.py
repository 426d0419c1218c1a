"""Judges task 4.1: crashes at every moment, damage, old checkpoints, and disks that fail."""

import errno
import os
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from phase4 import checkpoints as b
from phase4.store_contract import StoreContract, check_closed, check_load
from phase4.stores import Facts, Plan, draw_damages


def _call(grade: Grade, body: Any, *args: object) -> Any:
    with TemporaryDirectory(prefix="distlab-") as root:
        return grade.call(body, root, *args)


CHECKPOINTS = StoreContract(
    "4.1",
    "checkpoints",
    run=lambda grade, *args: [_call(grade, b.run, *args)],
    crashes={
        "a fourth step where three stay": Plan(4, there=(1, 2, 3)),
        "a step where one stays": Plan(7, there=(5,), keep=1),
        "the first step of a run whose folder is missing": Plan(1, is_made=False),
        "a step whose damaged checkpoint is there": Plan(3, there=(1, 2, 3), damaged=(3,), keep=9),
        "a step after a kill between a renaming and its sync": Plan(
            4, there=(1, 2, 3), renamed=(1,)
        ),
    },
    kept={
        "a damaged one among them": (
            *((5, 6), Plan(0, there=(1, 2, 3, 4), damaged=(3,))),
            [(2, 3, 4, 5), (4, 5, 6)],
        ),
        "an earlier step than others": ((3,), Plan(0, there=(1, 5, 6), keep=2), [(3, 5, 6)]),
        "a damaged one is replaced": ((3,), Plan(0, there=(1, 2, 3), damaged=(3,)), [(1, 2, 3)]),
        "a crash has left folders": (
            *((4,), Plan(0, (1, 2, 3), leftovers=(".step-00000004.partial", ".step-1.removed"))),
            [(2, 3, 4)],
        ),
    },
    damages=partial(draw_damages, num_flips=30),
    is_one_process=True,
)
globals().update(CHECKPOINTS.tests())


@task("4.1")
def test_loading_runs_no_code(grade: Grade) -> None:
    check(
        not _call(grade, b.load_code),
        "a checkpoint with an object that opens a file when it is unpickled was loaded, and the "
        "file was made. Load with torch.load(…, weights_only=True).",
    )


# Disks that fail


FULL = {"the disk is full": 0, "the disk fills up": 2000, "the folder can't be made": None}


@task("4.1")
@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_loses_nothing(grade: Grade, what: str) -> None:
    facts = _call(grade, b.save_where_it_fails, FULL[what])
    _check_failure(facts, what, "" if FULL[what] is None else os.strerror(errno.EFBIG))


@task("4.1")
def test_a_sync_that_fails_loses_nothing(grade: Grade) -> None:
    for place, facts in enumerate(_call(grade, b.save_where_a_sync_fails), start=1):
        what = f"sync {place} of the save says that the disk is broken"
        _check_failure(facts, what, os.strerror(errno.EIO))


@task("4.1")
def test_what_was_saved_stays_if_an_old_one_does(grade: Grade) -> None:
    facts = _call(grade, b.save_where_an_old_one_stays)
    check_load(
        *(facts, 3, "step 3 was saved with keep=2, and step 1 could not be removed"),
        f"The folder holds {facts['left']}. Clean up a save that fails, not one after which "
        "something fails.",
    )


def _check_failure(facts: Facts, what: str, reason: str) -> None:
    check(
        facts["error"] == "OSError",
        f"{what}: save_checkpoint should raise an OSError; it raises "
        f"{facts['error'] or 'nothing'}. Into a file, torch.save raises a RuntimeError that does "
        "not say why the write failed.",
    )
    check(
        reason in facts["reason"],
        f"{what}: the OSError should say what the system said, {reason!r}; it says "
        f"{facts['reason']!r:.200}. Let it through, or raise yours from it; what fails in cleaning "
        "up must not take its place.",
    )
    check(
        facts["same"],
        f"{what}: the checkpoints of steps 1 and 2 should be as before, and nothing else be left; "
        f"the folder holds {facts['left']}. Remove old ones only after the new one is durable.",
    )
    check_closed(facts["open"], f"a save that has failed ({what})")
