"""Random numbers that should differ between replicas, and samplers in a wrong order."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, Subset

from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.messages.meetings import Attendance
from distlab.sim.reporting.report import WHO, place
from distlab.sim.reporting.sites import Places, Site
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.parameters import Digest, digest
from distlab.util.replacing import Replace
from distlab.util.text import rank_names

Unnoticed = Callable[[], AbstractContextManager[object]]
MASKS = ("aten.bernoulli_.float", "aten.native_dropout.default", "aten.bernoulli.p")
SHORT = 32  # elements; shorter masks may be equal by chance


class _Padded(NamedTuple):
    """A sampler that gives each rank ``share`` samples, ``total`` of a dataset of ``size``."""

    share: int
    total: int
    size: int
    site: Site

    def text(self) -> str:
        """Return a line for the user."""
        return (
            f"an evaluation counts {self.total} samples of a dataset that has {self.size}: to give "
            f"each rank {self.share}, the DistributedSampler gives some of them twice. Give "
            f"each rank the samples range(rank, {self.size}, number of ranks) instead; "
            f"{place(self.site)}"
        )


class Draws:
    """Watches dropout masks and samplers."""

    def __init__(
        self, findings: Findings, rank_states: RankStates, places: Places, unnoticed: Unnoticed
    ) -> None:
        self._findings, self._rank_states, self._places = findings, rank_states, places
        self._unnoticed = unnoticed
        self._masks: defaultdict[int, list[tuple[Digest, Site]]] = defaultdict(list)
        self._padded: dict[int, _Padded] = {}  # by rank
        # For each number that all ranks have summed since, whether it is the size of each share.
        self._are_shares: list[bool] = []
        self._epochs: WeakKeyDictionary[DistributedSampler[Any], int] = WeakKeyDictionary()
        self._starts: Counter[tuple[int, Site, int]] = Counter()
        # For each line and number of samples, the hashes of the parts that each rank goes through.
        self._parts: defaultdict[tuple[Site, int], defaultdict[int, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        self._hashes: WeakKeyDictionary[Subset[Any], int] = WeakKeyDictionary()
        # For each line, number of samples and start, the first rank to begin, and its sampler's
        # seed + epoch, and the ranks that begin by the rank that their sampler was given.
        self._seeds: dict[tuple[Site, int, int], tuple[int, int]] = {}
        self._takers: dict[tuple[Site, int, int, int], int] = {}

    def install(self, replace: Replace) -> None:
        """Watch every ``DistributedSampler``."""
        start = DistributedSampler.__iter__
        replace(DistributedSampler, "__iter__", lambda sampler: self._started(start, sampler))

    def _started(
        self, start: Callable[[Any], Iterator[Any]], sampler: DistributedSampler[Any]
    ) -> Iterator[Any]:
        if sampler.shuffle and torch.is_grad_enabled():
            site = self._places.call_site()[0]
            self._compare_epochs(sampler, site)
            self._compare_seeds(sampler, site)
        self._note_part(sampler)
        self._note_padding(sampler)
        self._epochs[sampler] = sampler.epoch
        return start(sampler)

    def _compare_epochs(self, sampler: DistributedSampler[Any], site: Site) -> None:
        """Report a sampler that repeats an order on one rank."""
        if self._epochs.get(sampler) == sampler.epoch:
            self._findings.add(
                ("epoch", site),
                f"{WHO} went through a DistributedSampler again, still in epoch {sampler.epoch}, "
                f"and so in the same order: call set_epoch before each epoch; {place(site)}",
                self._rank_states.current,
            )

    def _compare_seeds(self, sampler: DistributedSampler[Any], site: Site) -> None:
        """Report ranks that take their shares from different orders, one start after another."""
        if sampler.num_replicas != self._rank_states.num_ranks:
            return
        rank, size = self._rank_states.current, sampler.total_size
        seed = sampler.seed + sampler.epoch  # torch seeds the order with the sum
        self._starts[rank, site, size] += 1
        start = site, size, self._starts[rank, site, size]
        self._compare_ranks(sampler.rank, start, rank)
        first, other = self._seeds.setdefault(start, (rank, seed))
        if seed != other:
            self._findings.add(
                ("seed", site),
                f"{rank_names((first, rank))} go through a DistributedSampler with seed + epoch = "
                f"{other} and {seed}, and so in different orders: their shares overlap, and leave "
                f"samples out. Give all ranks one seed and one epoch; {place(site)}",
            )

    def _compare_ranks(self, given: int, start: tuple[Site, int, int], rank: int) -> None:
        """Report ranks that take the same share, because their samplers got the same rank."""
        first = self._takers.setdefault((*start, given), rank)
        if first != rank:
            self._findings.add(
                ("share", start[0]),
                f"{rank_names((first, rank))} go through a DistributedSampler that was given "
                f"rank={given}: they train on the same share, and another share is never used. "
                f"Leave rank= out, or give dist.get_rank(); {place(start[0])}",
            )

    def _note_part(self, sampler: DistributedSampler[Any]) -> None:
        """Note the part of a dataset from which a rank takes its share."""
        part = sampler.dataset
        if not isinstance(part, Subset) or sampler.num_replicas != self._rank_states.num_ranks:
            return
        if part not in self._hashes:
            indices: Any = getattr(part.indices, "tolist", lambda: part.indices)()
            self._hashes[part] = hash(tuple(map(repr, indices)))
        site = self._places.call_site()[0]
        by_rank = self._parts[site, len(part.indices)]
        by_rank[self._rank_states.current].add(self._hashes[part])

    def _note_padding(self, sampler: DistributedSampler[Any]) -> None:
        """Note an evaluation, in which a sampler gives some samples twice to make shares equal."""
        self._padded.pop(self._rank_states.current, None)
        self._are_shares.clear()
        num_samples: int = len(sampler.dataset)  # type: ignore[arg-type]
        is_padded = sampler.total_size > num_samples and sampler.num_samples > 1
        is_of_all = sampler.num_replicas == self._rank_states.num_ranks
        if is_padded and is_of_all and not torch.is_grad_enabled():
            site = self._places.call_site()[0]
            padded = _Padded(sampler.num_samples, sampler.total_size, num_samples, site)
            self._padded[self._rank_states.current] = padded

    def met(self, members: Sequence[Attendance]) -> None:
        """Look at a call of all ranks that may sum the counts of an evaluation.

        A count that is the whole share on each rank counts what the sampler gives twice. With
        another number, it makes an average; alone, it may be the throughput.
        """
        call, padded = members[0].call, {self._padded.get(member.rank) for member in members}
        is_sum = call.name == "all_reduce" and call.op == dist.ReduceOp.SUM
        if not is_sum or len(members) < self._rank_states.num_ranks or len(padded) > 1:
            return
        one, inputs = padded.pop(), [member.call.inputs[0] for member in members]
        if one and all(x.numel() < SHORT and not x.is_meta for x in inputs):
            columns = zip(*(x.flatten().tolist() for x in inputs), strict=False)
            self._are_shares += [{*column} == {one.share} for column in columns]
            if len(self._are_shares) > 1 and any(self._are_shares):
                self._findings.add(("padding", one.site), one.text())

    def ended(self) -> None:
        """Compare the parts that ranks have gone through; called at the end of the world.

        A rank may go through more parts than another, such as that for validation.
        """
        for (site, _), by_rank in self._parts.items():
            for (one, ours), (other, theirs) in combinations(sorted(by_rank.items()), 2):
                if not (ours <= theirs or theirs <= ours):
                    self._findings.add(
                        ("part", site),
                        f"{rank_names((one, other))} go through DistributedSamplers of different "
                        "parts of a dataset, such as random_split draws on each rank: their shares "
                        "overlap or leave samples out. Give all ranks the same part, drawn from "
                        f"one seed; {place(site)}",
                    )

    def operation(self, name: str, args: Sequence[object], out: object) -> None:
        """Note a mask that the running rank draws."""
        if name not in MASKS:
            return
        mask = out[-1] if isinstance(out, tuple) else out
        with self._unnoticed():
            drawn = digest(mask) if isinstance(mask, Tensor) and mask.numel() >= SHORT else None
        if drawn and not drawn.is_constant:
            self._masks[self._rank_states.current].append((drawn, self._places.call_site()[0]))

    def compare(self, replicas: Sequence[int], step: int) -> None:
        """Report masks that replicas drew alike since the last step.

        Args:
            replicas: Ranks that train the same model on different data.
            step: Number of the step that begins now, from 1.
        """
        drawn = [self._masks.pop(rank, []) for rank in replicas]
        for masks in zip(*drawn, strict=False):
            if len({mask.key for mask, _ in masks}) == 1 < len(masks):
                site = masks[0][1]
                self._findings.add(
                    ("mask", site),
                    f"step {step}: {rank_names(replicas)} drop the same elements, because their "
                    "random states are equal: after the weights are made, seed each replica "
                    f"differently; {place(site)}",
                )
