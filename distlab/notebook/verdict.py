"""The report on a cell that has failed on real ranks, in the form of the simulator's.

rank 2 of 4 raised ZeroDivisionError: division by zero

Traceback (most recent call last): …

The other ranks:
  ranks 0, 1 and 3  barrier (call 1 of ranks 0-3)  cell 3:3 in <module>
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from distlab.notebook.failing import Failure
from distlab.notebook.under_way import DEADLOCK_S, UnderWay
from distlab.production.hang_report import Hang
from distlab.sim.postmortem.rows import alike
from distlab.sim.reporting.report import table
from distlab.util.text import clauses, rank_names, verb

PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer")


def verdict(cell: UnderWay, ranks: Sequence[int], num_ranks: int, folder: Path) -> str:
    """Return the report; "" if the cell has not failed.

    Args:
        cell: The cell, which has ended.
        ranks: Ranks that ran it.
        num_ranks: Number of all ranks.
        folder: Folder with the evidence of interrupted ranks.
    """
    is_stopped = bool(cell.interrupted or cell.dead)
    causes = {r: f for r, f in cell.failures.items() if not (is_stopped and _is_victim(f))}
    causes = {rank: failure for rank, failure in causes.items() if rank not in cell.interrupted}
    hang = _hang(cell, ranks, num_ranks, folder)
    if cell.dead or causes:
        return _of_failure(cell, causes, num_ranks, hang)
    return _of_interrupt(cell, hang) if cell.interrupted else ""


def _is_victim(failure: Failure) -> bool:
    return any(words in failure.headline for words in PEER_IS_GONE)


def _hang(cell: UnderWay, ranks: Sequence[int], num_ranks: int, folder: Path) -> Hang:
    """Read the evidence, after adding what is known of ranks that have left none."""
    states = dict.fromkeys(range(num_ranks), "not in this cell")
    states |= dict.fromkeys(ranks, "done with the cell")
    states |= {rank: f"waiting at {f.where}" for rank, f in cell.failures.items()}
    states |= dict.fromkeys(cell.dead, "vanished") | dict.fromkeys(cell.interrupted - cell.dead, "")
    folder.mkdir(exist_ok=True)
    reason = {"ranks": num_ranks, "states": states}
    (folder / "reason.json").write_text(json.dumps(reason))
    return Hang(folder)


def _of_failure(cell: UnderWay, causes: Mapping[int, Failure], num_ranks: int, hang: Hang) -> str:
    deaths = {rank: cell.death(rank) for rank in sorted(cell.dead | cell.killed)}
    parts = [f"{rank_names(r)} of {num_ranks} {text}" for text, r in _by_text(deaths).items()]
    headlines = _by_text({rank: failure.headline for rank, failure in causes.items()})
    parts += [f"{rank_names(r)} of {num_ranks} raised {text}" for text, r in headlines.items()]
    tracebacks = "\n\n".join(dict.fromkeys(failure.text for failure in causes.values()))
    others = [found.row(r) for r, found in hang.found.items() if r not in {*causes, *cell.dead}]
    rest = "\n".join(["The other ranks:", *table(alike(others))]) if others else ""
    return "\n\n".join(filter(None, [clauses(parts), tracebacks, rest]))


def _of_interrupt(cell: UnderWay, hang: Hang) -> str:
    found = {rank: hang.found[rank] for rank in sorted(cell.interrupted)}
    if any(f.waits_in or f.place.operation for f in found.values()):
        idle = f"\nThe cell was ended because nothing had happened for {DEADLOCK_S:g} s."
        return hang.text() + idle * cell.is_idle
    places = _by_text({rank: str(f.place) for rank, f in found.items()})
    does = {where: verb(ranks, "were", "was") for where, ranks in places.items()}
    return clauses([f"{rank_names(r)} {does[w]} interrupted {w}" for w, r in places.items()])


def _by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return ranks
