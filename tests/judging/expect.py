"""Steps that nearly all judges share: running a body on ranks, comparing, looping over cases."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, WrongResult, check, check_cost
from distlab.sim import Options
from judging.checks import exceeds, is_close, of_members, short_beside
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group


def expect(what: str, found: Any, right: Any, cause: str = "", tolerance: float = 0.0) -> None:
    """Check a value; the error gives the expected and the actual value, and the likely cause.

    Args:
        what: Subject of the message, with the rank, such as "rank 1 of 3: the mean".
        found: Learner's value.
        right: Expected value.
        cause: Sentences at the end of the message.
        tolerance: Greatest allowed difference between numbers.
    """
    if not is_close(found, right, tolerance):  # checked first, because formatting values is slow
        check(False, _should_be(what, found, right, cause))


def expect_cost(what: str, found: Any, right: Any, cause: str = "") -> None:
    """Check one or more costs, in the way of ``expect``: higher ones alone cost too much."""
    if not is_close(found, right, 0.0):
        judge = check_cost if exceeds(found, right) else check
        judge(False, _should_be(what, found, right, cause))


def _should_be(what: str, found: Any, right: Any, cause: str) -> str:
    wanted, got = short_beside(right, found), short_beside(found, right)
    return f"{what} should be {wanted}; got {got}. {cause}"


def expect_on_all_ranks(
    what: str,
    by_rank: Sequence[Any],
    right: Any,
    cause: str = "",
    tolerance: float = 0.0,
    where: str = "",
) -> None:
    """Check a value that should be ``right`` on every rank; ``where`` names the test case."""
    for rank, found in enumerate(by_rank):
        here = f"rank {rank} of {len(by_rank)}{where}"
        expect(f"{here}: {what}", found, right, cause, tolerance)


def over(
    cases: Iterable[Any], check_case: Callable[[Grade, Any], None], **options: Any
) -> Callable[..., None]:
    """Return a test that checks each case; ``options`` are passed to ``parametrize``."""

    @pytest.mark.parametrize("case", [*cases], **options)
    def test(grade: Grade, case: Any) -> None:
        check_case(grade, case)

    return test


def results_in_group(
    grade: Grade, body: Callable[..., Any], *args: object, options: Options | None = None
) -> list[Any]:
    """Run a body in a group whose members have other ranks in the world; return their results."""
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, body, *args), options=options, if_stuck=STUCK_IN_GROUP
    )
    return of_members(run)


def check_small(run: Run, num_collectives: int, num_bytes: int, what: str) -> None:
    """Check the cost of gathering or reducing a few numbers.

    Args:
        run: Run of the simulated world.
        num_collectives: Largest number of collectives that a rank may call.
        num_bytes: Largest number of bytes that a rank may contribute in total.
        what: Name of the function.
    """
    most = num_bytes * 2 * (len(run.results) - 1)
    for rank, (calls, sent) in enumerate(zip(run.collectives, run.bytes_sent, strict=True)):
        check_cost(
            calls <= num_collectives,
            f"{what} should call at most {num_collectives} collectives; rank {rank} of "
            f"{len(run.results)} called {calls}. Put all numbers into one tensor; gathering "
            "objects takes several collectives.",
        )
        check_cost(
            sent <= most,
            f"{what}: rank {rank} of {len(run.results)} sent {sent:g} bytes, and {most} are "
            f"enough for {num_bytes} bytes from each rank. Send a tensor with these numbers alone.",
        )


def floats(function: str, values: Sequence[Any]) -> tuple[float, ...]:
    """Convert values from a lesson to floats, if they are Python's own numbers.

    Raises:
        WrongResult: A value is something else, such as a tensor, which would keep memory in use.
    """
    for value in values:
        if not isinstance(value, int | float):
            raise WrongResult(
                f"{function} should return Python's own numbers; {value!r:.50} is a "
                f"{type(value).__name__}"
            )
    return tuple(map(float, values))
