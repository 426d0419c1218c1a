"""GradScalers that skip a step on one replica, but not on another.

    rank 0   unscale_ finds no inf ─▶ average ─▶ gradients with inf ─▶ steps
    rank 1   unscale_ finds inf    ─▶ average ─▶ gradients with inf ─▶ skips

Ranks that have equal parameters and equal gradients have to decide alike, and so have ranks that
have just summed gradients, whose shards may differ.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from distlab.sim.gpu.device import await_values
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Places, Site
from distlab.sim.sanitizer.draws import Unnoticed
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.parameters import digest
from distlab.util.replacing import Replace
from distlab.util.text import rank_names

State = int  # 0 if unknown


class _Decision(NamedTuple):
    """What one rank's scaler does about a step.

    Attributes:
        state: What tells parameters and gradients from others before it.
        looked_at: Line that looked for inf.
        sums: Groups in which the rank has summed gradients since its last backward pass began.
    """

    state: State
    is_skip: bool
    looked_at: Site
    sums: frozenset[tuple[int, ...]]


class Scalers:
    """Compares what the scalers of all ranks decide.

    Args:
        sums: For each rank, the groups in which it may have summed gradients; see Recorder.
    """

    def __init__(
        self,
        findings: Findings,
        rank_states: RankStates,
        places: Places,
        unnoticed: Unnoticed,
        sums: Mapping[int, Iterable[tuple[int, ...]]],
    ) -> None:
        self._findings, self._rank_states, self._places = findings, rank_states, places
        self._unnoticed, self._sums = unnoticed, sums
        # For each rank, the number of each of its optimizers, and its steps so far.
        self._numbers: defaultdict[int, MutableMapping[Optimizer, int]] = defaultdict(
            WeakIdKeyDictionary
        )
        self._num_steps: Counter[tuple[int, int]] = Counter()
        self._num_optimizers: Counter[int] = Counter()
        # For each optimizer, the line of its last unscale_().
        self._looked_at: MutableMapping[Optimizer, Site] = WeakIdKeyDictionary()
        # What the ranks that have come to a step of an optimizer decide.
        self._decisions: defaultdict[tuple[int, int], dict[int, _Decision]] = defaultdict(dict)

    def install(self, replace: Replace) -> None:
        """Watch every scaler."""
        step, unscale = GradScaler.step, GradScaler.unscale_

        def unscale_and_note(scaler: GradScaler, optimizer: Optimizer) -> None:
            if self._rank_states.is_in_rank():
                self._looked_at[optimizer] = self._places.call_site()[0]
            unscale(scaler, optimizer)

        def step_and_note(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kw: Any) -> Any:
            if not self._rank_states.is_in_rank() or not scaler.is_enabled():
                return step(scaler, optimizer, *args, **kw)
            tensors = _tensors(optimizer)
            await_values(tensors)
            with self._unnoticed():
                state = _state(tensors)
            result = step(scaler, optimizer, *args, **kw)
            site = self._places.call_site()[0]
            with self._unnoticed():
                self._decided(optimizer, state, is_skip=_has_found(scaler, optimizer), site=site)
            return result

        replace(GradScaler, "unscale_", unscale_and_note)
        replace(GradScaler, "step", step_and_note)

    def _decided(self, optimizer: Optimizer, state: State, *, is_skip: bool, site: Site) -> None:
        rank = self._rank_states.current
        known = self._numbers[rank]
        if optimizer not in known:
            known[optimizer] = self._num_optimizers[rank]
            self._num_optimizers[rank] += 1
        number = known[optimizer]
        self._num_steps[rank, number] += 1
        step = number, self._num_steps[rank, number]
        looked_at = self._looked_at.pop(optimizer, site)
        sums = frozenset(self._sums.get(rank, ()))
        self._decisions[step][rank] = _Decision(state, is_skip, looked_at, sums)
        if len(self._decisions[step]) == self._rank_states.num_ranks:
            self._compare(step[1], self._decisions.pop(step))

    def ended(self) -> None:
        """Compare steps to which only some ranks have come; called at the end of the world."""
        for (_, number), decisions in self._decisions.items():
            self._compare(number, decisions)

    def _compare(self, number: int, decisions: dict[int, _Decision]) -> None:
        for ranks in _that_have_to_agree(decisions):
            skipping = [rank for rank in ranks if decisions[rank].is_skip]
            if 0 < len(skipping) < len(ranks):
                others = [rank for rank in ranks if rank not in skipping]
                self._report(number, skipping, others, decisions[skipping[0]].looked_at)

    def _report(
        self, number: int, skipping: Sequence[int], others: Iterable[int], looked_at: Site
    ) -> None:
        self._findings.add(
            ("scaler", looked_at),
            f"GradScaler skipped step {number} on {rank_names(skipping)}, but not on "
            f"{rank_names(others)}: each looked for inf or nan in its own gradients. Average the "
            f"gradients before unscale_(), or all-reduce found_inf; {place(looked_at)}",
        )


def _that_have_to_agree(decisions: Mapping[int, _Decision]) -> Iterable[Sequence[int]]:
    """Return the sets of ranks that are replicas, or have summed gradients with one another."""
    by_reason: defaultdict[object, list[int]] = defaultdict(list)
    for rank, decision in sorted(decisions.items()):
        for reason in (*[decision.state] * bool(decision.state), *decision.sums):
            by_reason[reason].append(rank)
    return by_reason.values()


def _tensors(optimizer: Optimizer) -> list[Tensor | None]:
    """Return an optimizer's gradients, and the parameters that have them."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [x for p in parameters if p.grad is not None for x in (p, p.grad)]


def _state(tensors: Sequence[Tensor | None]) -> State:
    """Return what tells tensors from others."""
    digests = [*map(digest, tensors)]
    are_known = all(d or x is None for d, x in zip(digests, tensors, strict=True))
    return hash(tuple(d.key if d else 0 for d in digests)) if are_known else 0


def _has_found(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether a scaler has found inf or nan in an optimizer's gradients."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(x) for x in found.values() if not x.is_meta)
