"""The bank: broken programs get the right report, and correct ones get none.

Every program runs as it is, with its events in 4 other orders, and with buffered sends.
"""

from dataclasses import replace
from itertools import product
from typing import get_args

# Importing each module enters its programs in the catalogue.
import broken_by_strangers  # noqa: F401
import broken_calls  # noqa: F401
import broken_collectives  # noqa: F401
import broken_ends  # noqa: F401
import broken_messages  # noqa: F401
import broken_notes  # noqa: F401
import broken_threads  # noqa: F401
import correct_programs  # noqa: F401
import correct_threads  # noqa: F401
import pytest
from catalogue import BROKEN, CORRECT, PASSES, Broken, Correct

from distlab.sim import Deadlock, Faults, Mismatch, Options, RankError, SimulationError, simulate
from distlab.sim.reporting.errors import DeadlockKind

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.* on a group that it is not in"),
]
ORDERS = range(1, 5)
FEW_ORDERS = range(2)  # with buffered sends; order 0 adds no random delays
JITTER_S = 1e-5
NEVER, EMPTY, ALWAYS = -1, 0, 1 << 20  # eager_bytes: buffer no sends, only empty ones, or all

each_broken = pytest.mark.parametrize("broken", BROKEN, ids=lambda entry: entry.name)
each_correct = pytest.mark.parametrize("correct", CORRECT, ids=lambda entry: entry.name)


def options(faults: Faults, eager_bytes: int, order: int) -> Options:
    """Return options that delay every call at random, except in order 0."""
    shaken = replace(faults, jitter_s=JITTER_S if order else 0.0, seed=order)
    return Options(eager_bytes=eager_bytes, faults=shaken)


def run_broken(broken: Broken, eager_bytes: int, order: int = 0) -> SimulationError | None:
    try:
        simulate(
            broken.program, broken.num_ranks, options=options(broken.faults, eager_bytes, order)
        )
    except SimulationError as error:
        return error
    return None


def kind_of(error: SimulationError | None) -> str:
    if isinstance(error, Deadlock | Mismatch):
        return error.kind
    return error.exception if isinstance(error, RankError) else PASSES


def check_verdict(broken: Broken, eager_bytes: int, order: int = 0) -> None:
    """Check the error's class, kind and ranks, which must not depend on the order of events."""
    error = run_broken(broken, eager_bytes, order)
    kind = kind_of(error)
    assert kind == broken.right_kind(is_buffered=eager_bytes == ALWAYS), (order, error)
    if error is not None:
        assert isinstance(error, broken.error), (order, error)
    if isinstance(error, Deadlock) and kind == broken.kind:
        assert error.ranks == broken.ranks, (order, error)
    elif error is not None and kind == broken.kind:
        assert set(error.ranks) >= set(broken.ranks), (order, error)


def check_results(correct: Correct, eager_bytes: int, order: int = 0) -> None:
    simulated = simulate(
        correct.program,
        len(correct.results),
        options=options(correct.faults, eager_bytes, order),
    )
    assert simulated.results == correct.results, order


@each_broken
def test_a_broken_program_is_reported_in_the_right_words(broken: Broken) -> None:
    check_verdict(broken, NEVER)
    message = str(run_broken(broken, NEVER))
    text = " ".join(message.split())  # collapses the padding of columns
    assert [phrase for phrase in broken.says if phrase not in text] == [], message
    assert [phrase for phrase in broken.never if phrase in text] == [], message


@each_broken
def test_the_verdict_does_not_depend_on_the_order_of_events_or_on_buffers(broken: Broken) -> None:
    for order in ORDERS:
        check_verdict(broken, NEVER, order)
    for eager_bytes, order in product((EMPTY, ALWAYS), FEW_ORDERS):
        check_verdict(broken, eager_bytes, order)


@each_correct
def test_a_correct_program_is_never_reported(correct: Correct) -> None:
    for order in (0, *ORDERS):
        check_results(correct, NEVER, order)
    for eager_bytes, order in product((EMPTY, ALWAYS), FEW_ORDERS):
        check_results(correct, eager_bytes, order)


def test_the_bank_holds_every_kind() -> None:
    kinds = {broken.kind for broken in BROKEN}
    assert [kind for kind in get_args(DeadlockKind) if kind not in kinds] == []
    names = [entry.name for entry in (*BROKEN, *CORRECT)]
    assert len(set(names)) == len(names)


def test_only_programs_that_forget_a_handle_are_said_to() -> None:
    forgetful = {
        correct.name
        for correct in CORRECT
        if simulate(
            correct.program, len(correct.results), options=Options(faults=correct.faults)
        ).trace.unwaited
    }
    assert forgetful == {"never_waits_for_its_isend", "message_for_nobody"}
