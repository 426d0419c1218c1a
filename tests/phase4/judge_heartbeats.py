"""Judges task 4.5: which rank is gone, which waits, which is slow, and that none is blamed wrongly.

Stories drawn at random are compared with a model of the monitor (``health.py``), poll by poll.
"""

from collections.abc import Sequence

from distlab.grade import Grade, check, task
from phase4 import heartbeats as b
from phase4.health import difference, draw, in_words
from phase4.heartbeats import Poll


@task("4.5")
def test_what_a_monitor_says(grade: Grade) -> None:
    stories = [draw(grade.random, num_events) for num_events in (20, 80) for _ in range(60)]
    wrong = []
    for story, polls in zip(stories, grade.call(b.watch_all, stories), strict=True):
        _check_ranks(polls, story.num_ranks)
        if found := difference(story, polls):
            wrong.append((*found, story))
    if wrong:
        length, text, story = min(wrong, key=lambda one: one[0])  # the shortest says most
        check(False, f"{in_words(story, length)}: {text}")


def _check_ranks(polls: Sequence[Poll], num_ranks: int) -> None:
    for poll in polls:
        check(
            bool(poll),
            "poll waited for a rank that has not reported yet: store.get waits until its key is "
            "there. Ask store.check first.",
        )
        ranks = [rank for rank, *_ in poll]
        check(
            ranks == [*range(num_ranks)],
            f"poll should say what each of {num_ranks} ranks does, in order; it names {ranks}.",
        )


@task("4.5")
def test_messages_to_the_store(grade: Grade) -> None:
    calls = grade.call(b.send, 3, 3)
    of_report = (
        "A rank that waits for an answer makes the step longer: number the reports on the rank "
        "itself."
    )
    of_poll = "Two for each rank are enough, to look whether there is a report and to read it."
    for kind, most, cause in (("report", 1, of_report), ("poll", 2 * 3, of_poll)):
        for names in calls[kind]:
            check(
                len(names) <= most,
                f"a {kind} of 3 ranks called {len(names)} methods of the store, {names}; "
                f"{most} should be enough. {cause}",
            )
