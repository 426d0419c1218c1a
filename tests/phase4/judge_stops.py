"""Judges task 4.7: that all ranks stop in one step, what handlers do, and how ranks leave."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from judging.checks import MEASURED, uneven
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import stops as b
from phase4.stops import Plan

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
EXIT_STOPPED = 75
STUCK = (
    "All ranks ask in every step, and all of them leave in the same one: a rank that stops because "
    "a signal has come to it alone leaves the others waiting in their next collective."
)
LEAVING = (
    "After its save, a rank waits for those of all others: torchrun ends all ranks when the first "
    "one has exited, whether they have saved or not."
)


def _told(plan: Plan) -> str:
    arrivals = [f"{signal.Signals(n).name} to rank {r} in step {s}" for r, s, n in plan.arrivals]
    return " and ".join(arrivals) or "no signal"


def _check_answers(plan: Plan, by_rank: Sequence[Any]) -> None:
    first = min((step for _, step, _ in plan.arrivals), default=plan.num_steps)
    expected = [step >= first for step in range(plan.num_steps)]
    for rank, found in enumerate(by_rank):
        where = f"{_told(plan)}: rank {rank} of {len(by_rank)}"
        check(
            found["computed"] == [*range(plan.num_steps)],
            f"{where} computed the steps {found['computed']} of {plan.num_steps}. A handler only "
            "notes that the signal has come; the step goes on to its end.",
        )
        check(
            found["answers"] == expected,
            f"{where} should hear {expected} from agreed(), step by step; it hears "
            f"{found['answers']}. The answer is the same on all ranks, and true as soon as one of "
            "them has got a signal; it stays true.",
        )
        check(
            not found["changed"],
            f"{where} no longer handles {_names(found['changed'])} as before the with statement. "
            "signal.signal returns the handler that was there: keep it, and put it back.",
        )
        _check_kept(found, where)


def _check_kept(found: Any, where: str) -> None:
    check(
        not found["let through"],
        f"{where}: {' and '.join(found['let through'])}. From the beginning of the with statement "
        "to its end, also while leave saves and however often one comes, a signal is noted, and "
        "nothing else: whatever handled it before might end the rank in the middle of a step.",
    )


def _names(numbers: Sequence[int]) -> str:
    return " and ".join(signal.Signals(number).name for number in numbers)


def _train(grade: Grade, num_ranks: int, plan: Plan) -> None:
    options = uneven(grade.random, num_ranks)
    run = grade.run(b.train, num_ranks, plan, options=options, if_stuck=STUCK)
    _check_answers(plan, run.results)


@task("4.7", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_ranks_stop_after_the_same_step(grade: Grade, num_ranks: int) -> None:
    rank, step = grade.random.randrange(num_ranks), grade.random.randrange(1, 4)
    _train(grade, num_ranks, Plan(((rank, step, TERM),)))


@task("4.7")
@pytest.mark.parametrize("num_ranks", [1, 5, 8])
def test_without_a_signal_nobody_stops(grade: Grade, num_ranks: int) -> None:
    _train(grade, num_ranks, Plan())


@task("4.7")
def test_signals_that_come_to_several_ranks(grade: Grade) -> None:
    _train(grade, 5, Plan(((3, 3, TERM), (1, 2, USR1), (1, 3, TERM))))
    _train(grade, 3, Plan((*((rank, 1, TERM) for rank in range(3)), (1, 1, TERM), (2, 3, TERM))))


@task("4.7", real=True)
def test_a_signal_that_comes_while_ranks_wait(grade: Grade) -> None:
    run = grade.run(b.train_while_others_wait, 3, 0, 2, if_stuck=STUCK)
    for rank, answers in enumerate(run.results):
        check(
            answers == run.results[0],
            f"rank {rank} hears {answers}, rank 0 {run.results[0]}: all should hear the same.",
        )
        check(
            not answers[0] and answers[2:] == [True, True],
            "rank 2 got SIGTERM while it waited for rank 0 in the agreed() of step 1. All ranks "
            f"should hear True from step 2 on at the latest; rank {rank} hears {answers}. Don't "
            "write the answer over a flag that the handler has set meanwhile.",
        )


@task("4.7")
def test_the_signals_that_ask_to_stop(grade: Grade) -> None:
    _train(grade, 2, Plan(((1, 2, USR1),)))
    _train(grade, 2, Plan(((0, 2, USR2),), signals=(USR2,)))


@task("4.7")
def test_other_signals_are_left_alone(grade: Grade) -> None:
    plan = Plan(((0, 1, USR2),))  # simulated: nothing handles it
    run = grade.run(b.train, 2, plan, if_stuck=STUCK)
    for rank, found in enumerate(run.results):
        check(
            not any(found["answers"]),
            f"SIGUSR2 is not among the signals of StopRequest(), but rank {rank} was told to stop. "
            "Catch those that are given, by default SIGTERM and SIGUSR1.",
        )


@task("4.7")
def test_handlers_come_back_also_after_an_error(grade: Grade) -> None:
    found = grade.call(b.fail)
    check(
        found["came out"],
        "an error in a step, inside of the with statement, should come out of it; it does not. "
        "__exit__ returns None: with a true value it swallows all errors of training, and the "
        "SystemExit of leave too, so that the run looks finished.",
    )
    changed = found["changed"]
    check(
        not changed,
        f"after an error inside of the with statement, {_names(changed)} should be handled as "
        "before, by a function of the caller's or not at all; StopRequest has left something else. "
        "__exit__ puts back what signal.signal returned in __enter__.",
    )


@task("4.7")
def test_asking_costs_one_small_all_reduce(grade: Grade) -> None:
    steps, ranks = 4, 3
    run = grade.run(b.ask, ranks, steps, options=MEASURED, if_stuck=STUCK)
    _check_cost(run, steps)


def _check_cost(run: Run, steps: int) -> None:
    for rank, calls in enumerate(run.collectives):
        check(
            calls == steps,
            f"rank {rank} asked {steps} times, and called {calls} collectives; each time should "
            "take one all-reduce.",
        )
        most = 8 * steps * 2 * (len(run.collectives) - 1)
        check(
            run.bytes_sent[rank] <= most,
            f"rank {rank} sent {run.bytes_sent[rank]:g} bytes to ask {steps} times; one number, of "
            f"at most 8 bytes, is enough, which makes {most} with the sums on their way.",
        )


@task("4.7")
def test_stopping_inside_a_group(grade: Grade) -> None:
    plan = Plan(((2, 1, TERM),), num_steps=3)
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.train, plan, if_stuck=STUCK_IN_GROUP)
    _check_answers(plan, [run.results[member] for member in MEMBERS])
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.leave, False, if_stuck=STUCK_IN_GROUP)
    _check_leaving([run.results[member] for member in MEMBERS])


@task("4.7", real=True)
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["one signal", "two signals"])
def test_ranks_leave_when_all_have_saved(grade: Grade, is_interrupted: bool) -> None:
    _check_leaving(grade.run(b.leave, 3, is_interrupted, if_stuck=STUCK).results)


def _check_leaving(by_rank: Sequence[Any]) -> None:
    for rank, found in enumerate(by_rank):
        where = f"rank {rank} of {len(by_rank)}"
        check(
            found["code"] == EXIT_STOPPED,
            f"leave should end {where} with SystemExit and the code {EXIT_STOPPED}, EXIT_STOPPED "
            f"of given.py; the code is {found['code']!r} (None: it returned, or __exit__ has "
            "swallowed the exit).",
        )
        _check_kept(found, where)
        check(
            len(found["saved_s"]) == 1,
            f"leave should save once on every rank; {where} saved {len(found['saved_s'])} times.",
        )
    last, first = max(f["saved_s"][0] for f in by_rank), min(f["left_s"] for f in by_rank)
    check(
        first >= last,
        f"a rank left {1e3 * (last - first):.1f} ms before the last one had saved. {LEAVING}",
    )
