"""Judges task 4.1: crashes at every moment, damage, what stays, and disks that fail."""

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import short
from judging.expect import expect
from phase4 import broken_disks
from phase4 import checkpoints as b
from phase4.checkpoints import Plan, name_of

PLANS = {
    "a fourth step where three stay": Plan(4, there=(1, 2, 3)),
    "a fourth step where all stay": Plan(4, there=(1, 2, 3), keep=9),
    "a step where one stays": Plan(7, there=(5,), keep=1),
    "the first step": Plan(1),
    "the first step of a run whose folder is missing": Plan(1, is_made=False),
    "a step whose damaged checkpoint is there": Plan(3, there=(1, 2, 3), damaged=(3,), keep=9),
    "a step after a crash": Plan(
        4, there=(2, 3), leftovers=(".step-00000004.partial", ".step-00000001.removed")
    ),
    "a step after a kill between a renaming and its sync": Plan(4, there=(1, 2, 3), renamed=(1,)),
}
LEFT = {"a step after a crash": (2, 3, 4)}  # steps that are left in the end
RULES = (
    "A file's content is safe after os.fsync of the file (flush it before), a name that is new, "
    "changed or gone after os.fsync of its folder."
)


def _names(steps: Sequence[int]) -> list[str]:
    return [name_of(step) for step in steps]


def _loaded(load: Mapping[str, Any]) -> str:
    """Say what a load has found."""
    if load["error"]:
        return f"none, and raises {short(load['error'])}"
    return f"step {load['step']}{'' if load['equal'] else ', not as it was saved'}"


def _check_loads(load: Mapping[str, Any], step: int | None, where: str, cause: str = "") -> None:
    """Check that a load finds a step as it was saved, or returns None."""
    check(
        load["step"] == step and load["equal"] == (step is not None) and not load["error"],
        f"{where}, load_checkpoint should find step {step}, with all keys, dtypes, lists and "
        f"tuples; it finds {_loaded(load)}. {cause}",
    )


# Crashes


@task("4.1")
@pytest.mark.parametrize("what", PLANS)
def test_a_crash_leaves_the_old_or_the_new_one(grade: Grade, what: str) -> None:
    plan, found = PLANS[what], grade.call(b.crash, PLANS[what])
    new, operations = name_of(plan.step), found["operations"]
    check(found["path"], f"save_checkpoint should return the path of the new one, …/{new}.")
    _check_operations(operations, found["left"], new)
    for state in found["states"]:
        done = operations[: state["done"]]
        last = "; ".join(done[-5:]) or "nothing"
        when = (
            f"save of {what}: if the power fails after {len(done)} of {len(operations)} operations "
            f"({last}),"
        )
        _check_crash(plan, state, when)
        if state["is_end"]:
            _check_loads(
                *(state, plan.step, f"save of {what}: if the power fails when it has returned"),
                f"Only these files may have reached the disk: {_files(state)}. {RULES} The save "
                f"did this: {'; '.join(operations)}.",
            )
    if what in LEFT:
        cause = "The next save removes what a crash has left, .step-*."
        expect(f"the folder after {what}", found["left"], _names(LEFT[what]), cause)


def _check_operations(operations: Sequence[str], left: Sequence[str], new: str) -> None:
    check(new in left, f"after the save, the folder should hold {new}; it holds {left}.")
    written = [text for text in operations if text.startswith("writes ")]
    check(
        bool(written) and f"{b.MANIFEST} (" in written[-1],
        f"manifest.json is the last file of a checkpoint to be written: {short(written)}. It says "
        "that all others are complete, so it must not be there before they are.",
    )


def _files(state: Mapping[str, Any]) -> str:
    sizes = [f"{name} ({size:,} bytes)" for name, size in state["files"].items()]
    return ", ".join(sizes) or "no files"


def _check_crash(plan: Plan, state: Mapping[str, Any], when: str) -> None:
    """Check a state that a crash may leave during the save."""
    names = {path.split("/")[1] for path in state["files"]}
    others = sorted(name for name in names if not name.startswith(("step-", ".step-")))
    check(
        not others,
        f"{when} {others} may be left beside the checkpoints. Let whatever is not finished have a "
        "name that begins with .step-, by which the next save knows what to remove, and keep no "
        "other files: the newest checkpoint is found by the names.",
    )
    known = _names(plan.damaged)
    broken = [text for text in state["broken"] if text.partition(":")[0] not in known]
    check(
        not broken,
        f"{when} a damaged checkpoint may be found: {short(broken)}. Left are {_files(state)}. "
        f"{RULES} Give a checkpoint its name when its files are safe, and take it away before they "
        "go.",
    )
    before = [step for step in plan.there if step not in plan.damaged]
    allowed = [max(before) if before else None, plan.step]
    check(
        not state["error"]
        and state["step"] in allowed
        and state["equal"] == (state["step"] is not None),
        f"{when} load_checkpoint should find step {' or '.join(map(str, allowed))}; it finds "
        f"{_loaded(state)}. Left are {_files(state)}.",
    )
    stay = [step for step in before if step not in plan.renamed]
    check(
        len(state["intact"]) >= min(plan.keep, len(stay)),
        f"{when} {short(state['intact'])} may be all that is left undamaged. Before the save there "
        f"were {counted(len(stay), 'undamaged checkpoint')}, and keep is {plan.keep}: what is "
        "older is removed, but not before the new one is durable, synced folder and all.",
    )


@task("4.1")
def test_nothing_stays_open(grade: Grade) -> None:
    _check_closed(grade.call(b.left_open), "two saves and a load")


def _check_closed(names: Sequence[str], after: str) -> None:
    check(
        not names,
        f"after {after}, these are still open: {short(names)}. A run saves thousands of times, and "
        "a process may have about a thousand open files: os.close what os.open has opened, in a "
        "finally, for a sync may fail.",
    )


# Damage


@task("4.1")
def test_damage_is_noticed_and_the_checkpoint_before_is_loaded(grade: Grade) -> None:
    damages = b.damages(grade.random, 30)
    for damage, found in zip(damages, grade.call(b.damaged, damages), strict=True):
        where = f"{damage} in the newest of three checkpoints"
        where += f", in {found['file']}" if found["file"] else ""
        step = 1 if damage.is_of_two else 2
        cause = (
            "Compare the size and the SHA-256 of every file with those in the manifest, and the "
            "step with the name."
        )
        _check_loads(found, step, where, cause)
        expect(
            f"{where}: the paths in skipped",
            *(sorted(found["skipped"]), _names(range(step + 1, 4))),
            f"Step {step} is loaded, and the newest is that of the highest step, whatever the "
            "clock says.",
        )
        older = [name for name in found["read"] if name < name_of(step)]
        check(
            not older,
            f"{where}: step {step} is loaded, yet files of {older} were read. Reading all that is "
            "kept costs minutes where a checkpoint is large: stop at the first undamaged one.",
        )
        _check_reads(found["read"], where, twice=name_of(step))
        reason = found["skipped"][name_of(3)]
        check(
            b.names_a_file(reason, found["files"], found["file"]),
            f"{where}: the reason should name the file that is damaged, of "
            f"{short(found['files'])}; it says {reason!r:.200}.",
        )


def _check_reads(times: Mapping[str, int], where: str, twice: str = "") -> None:
    often = [name for name, n in times.items() if n > 1 + (name == twice)]
    check(
        not often,
        f"{where}: a file of {often} was read several times ({dict(times)}). Each checkpoint that "
        "is looked at is read once, and the loaded one twice: that takes minutes where it is "
        "large.",
    )


@task("4.1")
def test_without_an_undamaged_one_nothing_is_loaded(grade: Grade) -> None:
    found = grade.call(b.all_damaged)
    error = found["all"]["error"]
    check(
        error.startswith("RuntimeError") and all(name in error for name in _names((1, 2))),
        "two checkpoints, both damaged: load_checkpoint should raise a RuntimeError that names "
        f"both; {f'it raises {error!r:.200}' if error else 'it raises nothing'}. Who gets None "
        "begins anew, and overwrites what might have been saved.",
    )
    check(found["unchanged"], "load_checkpoint should change nothing in the folder; it has.")
    for where, load in found["nothing"].items():
        _check_loads(load, None, where)


@task("4.1")
def test_loading_runs_no_code(grade: Grade) -> None:
    check(
        not grade.call(b.load_code),
        "a checkpoint with an object that opens a file when it is unpickled was loaded, and the "
        "file was made. Load with torch.load(…, weights_only=True).",
    )


# What stays


KEPT = {  # steps that are saved, the folder before, and the steps that are left after each save
    "a new run": ((1,), Plan(0), [(1,)]),
    "a damaged one among them": (
        *((5, 6), Plan(0, there=(1, 2, 3, 4), damaged=(3,))),
        [(2, 3, 4, 5), (4, 5, 6)],
    ),
    "two damaged ones": ((8,), Plan(0, there=(1, 2, 3), damaged=(2, 3), keep=2), [(1, 2, 3, 8)]),
    "steps of two and three digits": (
        *((10, 90, 100), Plan(0, keep=2)),
        [(10,), (10, 90), (90, 100)],
    ),
    "an earlier step than others": ((3,), Plan(0, there=(1, 5, 6), keep=2), [(3, 5, 6)]),
    "one stays": ((4,), Plan(0, there=(1, 2), keep=1), [(4,)]),
    "a damaged one is replaced": ((3,), Plan(0, there=(1, 2, 3), damaged=(3,)), [(1, 2, 3)]),
}


@task("4.1")
@pytest.mark.parametrize("what", KEPT)
def test_the_newest_undamaged_ones_stay(grade: Grade, what: str) -> None:
    steps, plan, right = KEPT[what]
    found = grade.call(b.save_all, steps, plan)
    for step, left, times, kept in zip(steps, found["left"], found["read"], right, strict=True):
        _check_reads(times, f"save of step {step}, where {plan.there} were there")
        expect(
            f"steps {plan.there} were there, damaged {plan.damaged}; then {steps} were saved with "
            f"keep={plan.keep}. The folder after step {step}",
            *(left, _names(kept)),
            "Count undamaged ones only, and remove what is older than all of them.",
        )
    newest = max((*steps, *(step for step in plan.there if step not in plan.damaged)))
    _check_loads(found, newest, f"after the saves of {steps}")
    check(found["unchanged"], "save_checkpoint has changed the state, which is the caller's.")


@task("4.1")
def test_an_undamaged_checkpoint_is_not_overwritten(grade: Grade) -> None:
    found = grade.call(b.save_again)
    check(
        found["refusal"].startswith("FileExistsError"),
        "step 2 is saved again, while its checkpoint is undamaged: save_checkpoint should raise a "
        f"FileExistsError; it raises {found['refusal'] or 'nothing'}.",
    )
    expect("the folder after the refusal", found["left"], _names((1, 2)))
    _check_loads(found, 2, "after the refusal")


# Disks that fail


@task("4.1")
@pytest.mark.parametrize("limit_bytes", [0, 2000, 100_000])
def test_a_full_disk_loses_nothing(grade: Grade, limit_bytes: int) -> None:
    found = grade.call(broken_disks.save_where_it_fails, "full", limit_bytes)
    _check_failure(found, "the disk is full", os.strerror(errno.EFBIG))


@task("4.1")
def test_a_sync_that_fails_loses_nothing(grade: Grade) -> None:
    for place, found in enumerate(grade.call(broken_disks.save_where_a_sync_fails), start=1):
        what = f"sync {place} of the save says that the disk is broken"
        _check_failure(found, what, os.strerror(errno.EIO))


@task("4.1")
def test_a_place_where_nothing_can_be_written(grade: Grade) -> None:
    found = grade.call(broken_disks.save_where_it_fails, "impossible", 0)
    _check_failure(found, "the folder can't be made")


@task("4.1")
def test_what_was_saved_stays_if_an_old_one_does(grade: Grade) -> None:
    found = grade.call(broken_disks.save_where_an_old_one_stays)
    _check_loads(
        *(found, 3, "step 3 was saved with keep=2, and step 1 could not be removed"),
        f"The folder holds {found['left']}. Clean up a save that fails, not one after which "
        "something fails.",
    )


def _check_failure(found: Mapping[str, Any], what: str, reason: str = "") -> None:
    check(
        found["error"] == "OSError",
        f"{what}: save_checkpoint should raise an OSError; it raises "
        f"{found['error'] or 'nothing'}. Into a file, torch.save raises a RuntimeError that does "
        "not say why the write failed.",
    )
    check(
        reason in found["reason"],
        f"{what}: the OSError should say what the system said, {reason!r}; it says "
        f"{found['reason']!r:.200}. Let it through, or raise yours from it; what fails in cleaning "
        "up must not take its place.",
    )
    check(
        found["same"],
        f"{what}: the checkpoints of steps 1 and 2 should be as before, and nothing else be left; "
        f"the folder holds {found['left']}. Remove old ones only after the new one is durable.",
    )
    _check_closed(found["open"], f"a save that has failed ({what})")
