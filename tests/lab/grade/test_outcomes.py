"""Turning the end of a test into a verdict, and verdicts into a task's outcome."""

from pathlib import Path

import pytest

from distlab import course
from distlab.grade import table
from distlab.grade.checks import Wrong
from distlab.grade.outcomes import OUTPUT_CHARACTERS, Outcome, Verdict, verdict_on
from distlab.grade.results import TaskResult, TestResult
from distlab.launch import RankFailed, RankHung

TASK = course.load(Path(__file__).parents[3]).task("1.4")
TODO = "Task 1.4: broadcast, see guidelines.md#14-broadcast-along-a-tree"


def raised(name: str, text: str) -> RankFailed:
    message = f"rank 0 of 2 raised {name}: {text}"
    return RankFailed(message, rank=0, exception=name)


def a_task(*tests: tuple[str, Verdict], expected: int | None = None) -> TaskResult:
    results = [TestResult(f"test[{world}]", world, verdict, 0.1) for world, verdict in tests]
    return TaskResult(
        TASK, "a.py", "ab", len(tests) if expected is None else expected, False, results
    )


PASSED = Verdict(Outcome.PASSED)
HANG = Verdict(Outcome.HANG, "4 of 4 wait in recv")


def test_only_the_error_of_a_template_is_a_todo() -> None:
    verdict = verdict_on(raised("NotImplementedError", TODO))
    assert (verdict.outcome, verdict.message) == (Outcome.TODO, TODO)
    assert (verdict.kind, verdict.missing) == ("todo", ("1.4", "broadcast"))
    other = verdict_on(raised("NotImplementedError", "Module is missing forward"))
    assert other.outcome is Outcome.FAILED
    assert "rank 0 of 2 raised NotImplementedError: Module is missing" in other.message


def test_what_is_wrong_in_the_simulated_world_is_told_before_a_crash_on_processes() -> None:
    wrong = verdict_on(Wrong("rank 1 sent 7000 elements"))
    crash = Verdict(Outcome.CRASH, "rank 1 of 2 has returned while rank 0 still waited")
    task = a_task(("gloo", crash), ("sim", PASSED), ("sim", wrong))
    assert (task.outcome, task.points) == (Outcome.FAILED, 0)
    assert a_task(("gloo", crash), ("sim", PASSED)).outcome is Outcome.CRASH


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_graders_own_error_is_never_hidden(world: str) -> None:
    error = Verdict(Outcome.GRADER_ERROR, "KeyError: 3")
    task = a_task(("sim", Verdict(Outcome.OOM, "grew")), (world, error))
    assert task.outcome is Outcome.GRADER_ERROR


def test_after_two_hangs_the_rest_is_known() -> None:
    assert not a_task(("sim", HANG), ("sim", PASSED)).is_known
    assert a_task(("sim", HANG), ("sim", PASSED), ("gloo", HANG)).is_known


def test_a_task_of_which_nothing_was_run_scores_nothing_and_is_not_the_graders_fault() -> None:
    task = a_task(expected=3)
    assert (task.outcome, task.points) == (Outcome.NOT_RUN, 0)
    expected = "Task 1.4: none of its tests were run, because pytest ended first."
    assert table.message(task) == expected
    assert a_task(expected=0).outcome is Outcome.GRADER_ERROR


def test_a_task_that_waits_for_another_one_says_for_which() -> None:
    missing = "Task 1.3: exchange, see guidelines.md#14-exchange"
    needs = a_task(("sim", verdict_on(raised("NotImplementedError", missing))))
    assert table.message(needs) == f"Task 1.4 needs another task first. {missing}"
    assert not needs.is_known, "a test that does without may tell more"
    own = a_task(("sim", verdict_on(raised("NotImplementedError", TODO))))
    assert (table.message(own), own.is_known) == (TODO, True)


def test_only_the_last_lines_of_what_ranks_print_are_shown() -> None:
    assert Verdict(Outcome.PASSED, output="one\ntwo\n").output_tail == "one\ntwo"
    flood = "".join(f"{n} " + 1000 * "flood " + "\n" for n in range(100))
    shown = Verdict(Outcome.PASSED, output=flood).output_tail.splitlines()
    assert [line.split(" ")[0] for line in shown] == ["…", *map(str, range(90, 100))]
    assert max(map(len, shown)) == OUTPUT_CHARACTERS


def test_a_hang_is_explained_by_what_kind_it_is() -> None:
    def advice(kind: str) -> str:
        verdict = verdict_on(RankHung("7 of 8 wait in barrier", kind=kind, rank=5))
        assert (verdict.outcome, verdict.kind) == (Outcome.HANG, kind)
        return table.next_step(a_task(("gloo", verdict)))

    assert advice("deadlock") == "guidelines.md 1.4"
    assert "Does this loop ever end, or" in advice("endless loop")
    assert "What does this line wait for" in advice("blocked")
    assert "--world-timeout" in advice("time is up")


def test_a_hang_that_is_not_explained_asks_nothing_of_the_learner() -> None:
    verdict = verdict_on(RankHung("time is up after 10 s"))
    assert verdict.kind == "time is up"
    assert "ever end" not in table.next_step(a_task(("sim", verdict)))
