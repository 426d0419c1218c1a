"""Mistakes in collective calls: one tensor given several times, and calls in another order."""

import linecache
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.utils.weak import WeakIdKeyDictionary

import distlab
from distlab.process_group.call import Call
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.messages.meetings import Attendance
from distlab.sim.reporting.report import WHO, place
from distlab.sim.reporting.sites import Places, Site
from distlab.sim.sanitizer.callers import Caller, Callers
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.parameters import Digest, Owner, Parameters, Storage, digest, storage_of
from distlab.util.text import rank_names

_OF_DISTLAB = f"{Path(distlab.__file__).parent}{os.sep}"
_OF_AUTOGRAD = f"{Path(torch.autograd.__file__).parent}{os.sep}"
_OF_FSDP = f"{Path(fsdp.__file__).parent}{os.sep}"
_OF_FUNCTIONS = torch.autograd.function.__file__
WITHOUT_ROOT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SUMMING = ("all_reduce", "reduce_scatter")
JOINING = "aten.cat.default"
SMALL = 4  # elements; a shorter tensor may be equal on all ranks by chance

_OF_REPLICAS = (
    "do all of them train on the same data? Give the DataLoader a DistributedSampler, or each rank "
    "other data."
)
_BY_HAND = (
    "do all of them train on the same data, or are they no replicas of each other, but parts of "
    "one model?"
)


class Calls:
    """Watches collective calls."""

    def __init__(
        self,
        findings: Findings,
        parameters: Parameters,
        groups_of_ddp: Collection[object],
        rank_states: RankStates,
        places: Places,
    ) -> None:
        self._findings, self._parameters, self._rank_states = findings, parameters, rank_states
        self._callers = Callers(places)
        self._caller_of: dict[Attendance, Caller] = {}  # in calls that are open
        # For each tensor that was joined from gradients, the parameters in order.
        self._joined: MutableMapping[Storage, list[Owner]] = WeakIdKeyDictionary()
        # For each group and rank, the lines and the gradients of its calls, in order.
        self._lines: defaultdict[object, dict[int, list[_Done]]] = defaultdict(dict)
        self._texts: defaultdict[object, dict[int, list[_Done]]] = defaultdict(dict)
        # The same for sums: how the program called the functions that make them.
        self._outer_texts: defaultdict[object, dict[int, list[_Done]]] = defaultdict(dict)
        self._gradients: defaultdict[object, dict[int, list[_Done]]] = defaultdict(dict)
        # For each group, the first call in which gradients of different parameters met.
        self._crossings: dict[object, _Crossing] = {}
        # Calls of DistributedDataParallel and of FSDP that are open.
        self._of_ddp: set[Attendance] = set()
        self._of_fsdp: set[Attendance] = set()
        self._groups_of_ddp = groups_of_ddp

    def posted(self, attendance: Attendance) -> bool:
        """Look at a call of the running rank; return whether DistributedDataParallel makes it."""
        self._look_for_aliases(attendance, attendance.call)
        if attendance.name in SUMMING and attendance.call.inputs:
            self._caller_of[attendance] = self._callers.current()
        is_of_ddp = self._is_of_ddp(attendance)
        if is_of_ddp:
            self._of_ddp.add(attendance)
        if attendance.name == "reduce_scatter" and self._callers.is_torch_in(_OF_FSDP):
            self._of_fsdp.add(attendance)
        return is_of_ddp

    def _is_of_ddp(self, attendance: Attendance) -> bool:
        """Return whether DistributedDataParallel averages gradients in this backward pass."""
        is_in_backward = torch._C._current_graph_task_id() != -1
        is_its_group = attendance.meeting.key in self._groups_of_ddp
        is_candidate = attendance.name == "all_reduce" and is_its_group and is_in_backward
        return is_candidate and _is_called_by_autograd()

    def _look_for_aliases(self, attendance: Attendance, call: Call) -> None:
        count = _most_aliases(call.outputs)
        if count > 1:
            self._findings.add(
                ("alias", attendance.site),
                f"the {len(call.outputs)} tensors that {call.name} fills on {WHO} share memory, "
                f"{count} of them the same place, so each overwrites the one before; "
                f"{place(attendance.site)}",
                attendance.rank,
            )

    def is_of_gradient(self, attendance: Attendance) -> bool:
        """Return whether a call gives all ranks a parameter's gradient, and nothing else."""
        inputs, is_of_all = attendance.call.inputs, attendance.name in WITHOUT_ROOT
        owner = self._parameters.of_gradient(attendance.rank, inputs[0])
        return is_of_all and len(inputs) == 1 and owner is not None

    def met(self, key: object, members: Sequence[Attendance]) -> list[tuple[int, Tensor]]:
        """Look at a call of all ranks of a group, before its tensors change.

        Returns:
            The ranks that give a parameter's gradient, and that parameter.
        """
        if members[0].call.name not in WITHOUT_ROOT or not all(m.call.inputs for m in members):
            return []
        for member in members:
            done = _Done(f"calls from {place(member.site)}", member.site)
            self._lines[key].setdefault(member.rank, []).append(done)
            done = _Done(f"calls {_source(member.site)}", member.site)
            self._texts[key].setdefault(member.rank, []).append(done)
        owners = [self._parameters.of_gradient(m.rank, m.call.inputs[0]) for m in members]
        if members[0].call.name in SUMMING:
            self._note_callers(key, members)
            self._note_gradients(key, members, owners)
        for calls in (self._of_ddp, self._of_fsdp):
            calls.difference_update(members)
        pairs = zip(members, owners, strict=True)
        return [(member.rank, owner.values) for member, owner in pairs if owner]

    def _note_callers(self, key: object, members: Sequence[Attendance]) -> None:
        """Note how the program called the functions in which ranks sum tensors.

        Where all give the same number, as to wait for one another, any order is right.
        """
        inputs = [member.call.inputs[0] for member in members]
        is_waiting = max(x.numel() for x in inputs) <= SMALL and _are_equal(inputs)
        for member in members:
            site, text = self._caller_of.pop(member)
            done = _Done("waits" if is_waiting else f"calls {text}", site)
            self._outer_texts[key].setdefault(member.rank, []).append(done)

    def operation(self, name: str, args: Sequence[Any], out: object) -> None:
        """Note a tensor that the running rank joins from gradients, and from nothing else."""
        if name != JOINING or not isinstance(out, Tensor):
            return
        owners = list[Owner]()
        for tensor in args[0]:
            owner = self._parameters.of_gradient(self._rank_states.current, tensor)
            if owner is None:
                return
            owners.append(owner)
        if storage := storage_of(out):
            self._joined[storage] = owners

    def _owners(self, member: Attendance, owner: Owner | None) -> Sequence[Owner]:
        """Return the parameters whose gradients a rank gives, in order."""
        storage = storage_of(member.call.inputs[0])
        return [owner] if owner else self._joined.get(storage, []) if storage else []

    def taken(self, members: Sequence[Attendance]) -> Iterator[tuple[Tensor, Site]]:
        """Yield the parameters whose gradients ranks give, even joined, and the lines."""
        for member in members:
            tensors = member.call.inputs if member.call.is_coalesced else member.call.inputs[:1]
            for tensor in tensors:
                owner = self._parameters.of_gradient(member.rank, tensor)
                for taken in self._owners(member, owner):
                    yield taken.values, member.site

    def _note_gradients(
        self, key: object, members: Sequence[Attendance], owners: Sequence[Owner | None]
    ) -> None:
        """Look at a call that sums the ranks' tensors, which may be gradients."""
        for member, owner in zip(members, owners, strict=True):
            if owner:
                done = _Done(f"averages the gradient of {owner.title}", member.site)
                self._gradients[key].setdefault(member.rank, []).append(done)
        known = [owner for owner in owners if owner]
        are_all = len(known) == len(members)
        for meeting in zip(*map(self._owners, members, owners), strict=False):
            self._note_crossing(key, members, meeting)
        is_of_ddp = not self._of_ddp.isdisjoint(members)
        is_of_fsdp = self._of_fsdp.issuperset(members)
        if len(members) > 1 and (are_all or is_of_ddp or is_of_fsdp):
            advice = _OF_REPLICAS if is_of_ddp or is_of_fsdp else _BY_HAND
            self._look_for_same_data(members, advice, is_of_ddp=is_of_ddp)

    def _note_crossing(
        self, key: object, members: Sequence[Attendance], owners: Sequence[Owner]
    ) -> None:
        """Note gradients of different parameters that meet, if every rank has all of these.

        Equal parameters meet rightly: they are the tied weights of two stages, or one parameter
        that a rank numbers in another way because it has made one model more.
        """
        ranks, titles = [member.rank for member in members], [owner.title for owner in owners]
        if key in self._crossings or len({*titles}) == 1:
            return
        is_known = all(self._parameters.has_all(rank, titles) for rank in ranks)
        if is_known and not _are_equal([owner.values for owner in owners]):
            number = len(self._lines[key][ranks[0]])
            self._crossings[key] = _Crossing(number, ranks, titles, members[0].site)

    def _look_for_same_data(
        self, members: Sequence[Attendance], advice: str, *, is_of_ddp: bool
    ) -> None:
        """Report gradients that are equal on several ranks before they are summed.

        They are, too, if all gradients have been cut between the samples and the loss. Equal
        gradients on some ranks are a mistake only between replicas, as DistributedDataParallel has:
        ranks that split a layer share their samples, and may average other gradients by hand.
        """
        inputs = members[0].call.inputs
        is_map = not inputs[0].is_floating_point() and not inputs[0].is_complex()  # of used ones
        if is_map or self._findings.has("cut") or sum(x.numel() for x in inputs) < SMALL:
            return
        by_values: defaultdict[Digest, list[int]] = defaultdict(list)
        for member in members:
            found = digest(_whole(member.call))
            if found and isfinite(found.norm) and not found.is_constant:
                by_values[found].append(member.rank)
        for found, ranks in by_values.items():
            if len(ranks) == len(members) or (is_of_ddp and len(ranks) > 1):
                self._findings.add(
                    ("same data", members[0].site),
                    f"{rank_names(ranks)} computed the same gradients (norm {found.norm:.4g}) "
                    f"before averaging them: {advice} {place(members[0].site)}",
                )

    def ended(self) -> None:
        """Compare the order of all calls; called at the end of the world."""
        for by_rank in (
            *self._gradients.values(),
            *self._lines.values(),
            *self._texts.values(),
        ):
            self._compare_order(by_rank)
        for by_rank in self._outer_texts.values():
            self._compare_order(by_rank, is_swapped=_is_swapped)
        if not self._findings.has("order"):
            for crossing in self._crossings.values():
                self._findings.add(("crossing", crossing.site), crossing.text())

    def _compare_order(
        self,
        by_rank: dict[int, list["_Done"]],
        is_swapped: Callable[[Sequence[str], Sequence[str], int], bool] = lambda *_: True,
    ) -> None:
        """Report ranks that did the same things in another order, if these were swapped."""
        first, *others = sorted(by_rank)
        ours = [done.what for done in by_rank[first]]
        for rank in others:
            theirs = [done.what for done in by_rank[rank]]
            if ours == theirs or Counter(ours) != Counter(theirs):
                continue
            pairs = enumerate(zip(ours, theirs, strict=True))
            number = next(number for number, (one, other) in pairs if one != other)
            if not is_swapped(ours, theirs, number):
                continue
            site = by_rank[rank][number].site
            self._findings.add(
                ("order", site),
                "ranks make the same calls in another order, so different tensors meet: as call "
                f"{number + 1}, rank {first} {ours[number]}, and rank {rank} {theirs[number]}. Use "
                "one order on all ranks, and give zeros where a rank has nothing to average; "
                f"{place(site)}",
            )
            return


def _is_called_by_autograd() -> bool:
    """Return whether autograd's C++ code makes the call, not Python code in a backward pass."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OF_DISTLAB):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OF_AUTOGRAD)


def _whole(call: Call) -> Tensor:
    """Return what a rank gives to a call that sums: one tensor, or its parts for all ranks."""
    first, *more = call.inputs
    return torch.cat([x.flatten() for x in call.inputs]) if more else first


def goes_back_through_ranks() -> bool:
    """Return whether the ``backward`` of an ``autograd.Function`` makes the call.

    Hooks, which average gradients of parameters, are called by autograd itself.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_OF_AUTOGRAD):
        frame = frame.f_back
    is_of_function = frame is not None and frame.f_code.co_filename == _OF_FUNCTIONS
    return is_of_function and torch._C._current_graph_task_id() != -1


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors of several ranks have the same values, or none that can be read."""
    digests = [digest(tensor) for tensor in tensors]
    return len({found and found.key for found in digests}) == 1


class _Crossing(NamedTuple):
    """A call in which ranks gave the gradients of different parameters."""

    number: int  # of the call in its group, from 1
    ranks: Sequence[int]
    names: Sequence[str]  # of the parameters
    site: Site

    def text(self) -> str:
        """Return a line for the user."""
        (first, one), *others = zip(self.ranks, self.names, strict=True)
        rank, other = next(pair for pair in others if pair[1] != one)
        return (
            f"gradients of different parameters meet: in call {self.number}, rank {first} averages "
            f"that of {one}, and rank {rank} that of {other}. Each rank must give all "
            f"gradients in one order, and zeros for those that it lacks; {place(self.site)}"
        )


class _Done(NamedTuple):
    """A rank's part in a call: what it did, and where."""

    what: str
    site: Site


def _is_swapped(ours: Sequence[str], theirs: Sequence[str], first: int) -> bool:
    """Return whether calls, from the first one that differs to the last in a row, are the same.

    They are not where each rank chooses by its data from which of two branches it makes a call.
    """
    numbers = range(first, len(ours))
    end = next((number for number in numbers if ours[number] == theirs[number]), len(ours))
    return Counter(ours[first:end]) == Counter(theirs[first:end])


def _source(site: Site) -> str:
    """Return the text of a line, such as ``dist.all_reduce(a)``."""
    return linecache.getline(site[0], site[1]).strip()


def _most_aliases(tensors: Sequence[Tensor]) -> int:
    """Return how many of the tensors begin at the same place in memory, at most."""
    places = Counter(
        (id(storage), tensor.storage_offset())
        for tensor in tensors
        if tensor.numel() and (storage := storage_of(tensor)) is not None
    )
    return max(places.values(), default=0)
