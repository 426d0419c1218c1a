"""Reports a hang like the simulator's deadlocks: which ranks wait for which, and at which lines.

hang (missing rank): rank 0 waits in all_reduce (call 41 of ranks 0 and 1) for rank 1, but rank 1 …
  rank 0  all_reduce (call 41 of ranks 0 and 1), (9,) float32  imagenet_trainer.py:134 in train_step
  rank 1  running                                              my_layers.py:12 in forward
rank1.txt in out/run/hang/2026-11-27T18.40.12 shows how it came to that line. …
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distlab.launch.stacks import Place, read_place
from distlab.sim.postmortem.rows import alike
from distlab.sim.reporting.report import Row, place, table
from distlab.util import files
from distlab.util.text import clauses, joined, rank_names, verb

MAX_BYTES = 2**24
SILENT = "no evidence"
VERBS = {"vanished": ("have", "has"), SILENT: ("have left", "has left")}  # others: are, is
ORDER = "Every rank of a group must make the same collective calls in the same order."
PAIRED = (
    "On every rank start the send with isend, receive, and only then wait for the send, or give "
    "both to batch_isend_irecv. If all ranks wait to receive, a send may be missing."
)
CROSSED = "Ranks that share several groups have to use them in the same order."
COMPLETE = (
    "All ranks have made this call, so look at the network and the GPUs: dmesg has Xid and link "
    "errors, and NCCL_DEBUG=INFO shows what NCCL does."
)
ADVICE = {
    "stopped": "Look for what has stopped {}: SIGSTOP, ctrl-Z, a debugger or a paused container.",
    "vanished": "Look for what has killed {}: dmesg names the victims of the out-of-memory killer.",
    SILENT: "{} may be stopped, cut off, or stuck outside Python: see its machine, and its log.",
}
SAME_FORM = ("all_reduce", "allreduce", "broadcast", "reduce")  # all ranks give equal forms
Site = tuple[str, int, str]
Headline = tuple[str, str]  # (first line of a report, what to do next)


class NoEvidenceError(Exception):
    """There is no evidence of a hang; the message says so in one line."""


class Call(NamedTuple):
    """A collective call of one rank, as its flight recorder kept it."""

    group: str
    ranks: tuple[int, ...]
    number: int
    name: str
    form: str
    is_done: bool
    site: Site | None

    @property
    def title(self) -> str:
        """A title such as ``all_reduce (call 3 of ranks 0-7)``."""
        return f"{self.name} (call {self.number} of {rank_names(self.ranks)})"


class Found(NamedTuple):
    """What one rank has left.

    Attributes:
        state: "stopped", "vanished", "no evidence", or "" for a rank that has told where it is.
        said: Last line of its log, or "".
    """

    place: Place
    calls: list[Call]
    state: str
    said: str = ""

    @property
    def waits_in(self) -> Call | None:
        """The oldest collective that is under way."""
        return None if self.state else next((c for c in self.calls if not c.is_done), None)

    @property
    def fate(self) -> str:
        """What a rank is that waits in no collective, such as ``running at ring.py:9 in step``."""
        return self.state or f"{'waiting' if self.place.operation else 'running'} {self.place}"

    def row(self, rank: int) -> Row:
        """Return the rank's row of the table."""
        call, frame = self.waits_in, self.place.frame
        if self.state:
            return Row((rank,), self.state, "")
        site = (frame.file, frame.line, frame.function) if frame else None
        site = (call and call.site) or site
        named = ", ".join(filter(None, [call.title, call.form])) if call else ""  # barrier: no form
        text = named or self.place.operation or "running"
        return Row((rank,), text, place(site) if site else "")


def report(run_dir: Path) -> str:
    """Describe the newest hang of a training run, or the one in a folder RUN_DIR/hang/TIME.

    Raises:
        NoEvidenceError: No rank has left any evidence.
    """
    if any(run_dir.glob("rank*.json")):  # a folder of one hang
        return Hang(run_dir).text()
    folders = sorted(path for path in run_dir.glob("hang/*") if any(path.glob("rank*")))
    if not folders:
        is_run = (run_dir / "config.yaml").exists()
        why = "no rank of this run has hung" if is_run else "this is not the run_dir of a training"
        raise NoEvidenceError(f"{run_dir}: {why}")
    return Hang(folders[-1]).text()


class Hang:
    """The evidence that the ranks of one hang have left in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.damaged = folder, list[str]()
        known = self._read("reason.json")
        numbers = [int(n) for path in folder.glob("rank*") if (n := path.stem[4:]).isdecimal()]
        left = {rank: self._read(f"rank{rank}.json") for rank in sorted({*numbers})}
        size = max([0, *(n + 1 for n in numbers), *(c.get("ranks", 0) for c in left.values())])
        self.reason, states = str(known.get("reason", "")), known.get("states", {})
        self.found = {
            rank: self._found(rank, left.get(rank, {}), states.get(str(rank), ""))
            for rank in range(max(size, len(states)))
        }
        waits = {rank: found.waits_in for rank, found in self.found.items()}
        self.waits = {rank: call for rank, call in waits.items() if call}

    def _read(self, name: str) -> dict[str, Any]:
        """Return a file's content; {} if it is missing, or damaged, which is noted."""
        path = self.folder / name
        try:
            return _checked(json.loads(files.read_regular(path, MAX_BYTES)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, LookupError) as error:
            self.damaged.append(f"{path} is damaged: {type(error).__name__}: {error}")
            return {}

    def _found(self, rank: int, content: Mapping[str, Any], state: str) -> Found:
        stacks = self.folder / f"rank{rank}.txt"
        text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
        seen, calls = read_place(text), content.get("calls", [])
        state = state or ("" if seen.frame or calls else SILENT)
        return Found(seen, calls, state, content.get("said", ""))

    def text(self) -> str:
        """Return the report: a headline, a row for each rank, and what to do next."""
        headline, advice = (
            self._mismatch()
            or self._missing()
            or self._crossed()
            or self._complete()
            or self._by_stacks()
        )
        rows = table(alike(found.row(rank) for rank, found in self.found.items()))
        why = [f"The run was ended because of this: {self.reason}"] if self.reason else []
        lines = _sides({rank: found.said for rank, found in self.found.items() if found.said})
        said = [f"Last line of {rank_names(ranks)}: {line}" for line, ranks in lines.items()]
        return "\n".join([f"hang {headline}", *rows, advice, *said, *why, *self.damaged])

    # Causes

    def _mismatch(self) -> Headline | None:
        """Find the first call of a group, not done, that differs from rank to rank."""
        calls: dict[tuple[str, int], dict[int, Call]] = {}
        for rank, found in self.found.items():
            for call in found.calls:
                calls.setdefault((call.group, call.number), {})[rank] = call
        for key in sorted(calls):
            is_done = all(call.is_done for call in calls[key].values())
            if not is_done and (words := _difference(calls[key])):
                return words, ORDER
        return None

    def _missing(self) -> Headline | None:
        """Find a call that waits for ranks which wait in no collective themselves."""
        idle = {rank: [p for p in self._absent(rank) if p not in self.waits] for rank in self.waits}
        blocked = [rank for rank in self.waits if idle[rank]]
        if not blocked:
            return None
        present = min(blocked, key=lambda rank: (len(idle[rank]), rank))
        words = f"{self._wait(present)}, but {self._fates(idle[present])}"
        return f"(missing rank): {words}", self._advice(idle[present])

    def _crossed(self) -> Headline | None:
        """Find ranks that wait in different collectives for each other."""
        waits = dict.fromkeys(self._wait(rank) for rank in self.waits if self._absent(rank))
        return (f"(order mismatch): {clauses([*waits])}", CROSSED) if waits else None

    def _complete(self) -> Headline | None:
        """Find calls that all ranks have made."""
        waits = dict.fromkeys(self._wait(rank) for rank in self.waits)
        return (f"(no rank is missing): {clauses([*waits])}", COMPLETE) if waits else None

    def _by_stacks(self) -> Headline:
        """Describe the lines of the ranks, because no collective is known to be under way."""
        waiting = [rank for rank, f in self.found.items() if f.place.operation and not f.state]
        others = [rank for rank in self.found if rank not in waiting]
        operations = {self.found[rank].place.operation for rank in waiting}
        names = joined(sorted(operations))
        if not others:
            advice = PAIRED if operations <= {"send", "recv"} else ORDER
            return f"(send/recv cycle): {rank_names(waiting)} wait in {names}", advice
        waits = f"{rank_names(waiting)} {verb(waiting, 'wait')} in {names}, but " if waiting else ""
        return f"(missing rank): {waits}{self._fates(others)}", self._advice(others)

    # Words

    def _absent(self, rank: int) -> list[int]:
        """Return the ranks that have not made the call in which a rank waits."""
        call = self.waits[rank]
        return [p for p in call.ranks if self._last(p, call.group) < call.number]

    def _last(self, rank: int, group: str) -> int:
        calls = self.found[rank].calls if rank in self.found else []
        return max((call.number for call in calls if call.group == group), default=0)

    def _wait(self, rank: int) -> str:
        """Describe a wait, such as ``ranks 0 and 2 wait in barrier (call 1 of …) for rank 1``."""
        call, absent = self.waits[rank], self._absent(rank)
        mates = [r for r, other in self.waits.items() if other[:3] == call[:3]]
        missing = f" for {rank_names(absent)}" if absent else ""
        return f"{rank_names(mates)} {verb(mates, 'wait')} in {call.title}{missing}"

    def _fates(self, ranks: Iterable[int]) -> str:
        return clauses(
            [
                f"{rank_names(who)} {verb(who, *VERBS.get(fate, ('are', 'is')))} {fate}"
                for fate, who in _sides({rank: self.found[rank].fate for rank in ranks}).items()
            ]
        )

    def _advice(self, ranks: Sequence[int]) -> str:
        """Return what to do next about ranks that others wait for."""
        states = _sides({rank: self.found[rank].state for rank in ranks})
        state = next((state for state in ADVICE if state in states), "")
        if state:
            advice = ADVICE[state].format(rank_names(states[state]))
            return advice[:1].upper() + advice[1:]
        if any(states):
            return ORDER
        return f"rank{ranks[0]}.txt in {self.folder} shows how it came to that line. {ORDER}"


def _sides(of_ranks: Mapping[int, str]) -> dict[str, list[int]]:
    """Group ranks by what they have in common."""
    sides: dict[str, list[int]] = {}
    for rank, side in of_ranks.items():
        sides.setdefault(side, []).append(rank)
    return sides


def _difference(met: Mapping[int, Call]) -> str:
    """Return how the ranks' calls of the same number differ; "" if they don't."""
    names = _sides({rank: call.name for rank, call in met.items()})
    forms = _sides({rank: f"with {call.form}" for rank, call in met.items()})
    first = next(iter(met.values()))
    where = f"in call {first.number} of {rank_names(first.ranks)}"
    if len(names) > 1:
        return f"(operation mismatch): {_on_ranks(names)}, {where}"
    if len(forms) > 1 and first.name in SAME_FORM:
        return f"(shape or dtype mismatch): {first.name} {_on_ranks(forms)}, {where}"
    return ""


def _on_ranks(sides: Mapping[str, Sequence[int]]) -> str:
    texts = [f"{text} on {rank_names(ranks)}" for text, ranks in sides.items()]
    return ", but ".join(texts) if len(texts) == 2 else joined(texts)


def _checked(content: Any) -> dict[str, Any]:
    """Return the content of a file with its calls as ``Call`` objects."""
    known: dict[str, Any] = dict(content)
    known["ranks"] = int(known["ranks"])
    known["said"] = str(known.get("said", ""))
    known["calls"] = [_call(call) for call in known.get("calls", [])]
    known["states"] = {str(k): str(state) for k, state in dict(known.get("states", {})).items()}
    return known


def _call(call: Mapping[str, Any]) -> Call:
    site = call["site"]
    return Call(
        group=str(call["group"]),
        ranks=tuple(map(int, call["ranks"])),
        number=int(call["number"]),
        name=str(call["name"]),
        form=str(call["form"]),
        is_done=bool(call["is_done"]),
        site=(str(site[0]), int(site[1]), str(site[2])) if site else None,
    )
