"""Sentences about a rank's threads that wait for each other, and about locks held too long."""

import re
from collections.abc import Iterable, Sequence

from distlab.sim.messages.pending import Pending
from distlab.sim.messages.thread_wait import ThreadWait, beside, thread_name
from distlab.util.text import clauses, rank_names, verb

HELD, HELD_BY_EACH = "which it holds itself", "which each of them holds itself"


def alike(waits: Iterable[ThreadWait]) -> list[list[ThreadWait]]:
    """Group the waits of different ranks in which the same threads wait for the same things."""
    groups: dict[str, list[ThreadWait]] = {}
    for wait in waits:
        groups.setdefault(words([0], wait), []).append(wait)
    return list(groups.values())


def words(ranks: Sequence[int], wait: ThreadWait) -> str:
    """Describe a thread that cannot continue and the one that waits for it, or a whole circle."""
    chain = wait.chain()
    links = _circle(chain) or chain[:-3:-1]
    if len(links) == 1 and not wait.waiters[0].name:
        text = of_several(wait.text()) if len(ranks) > 1 else wait.text()
        return f"{rank_names(ranks)} {text}, and no thread of {verb(ranks, 'them', 'it')} can go on"
    return f"on {rank_names(ranks)} {clauses([_of_thread(link) for link in links])}"


def of_several(text: str) -> str:
    """Return the text of a rank's wait for several ranks: ``wait for a lock of their own``."""
    text = re.sub("^waits for", "wait for", text)
    return text.replace("of its own", "of their own").replace(HELD, HELD_BY_EACH)


def advice(wait: ThreadWait) -> str:
    """Return advice on a chain of threads, or on the circle that it ends in."""
    chain = wait.chain()
    circle = _circle(chain)
    if not circle:
        return chain[-1].awaited.advice
    if all(link.awaited.is_lock for link in circle):
        return "Let all threads take these locks in the same order."
    if any(link.awaited.is_lock for link in circle):
        return "Release the lock before waiting for a thread that needs it."
    return "Threads that wait for each other never go on: one of them must not wait."


def held_during(wait: Pending) -> tuple[str, str]:
    """Return a clause and advice about a lock that a waiting thread holds and another one needs.

    Both texts are "" if there is no such lock.
    """
    for other in beside(wait):
        chain = other.chain()
        links = [link.awaited for link in chain]
        if chain[-1].following() is wait and any(link.is_lock for link in links):
            return (
                f"on rank {wait.rank} {_of_thread(other)}",
                f"On rank {wait.rank} {thread_name(wait.waiters[0])} holds a lock while it waits "
                f"in {wait.name}. If a rank waits for what {thread_name(other.waiters[0])} does "
                "with that lock, release it before communicating.",
            )
    return "", ""


def _circle(chain: Sequence[ThreadWait]) -> list[ThreadWait]:
    """Return the waits that form a circle at the end of a chain; [] if there is no circle."""
    following = chain[-1].following()
    starts = [number for number, link in enumerate(chain) if link is following]
    return [*chain[starts[0] :]] if starts else []


def _of_thread(link: ThreadWait) -> str:
    return f"{thread_name(link.waiters[0])} {link.text()}"
