"""The sanitizer of a world: it installs the watchers, and passes on what the ranks do."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import Pending
from distlab.sim.messages.work import SimWork
from distlab.sim.reporting.sites import Places, Site
from distlab.sim.results.simulated import StepOf
from distlab.sim.sanitizer.calls import SMALL, WITHOUT_ROOT, Calls, goes_back_through_ranks
from distlab.sim.sanitizer.cuts import Cuts, Operations
from distlab.sim.sanitizer.ddp import Wrappings
from distlab.sim.sanitizer.declared import Declared
from distlab.sim.sanitizer.draws import Draws, Unnoticed
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.in_flight import InFlight
from distlab.sim.sanitizer.mesh_copies import MeshCopies
from distlab.sim.sanitizer.recorder import Norm, Recorder
from distlab.sim.sanitizer.replicas import Replicas
from distlab.sim.sanitizer.scalers import Scalers
from distlab.sim.sanitizer.steps import Steps
from distlab.util.replacing import Replace, replace_until


class Sanitizer:
    """Watches a world from its begin to its end.

    Args:
        rank_states: The states of the ranks.
        places: Finds the program's lines.
        unnoticed: Function that returns a context manager in which operations of the running rank
            take no time and no memory.
        steps: The optimizer steps of all ranks.
        open_handles: The operations for which no rank has waited yet.

    Attributes:
        findings: The mistakes found so far.
    """

    def __init__(
        self,
        rank_states: RankStates,
        places: Places,
        unnoticed: Unnoticed,
        steps: Steps,
        open_handles: Collection[Pending],
    ) -> None:
        self.findings = Findings()
        self._rank_states, self._places, self._unnoticed = rank_states, places, unnoticed
        self._cuts = Cuts(self.findings)
        self._draws = Draws(self.findings, rank_states, places, unnoticed)
        self._in_flight = InFlight(self.findings, places, open_handles, steps.number)
        self._wrappings = Wrappings(rank_states, places)
        self._calls = Calls(
            self.findings, steps.parameters, self._wrappings.groups, rank_states, places
        )
        self._recorder = Recorder(steps.parameters, self._wrappings, rank_states.num_ranks)
        self._replicas = Replicas(self.findings, self._recorder)
        self._scalers = Scalers(self.findings, rank_states, places, unnoticed, self._recorder.sums)
        self._mesh_copies = MeshCopies(self.findings, steps.parameters)
        self._declared = Declared(self.findings, rank_states, places, unnoticed)
        steps.kind_of = self._is_in_ddp
        steps.listeners += [self._stepped, self._mesh_copies.steps]
        steps.listeners_after += [self._recorder.stepped, self._mesh_copies.stepped]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the ranks that run inside the block."""
        with contextlib.ExitStack() as undo:
            replace = partial(replace_until, undo)
            self._draws.install(replace)
            self._scalers.install(replace)
            self._declared.install(replace)
            self._watch_clipping(replace)
            self._watch_losses(replace)
            self._watch_zeroing(replace)
            self._wrappings.install(replace)
            undo.callback(register_module_forward_pre_hook(self._wrappings.called).remove)
            self._watch_torchs_ways(replace)
            self._watch_waits(replace)
            yield
            self._calls.ended()
            self._draws.ended()
            self._scalers.ended()
            self._replicas.ended()
            self._mesh_copies.ended()

    def operations(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that watches the operations of the calling thread."""
        recorder = self._recorder
        followed = recorder.visits, recorder.gathered, recorder.returned
        return Operations(self._touched, self._calls, self._cuts, self._draws, *followed)

    # What the world tells

    def posted(self, attendance: Attendance) -> None:
        """Look at a collective call of the running rank."""
        with self._unnoticed():
            is_of_ddp = self._calls.posted(attendance)
            self._cuts.posted(attendance)
            self._in_flight.posted(attendance)
            for visits in (self._recorder.visits, self._recorder.gathered):
                visits.posted(attendance.call)
        if inputs := attendance.call.inputs:
            is_long = inputs[0].numel() > SMALL
            is_sum = attendance.name in WITHOUT_ROOT and is_long
            self._recorder.spoke(
                attendance.rank, attendance.group, has_summed=is_sum, is_long=is_long
            )
            if not is_of_ddp:
                self._recorder.num_shared[attendance.rank] += sum(x.numel() for x in inputs)
            is_of_gradient = is_of_ddp or self._calls.is_of_gradient(attendance)
            if is_long and attendance.name != "broadcast" and not is_of_gradient:
                self._recorder.exchanged(attendance.rank)
        if is_of_ddp:
            self._recorder.synced(attendance.rank)
        elif goes_back_through_ranks():
            self._recorder.returned.mark(attendance.call)
            self._recorder.back_through.add(tuple(sorted(attendance.group)))

    def met(self, key: object, members: Sequence[Attendance]) -> None:
        """Look at a collective call of all ranks of a group, before its tensors change."""
        self._draws.met(members)
        self._in_flight.met(members)
        if any(x.numel() > SMALL for member in members for x in member.call.inputs):
            self._mesh_copies.spoke(member.rank for member in members)
        self._recorder.taken_at.update(self._calls.taken(members))
        for rank, parameter in self._calls.met(key, members):
            self._recorder.averaged(rank, parameter)

    def sent(self, message: Message) -> None:
        """Look at a message that the running rank posts."""
        self._recorder.sends_messages = True
        self._mesh_copies.spoke([message.rank, message.peer])
        with self._unnoticed():
            self._in_flight.sent(message)

    def note_unwaited(self, rows: Sequence[str]) -> None:
        """Report operations whose handles were never waited for."""
        if rows:
            more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
            self.findings.add(
                ("unwaited", ""),
                "never waited for, so its tensor was never safe to use, and its message may be "
                f"lost: {' '.join(rows[0].split())}{more}",
            )

    def note_crossed(self, texts: Iterable[str]) -> None:
        """Report messages that were received with another tag than they were sent with."""
        for text in texts:
            self.findings.add(("tag", text), text)

    # What torch tells

    def _touched(self, operation: Any, args: Any, kwargs: Any) -> None:
        if not self._rank_states.is_in_rank():
            return
        rank = self._rank_states.current
        if self._in_flight.has_lent(rank):
            with self._unnoticed():
                self._in_flight.touched(rank, operation, args, kwargs)

    def _is_in_ddp(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(self._wrappings.of(p) for group in groups for p in group["params"])

    def _stepped(self, rank: int, at: StepOf, optimizer: Optimizer, site: Site) -> None:
        step = self._recorder.steps(rank, at, optimizer, site)
        if step is not None:
            self._replicas.judge(step)
            for ranks in {ranks for _, ranks in self._replicas.confirmed}:
                self._draws.compare(ranks, step.number)

    def _watch_clipping(self, replace: Replace) -> None:
        clip = clip_grad.clip_grad_norm_

        def clip_and_note(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            clipped = [parameters] if isinstance(parameters, Tensor) else [*parameters]
            total: Tensor = clip(clipped, max_norm, *args, **kwargs)
            if self._rank_states.is_in_rank() and not total.is_meta:
                site = self._places.call_site()[0]
                with self._unnoticed():
                    whole = getattr(total, "full_tensor", total.detach)()
                    norm = Norm(float(whole), float(max_norm), site, [*map(ref, clipped)])
                self._recorder.clipped(self._rank_states.current, norm)
            return total

        for owner in (clip_grad, nn.utils):
            replace(owner, "clip_grad_norm_", clip_and_note)

    def _watch_losses(self, replace: Replace) -> None:
        go_back = torch.autograd.backward

        def note_and_go_back(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._rank_states.is_in_rank():
                self._recorder.visits.goes_back(tensors)
                self._recorder.gathered.goes_back(tensors)
            if self._rank_states.is_in_rank() and _is_number(tensors):
                with self._unnoticed():
                    value = float(tensors.detach())
                self._recorder.goes_back(self._rank_states.current, value)
            go_back(tensors, *args, **kwargs)

        replace(torch.autograd, "backward", note_and_go_back)

    def _watch_zeroing(self, replace: Replace) -> None:
        def zero_and_note(owner: Any, zero: Callable[..., None], *args: Any, **kw: Any) -> None:
            if self._rank_states.is_in_rank():
                self._recorder.dropped(self._rank_states.current)
            zero(owner, *args, **kw)

        for kind in (Optimizer, nn.Module):
            replace(kind, "zero_grad", partialmethod(zero_and_note, kind.zero_grad))

    def _watch_torchs_ways(self, replace: Replace) -> None:
        """Note what makes ranks step with other gradients, or take fewer steps, without mistake."""
        enter, make = Join.__enter__, averagers.ModelAverager.__init__

        def enter_and_note(join: Any) -> Any:
            self._recorder.leaves_early = True
            return enter(join)  # type: ignore[no-untyped-call]

        def make_and_note(averager: Any, *args: Any, **kwargs: Any) -> None:
            self._recorder.averages_parameters = True
            make(averager, *args, **kwargs)

        set_sync = FSDPModule.set_requires_gradient_sync

        def set_sync_and_note(module: Any, *args: Any, **kwargs: Any) -> None:
            set_sync(module, *args, **kwargs)
            if self._rank_states.is_in_rank():
                rank, site = self._rank_states.current, self._places.call_site()[0]
                self._recorder.sync_off_at.pop(rank, None)
                if not (*args, kwargs.get("requires_gradient_sync"))[0]:
                    self._recorder.sync_off_at[rank] = site

        replace(FSDPModule, "set_requires_gradient_sync", set_sync_and_note)
        replace(Join, "__enter__", enter_and_note)
        replace(averagers.ModelAverager, "__init__", make_and_note)

    def _watch_waits(self, replace: Replace) -> None:
        wait = SimWork.wait

        def look_and_wait(work: SimWork, timeout: timedelta | None = None) -> bool:
            with self._unnoticed():
                self._in_flight.waits(work.pending)
            return wait(work, timeout)

        replace(SimWork, "wait", look_and_wait)


def _is_number(roots: Any) -> bool:
    """Return whether a backward pass begins at one number, as at a loss, that can be read here."""
    is_plain = isinstance(roots, Tensor) and not isinstance(roots, DTensor)
    return is_plain and roots.numel() == 1 and not roots.is_meta
