"""Judges task 4.4: what training waits for, what is written, and that no error is lost."""

import pytest

from distlab.grade import Grade, check, task
from judging.checks import short
from phase4 import async_saves as b


@task("4.4")
def test_training_goes_on_during_the_write(grade: Grade) -> None:
    found = grade.call(b.save_and_change)
    check(
        not found["waited"],
        "save should return while the write goes on; it has waited for its own write. Start a "
        "thread, and don't join it before the next save, wait or the end of the with statement.",
    )
    check(found["unchanged"], "save has changed the state, which is the caller's.")


@task("4.4")
def test_what_is_written_is_the_state_of_the_save(grade: Grade) -> None:
    found = grade.call(b.save_and_change)
    check(
        found["steps"] == [3] and not found["different"],
        "the state was changed after save had returned, and before the write began. What was "
        f"written should be as it was: {short(found['right'])}; it is {short(found['written'])}. "
        "Copy every tensor, and every dict, list and tuple; on a CPU, tensor.cpu() is no copy.",
    )


@task("4.4")
def test_the_copy_is_made_before_save_returns(grade: Grade) -> None:
    others = grade.call(b.who_reads)
    check(
        not others,
        "another thread than training's has read the state. It must be copied before save returns: "
        "after that, training changes it.",
    )


@task("4.4")
def test_one_write_at_a_time(grade: Grade) -> None:
    found = grade.call(b.save_four)
    check(
        found["most_at_once"] == 1,
        f"four steps were saved one after the other; {found['most_at_once']} writes went on at the "
        "same time. A save waits for the write before it, so that there is one copy in memory.",
    )
    check(
        found["steps"] == [1, 2, 3, 4] and found["values"] == [1, 2, 3, 4],
        f"the steps 1, 2, 3 and 4 were saved; written were {found['steps']}, with the values of "
        f"{found['values']}. Each save is written, in the order of the saves.",
    )


@task("4.4")
def test_waiting_for_what_is_written(grade: Grade) -> None:
    expected: list[int] = []
    for when, steps in grade.call(b.wait).items():
        expected = [*expected, len(expected) + 1]
        check(
            steps == expected,
            f"after {when}, the steps {expected} should be written; they are {steps}.",
        )


@task("4.4")
@pytest.mark.parametrize("how", ["save", "wait", "with"])
def test_an_error_is_told_once(grade: Grade, how: str) -> None:
    found = grade.call(b.fail, how)
    what = {"save": "the next save", "wait": "wait", "with": "the end of the with statement"}[how]
    kind, text = found["first"] or ("nothing", "")
    check(
        kind == "RuntimeError" and "step 300" in text and b.FULL in text,
        f"the write of step 300 has failed, since the disk is full. {what} should raise a "
        f"RuntimeError that says 'step 300' and '{b.FULL}'; it raises {kind} {short(text)}.",
    )
    check(
        not found["second"],
        f"{what} has told of the error; wait() after that should raise nothing, it raises "
        f"{short(found['second'])}.",
    )
    check(
        found["written"] == [],
        f"the save that raised should save nothing; written were {found['written']}.",
    )
    check(
        found["afterwards"] == [302] and not found["later"],
        f"after the error, step 302 was saved; written should be [302], but {found['afterwards']} "
        f"were, and raised was {short(found['later'] or 'nothing')}.",
    )


@task("4.4")
def test_python_waits_for_the_last_write(grade: Grade) -> None:
    found = grade.call(b.save_and_change)
    check(
        not found["is_daemon"],
        "the write runs in a daemon thread: when the program ends, Python cuts it off.",
    )


@task("4.4")
def test_the_seconds_of_copy_and_write(grade: Grade) -> None:
    found = grade.call(b.seconds)
    check(found["before"] == 0.0, "before the first save, snapshot_s and write_s should be 0.0.")
    check(
        0 < found["snapshot_s"] <= found["save_s"] - 0.8 * b.LATE_S,
        f"a save took {found['save_s']:.3f} s, {b.LATE_S} s of which it waited for the write "
        f"before; snapshot_s should be what the copy took, it is {found['snapshot_s']:.3f}.",
    )
    check(
        found["write_s"] >= 0.8 * b.LATE_S,
        f"a write took at least {b.LATE_S} s; when it had ended, write_s was "
        f"{found['write_s']:.3f}.",
    )
    check(
        0 < found["second_write_s"] <= found["all_s"],
        f"after the second write, write_s should be what it took, it is "
        f"{found['second_write_s']:.3f}.",
    )
