"""Judges task 4.4: what training waits for, what is written, and that no error is lost."""

import pytest

from distlab.grade import Grade, check, task
from distlab.sim import Options
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
    run = grade.run(b.save_four, 1, options=Options(has_devices=True))
    found, num_bytes = run.results[0], 4 * b.NUM_ELEMENTS
    check(
        found["most_at_once"] == 1,
        f"four steps were saved one after the other; {found['most_at_once']} writes went on at the "
        "same time. A save waits for the write before it, so that there is one copy in memory.",
    )
    check(
        found["steps"] == [1, 2, 3, 4] and found["values"] == [{1}, {2}, {3}, {4}],
        f"the steps 1, 2, 3 and 4 were saved; written were {found['steps']}, with the values of "
        f"{found['values']}. Each save is written, in the order of the saves.",
    )
    check(
        run.peak_bytes[0] < 2.5 * num_bytes,
        f"four steps of a state of {num_bytes:,} bytes were saved, and with it up to "
        f"{run.peak_bytes[0]:,} bytes were held: there is memory for one copy. Copy when the write "
        "before has ended, and let go of what is written.",
    )


@task("4.4")
def test_a_copy_has_the_elements_alone_and_is_on_the_cpu(grade: Grade) -> None:
    found = grade.call(b.copy_of_a_slice)
    elements = 4 * (b.NUM_ELEMENTS + 2)
    check(
        found["num_bytes"] < 1.5 * elements,
        f"two tensors of {elements:,} bytes together were saved, one of them a slice of a longer "
        f"one; the copies hold {found['num_bytes']:,} bytes. copy.deepcopy copies the whole "
        "storage behind a slice: copy its elements.",
    )
    check(
        set(found["devices"].values()) == {"cpu"},
        f"all copies should be on the CPU; they are on {found['devices']}. On its own device a "
        "copy takes the memory that training needs.",
    )


@task("4.4")
def test_waiting_for_what_is_written(grade: Grade) -> None:
    expected: list[int] = []
    found = grade.call(b.wait)
    for when, steps in found["steps"].items():
        expected = [*expected, len(expected) + 1]
        check(
            steps == expected,
            f"after {when}, the steps {expected} should be written; they are {steps}.",
        )
    check(
        found["is_told"],
        "an error was raised inside of the with statement, and nobody saw it: __exit__ should "
        "return nothing, for what is true there ends the error.",
    )


@task("4.4")
@pytest.mark.parametrize("how", ["save", "wait", "with"])
def test_an_error_is_told_once(grade: Grade, how: str) -> None:
    found = grade.call(b.fail, how)
    what = {"save": "the next save", "wait": "wait", "with": "the end of the with statement"}[how]
    kind, text = found["first"] or ("nothing", "")
    failure = b.FAILURES[how]
    reason = failure.args[-1]
    check(
        kind == "RuntimeError" and "step 300" in text and reason in text,
        f"the write of step 300 has raised {failure!r}. {what} should raise a RuntimeError that "
        f"says 'step 300' and '{reason}'; it raises {kind} {short(text)}. A write may fail with "
        "any error, and in a thread nobody sees it.",
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
        f"the second write took at most {found['all_s']:.3f} s, and training {b.TRAINING_S:.0f} s "
        f"before it waited for it; write_s is {found['second_write_s']:.3f}. It should be what the "
        "write took, and so end with it.",
    )
