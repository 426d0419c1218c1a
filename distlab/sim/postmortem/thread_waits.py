"""Sentences on threads of a rank that wait for each other, and on locks held for too long."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distlab.sim.messages.pending import Pending
from distlab.sim.messages.thread_wait import ThreadWait, beside, thread_name
from distlab.util.text import clauses, rank_names, verb

HELD, HELD_BY_EACH = "which it holds itself", "which each of them holds itself"


class Held(NamedTuple):
    """A lock that a thread holds while it communicates, and that another one waits for."""

    words: str
    advice: str


def alike(waits: Iterable[ThreadWait]) -> list[list[ThreadWait]]:
    """Put together the waits of ranks whose threads wait in the same way."""
    groups: dict[str, list[ThreadWait]] = {}
    for wait in waits:
        groups.setdefault(words([0], wait), []).append(wait)
    return list(groups.values())


def words(ranks: Sequence[int], wait: ThreadWait) -> str:
    """Say which thread cannot continue and which one waits for it, or which wait for each other."""
    chain = wait.chain()
    told = _circle(chain) or chain[:-3:-1]
    if len(told) == 1 and not wait.waiters[0].name:
        text = f"{rank_names(ranks)} {verb(ranks, 'wait')} for {wait.awaited.text}"
        if len(ranks) > 1:
            text = text.replace("of its own", "of their own").replace(HELD, HELD_BY_EACH)
        return f"{text}, and no thread of {verb(ranks, 'them', 'it')} can go on"
    return f"on {rank_names(ranks)} {clauses([_of_thread(link) for link in told])}"


def advice(wait: ThreadWait) -> str:
    """Say what to look for: of a chain of threads, the last one counts."""
    chain = wait.chain()
    circle = _circle(chain)
    if not circle:
        return chain[-1].awaited.advice
    if all(link.awaited.is_lock for link in circle):
        return "Let all threads take these locks in the same order."
    if any(link.awaited.is_lock for link in circle):
        return "Release the lock before waiting for a thread that needs it."
    return "Threads that wait for each other never go on: one of them must not wait."


def held_during(wait: Pending) -> Held | None:
    """Find a lock that the thread holds that waits in an operation, and that another one needs."""
    for other in beside(wait):
        chain = other.chain()
        links = [link.awaited for link in chain]
        if chain[-1].following() is wait and any(link.is_lock for link in links):
            return Held(
                f"on rank {wait.rank} {_of_thread(other)}",
                f"On rank {wait.rank} {thread_name(wait.waiters[0])} holds a lock while it waits "
                f"in {wait.name}. If a rank waits for what {thread_name(other.waiters[0])} does "
                "with that lock, release it before communicating.",
            )
    return None


def _circle(chain: Sequence[ThreadWait]) -> list[ThreadWait]:
    """Return the waits of a chain that lead back to themselves; none if it has an end."""
    following = chain[-1].following()
    starts = [number for number, link in enumerate(chain) if link is following]
    return [*chain[starts[0] :]] if starts else []


def _of_thread(link: ThreadWait) -> str:
    return f"{thread_name(link.waiters[0])} {link.text()}"
