"""Contracts of collectives as data, and the tests that check an answer against its contract.

A judge states what its task promises, and gets one test for each promise:

    TREE = Contract(task="3.4", name="a_tree", collective=AllReduce("tree_all_reduce"), …)
    globals().update(TREE.tests())
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import inf
from random import Random
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.sim import Options
from distlab.util.text import counted
from judging.calls import typed
from judging.checks import (
    AS_NCCL,
    MEASURED,
    UNIFORM,
    check_no_collective,
    check_peak,
    check_sizes,
    check_waited,
    of_members,
    rounds_of,
    short_beside,
    sizes_of,
    uneven,
)
from judging.expect import over
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from judging.tensors import (
    FRACTIONS,
    KINDS,
    LARGE,
    Kind,
    even_size,
    exact,
    given_group,
    numbers_of,
    own_device,
    powers,
)

OVERWRITTEN = 77  # the caller fills x with this number as soon as the function returns
SLACK_BYTES = 256  # room for a few numbers
FIVE = 5  # number of ranks in the tests of unusual sizes
FEW_RANKS = 8  # with more ranks, there are too many subsets to search for a sum
IN_GROUP = f"inside the group {list(MEMBERS)} of {OUTER_WORLD_SIZE} ranks, "
SIZES: dict[str, Callable[[Random, int], Kind]] = {  # by name: draws a tensor for n ranks
    "fewer than ranks": lambda _random, n: Kind((n - 1,)),
    "float16": lambda random, _n: Kind((random.randrange(2000, 3000),), "float16"),
    "bfloat16": lambda random, _n: Kind((random.randrange(2000, 3000),), "bfloat16"),
    "large": lambda random, _n: Kind((even_size(random, *LARGE),)),
}
Numbers = Callable[[Kind, int], Tensor]  # makes a rank's tensor before the call


# Collectives: how to call each, and how to check its result


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce in place, and the base class of the other collectives."""

    function: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    has_a_sum: ClassVar[bool] = True  # True if all ranks should end with the same sum, bit for bit
    advice: str = "Is every part of x added once, in the dtype of x? A cast loses digits."

    def cut_into(self, segment_bytes: int) -> Any:
        """Return this collective, with messages of at most ``segment_bytes``."""
        return replace(self, keywords={"segment_bytes": segment_bytes})

    def variants(self, n: int) -> list[Any]:
        """Return a copy of this collective for each value of an argument, such as the source."""
        assert n
        return [self]

    def bring(self, kind: Kind, rank: int, n: int, numbers: Numbers) -> Tensor:
        """Return a rank's x as it is before the call."""
        assert n
        return numbers(kind, rank)

    def call(self, lesson: Any, x: Tensor, group: Any) -> Any:
        return getattr(lesson, self.function)(x, **given_group(group), **self.keywords)

    def found(self, x: Tensor, returned: Any, rank: int, n: int) -> Any:
        """Return the result to check, as plain numbers."""
        del returned, rank, n
        return numbers_of(x)

    def check(self, by_rank: Sequence[Any], kind: Kind, numbers: Numbers, where: str) -> None:
        """Check what ``found`` returned on each rank."""
        n = len(by_rank)
        parts = [self.bring(kind, rank, n, numbers) for rank in range(n)]
        wanted = numbers_of(_sum(parts))
        for rank, got in enumerate(by_rank):
            cause = got != wanted and why_not_the_sum(got, parts, rank, self.advice)
            check(
                not cause,
                f"{where}rank {rank} of {n}, {kind}: the sum should be "
                f"{short_beside(wanted, got)}, but x is {short_beside(got, wanted)}. {cause}",
            )


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


def why_not_the_sum(got: Any, parts: Sequence[Tensor], rank: int, advice: str) -> str:
    """Explain the likely mistake behind a wrong sum."""
    n = len(parts)
    if got == numbers_of(parts[rank]):
        return (
            "That is what this rank brought: does the sum come to this rank, and is it written "
            "into x itself? `x = x + …` makes a new tensor, `x += …` writes into the caller's."
        )
    if got == numbers_of(_sum(parts) / n):
        return "That is the mean: return the sum."
    for ranks in _subsets(n):
        if got == numbers_of(_sum([parts[rank] for rank in ranks])):
            return (
                f"That is the sum of what ranks {list(ranks)} brought: is every rank's x added "
                f"exactly once, and passed on? {advice}"
            )
    return (
        "It is not the sum of any set of ranks, at least not in every place: is a rank's x added "
        f"twice, or a part of it not at all? {advice}"
    )


def _subsets(n: int) -> Iterator[tuple[int, ...]]:
    return (
        ranks
        for size in (range(1, n) if n <= FEW_RANKS else ())
        for ranks in combinations(range(n), size)
    )


@dataclass(frozen=True)
class Broadcast(AllReduce):
    """A broadcast in place; its variants have each rank as the source, and omit src if it is 0."""

    has_a_sum: ClassVar[bool] = False
    src: int = 0

    def variants(self, n: int) -> list[Any]:
        return [replace(self, src=src) for src in range(n)]

    def call(self, lesson: Any, x: Tensor, group: Any) -> Any:
        given = () if self.src == 0 else (self.src,)
        return getattr(lesson, self.function)(x, *given, **given_group(group))

    def check(self, by_rank: Sequence[Any], kind: Kind, numbers: Numbers, where: str) -> None:
        n = len(by_rank)
        brought = [numbers_of(numbers(kind, rank)) for rank in range(n)]
        wanted = brought[self.src]
        for rank, got in enumerate(by_rank):
            cause = f"That is what rank {brought.index(got)} brought. " if got in brought else ""
            check(
                got == wanted,
                f"{where}rank {rank} of {n}, src {self.src}, {kind}: x should be "
                f"{short_beside(wanted, got)}, but is {short_beside(got, wanted)}. {cause}"
                f"{self.advice}",
            )


@dataclass(frozen=True)
class ReduceScatter(AllReduce):
    """A reduce-scatter that returns its result as a one-dimensional view of x."""

    has_a_sum: ClassVar[bool] = False

    def found(self, x: Tensor, returned: Any, rank: int, n: int) -> Any:
        del rank
        chunk = typed(self.function, returned, Tensor)
        return {
            "chunk": numbers_of(chunk),
            "shape": [*chunk.shape],
            "is_view": chunk.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(),
            "in_x": [numbers_of(chunk) for chunk in x.view(-1).tensor_split(n)],
        }

    def check(self, by_rank: Sequence[Any], kind: Kind, numbers: Numbers, where: str) -> None:
        n = len(by_rank)
        parts = [self.bring(kind, rank, n, numbers).view(-1) for rank in range(n)]
        chunks = [[*part.tensor_split(n)] for part in parts]
        sums = [numbers_of(chunk) for chunk in _sum(parts).tensor_split(n)]
        for rank, found in enumerate(by_rank):
            here = f"{where}rank {rank} of {n}, {kind}"
            self._check_shape(here, found["shape"], len(chunks[0][rank]), rank)
            got, wanted = found["chunk"], sums[rank]
            brought = [of_rank[rank] for of_rank in chunks]
            cause = got != wanted and self._cause(found, sums, brought, rank)
            check(
                not cause,
                f"{here}: chunk {rank} of the sum is {short_beside(wanted, got)}; returned was "
                f"{short_beside(got, wanted)}. {cause}",
            )
            self._check_place(here, found, rank)

    def _check_shape(self, here: str, shape: list[int], length: int, rank: int) -> None:
        check(
            len(shape) == 1,
            f"{here}: the chunk should have one dimension; its shape is {shape}. x.view(-1) has "
            "one.",
        )
        check(
            shape == [length],
            f"{here}: chunk {rank} has {counted(length, 'element')}, but {shape[0]} came back. "
            "tensor_split makes the first chunks one element longer if N does not divide the size.",
        )

    def _cause(self, found: Any, sums: list[Any], parts: list[Tensor], rank: int) -> str:
        start = (
            "begin one chunk earlier or later, so that the last one to arrive at rank r is chunk r."
        )
        got = found["chunk"]
        if got in sums:
            return f"That is chunk {sums.index(got)} of the sum: {start}"
        complete = [i for i, chunk in enumerate(found["in_x"]) if chunk and chunk == sums[i]]
        if len(complete) == 1 and rank not in complete:
            return f"x holds the complete sum of chunk {complete[0]} instead: {start}"
        return why_not_the_sum(got, parts, rank, self.advice)

    def _check_place(self, here: str, found: Any, rank: int) -> None:
        check(
            found["is_view"],
            f"{here}: the chunk should be a view of x; yours has memory of its own. Add in the "
            "chunks of x: `chunk += …`.",
        )
        check(
            found["in_x"][rank] == found["chunk"],
            f"{here}: chunk {rank} of x should hold the sum; what you returned lies elsewhere in "
            f"x, and that chunk holds {short_beside(found['in_x'][rank], found['chunk'])}.",
        )


@dataclass(frozen=True)
class AllGather(AllReduce):
    """An all-gather in place; before it, rank r holds only chunk r of the result."""

    has_a_sum: ClassVar[bool] = False

    def bring(self, kind: Kind, rank: int, n: int, numbers: Numbers) -> Tensor:
        x = numbers(kind, 0)
        for place, chunk in enumerate(x.view(-1).tensor_split(n)):
            if place != rank:
                chunk.fill_(OVERWRITTEN)
        return x

    def found(self, x: Tensor, returned: Any, rank: int, n: int) -> Any:
        del returned, rank
        return [numbers_of(chunk) for chunk in x.view(-1).tensor_split(n)]

    def check(self, by_rank: Sequence[Any], kind: Kind, numbers: Numbers, where: str) -> None:
        n = len(by_rank)
        wanted = [numbers_of(chunk) for chunk in numbers(kind, 0).view(-1).tensor_split(n)]
        for rank, chunks in enumerate(by_rank):
            for place, (got, right) in enumerate(zip(chunks, wanted, strict=True)):
                check(
                    got == right,
                    f"{where}rank {rank} of {n}, {kind}: chunk {place}, which rank {place} brings, "
                    f"is {short_beside(right, got)}, but in x it is {short_beside(got, right)}. "
                    f"{self._cause(got, wanted)}{self.advice}",
                )

    def _cause(self, got: Any, chunks: list[Any]) -> str:
        return f"That is chunk {chunks.index(got)}. " if got in chunks else ""


def use(
    lesson: Any, variants: list[Any], kinds: list[Kind], numbers: Numbers, group: Any = None
) -> list[Any]:
    """Call each variant with a tensor of each kind; overwrite each tensor after its call."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    found: list[Any] = []
    memory = torch.empty(0)
    for variant, kind in product(variants, kinds):
        memory.fill_(OVERWRITTEN)
        x = variant.bring(kind, rank, n, numbers).to(own_device(group))
        memory = x.detach()
        returned = variant.call(lesson, x, group)
        found.append(variant.found(memory, returned, rank, n))
    return found


def use_fractions(lesson: Any, variant: Any, num_elements: int) -> list[list[float]]:
    """Call an all-reduce in several dtypes, on numbers whose sum depends on the order."""
    sums = []
    for dtype in FRACTIONS:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(num_elements, generator=generator, dtype=torch.float64)
        x = x.to(getattr(torch, dtype))
        variant.call(lesson, x, None)
        sums.append(x.tolist())
    return sums


# The contract


@dataclass(frozen=True)
class Call:
    """A completed call on every rank of a simulated world."""

    run: Run
    variant: Any  # the variant of the collective that was called
    kind: Kind

    @property
    def n(self) -> int:
        return len(self.run.results)


@dataclass(frozen=True)
class Contract:
    """A task's promises about a collective, with advice for answers that break a promise."""

    task: str
    name: str  # beginning of its tests' names
    collective: Any
    worlds: Sequence[int]  # numbers of ranks in the tests of costs
    length: Callable[[Random], int]  # draws the number of elements in those tests
    made_of: str  # sentence that says what the collective should be built from
    traffic: Callable[[Call], None]  # checks the messages between ranks
    messages: Callable[[int, int], Counter[int]]  # counts by length, for x's elements and ranks
    rounds: Callable[[int], int] | None  # limit by number of ranks; None: the task has its own test
    late: str  # advice if a call takes more rounds
    inboxes: Callable[[int], int]  # number of messages that a rank may hold besides x
    memory: str  # advice if a call takes more memory
    timed_up_to: float = inf  # elements; with more, even correct answers may take longer
    stuck: str = ""  # likely cause of a deadlock
    if_batched: str = ""  # likely cause of an NCCL-only deadlock; "" if the task allows one
    options: Options = MEASURED
    kinds: Sequence[Kind] = tuple(KINDS)
    kinds_on: Sequence[int] = (2, 3)  # numbers of ranks in the tests of all kinds
    bits_on: Sequence[int] = (5,)  # numbers of ranks in the tests of equal bits

    def tests(self) -> dict[str, Callable[..., None]]:
        """Return the tests by name, marked as tests of the task."""
        tests = {
            "keeps_to_its_costs": over(self.worlds, self._test_costs),
            "of_any_size": over([*SIZES], self._test_size),
            "of_every_kind": over(self.kinds_on, self._test_kinds),
            "inside_a_group": self._test_group(),
        }
        if self.collective.has_a_sum:
            tests["gives_all_ranks_the_same_bits"] = over(self.bits_on, self._test_bits)
        if self.if_batched:
            tests["cannot_deadlock_on_nccl"] = over((2, 3), self._test_nccl)
        return {
            f"test_{self.name}_{promise}": task(self.task, real=promise == "of_every_kind")(test)
            for promise, test in tests.items()
        }

    def drawn(self, random: Random, n: int) -> tuple[Any, Kind]:
        """Draw the arguments of a call."""
        return random.choice(self.collective.variants(n)), Kind((self.length(random),))

    def _test_costs(self, grade: Grade, n: int) -> None:
        self.check_call(grade, n, *self.drawn(grade.random, n))

    def _test_size(self, grade: Grade, size: str) -> None:
        kind = SIZES[size](grade.random, FIVE)
        variant, _ = self.drawn(grade.random, FIVE)
        if "segment_bytes" in variant.keywords:
            variant = variant.cut_into(40 + kind.num_bytes // 20)
        self.check_call(grade, FIVE, variant, kind)

    def check_call(self, grade: Grade, n: int, variant: Any, kind: Kind) -> Call:
        """Call the collective once; check the result, and then all its costs."""
        run = grade.run(
            *(use, n, [variant], [kind], powers),
            cluster=UNIFORM,
            options=self.options,
            if_stuck=self.stuck,
        )
        call = Call(run, variant, kind)
        variant.check([found for (found,) in run.results], kind, powers, "")
        check_no_collective(run, self.made_of)
        self.traffic(call)
        if kind.num_elements <= self.timed_up_to:
            self._check_rounds(call)
        self._check_peak(call)
        check_waited(run)
        return call

    def _check_rounds(self, call: Call) -> None:
        if self.rounds is None:
            return
        most, longest = self.rounds(call.n), self._longest(call)
        taken = rounds_of(call.run, longest)
        check_cost(
            taken <= most + 0.01,
            f"on {counted(call.n, 'rank')} it should take {counted(most, 'round')}, as long as so "
            f"many messages of {longest:,} bytes, one after the other; yours takes {taken:g}. "
            f"{self.late}",
        )

    def _longest(self, call: Call) -> int:
        """Return the bytes of the longest message or, if x is sent in segments, their limit."""
        longest = max(self.messages(call.kind.num_elements, call.n), default=0)
        num_bytes: int = call.variant.keywords.get("segment_bytes", longest * call.kind.item_bytes)
        return num_bytes

    def _check_peak(self, call: Call) -> None:
        most = [
            call.kind.num_bytes + self.inboxes(rank) * self._longest(call) + SLACK_BYTES
            for rank in range(call.n)
        ]
        check_peak(call.run, most, self.memory)

    def _test_kinds(self, grade: Grade, n: int) -> None:
        variants = self.collective.variants(n)
        args = variants, [*self.kinds], exact
        run = grade.run(use, n, *args, options=uneven(grade.random, n), if_stuck=self.stuck)
        check_results(run.results, *args)
        if grade.is_simulated:
            check_no_collective(run, self.made_of)
            self.check_sizes(run, n)
            check_waited(run)

    def check_sizes(self, run: Run, n: int) -> None:
        """Check the message sizes for all kinds of tensors, each in its own dtype."""
        variants = self.collective.variants(n)
        expected: Counter[int] = Counter()
        for _, kind in product(variants, self.kinds):
            for length, count in self.messages(kind.num_elements, n).items():
                expected[length * kind.item_bytes] += count
        segment_bytes = self.collective.keywords.get("segment_bytes")
        if segment_bytes is None:
            check_sizes(run, expected)
            return
        longest = max(sizes_of(run), default=0)
        check_cost(
            longest <= segment_bytes,
            f"with segment_bytes={segment_bytes}, a message of {longest} bytes was sent. A message "
            "should hold at most segment_bytes: an element of x has x.element_size() of them, 1 to "
            "8 here.",
        )
        wanted, got = (
            sum(size * count for size, count in sizes.items())
            for sizes in (expected, sizes_of(run))
        )
        judge = check_cost if got > wanted else check
        judge(
            got == wanted,
            f"on {counted(n, 'rank')}, all ranks together should send {wanted:,} bytes; they send "
            f"{got:,.0f}. Send the segments in the dtype of x.",
        )

    def _test_bits(self, grade: Grade, n: int) -> None:
        num_elements, variant = grade.random.randrange(500, 1000), self.collective
        if "segment_bytes" in variant.keywords:
            variant = variant.cut_into(400)
        run = grade.run(use_fractions, n, variant, num_elements, if_stuck=self.stuck)
        by_rank = run.results
        for rank, sums in enumerate(by_rank):
            for dtype, got, first in zip(FRACTIONS, sums, by_rank[0], strict=True):
                check_same_bits(f"rank {rank} of {n}, {dtype}", got, first)

    def _test_nccl(self, grade: Grade, n: int) -> None:
        variant, kind = self.drawn(grade.random, n)
        args = [variant], [kind], powers
        run = grade.run(use, n, *args, options=AS_NCCL, if_stuck=self.if_batched)
        check_results(run.results, *args)

    def _test_group(self) -> Callable[..., None]:
        args = self.collective.variants(len(MEMBERS)), [*self.kinds], exact

        def test(grade: Grade) -> None:
            run = grade.run(inside_group, OUTER_WORLD_SIZE, use, *args, if_stuck=STUCK_IN_GROUP)
            check_results(of_members(run), *args, where=IN_GROUP)

        return test


def check_results(
    by_rank: Sequence[Any],
    variants: list[Any],
    kinds: list[Kind],
    numbers: Numbers,
    where: str = "",
) -> None:
    """Check what ``use`` returned on each rank that took part."""
    for place, (variant, kind) in enumerate(product(variants, kinds)):
        variant.check([found[place] for found in by_rank], kind, numbers, where)


def check_same_bits(where: str, got: Sequence[float], first: Sequence[float]) -> None:
    """Check that x holds the same bits on a rank as on rank 0."""
    check(
        len(got) == len(first),
        f"{where}: x has {len(got)} elements after the call, but {len(first)} on rank 0.",
    )
    differ = [pair for pair in zip(first, got, strict=True) if pair[0] != pair[1]]
    there, here = differ[0] if differ else (0.0, 0.0)
    check(
        not differ,
        f"{where}: x differs from rank 0's x in {len(differ)} of {len(got)} elements, perhaps only "
        f"in the last bits: {there} on rank 0 is {here} here. Ranks that add in different orders "
        "round differently, and their models drift apart: let one rank finish each sum, or add in "
        "the same order everywhere.",
    )
