"""Ranks that train the same model: are their parameters and gradients equal before each step?

Nothing declares which ranks are replicas, except for torch's DistributedDataParallel, so it is
inferred. Ranks are replicas in a step if all their parameters are equal, and not all are constant,
as new biases are. Then:

    gradients of one step             verdict
    all equal                         right
    some equal, others not            a finding: the others were not averaged
    none equal, in DDP                a finding: nothing was averaged
    none equal, in ZeRO               the same, if nothing was exchanged after the backward pass
    none equal, in no step            a finding, unless the ranks send each other messages, or
                                      their parameters are equal again before a later step, or a
                                      collective as large as a parameter follows the last one
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isnan

from distlab.sim.reporting.report import WHO, place
from distlab.sim.reporting.sites import Site
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.parameters import Digest
from distlab.sim.sanitizer.recorder import Recorder, Step
from distlab.sim.sanitizer.shared import Shared, with_one_loss
from distlab.sim.sanitizer.values import (
    Values,
    is_equal,
    is_equal_not_by_chance,
    names_of,
    with_whole_gradients,
)
from distlab.util.text import joined, rank_names, told_apart

_ZERO = (
    " ZeroRedundancyOptimizer shares the update out, but does not average: wrap the model in "
    "DistributedDataParallel, or all_reduce the gradients before the step."
)
_AFTER_THE_STEP = " They are averaged only after it, or with other ranks."


def _cause_of_drift(step: Step, ranks: Sequence[int]) -> str:
    rates = {step.rates[rank] for rank in ranks}
    first, *_, last = sorted(ranks, key=step.num_states.__getitem__)
    if len(rates) > 1:
        return (
            f"Their learning rates are {joined(told_apart(sorted(rates), 6))}: give schedulers the "
            "same numbers on all ranks, such as an averaged loss."
        )
    if step.num_states[first] != step.num_states[last]:
        return (
            "Their optimizers began it with state, such as momentum, of "
            f"{step.num_states[first] or 'no'} parameters on rank {first}, and of "
            f"{step.num_states[last]} on rank {last}: load or broadcast it on all ranks."
        )
    return "Something besides the averaged gradients changed them."


class Replicas:
    """Compares replicas.

    Attributes:
        confirmed: Sets of ranks that have averaged gradients, each with the optimizer's number.
    """

    def __init__(self, findings: Findings, recorder: Recorder) -> None:
        self._findings, self._recorder = findings, recorder
        self._shared = Shared(findings)
        self.confirmed: set[tuple[int, tuple[int, ...]]] = set()
        # For each rank, optimizer and parameter, the value in its first step.
        self._starts: dict[tuple[int, int, int], Digest | None] = {}
        self._judged: set[tuple[int, int, int]] = set()  # those that have had a gradient
        # First steps of replicas that may have averaged nothing, by optimizer and ranks.
        self._unsynced: dict[tuple[int, tuple[int, ...]], Step] = {}
        self._equal: dict[int, list[tuple[int, ...]]] = {}  # by optimizer: alike in its last step
        self._last: dict[int, Step] = {}  # by optimizer
        self._reported: set[tuple[int, ...]] = set()  # those whose gradients differed
        self._were_alike: set[int] = set()  # ranks that have been replicas in any step

    def ended(self) -> None:
        """Judge steps to which only some ranks have come; called at the end of the world."""
        for step in self._recorder.unfinished():
            self.judge(step)
        if not self._findings.has("scaler"):
            self._judge_results()
        self._judge_norms(Step(("", 0, ""), 0, norms={**self._recorder.norms()}), [])
        self._report_unfed()
        self._shared.ended()
        if not self._recorder.sends_messages:
            for (_, ranks), step in self._unsynced.items():
                self._report_unsynced(ranks, step)

    def _report_unfed(self) -> None:
        """Report optimizers that have stepped more than once, and never with a gradient."""
        for rank, count, site, sync_off_at in self._recorder.unfed():
            cause = "Was it made before the model got other parameters, as by fully_shard?"
            if sync_off_at:
                cause = (
                    "FSDP keeps gradients to itself since set_requires_gradient_sync(False), "
                    f"{place(sync_off_at)}: call it with True before the last backward pass of "
                    "each step."
                )
            self._findings.add(
                ("unfed", site),
                f"an optimizer took {count} steps on {WHO} without a gradient in any of its "
                f"parameters, so it changed nothing. {cause} {place(site)}",
                rank,
            )

    def judge(self, step: Step) -> None:
        """Compare the ranks before a step."""
        if self._findings.has("scaler"):
            return None  # the ranks no longer take the same steps
        step.values = with_whole_gradients(step.values)
        if step.is_ddp and len({*step.total_syncs.values()}) > 1:
            return None if self._recorder.leaves_early else self._report_skipped(step)
        alike = _alike(step)
        self._judge_norms(step, alike)
        self._judge_syncs(step)
        self._judge_drift(step, alike)
        for ranks in alike:
            # Equal again: they average parameters, now and then.
            self._unsynced.pop((step.optimizer, ranks), None)
            self._judge_gradients(ranks, step)
        self._shared.judge(step)
        self._judge_start(step, alike)
        return None

    def _judge_drift(self, step: Step, alike: list[tuple[int, ...]]) -> None:
        """Report ranks that were alike before the last step, and are not before this one."""
        for before in self._equal.pop(step.optimizer, ()):
            is_equal = any({*before} <= {*ranks} for ranks in alike)
            is_complete = {*before} <= step.values.keys()
            is_known = (step.optimizer, before) in self.confirmed and before not in self._reported
            may_differ = self._recorder.averages_parameters or not is_complete or is_equal
            if is_known and not may_differ:
                text = f"were equal before step {step.number - 1}, and differ now"
                cause = _cause_of_drift(self._last[step.optimizer], before)
                self._report_drift(step, before, step.values, text, cause)
        self._equal[step.optimizer], self._last[step.optimizer] = alike, step

    def _report_skipped(self, step: Step) -> None:
        fewest, most = (f(step.total_syncs, key=step.total_syncs.__getitem__) for f in (min, max))
        self._findings.add(
            ("skipped", step.site),
            f"step {step.number}: rank {most} had averaged gradients {step.total_syncs[most]} "
            f"times before it, and rank {fewest} {step.total_syncs[fewest]} times: rank {most} has "
            f"left out a step that rank {fewest} took; {place(step.site)}",
        )

    def _judge_gradients(self, ranks: tuple[int, ...], step: Step) -> None:
        columns = [*zip(*(step.values[rank] for rank in ranks), strict=True)]
        present = [column for column in columns if any(v.gradient for v in column)]
        wrong = [column for column in present if not is_equal(v.gradient for v in column)]
        right = [
            column for column in present if is_equal_not_by_chance([v.gradient for v in column])
        ]
        if not step.is_ddp and any(v.is_of_visitors for column in wrong for v in column):
            return  # experts that began alike
        if right and (
            step.is_ddp or self._recorder.sends_messages or self._recorder.have_summed >= {*ranks}
        ):
            self.confirmed.add((step.optimizer, ranks))
        must_average = step.is_ddp or self._has_zero_alone(ranks, step)
        if wrong and (right or must_average) and not self._recorder.averages_parameters:
            self._report_gradients(ranks, step, wrong, len(present))
        elif wrong and step.number == 1:
            self._unsynced[step.optimizer, ranks] = step

    def _has_zero_alone(self, ranks: Sequence[int], step: Step) -> bool:
        """Return whether ranks share out an update of gradients that they have never exchanged."""
        are_taken = any(v.taken_at for rank in ranks for v in step.values[rank])
        may_average = are_taken or self._recorder.sends_messages
        return step.is_zero and step.alone >= {*ranks} and not may_average

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
        gradients = [v.gradient for v in wrong[0]]
        other = next(k for k, g in enumerate(gradients) if not is_equal([gradients[0], g]))
        norms = told_apart([g.norm if g else 0.0 for g in (gradients[0], gradients[other])], 4)
        if step.is_ddp:
            advice = _advice(step, ranks, wrong)
        else:
            is_zero = self._has_zero_alone(ranks, step)
            advice = _ZERO if is_zero else _not_taken(step, ranks, wrong)
        self._findings.add(
            ("gradients", (step.site, ranks)),
            f"step {step.number}: {len(wrong)} of {num_present} gradients differ between "
            f"{rank_names(ranks)}, whose parameters are equal: {names_of(wrong)} (norm "
            f"{norms[0]} on rank {ranks[0]}, {norms[1]} on rank {ranks[other]}). They were not "
            f"averaged; {place(step.site)}.{advice}",
        )

    def _judge_start(self, step: Step, alike: Iterable[tuple[int, ...]]) -> None:
        """Report ranks whose gradients are equal, but whose parameters were not from the start.

        Each parameter is judged in the first step in which its gradient is not constant, as it is
        where the next layer begins with zeros.
        """
        fresh = {rank: self._fresh(rank, step.optimizer, step.values[rank]) for rank in step.values}
        for ranks in _with_equal_gradients(step, [rank for rank in fresh if fresh[rank]]):
            numbers = sorted(set[int].intersection(*(fresh[rank] for rank in ranks)))
            wrong = [
                [step.values[rank][number] for rank in ranks]
                for number in numbers
                if not is_equal(self._starts[rank, step.optimizer, number] for rank in ranks)
            ]
            if wrong := [column for column in wrong if not is_equal(v.value for v in column)]:
                self._report_start(ranks, step, wrong, _among_others(ranks, alike))

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
        self,
        ranks: Sequence[int],
        step: Step,
        wrong: Sequence[Sequence[Values]],
        replicas: Sequence[int],
    ) -> None:
        advice = "Broadcast them before training, or build the model from one seed"
        if uses := wrong[0][0].ddp:
            advice = uses.model.why_unequal()
        if replicas:
            advice = (
                f"{rank_names(replicas).capitalize()} hold equal ones: average over these ranks, "
                "by the group of the data-parallel dimension"
            )
        self._findings.add(
            ("start", step.site),
            f"step {step.number}: {rank_names(ranks)} average their gradients, but began with "
            f"different parameters: {names_of(wrong)}. {advice}; {place(step.site)}",
        )

    def _judge_results(self) -> None:
        """Compare what the last steps of replicas made of equal parameters and gradients."""
        for optimizer, ranks in self.confirmed:
            step = self._recorder.begun[ranks[0], optimizer][0]
            if not self._is_end(optimizer, ranks, step) or ranks in self._reported:
                continue
            gradients = zip(*(step.values[rank] for rank in ranks), strict=True)
            if all(is_equal(v.gradient for v in column) for column in gradients):
                text = (
                    "were equal before it, the last one, with equal gradients, and differ after it"
                )
                cause = _cause_of_drift(step, ranks)
                self._report_drift(step, ranks, step.results, text, cause)

    def _is_end(self, optimizer: int, ranks: tuple[int, ...], step: Step) -> bool:
        """Return whether all ranks were alike in a step, their last one, and mended nothing."""
        may_mend = (
            self._recorder.sends_messages
            or self._recorder.averages_parameters
            or self._recorder.leaves_early
        )
        is_last = all(self._recorder.begun[rank, optimizer][0] is step for rank in ranks)
        is_done = ranks in self._equal[optimizer] and {*ranks} <= step.results.keys()
        return (
            is_last and is_done and not may_mend and not self._recorder.spoke_at_length & {*ranks}
        )

    def _report_drift(
        self,
        step: Step,
        ranks: tuple[int, ...],
        values: Mapping[int, Sequence[Values]],
        text: str,
        cause: str,
    ) -> None:
        """Report replicas that were equal, if they differ now."""
        columns = zip(*(values[rank] for rank in ranks), strict=True)
        wrong = [column for column in columns if not is_equal(v.value for v in column)]
        if not wrong:
            return
        self._findings.add(
            ("drift", step.site),
            f"step {step.number}: {rank_names(ranks)} {text}: {names_of(wrong)}; "
            f"{place(step.site)}. {cause}",
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
        norms = {rank: step.norms[rank][0] for rank in ranks if len(step.norms[rank]) == 1}
        if len(norms) < max(2, len(ranks)) or _have_own_heads(step, ranks):
            return
        first, *_, last = sorted(ranks, key=lambda rank: _nan_last(norms[rank].total))
        is_scaled = any(norm.factor != 1 for norm in norms.values())
        if is_scaled and _are_apart(norms[first].total, norms[last].total):
            pair = sorted([first, last])
            factors = told_apart([norms[rank].factor for rank in pair], 3)
            self._findings.add(
                ("norm", norms[first].site),
                f"clip_grad_norm_ scaled the gradients by {factors[0]} on rank {pair[0]} and "
                f"by {factors[1]} on rank {pair[1]}: each took the norm of its own gradients, "
                "instead of the norm over all shards, or before they were averaged; "
                f"{place(norms[first].site)}",
            )

    def _judge_syncs(self, step: Step) -> None:
        most = max(step.num_syncs.values())
        if step.is_ddp and most > 1:
            self._findings.add(
                ("no_sync", step.site),
                f"step {step.number}: DistributedDataParallel averaged gradients in {most} "
                "backward passes for one step, where one is enough: run all but the last one, each "
                f"with its forward pass, inside no_sync(); {place(step.site)}",
            )

    def _report_unsynced(self, ranks: tuple[int, ...], step: Step) -> None:
        is_by_hand = any((rank, step.optimizer) in self._recorder.by_hand for rank in ranks)
        may_average_parameters = self._shared_after(ranks, step) and not is_by_hand
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

    def _shared_after(self, ranks: tuple[int, ...], step: Step) -> bool:
        """Return whether ranks have shared as much as a parameter since the last step.

        An averaged loss is less than that.
        """
        last = {rank: self._recorder.begun[rank, step.optimizer][0] for rank in ranks}
        num_shared = self._recorder.num_shared
        largest = max(value.shape.numel() for value in step.values[ranks[0]])
        return any(num_shared[r] - last[r].num_shared[r] >= largest for r in ranks)


def _advice(step: Step, ranks: Sequence[int], wrong: Sequence[Sequence[Values]]) -> str:
    """Return why DistributedDataParallel has not averaged gradients."""
    uses = next((column[0].ddp for column in wrong if column[0].ddp), None)
    if uses is None:
        others = next(v.ddp for values in step.values.values() for v in values if v.ddp)
        return _left_out(wrong, others.model.made_at)
    averaged = uses.model.ranks
    if not {*ranks} <= {*averaged}:
        return (
            f" DistributedDataParallel averages over {rank_names(averaged)} alone on rank "
            f"{ranks[0]}: give it a process_group of all ranks with the same parameters."
        )
    values = step.values[ranks[0]]
    lacking = [v.name for v in values if v.ddp is uses and v.gradient is None]
    return f" DistributedDataParallel has not done it: {uses.why_not(lacking)}"


def _not_taken(step: Step, ranks: Sequence[int], wrong: Sequence[Sequence[Values]]) -> str:
    """Say that no collective has ever taken gradients, if others went through one; else ""."""
    taken_at = next((v.taken_at for v in step.values[ranks[0]] if v.taken_at), None)
    if taken_at is None or any(v.taken_at for column in wrong for v in column):
        return ""
    replacement = next((column[0].replacement for column in wrong if column[0].replacement), "")
    more = f" {replacement}: list the parameters after that." if replacement else ""
    return f" No collective took them; the others went through {place(taken_at)}.{more}"


def _left_out(wrong: Sequence[Sequence[Values]], made_at: Site) -> str:
    """Return why DistributedDataParallel averages none of these parameters' gradients."""
    if model := wrong[0][0].left_out_by:
        return (
            " They required no gradient when DistributedDataParallel was made, so it leaves them "
            f"out: let them require one before; {place(model.made_at)}."
        )
    return (
        " DistributedDataParallel does not contain these parameters: it averages those that its "
        f"module has when it is made, {place(made_at)}. Add layers before that, or wrap them, too."
    )


def _among_others(ranks: Sequence[int], alike: Iterable[tuple[int, ...]]) -> Sequence[int]:
    """Return the replicas of one of the ranks, if none of them is another one of the ranks."""
    of_one = (replicas for replicas in alike if len({*ranks} & {*replicas}) == 1)
    return next(of_one, ())


def _nan_last(norm: float) -> tuple[bool, float]:
    return isnan(norm), norm


def _are_apart(least: float, most: float) -> bool:
    """Return whether norms differ by more than rounding; NaN differs from all numbers."""
    return isnan(most) != isnan(least) or most > least * (1 + 1e-5)


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
