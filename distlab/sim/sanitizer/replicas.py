"""Ranks that train the same model: are their parameters and gradients equal before each step?

Nothing declares which ranks are replicas, except for torch's DistributedDataParallel, so it is
inferred. Ranks are replicas in a step if all their parameters are equal, and not all are constant,
as new biases are. Then:

    gradients of one step             verdict
    all equal                         right
    some equal, others not            a finding: the others were not averaged
    none equal, in DDP                a finding: nothing was averaged
    none equal, in no step            a finding, unless the ranks send each other messages, or
                                      their parameters are equal again before a later step, or a
                                      collective follows the last one
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from distlab.sim.reporting.report import WHO, place
from distlab.sim.reporting.sites import Site
from distlab.sim.results.simulated import StepOf
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.parameters import Digest, Parameters, digest, distinct_names
from distlab.sim.sanitizer.shared import Shared, with_one_loss
from distlab.sim.sanitizer.values import Values, is_equal, is_equal_not_by_chance, names_of
from distlab.sim.sanitizer.visits import Followed, Visits
from distlab.util.text import joined, rank_names

_NO_SYNC = (
    " DistributedDataParallel has averaged nothing since the last step: its backward passes ran "
    "inside no_sync(), its forward was not called (but that of the module inside), its hook sent "
    "nothing, or a parameter that got no gradient kept a bucket waiting."
)
_AFTER_THE_STEP = " They are averaged only after it."
_SOME_SYNCS = (
    " DistributedDataParallel averaged only some of the backward passes since the last step: the "
    "last one, and its forward pass, must run outside no_sync()."
)


class Norm(NamedTuple):
    """A call of ``clip_grad_norm_``."""

    total: float
    limit: float
    site: Site
    parameters: Sequence[ref[Tensor]]


@dataclass
class Step:
    """One step of one optimizer on the ranks that have come to it."""

    site: Site
    number: int  # from 1
    values: dict[int, list[Values]] = field(default_factory=dict)
    results: dict[int, list[Values]] = field(default_factory=dict)  # values after it
    rates: dict[int, float] = field(default_factory=dict)
    norms: dict[int, list[Norm]] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    num_syncs: dict[int, int] = field(default_factory=dict)
    total_syncs: dict[int, int] = field(default_factory=dict)
    num_calls: dict[int, int] = field(default_factory=dict)  # before it; see Replicas
    is_ddp: bool = False
    own_norms: set[int] = field(default_factory=set)  # ranks that clipped what they may own


class Replicas:
    """Watches optimizer steps.

    Attributes:
        confirmed: Sets of ranks that have averaged gradients, each with the optimizer's number.
        sends_messages: True if ranks send one another messages, by which they may average, too.
        leaves_early: True if torch's ``Join`` lets ranks with fewer batches leave out steps.
        averages_parameters: True if one of torch's averagers replaces the average of gradients.
        num_calls: For each rank, its collective calls that may average parameters: those that
            DistributedDataParallel does not make in a backward pass.
        visits: Data that ranks have sent one another by all_to_all.
        gathered: The same, with data that an all_gather has brought.
        returned: Gradients that the backward passes of layers have brought from other ranks.
    """

    def __init__(self, findings: Findings, parameters: Parameters, num_ranks: int) -> None:
        self._findings, self._parameters, self._num_ranks = findings, parameters, num_ranks
        self.visits, self.gathered = Visits(), Visits(are_gathered=True)
        self.returned = Followed()
        self.num_calls: Counter[int] = Counter()
        self._shared = Shared(findings)
        self._steps: dict[tuple[int, int], Step] = {}
        # For each rank, optimizer and parameter, the value in its first step.
        self._starts: dict[tuple[int, int, int], Digest | None] = {}
        self._judged: set[tuple[int, int, int]] = set()  # those that have had a gradient
        # The last step of each rank's optimizers, and their parameters.
        self._begun: dict[tuple[int, int], tuple[Step, list[ref[Tensor]]]] = {}
        self._norms: defaultdict[int, list[Norm]] = defaultdict(list)
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._syncs: defaultdict[int, set[int]] = defaultdict(set)  # backward passes, by rank
        self._total_syncs: Counter[int] = Counter()
        self._spoke_at_length: set[int] = set()  # since the last step
        self._have_summed: set[int] = set()  # ranks that may have averaged gradients by a call
        self._have_exchanged: set[int] = set()  # since the last step, other tensors than gradients
        self._averaged: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()  # by the program
        self._in_ddp: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        self._optimizer_of: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # the last one
        # Ranks that have averaged gradients by a call of their own, with the optimizer's number.
        self._by_hand: set[tuple[int, int]] = set()
        # First steps of replicas that may have averaged nothing, by optimizer and ranks.
        self._unsynced: dict[tuple[int, tuple[int, ...]], Step] = {}
        self._equal: dict[int, list[tuple[int, ...]]] = {}  # by optimizer: alike in its last step
        self.confirmed: set[tuple[int, tuple[int, ...]]] = set()
        self._reported: set[tuple[int, ...]] = set()  # those whose gradients differed
        self._were_alike: set[int] = set()  # ranks that have been replicas in any step
        # Optimizers of ranks whose parameters have had no gradient yet, and those whose have.
        self._unfed: dict[tuple[int, int], tuple[int, Site]] = {}
        self._fed: set[tuple[int, int]] = set()
        self.sends_messages = self.leaves_early = self.averages_parameters = False

    # Events

    def wrapped(self, module: nn.Module) -> None:
        """Note the parameters of a module that DistributedDataParallel averages."""
        for parameter in module.parameters():
            self._in_ddp[parameter] = True

    def synced(self, rank: int) -> None:
        """Note that DistributedDataParallel has averaged gradients in a backward pass."""
        self._syncs[rank].add(torch._C._current_graph_task_id())

    def averaged(self, rank: int, parameter: Tensor) -> None:
        """Note that a rank has summed a parameter's gradient by a call of its own."""
        self._averaged[parameter] = True
        if parameter in self._optimizer_of:
            self._by_hand.add((rank, self._optimizer_of[parameter]))

    def exchanged(self, rank: int) -> None:
        """Note that a rank has given another tensor than a gradient to a collective."""
        self._have_exchanged.add(rank)

    def goes_back(self, rank: int, loss: float) -> None:
        """Note a loss from which a rank goes back."""
        self._losses[rank].append(loss)

    def spoke(self, rank: int, *, has_summed: bool, is_long: bool) -> None:
        """Note a rank's collective call, and whether it may average gradients or parameters."""
        if is_long:
            self._spoke_at_length.add(rank)
        if has_summed:
            self._have_summed.add(rank)

    def clipped(self, rank: int, norm: Norm) -> None:
        """Note a call of ``clip_grad_norm_``."""
        self._norms[rank].append(norm)

    def steps(self, rank: int, at: StepOf, optimizer: Optimizer, site: Site) -> Step | None:
        """Note a step that a rank begins; return it if all ranks have come to it."""
        step = self._steps.setdefault((at.optimizer, at.step), Step(site, at.step + 1))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._note_feeding((rank, at.optimizer), at.step, params, site)
        self._note_owner(rank, at.optimizer, params)
        names = distinct_names(self._parameters, params)
        step.values[rank] = [self._values(*pair) for pair in zip(names, params, strict=True)]
        step.rates[rank] = float(optimizer.param_groups[0].get("lr", 0.0))
        step.is_ddp = step.is_ddp or any(p in self._in_ddp for p in params)
        self._begun[rank, at.optimizer] = step, [*map(ref, params)]
        self._note_events(rank, step)
        if len(step.values) < self._num_ranks:
            return None
        del self._steps[at.optimizer, at.step]
        self._judge(step, at.optimizer)
        return step

    def _note_owner(self, rank: int, optimizer: int, params: Sequence[Tensor]) -> None:
        for parameter in params:
            self._optimizer_of[parameter] = optimizer
            if parameter in self._averaged:
                self._by_hand.add((rank, optimizer))

    def stepped(self, rank: int, optimizer: int) -> None:
        """Note what a step has made of a rank's parameters."""
        step, params = self._begun[rank, optimizer]
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
        step.num_syncs[rank] = len(self._syncs.pop(rank, ()))
        self._total_syncs[rank] += step.num_syncs[rank]
        step.total_syncs[rank] = self._total_syncs[rank]
        step.num_calls[rank] = self.num_calls[rank]
        for ranks in (self._have_exchanged, self._spoke_at_length):
            ranks.discard(rank)

    def _may_own(self, rank: int, norms: Iterable[Norm]) -> bool:
        """Return whether a rank has exchanged only gradients of parameters that it did not clip."""
        clipped = (parameter() for norm in norms for parameter in norm.parameters)
        are_shared = any(
            p is not None and (p in self._averaged or p in self._in_ddp) for p in clipped
        )
        return not (are_shared or self.sends_messages or rank in self._have_exchanged)

    def _note_feeding(
        self, key: tuple[int, int], count: int, params: Sequence[Tensor], site: Site
    ) -> None:
        """Note whether an optimizer's parameters have ever had a gradient."""
        if any(p.grad is not None for p in params):
            self._fed.add(key)
        elif params:
            self._unfed[key] = count + 1, site

    def _values(self, name: str, parameter: Tensor) -> Values:
        holder = self._parameters.holder(parameter)
        is_sharded = any(place.is_shard() for place in getattr(parameter, "placements", ()))
        return Values(
            name,
            parameter in self._in_ddp,
            parameter.shape,
            None if is_sharded else digest(parameter),
            None if is_sharded else digest(parameter.grad),
            id(holder),
            "norm" in type(holder).__name__.lower(),
            is_sharded,
            self.visits.have_made(parameter.grad),
            self.gathered.have_made(parameter.grad),
            self.returned.have_made(parameter.grad),
        )

    def ended(self) -> None:
        """Judge steps to which only some ranks have come; called at the end of the world."""
        for (number, _), step in self._steps.items():
            self._judge(step, number)
        self._steps.clear()
        self._judge_results()
        self._judge_norms(Step(("", 0, ""), 0, norms=self._norms), [])
        self._report_unfed()
        self._shared.ended()
        if not self.sends_messages:
            for (optimizer, ranks), step in self._unsynced.items():
                self._report_unsynced(ranks, step, optimizer)

    # Verdicts

    def _report_unfed(self) -> None:
        """Report optimizers that have stepped more than once, and never with a gradient."""
        for (rank, number), (count, site) in self._unfed.items():
            if count > 1 and (rank, number) not in self._fed:
                self._findings.add(
                    ("unfed", site),
                    f"an optimizer took {count} steps on {WHO} without a gradient in any of its "
                    "parameters, so it changed nothing. Was it made before the model got other "
                    f"parameters, as by fully_shard? {place(site)}",
                    rank,
                )

    def _judge(self, step: Step, optimizer: int) -> None:
        if step.is_ddp and len({*step.total_syncs.values()}) > 1:
            return None if self.leaves_early else self._report_skipped(step)
        alike = _alike(step)
        self._judge_norms(step, alike)
        self._judge_syncs(step)
        for before in self._equal.pop(optimizer, ()):
            is_equal = any({*before} <= {*ranks} for ranks in alike)
            is_complete = {*before} <= step.values.keys()
            is_known = (optimizer, before) in self.confirmed and before not in self._reported
            if is_known and not self.averages_parameters and is_complete and not is_equal:
                text = f"were equal before step {step.number - 1}, and differ now"
                self._report_drift(step, before, step.values, text)
        self._equal[optimizer] = alike
        for ranks in alike:
            # Equal again: they average parameters, now and then.
            self._unsynced.pop((optimizer, ranks), None)
            self._judge_gradients(ranks, step, optimizer)
        self._shared.judge(optimizer, step.number, step.site, step.values, step.losses)
        self._judge_start(step, optimizer)
        return None

    def _report_skipped(self, step: Step) -> None:
        fewest, most = (f(step.total_syncs, key=step.total_syncs.__getitem__) for f in (min, max))
        self._findings.add(
            ("skipped", step.site),
            f"step {step.number}: rank {most} had averaged gradients {step.total_syncs[most]} "
            f"times before it, and rank {fewest} {step.total_syncs[fewest]} times: rank {most} has "
            f"left out a step that rank {fewest} took; {place(step.site)}",
        )

    def _judge_gradients(self, ranks: tuple[int, ...], step: Step, optimizer: int) -> None:
        columns = [*zip(*(step.values[rank] for rank in ranks), strict=True)]
        present = [column for column in columns if any(v.gradient for v in column)]
        wrong = [column for column in present if not is_equal(v.gradient for v in column)]
        right = [
            column for column in present if is_equal_not_by_chance([v.gradient for v in column])
        ]
        if not step.is_ddp and any(v.is_of_visitors for column in wrong for v in column):
            return  # experts that began alike
        if right and (step.is_ddp or self.sends_messages or self._have_summed >= {*ranks}):
            self.confirmed.add((optimizer, ranks))
        if wrong and (right or step.is_ddp) and not self.averages_parameters:
            self._report_gradients(ranks, step, wrong, len(present))
        elif wrong and step.number == 1:
            self._unsynced[optimizer, ranks] = step

    def _report_gradients(
        self,
        ranks: tuple[int, ...],
        step: Step,
        wrong: Sequence[Sequence[Values]],
        num_present: int,
    ) -> None:
        if any({*ranks} <= {*others} for others in self._reported):
            return
        self._reported.add(ranks)
        norms = [v.gradient.norm if v.gradient else 0.0 for v in wrong[0][:2]]
        advice = self._advice(step, wrong) if step.is_ddp else ""
        self._findings.add(
            ("gradients", (step.site, ranks)),
            f"step {step.number}: {len(wrong)} of {num_present} gradients differ between "
            f"{rank_names(ranks)}, whose parameters are equal: {names_of(wrong)} (norm "
            f"{norms[0]:.4g} on rank {ranks[0]}, {norms[1]:.4g} on rank {ranks[1]}). They were not "
            f"averaged; {place(step.site)}.{advice}",
        )

    def _advice(self, step: Step, wrong: Sequence[Sequence[Values]]) -> str:
        """Return why DistributedDataParallel has not averaged gradients."""
        if not any(column[0].is_in_ddp for column in wrong):
            return " DistributedDataParallel does not contain these parameters."
        return _SOME_SYNCS if any(step.num_syncs.values()) else _NO_SYNC

    def _judge_start(self, step: Step, optimizer: int) -> None:
        """Report ranks whose gradients are equal, but whose parameters were not from the start.

        Each parameter is judged in the first step in which its gradient is not constant, as it is
        where the next layer begins with zeros.
        """
        fresh = {rank: self._fresh(rank, optimizer, step.values[rank]) for rank in step.values}
        for ranks in _with_equal_gradients(step, [rank for rank in fresh if fresh[rank]]):
            numbers = sorted(set[int].intersection(*(fresh[rank] for rank in ranks)))
            wrong = [
                [step.values[rank][number] for rank in ranks]
                for number in numbers
                if not is_equal(self._starts[rank, optimizer, number] for rank in ranks)
            ]
            if wrong := [column for column in wrong if not is_equal(v.value for v in column)]:
                self._report_start(ranks, step, wrong)

    def _fresh(self, rank: int, optimizer: int, values: Sequence[Values]) -> set[int]:
        """Return the numbers of the parameters whose gradients are not constant for once."""
        fresh = set()
        for number, v in enumerate(values):
            key = rank, optimizer, number
            self._starts.setdefault(key, v.value)
            if v.gradient and not v.gradient.is_constant and key not in self._judged:
                self._judged.add(key)
                fresh.add(number)
        return fresh

    def _report_start(
        self, ranks: Sequence[int], step: Step, wrong: Sequence[Sequence[Values]]
    ) -> None:
        self._findings.add(
            ("start", step.site),
            f"step {step.number}: {rank_names(ranks)} average their gradients, but began with "
            f"different parameters: {names_of(wrong)}. Broadcast them before training, or "
            f"build the model from one seed; {place(step.site)}",
        )

    def _judge_results(self) -> None:
        """Compare what the last steps of replicas made of equal parameters and gradients."""
        for optimizer, ranks in self.confirmed:
            step = self._begun[ranks[0], optimizer][0]
            if not self._is_end(optimizer, ranks, step) or ranks in self._reported:
                continue
            gradients = zip(*(step.values[rank] for rank in ranks), strict=True)
            if all(is_equal(v.gradient for v in column) for column in gradients):
                text = (
                    "were equal before it, the last one, with equal gradients, and differ after it"
                )
                self._report_drift(step, ranks, step.results, text)

    def _is_end(self, optimizer: int, ranks: tuple[int, ...], step: Step) -> bool:
        """Return whether all ranks were alike in a step, their last one, and mended nothing."""
        may_mend = self.sends_messages or self.averages_parameters or self.leaves_early
        is_last = all(self._begun[rank, optimizer][0] is step for rank in ranks)
        is_done = ranks in self._equal[optimizer] and {*ranks} <= step.results.keys()
        return is_last and is_done and not may_mend and not self._spoke_at_length & {*ranks}

    def _report_drift(
        self, step: Step, ranks: tuple[int, ...], values: Mapping[int, Sequence[Values]], text: str
    ) -> None:
        """Report replicas that were equal, if they differ now."""
        columns = zip(*(values[rank] for rank in ranks), strict=True)
        wrong = [column for column in columns if not is_equal(v.value for v in column)]
        if not wrong:
            return
        rates = {step.rates[rank] for rank in ranks}
        advice = " Something besides the averaged gradients changed them."
        if len(rates) > 1:
            advice = f" Their learning rates are {joined([f'{r:g}' for r in sorted(rates)])}."
        self._findings.add(
            ("drift", step.site),
            f"step {step.number}: {rank_names(ranks)} {text}: {names_of(wrong)}; "
            f"{place(step.site)}.{advice}",
        )

    def _judge_norms(self, step: Step, alike: Iterable[tuple[int, ...]]) -> None:
        """Report ranks whose gradients were scaled by different factors.

        Replicas that average no gradients in this step may clip their own, as local SGD does, and
        so may a rank that clips each sample's gradient, or a head for a loss of its own.
        """
        self._were_alike.update(rank for ranks in alike for rank in ranks)
        self._report_norms(step, [rank for rank in step.norms if rank not in self._were_alike])
        for ranks in alike:
            columns = zip(*(step.values[rank] for rank in ranks), strict=True)
            if any(is_equal_not_by_chance([v.gradient for v in column]) for column in columns):
                self._report_norms(step, ranks)

    def _report_norms(self, step: Step, ranks: Sequence[int]) -> None:
        norms = [step.norms[rank][0] for rank in ranks if len(step.norms[rank]) == 1]
        if len(norms) < max(2, len(ranks)) or _have_own_heads(step, ranks):
            return
        totals = [norm.total for norm in norms]
        is_scaled = any(norm.total > norm.limit for norm in norms)
        if is_scaled and max(totals) > min(totals) * (1 + 1e-5):
            factors = [n.limit / n.total if n.total > n.limit else 1.0 for n in norms[:2]]
            self._findings.add(
                ("norm", norms[0].site),
                f"clip_grad_norm_ scaled the gradients by {factors[0]:.3g} on rank {ranks[0]} and "
                f"by {factors[1]:.3g} on rank {ranks[1]}: each took the norm of its own gradients, "
                "instead of the norm over all shards, or before they were averaged; "
                f"{place(norms[0].site)}",
            )

    def _judge_syncs(self, step: Step) -> None:
        most = max(step.num_syncs.values())
        if step.is_ddp and most > 1:
            self._findings.add(
                ("no_sync", step.site),
                f"step {step.number}: DistributedDataParallel averaged gradients in {most} "
                "backward passes for one step, which is right and slow: run all but the last one, "
                f"each with its forward pass, inside no_sync(); {place(step.site)}",
            )

    def _report_unsynced(self, ranks: tuple[int, ...], step: Step, optimizer: int) -> None:
        is_by_hand = any((rank, optimizer) in self._by_hand for rank in ranks)
        may_average_parameters = self._spoke_after(ranks, optimizer) and not is_by_hand
        if may_average_parameters or self._findings.has("order", "crossing"):
            return
        columns = [*zip(*(step.values[rank] for rank in ranks), strict=True)]
        wrong = [column for column in columns if not is_equal(v.gradient for v in column)]
        self._findings.add(
            ("unsynced", step.site),
            f"{rank_names(ranks)} began with equal parameters, and step with gradients that were "
            f"never averaged, and differ: {names_of(wrong)}; {place(step.site)}."
            f"{_AFTER_THE_STEP if is_by_hand else ''}",
        )

    def _spoke_after(self, ranks: tuple[int, ...], optimizer: int) -> bool:
        """Return whether ranks have made collective calls since an optimizer's last step."""
        last = {rank: self._begun[rank, optimizer][0] for rank in ranks}
        return any(self.num_calls[rank] > last[rank].num_calls[rank] for rank in ranks)


def _have_own_heads(step: Step, ranks: Sequence[int]) -> bool:
    """Return whether ranks clipped parameters of their own, each for losses that differ."""
    have_losses = all(step.losses.get(rank) for rank in ranks)
    return step.own_norms >= {*ranks} and have_losses and not with_one_loss(ranks, step.losses)


def _with_equal_gradients(step: Step, ranks: Iterable[int]) -> list[list[int]]:
    """Return the sets of ranks all of whose gradients are equal."""
    by_gradients: defaultdict[object, list[int]] = defaultdict(list)
    for rank in ranks:
        values = step.values[rank]
        gradients = tuple((v.shape, v.gradient.key if v.gradient else 0) for v in values)
        by_gradients[gradients].append(rank)
    return [*by_gradients.values()]


def _alike(step: Step) -> list[tuple[int, ...]]:
    """Return the sets of two or more ranks whose parameters are equal before a step."""
    by_values: defaultdict[object, list[int]] = defaultdict(list)
    for rank, values in step.values.items():
        if any(v.value and not v.value.is_constant for v in values):
            key = tuple((v.shape, v.value.key if v.value else 0) for v in values)
            by_values[key].append(rank)
    return [tuple(sorted(ranks)) for ranks in by_values.values() if len(ranks) > 1]
