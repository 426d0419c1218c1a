"""What each rank does from one optimizer step to the next, for those who compare the ranks."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from distlab.sim.reporting.sites import Site
from distlab.sim.results.simulated import StepOf
from distlab.sim.sanitizer.ddp import Wrappings
from distlab.sim.sanitizer.meshes import along
from distlab.sim.sanitizer.parameters import Parameters, digest, distinct_names
from distlab.sim.sanitizer.values import Values
from distlab.sim.sanitizer.visits import Followed, Visits


class Norm(NamedTuple):
    """A call of ``clip_grad_norm_``."""

    total: float
    limit: float
    site: Site
    parameters: Sequence[ref[Tensor]]

    @property
    def factor(self) -> float:
        """The factor by which it scaled the gradients."""
        return 1.0 if self.total <= self.limit else self.limit / self.total


class Unfed(NamedTuple):
    """An optimizer of which no parameter has had a gradient.

    Attributes:
        site: Line of its last step.
        sync_off_at: Line that had switched the averaging of an FSDP module off, if that was so in
            each step.
    """

    rank: int
    num_steps: int
    site: Site
    sync_off_at: Site | None


@dataclass
class Step:
    """One step of one optimizer on the ranks that have come to it."""

    site: Site
    number: int  # from 1
    optimizer: int = 0
    values: dict[int, list[Values]] = field(default_factory=dict)
    results: dict[int, list[Values]] = field(default_factory=dict)  # values after it
    rates: dict[int, float] = field(default_factory=dict)
    num_states: dict[int, int] = field(default_factory=dict)  # parameters with optimizer state
    norms: dict[int, list[Norm]] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    num_syncs: dict[int, int] = field(default_factory=dict)
    total_syncs: dict[int, int] = field(default_factory=dict)
    num_shared: dict[int, int] = field(default_factory=dict)  # before it; see Recorder
    is_ddp: bool = False
    is_zero: bool = False  # a ZeroRedundancyOptimizer's
    # Ranks that have given no collective a long tensor since their last backward pass.
    alone: set[int] = field(default_factory=set)
    own_norms: set[int] = field(default_factory=set)  # ranks that clipped what they may own
    back_through: set[tuple[int, ...]] = field(default_factory=set)  # groups; see Recorder


class Recorder:
    """Records what the ranks do, and returns each step once all of them have come to it.

    Attributes:
        sends_messages: True if ranks send one another messages, by which they may average, too.
        leaves_early: True if torch's ``Join`` lets ranks with fewer batches leave out steps.
        averages_parameters: True if one of torch's averagers replaces the average of gradients.
        num_shared: For each rank, the elements that it has given to collectives which may average
            parameters: those that DistributedDataParallel does not call in a backward pass.
        visits: Data that ranks have sent one another by all_to_all.
        gathered: The same, with data that an all_gather has brought.
        returned: Gradients that the backward passes of layers have brought from other ranks.
        back_through: Groups whose ranks have gone back through one another's layers.
        begun: For each rank and optimizer, the last step, and the parameters in it.
        by_hand: Ranks that have averaged gradients by a call of their own, with the optimizer's
            number.
        have_summed: Ranks that may have averaged gradients by a call.
        sums: For each rank, the groups in which it may have summed gradients since its last
            backward pass began.
        taken_at: For each parameter whose gradient a collective took, the line of that.
        spoke_at_length: Ranks that have exchanged a long tensor since their last step.
        have_communicated: The same since their last backward pass began.
        sync_off_at: For each rank whose last call of ``set_requires_gradient_sync`` has switched
            the averaging of an FSDP module off, the line of that call.
    """

    def __init__(self, parameters: Parameters, wrappings: Wrappings, num_ranks: int) -> None:
        self._parameters, self._wrappings, self._num_ranks = parameters, wrappings, num_ranks
        self.visits, self.gathered = Visits(), Visits(are_gathered=True)
        self.returned = Followed()
        self.back_through: set[tuple[int, ...]] = set()
        self.sends_messages = self.leaves_early = self.averages_parameters = False
        self.num_shared: Counter[int] = Counter()
        self.begun: dict[tuple[int, int], tuple[Step, list[ref[Tensor]]]] = {}
        self.by_hand: set[tuple[int, int]] = set()
        self.have_summed: set[int] = set()
        self.sums: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        self.taken_at: MutableMapping[Tensor, Site] = WeakIdKeyDictionary()
        self.spoke_at_length: set[int] = set()
        self.have_communicated: set[int] = set()
        self.sync_off_at: dict[int, Site] = {}
        self._have_exchanged: set[int] = set()  # since the last step, other tensors than gradients
        self._steps: dict[tuple[int, int], Step] = {}  # those to which not all ranks have come
        self._norms: defaultdict[int, list[Norm]] = defaultdict(list)
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._syncs: defaultdict[int, set[int]] = defaultdict(set)  # backward passes, by rank
        self._total_syncs: Counter[int] = Counter()
        self._averaged: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # by the program
        self._optimizer_of: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # the last one
        # Optimizers of ranks whose parameters have had no gradient yet, and those whose have.
        self._unfed: dict[tuple[int, int], Unfed] = {}
        self._fed: set[tuple[int, int]] = set()

    def synced(self, rank: int) -> None:
        """Note that DistributedDataParallel has averaged gradients in a backward pass."""
        self._syncs[rank].add(torch._C._current_graph_task_id())

    def dropped(self, rank: int) -> None:
        """Note that a rank has dropped gradients, averaged or not, as zero_grad() does."""
        self._total_syncs[rank] += len(self._syncs.pop(rank, ()))

    def averaged(self, rank: int, parameter: Tensor) -> None:
        """Note that a rank has summed a parameter's gradient by a call of its own."""
        self._averaged[parameter] = True
        if parameter in self._optimizer_of:
            self.by_hand.add((rank, self._optimizer_of[parameter]))

    def exchanged(self, rank: int) -> None:
        """Note that a rank has given another tensor than a gradient to a collective."""
        self._have_exchanged.add(rank)

    def goes_back(self, rank: int, loss: float) -> None:
        """Note a loss from which a rank goes back."""
        self._losses[rank].append(loss)
        self.sums.pop(rank, None)
        self.have_communicated.discard(rank)

    def spoke(self, rank: int, group: Sequence[int], *, has_summed: bool, is_long: bool) -> None:
        """Note a rank's collective call, and whether it may average gradients or parameters."""
        if is_long:
            self.spoke_at_length.add(rank)
            self.have_communicated.add(rank)
        if has_summed:
            self.have_summed.add(rank)
            self.sums[rank].add(tuple(group))

    def clipped(self, rank: int, norm: Norm) -> None:
        """Note a call of ``clip_grad_norm_``."""
        self._norms[rank].append(norm)

    def steps(self, rank: int, at: StepOf, optimizer: Optimizer, site: Site) -> Step | None:
        """Note a step that a rank begins; return it if all ranks have come to it."""
        step = self._steps.setdefault(
            (at.optimizer, at.step), Step(site, at.step + 1, at.optimizer)
        )
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._note_feeding((rank, at.optimizer), at.step, params, site)
        self._note_owner(rank, at.optimizer, params)
        names = distinct_names(self._parameters, params)
        step.values[rank] = [self._values(*pair) for pair in zip(names, params, strict=True)]
        step.rates[rank] = float(optimizer.param_groups[0].get("lr", 0.0))
        step.num_states[rank] = len(optimizer.state)
        step.is_ddp = step.is_ddp or any(self._wrappings.of(p) for p in params)
        step.is_zero = step.is_zero or type(optimizer).__name__ == "ZeroRedundancyOptimizer"
        self.begun[rank, at.optimizer] = step, [*map(ref, params)]
        step.back_through |= self.back_through
        self._note_events(rank, step)
        if len(step.values) < self._num_ranks:
            return None
        return self._steps.pop((at.optimizer, at.step))

    def _note_owner(self, rank: int, optimizer: int, params: Sequence[Tensor]) -> None:
        for parameter in params:
            self._optimizer_of[parameter] = optimizer
            if parameter in self._averaged:
                self.by_hand.add((rank, optimizer))

    def stepped(self, rank: int, optimizer: int) -> None:
        """Note what a step has made of a rank's parameters."""
        step, params = self.begun[rank, optimizer]
        step.results[rank] = [
            value if value.is_sharded else value._replace(value=digest(parameter()))
            for value, parameter in zip(step.values[rank], params, strict=True)
        ]

    def _note_events(self, rank: int, step: Step) -> None:
        """Note what a rank has done since its last step."""
        step.norms[rank] = self._norms.pop(rank, [])
        step.losses[rank] = self._losses.pop(rank, [])
        if self._may_own(rank, step.norms[rank]):
            step.own_norms.add(rank)
        if rank not in self.have_communicated:
            step.alone.add(rank)
        step.num_syncs[rank] = len(self._syncs.pop(rank, ()))
        self._total_syncs[rank] += step.num_syncs[rank]
        step.total_syncs[rank] = self._total_syncs[rank]
        step.num_shared[rank] = self.num_shared[rank]
        for ranks in (self._have_exchanged, self.spoke_at_length):
            ranks.discard(rank)

    def _may_own(self, rank: int, norms: Iterable[Norm]) -> bool:
        """Return whether a rank has exchanged only gradients of parameters that it did not clip."""
        clipped = (parameter() for norm in norms for parameter in norm.parameters)
        are_shared = any(
            p is not None and (p in self._averaged or self._wrappings.of(p)) for p in clipped
        )
        return not (are_shared or self.sends_messages or rank in self._have_exchanged)

    def _note_feeding(
        self, key: tuple[int, int], count: int, params: Sequence[Tensor], site: Site
    ) -> None:
        """Note whether an optimizer's parameters have ever had a gradient."""
        if any(p.grad is not None for p in params):
            self._fed.add(key)
        elif params:
            known, off_at = self._unfed.get(key), self.sync_off_at.get(key[0])
            self._unfed[key] = Unfed(
                key[0], count + 1, site, off_at if known is None or known.sync_off_at else None
            )

    def _values(self, name: str, parameter: Tensor) -> Values:
        holder, wrapped = self._parameters.holder(parameter), self._wrappings.of(parameter)
        is_sharded = any(place.is_shard() for place in getattr(parameter, "placements", ()))
        return Values(
            name,
            wrapped.stepped() if wrapped else None,
            self._wrappings.frozen.get(parameter),
            self.taken_at.get(parameter),
            self._parameters.replacement(parameter),
            parameter.shape,
            None if is_sharded else digest(parameter),
            None if is_sharded else digest(parameter.grad),
            id(holder),
            "norm" in type(holder).__name__.lower(),
            is_sharded,
            self.visits.have_made(parameter.grad),
            self.gathered.have_made(parameter.grad),
            self.returned.have_made(parameter.grad),
            _ranks_of_terms(parameter.grad),
        )

    def unfinished(self) -> list[Step]:
        """Return the steps to which only some ranks have come, and forget them."""
        steps = [*self._steps.values()]
        self._steps.clear()
        return steps

    def norms(self) -> Mapping[int, list[Norm]]:
        """Return the norms that ranks have taken since their last steps."""
        return self._norms

    def unfed(self) -> list[Unfed]:
        """Return the ranks' optimizers that never had a gradient, if they took several steps."""
        never = [unfed for key, unfed in self._unfed.items() if key not in self._fed]
        return [unfed for unfed in never if unfed.num_steps > 1]


def _ranks_of_terms(gradient: Tensor | None) -> tuple[int, ...]:
    """Return the ranks whose gradients the optimizer will add up, as it does partial DTensors."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return ()
    return along(gradient.device_mesh, [p.is_partial() for p in gradient.placements])
