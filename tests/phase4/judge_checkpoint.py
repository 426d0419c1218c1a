"""Judges task 4.1: what crashes leave, damage, what stays, and disks that fail."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import short
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
RULES = (
    "A file's content is safe after os.fsync of the file (flush it before), a name that is new, "
    "changed or gone after os.fsync of its folder."
)


def _saved(
    grade: Grade, plan: Plan, body: Callable[..., Mapping[str, Any]] = b.save
) -> Mapping[str, Any]:
    found: Mapping[str, Any] = grade.call(body, plan)
    check(
        found["path"],
        f"save_checkpoint should return the path of the new checkpoint, …/{name_of(plan.step)}.",
    )
    check(
        name_of(plan.step) in found["left"],
        f"after the save of step {plan.step}, the folder should hold {name_of(plan.step)}; it "
        f"holds {found['left']}.",
    )
    return found


def _told(operations: Sequence[str], done: int) -> str:
    last = "; ".join(operations[max(0, done - 5) : done]) or "nothing"
    return f"after {done} of {len(operations)} operations ({last})"


def _files(state: Mapping[str, Any]) -> str:
    sizes = [f"{name} ({size:,} bytes)" for name, size in state["files"].items()]
    return ", ".join(sizes) or "no files"


@task("4.1")
def test_what_was_saved_is_loaded(grade: Grade) -> None:
    found = grade.call(b.save_all, (1,), Plan(0))
    check(
        found["step"] == 1 and found["equal"],
        "save_checkpoint was called for step 1 of a new run; load_checkpoint should find step 1 as "
        f"it was saved, with all keys, dtypes, lists and tuples; it finds {_found(found)}. The "
        f"folder holds {found['left'][0]}.",
    )


@task("4.1")
@pytest.mark.parametrize("what", PLANS)
def test_a_crash_leaves_the_old_or_the_new_one(grade: Grade, what: str) -> None:
    plan = PLANS[what]
    found = _saved(grade, plan, b.crash)
    operations = found["operations"]
    for state in found["states"]:
        when = f"save of {what}: if the power fails {_told(operations, state['done'])},"
        _check_names(state, when)
        _check_whole(plan, state, when)
        _check_old_or_new(plan, state, when)
        _check_kept(plan, state, when)
    done = "; ".join(operations)
    for state in found["states"]:
        check(
            not state["is_end"] or (state["step"] == plan.step and state["equal"]),
            f"save of {what}: if the power fails when save_checkpoint has just returned, "
            f"load_checkpoint should find step {plan.step}; it may find {_found(state)}, because "
            f"only these may have reached the disk: {_files(state)}. {RULES} The save did this: "
            f"{done}.",
        )


def _check_names(state: Mapping[str, Any], when: str) -> None:
    names = {path.split("/")[1] for path in state["files"]}
    others = sorted(name for name in names if not name.startswith(("step-", ".step-")))
    check(
        not others,
        f"{when} {others} may be left beside the checkpoints. Let whatever is not finished have a "
        "name that begins with .step-, by which the next save knows what to remove, and keep no "
        "other files: the newest checkpoint is found by the names.",
    )


def _check_whole(plan: Plan, state: Mapping[str, Any], when: str) -> None:
    known = {name_of(step) for step in plan.damaged}
    broken = [text for text in state["broken"] if text.partition(":")[0] not in known]
    check(
        not broken,
        f"{when} a damaged checkpoint may be found: {short(broken)}. Left are {_files(state)}. "
        f"{RULES} Give a checkpoint its name when its files are safe, and take it away before they "
        "go.",
    )


def _check_old_or_new(plan: Plan, state: Mapping[str, Any], when: str) -> None:
    before = [step for step in plan.there if step not in plan.damaged]
    allowed = [max(before) if before else None, plan.step]
    check(
        not state["error"]
        and state["step"] in allowed
        and state["equal"] == (state["step"] is not None),
        f"{when} load_checkpoint should find step {' or '.join(map(str, allowed))}; it finds "
        f"{_found(state)}. Left are {_files(state)}.",
    )


def _check_kept(plan: Plan, state: Mapping[str, Any], when: str) -> None:
    before = [step for step in plan.there if step not in (*plan.damaged, *plan.renamed)]
    intact, least = state["intact"], min(plan.keep, len(before))
    check(
        len(intact) >= least,
        f"{when} {short(intact)} may be all that is left undamaged. Before the save there were "
        f"{counted(len(before), 'undamaged checkpoint')}, and keep is {plan.keep}: what is older "
        "is removed, but not before the new one is durable, synced folder and all.",
    )


def _found(state: Mapping[str, Any]) -> str:
    if state["error"]:
        return f"none, and raises {short(state['error'])}"
    return f"step {state['step']}{'' if state['equal'] else ', not as it was saved'}"


@task("4.1")
def test_the_manifest_is_written_last(grade: Grade) -> None:
    operations = _saved(grade, Plan(4, there=(1, 2, 3)))["operations"]
    places = [i for i, text in enumerate(operations) if text.startswith("writes ")]
    written = [operations[i] for i in places]
    check(
        bool(written) and f"{b.MANIFEST} (" in written[-1],
        f"manifest.json is the last file of a checkpoint to be written: {short(written)}. It says "
        "that all others are complete, so it must not be there before they are.",
    )


@task("4.1")
def test_leftovers_of_a_crash_are_removed(grade: Grade) -> None:
    left = _saved(grade, PLANS["a step after a crash"])["left"]
    check(
        left == [name_of(step) for step in (2, 3, 4)],
        f"a crash had left .step-00000004.partial and .step-00000001.removed; the next save should "
        f"remove them, but the folder holds {left}.",
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
        expected = 1 if damage.is_of_two else 2
        check(
            found["step"] == expected and found["equal"],
            f"{where}: load_checkpoint should find step {expected}; it finds {_found(found)}. "
            "Compare the size and the SHA-256 of every file with those in the manifest, and the "
            "step with the name.",
        )
        _check_skipped(found, expected, where)
        reason = found["skipped"][name_of(3)]
        check(
            b.names_a_file(reason, found["files"], found["file"]),
            f"{where}: the reason should name the file that is damaged, of "
            f"{short(found['files'])}; it says {reason!r:.200}.",
        )


def _check_skipped(found: Mapping[str, Any], loaded: int, where: str) -> None:
    newer = [name_of(step) for step in range(loaded + 1, 4)]
    check(
        sorted(found["skipped"]) == newer,
        f"{where}: step {loaded} is loaded, so skipped should map the paths of {newer}, which are "
        f"newer, to reasons; it holds {short(found['skipped'])}. The newest is that of the "
        "highest step, whatever the clock says.",
    )
    older = [name for name in found["looked_at"] if name < name_of(loaded)]
    check(
        not older,
        f"{where}: step {loaded} is loaded, yet files of {older} were read. Reading all that is "
        "kept costs minutes where a checkpoint is large: stop at the first undamaged one.",
    )


@task("4.1")
def test_without_an_undamaged_one_nothing_is_loaded(grade: Grade) -> None:
    found = grade.call(b.all_damaged)
    error = found["all"]["error"]
    check(
        error.startswith("RuntimeError") and all(name_of(step) in error for step in (1, 2)),
        "two checkpoints, both damaged: load_checkpoint should raise a RuntimeError that names "
        f"both; {f'it raises {error!r:.200}' if error else 'it raises nothing'}. Who gets None "
        "begins anew, and overwrites what might have been saved.",
    )
    check(found["unchanged"], "load_checkpoint should change nothing in the folder; it has.")
    for place, what in (("nothing", "an empty folder"), ("missing", "no folder")):
        check(
            found[place]["step"] is None and not found[place]["error"],
            f"{what}: load_checkpoint should return None; it finds {_found(found[place])}.",
        )


# What stays


KEPT = {  # what is saved, what is there before, and what is left after each save
    "a damaged one among them": (
        *((5, 6), Plan(0, there=(1, 2, 3, 4), damaged=(3,))),
        [(2, 3, 4, 5), (4, 5, 6)],
    ),
    "two damaged ones": ((8,), Plan(0, there=(1, 2, 3), damaged=(2, 3), keep=2), [(1, 2, 3, 8)]),
    "steps of two and three digits": (
        *((10, 90, 100), Plan(0, keep=2)),
        [(10,), (10, 90), (90, 100)],
    ),
    "one stays": ((4,), Plan(0, there=(1, 2), keep=1), [(4,)]),
    "a damaged one is replaced": ((3,), Plan(0, there=(1, 2, 3), damaged=(3,)), [(1, 2, 3)]),
}


@task("4.1")
@pytest.mark.parametrize("what", KEPT)
def test_the_newest_undamaged_ones_stay(grade: Grade, what: str) -> None:
    steps, plan, expected = KEPT[what]
    found = grade.call(b.save_all, steps, plan)
    for step, left, right in zip(steps, found["left"], expected, strict=True):
        check(
            left == [name_of(one) for one in right],
            f"steps {plan.there} were there, damaged {plan.damaged}; then {steps} were saved with "
            f"keep={plan.keep}. After step {step} there should be the steps {right}; there are "
            f"{left}. Count undamaged ones only, and remove what is older than all of them.",
        )
    check(
        found["step"] == steps[-1] and found["equal"],
        f"after the saves of {steps}, load_checkpoint should find step {steps[-1]} as it was "
        f"saved, with all keys, dtypes, lists and tuples; it finds {_found(found)}.",
    )
    check(found["unchanged"], "save_checkpoint has changed the state, which is the caller's.")


@task("4.1")
def test_an_undamaged_checkpoint_is_not_overwritten(grade: Grade) -> None:
    found = grade.call(b.save_again)
    error = found["error"]
    check(
        error.startswith("FileExistsError"),
        "step 2 is saved again, while its checkpoint is undamaged: save_checkpoint should raise a "
        f"FileExistsError; it raises {error or 'nothing'}.",
    )
    check(
        found["step"] == 2 and found["equal"] and found["left"] == [name_of(1), name_of(2)],
        f"after the refusal there should be steps 1 and 2 as before; there are {found['left']}, "
        f"and load_checkpoint finds step {found['step']}.",
    )


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
    check(
        found["step"] == 3 and found["equal"],
        "step 3 was saved with keep=2, and step 1, which had to go, could not be removed: step 3 "
        f"is saved all the same. load_checkpoint finds {_found(found)}; the folder holds "
        f"{found['left']}. Clean up a save that fails, not one after which something fails.",
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


@task("4.1")
def test_loading_runs_no_code(grade: Grade) -> None:
    found = grade.call(b.load_code)
    check(
        not found["ran"],
        "a checkpoint with an object that opens a file when it is unpickled was loaded, and the "
        "file was made. Load with torch.load(…, weights_only=True).",
    )
