"""Judges task 4.4: the waits of training, the written states, and errors that are reported."""

import pytest

from distlab.grade import Grade, check, task
from distlab.sim import Options
from judging.checks import short
from judging.expect import expect
from phase4 import async_saves as b


@task("4.4")
def test_training_goes_on_during_the_write(grade: Grade) -> None:
    facts = grade.call(b.save_and_change)
    check(
        not facts["waited"],
        "save should return while the write goes on; it has waited for its own write. Start a "
        "thread, and don't join it before the next save, wait or the end of the with statement.",
    )
    check(facts["unchanged"], "save has changed the state, which is the caller's.")
    expect("the steps that are written after a save of step 3", facts["steps"], [3])
    expect(
        "what is written, where the state was changed after save had returned,",
        *(facts["written"], facts["right"]),
        "Copy every tensor, and every dict, list and tuple; on a CPU, tensor.cpu() is no copy.",
    )
    check(
        not facts["is_daemon"],
        "the write runs in a daemon thread: when the program ends, Python cuts it off.",
    )


@task("4.4")
def test_one_write_at_a_time(grade: Grade) -> None:
    run = grade.run(b.save_four, 1, options=Options(has_devices=True))
    facts, num_bytes = run.results[0], 4 * b.NUM_ELEMENTS
    expect(
        "the number of writes that go on at the same time, where four steps are saved,",
        *(facts["most_at_once"], 1),
        "A save waits for the write before it, so that there is one copy in memory.",
    )
    expect(
        "the steps that are written, and their values,",
        *([facts["steps"], facts["values"]], [[1, 2, 3, 4], [{1}, {2}, {3}, {4}]]),
        "Each save is written, in the order of the saves.",
    )
    check(
        run.peak_bytes[0] < 2.5 * num_bytes,
        f"four steps of a state of {num_bytes:,} bytes were saved, and with it up to "
        f"{run.peak_bytes[0]:,} bytes were held: there is memory for one copy. Copy when the write "
        "before has ended, and let go of what is written.",
    )


@task("4.4")
def test_a_copy_has_the_elements_alone_and_is_on_the_cpu(grade: Grade) -> None:
    num_bytes, devices = grade.call(b.copy_of_a_slice)
    elements = 4 * (b.NUM_ELEMENTS + 2)
    check(
        num_bytes < 1.5 * elements,
        f"two tensors of {elements:,} bytes together were saved, one of them a slice of a longer "
        f"one; the copies hold {num_bytes:,} bytes. copy.deepcopy copies the whole storage behind "
        "a slice: copy its elements.",
    )
    cause = "On its own device a copy takes the memory that training needs."
    expect("the devices of the copies", devices, ["cpu", "cpu"], cause)


@task("4.4")
def test_waiting_for_what_is_written(grade: Grade) -> None:
    facts = grade.call(b.wait)
    for count, (when, steps) in enumerate(facts["steps"].items(), start=1):
        expect(f"the steps that are written after {when}", steps, [*range(1, count + 1)])
    check(
        facts["comes out"],
        "an error was raised inside of the with statement, and did not come out of it: __exit__ "
        "should return nothing, for what is true there ends the error.",
    )


@task("4.4")
@pytest.mark.parametrize("how", b.FAILURES)
def test_an_error_is_told_once(grade: Grade, how: str) -> None:
    facts = grade.call(b.fail, how)
    what = {"save": "the next save", "wait": "wait", "with": "the end of the with statement"}[how]
    (kind, text), reason = facts["first"], b.FAILURES[how].args[-1]
    check(
        kind == "RuntimeError" and "step 300" in text and reason in text,
        f"the write of step 300 has raised {b.FAILURES[how]!r}. {what} should raise a RuntimeError "
        f"that says 'step 300' and '{reason}'; it raises {kind} {short(text)}. A write may fail "
        "with any error, and in a thread nobody sees it.",
    )
    expect(f"{what} has reported the error: what wait() raises then", facts["second"], [])
    expect("the steps that are written after the error", facts["written"], [], "None is saved.")
    expect(
        "the steps that are written, and the error, when step 302 is saved after that,",
        *([facts["afterwards"], facts["later"]], [[302], []]),
    )


@task("4.4")
def test_the_seconds_of_copy_and_write(grade: Grade) -> None:
    facts = grade.call(b.seconds)
    expect("snapshot_s + write_s before the first save", facts["before"], 0.0)
    check(
        0 < facts["snapshot_s"] <= facts["save_s"] - 0.8 * b.LATE_S,
        f"a save took {facts['save_s']:.3f} s, {b.LATE_S} s of which it waited for the write "
        f"before; snapshot_s should be what the copy took, it is {facts['snapshot_s']:.3f}.",
    )
    check(
        facts["write_s"] >= 0.8 * b.LATE_S,
        f"a write took at least {b.LATE_S} s; when it had ended, write_s was "
        f"{facts['write_s']:.3f}.",
    )
    check(
        0 < facts["second_write_s"] <= facts["all_s"],
        f"the second write took at most {facts['all_s']:.3f} s, and training {b.TRAINING_S:.0f} s "
        f"before it waited for it; write_s is {facts['second_write_s']:.3f}. It should be what the "
        "write took, and so end with it.",
    )
