"""Judges task 4.7: one step in which all ranks stop, handlers of signals, and leaving."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import uneven
from judging.expect import check_small, expect, expect_on_all_ranks, results_in_group
from phase4 import stops as b
from phase4.stops import Plan

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
EXIT_STOPPED = 75
STUCK = (
    "All ranks ask in every step, and all of them leave in the same one: a rank that stops because "
    "a signal has come to it alone leaves the others waiting in their next collective."
)


def _in_words(plan: Plan) -> str:
    arrivals = [f"{signal.Signals(n).name} to rank {r} in step {s}" for r, s, n in plan.arrivals]
    return " and ".join(arrivals) or "no signal"


def _check_answers(plan: Plan, by_rank: Sequence[Any]) -> None:
    signals = plan.signals or (TERM, USR1)
    arrivals = [step for _, step, number in plan.arrivals if number in signals]
    first = min(arrivals, default=plan.num_steps)
    for rank, facts in enumerate(by_rank):
        where = f"{_in_words(plan)}: rank {rank} of {len(by_rank)}"
        expect(
            f"{where}: the steps that are computed",
            *(facts["computed"], [*range(plan.num_steps)]),
            "A handler only notes that the signal has come; the step goes on to its end.",
        )
        expect(
            f"{where}: the answers of agreed(), step by step,",
            *(facts["answers"], [step >= first for step in range(plan.num_steps)]),
            "The answer is the same on all ranks, and true as soon as one of them has got one of "
            "the signals that are given, by default SIGTERM and SIGUSR1; it stays true.",
        )
        is_caught = all(number in signals for _, _, number in plan.arrivals)
        _check_handlers(facts if is_caught else {**facts, "let through": []}, where)


def _check_handlers(facts: Any, where: str) -> None:
    check(
        not facts["changed"],
        f"{where} no longer handles {' and '.join(facts['changed'])} as before the with "
        "statement, by a function of the caller's or not at all. signal.signal returns the handler "
        "that was there: keep it in __enter__, and put it back in __exit__.",
    )
    check(
        not facts["let through"],
        f"{where}: {' and '.join(facts['let through'])}. From the beginning of the with statement "
        "to its end, also while leave saves and however often one comes, a signal is noted, and "
        "nothing else: whatever handled it before might end the rank in the middle of a step.",
    )


def _train(grade: Grade, num_ranks: int, plan: Plan) -> None:
    options = uneven(grade.random, num_ranks)
    run = grade.run(b.train, num_ranks, plan, options=options, if_stuck=STUCK)
    _check_answers(plan, run.results)
    if grade.is_simulated:
        steps = plan.num_steps
        check_small(run, steps, 8 * steps, f"StopRequest.agreed, in {steps} steps,")


@task("4.7", real=True)
def test_all_ranks_stop_after_the_same_step(grade: Grade) -> None:
    rank, step = grade.random.randrange(3), grade.random.randrange(1, 4)
    _train(grade, 3, Plan(((rank, step, TERM),)))


PLANS = {
    "no signal": (3, Plan()),
    "one rank": (1, Plan(((0, 2, TERM),))),
    "several of five ranks": (5, Plan(((3, 3, TERM), (1, 2, USR1), (1, 3, TERM)))),
    "all ranks, some of them again": (
        *(3, Plan((*((rank, 1, TERM) for rank in range(3)), (1, 1, TERM), (2, 3, TERM)))),
    ),
    "SIGUSR1": (2, Plan(((1, 2, USR1),))),
    "SIGUSR2, which is given": (2, Plan(((0, 2, USR2),), signals=(USR2,))),
    "SIGUSR2, which is left to the caller": (2, Plan(((0, 1, USR2),))),
}


@task("4.7")
@pytest.mark.parametrize("what", PLANS)
def test_signals_of_all_kinds(grade: Grade, what: str) -> None:
    _train(grade, *PLANS[what])


@task("4.7", real=True)
def test_a_signal_that_comes_while_ranks_wait(grade: Grade) -> None:
    run = grade.run(b.train_while_others_wait, 3, 0, 2, if_stuck=STUCK)
    expect_on_all_ranks("the answers of agreed()", run.results, run.results[0])
    answers = run.results[0]
    check(
        not answers[0] and answers[2:] == [True, True],
        "rank 2 got SIGTERM while it waited for rank 0 in the agreed() of step 1. All ranks should "
        f"hear True from step 2 on at the latest; they hear {answers}. Don't write the answer over "
        "a flag that the handler has set meanwhile.",
    )


@task("4.7")
def test_handlers_come_back_also_after_an_error(grade: Grade) -> None:
    facts = grade.call(b.fail)
    cause = "Nothing is caught before the with statement begins."
    expect("the signals that StopRequest() itself handles", facts["too early"], [], cause)
    check(
        facts["came out"],
        "an error in a step, inside of the with statement, should come out of it; it does not. "
        "__exit__ returns None: with a true value it swallows all errors of training, and the "
        "SystemExit of leave too, so that the run looks finished.",
    )
    _check_handlers(facts, "after an error inside of the with statement, rank 0")


@task("4.7", real=True)
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["one signal", "two signals"])
def test_ranks_leave_when_all_have_saved(grade: Grade, is_interrupted: bool) -> None:
    plan = Plan(((1, 0, TERM),), leaves=True, is_interrupted=is_interrupted)
    _check_leaving(grade.run(b.train, 3, plan, if_stuck=STUCK).results)


@task("4.7")
def test_stopping_inside_a_group(grade: Grade) -> None:
    plan = Plan(((2, 1, TERM),), num_steps=3)
    _check_answers(plan, results_in_group(grade, b.train, plan))
    _check_leaving(results_in_group(grade, b.train, plan._replace(leaves=True)))


def _check_leaving(by_rank: Sequence[Any]) -> None:
    for rank, facts in enumerate(by_rank):
        where = f"rank {rank} of {len(by_rank)}"
        expect(
            f"{where}: the code of the SystemExit of leave",
            *(facts["code"], EXIT_STOPPED),
            "It is EXIT_STOPPED of given.py (None: leave has returned, or __exit__ has swallowed "
            "the exit).",
        )
        _check_handlers(facts, where)
        expect(f"{where}: the number of saves", len(facts["saved_s"]), 1)
    last, first = max(f["saved_s"][0] for f in by_rank), min(f["left_s"] for f in by_rank)
    check(
        first >= last,
        f"a rank left {1e3 * (last - first):.1f} ms before the last one had saved. After its save, "
        "a rank waits for those of all others: torchrun ends all ranks when the first one has "
        "exited, whether they have saved or not.",
    )
